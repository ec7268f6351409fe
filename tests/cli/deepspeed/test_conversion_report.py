"""The printed report: its parts in their order, short for odd keys, and the command that starts training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from infinity.cli.deepspeed.config_reader import read
from infinity.cli.deepspeed.conversion import convert
from infinity.cli.deepspeed.conversion_report import report, swap_text
from tests.cli.deepspeed.public import PUBLIC
from tests.cli.deepspeed.test_conversion import file_of, written


def told(values: Any, directory: Path, name: str = "ds_config.json", output: Path | None = None) -> str:
    source = read(written(values, directory, name))
    return report(convert(source), source, output)


def test_what_is_lost_comes_first_and_what_needs_no_thought_last(tmp_path: Path) -> None:
    values = {
        "zero_optimization": {"stage": 2, "overlap_comm": True, "zenflow": {"a": 1}, "zero_quantized_weights": True},
        "flops_profiler": {"enabled": True},
        "gradient_clipping": 1.0,
        "nonsense": 1,
    }
    titles = [line for line in told(values, tmp_path).splitlines() if line and not line.startswith("  ")]
    assert titles[:8] == [
        "No counterpart, changes the training:",
        "No counterpart, costs time or memory:",
        "No counterpart, diagnostics only:",
        "Unknown keys, ignored:",
        "Notes:",
        "Belongs to the training script (TrainingArguments), or to `infinity finetune` (--options):",
        "Not needed:",
        "In the swap config:",
    ]


def test_every_key_of_a_public_config_is_named(tmp_path: Path) -> None:
    for public in PUBLIC:
        source = read(file_of(public, tmp_path))
        said = report(convert(source), source, None)
        assert [item.shown for item in source.items if item.shown not in said] == []


def test_a_trainers_own_arguments_are_one_line(tmp_path: Path) -> None:
    values = {"train_batch_size": "auto", "gradient_clipping": "auto"}
    line = "  train_batch_size, gradient_clipping: auto: an argument of the Trainer sets it already\n"
    assert line in told(values, tmp_path)


def test_where_the_batch_sizes_are_open_a_note_says_what_one_process_instead_of_several_needs(tmp_path: Path) -> None:
    note = "One process instead of N GPUs needs N times the gradient accumulation for the same step."
    assert note in told({"gradient_accumulation_steps": "auto"}, tmp_path)
    assert note not in told({"gradient_accumulation_steps": 4}, tmp_path)


def test_keys_with_one_reason_are_one_line_with_their_values(tmp_path: Path) -> None:
    values = {"fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2}}
    said = told(values, tmp_path)
    assert "  fp16.loss_scale: 0, fp16.loss_scale_window: 1000, fp16.hysteresis: 2 - with --dtype fp16 " in said
    assert said.count("GradScaler") == 1


def test_auto_for_what_infinity_does_not_choose_is_what_infinity_does(tmp_path: Path) -> None:
    said = told({"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto"}}}, tmp_path)
    assert "  scheduler.params.warmup_min_lr: auto: the warm-up begins at 0\n" in said


def test_finetune_is_told_what_the_config_leaves_to_the_script(tmp_path: Path) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": "auto"}}
    said = told({"optimizer": optimizer, "bf16": {"enabled": True}}, tmp_path)
    assert "on text or chats; add your own --lr, --warmup-steps, which this config does not set):\n" in said


def test_the_words_of_an_option_are_said(tmp_path: Path) -> None:
    values = {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}, "scheduler": {"type": "WarmupDecayLR"}}
    said = told(values, tmp_path)
    assert "optimizer.type: Adam -> --optimizer adam (" in said  # Trainer has none
    assert "scheduler.type: WarmupDecayLR -> lr_scheduler_type linear | --schedule linear (" in said


def test_the_command_names_the_files(tmp_path: Path) -> None:
    said = told({"bf16": {"enabled": "auto"}}, tmp_path, output=tmp_path / "mine.yaml")
    assert f"infinity run {tmp_path}/mine.yaml train.py ITS ARGUMENTS\nin place of `deepspeed train.py ITS" in said
    assert f"Remove `--deepspeed {tmp_path}/ds_config.json`" in said
    inner = {"deepspeed_config": {"zero_stage": 2}}
    said = told(inner, tmp_path, "accelerate.yaml")
    assert f"in place of `accelerate launch --config_file {tmp_path}/accelerate.yaml train.py" in said
    assert "--deepspeed" not in said


def test_very_many_and_very_long_keys_stay_short(tmp_path: Path) -> None:
    said = told({"bf16": {}, "x" * 100_000: 1} | {f"zzz{number}": 1 for number in range(5000)}, tmp_path)
    assert "  and 4951 more\n" in said
    assert len(said) < 10_000


def test_the_swap_config_is_these_lines(tmp_path: Path) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/a b"}, "zero_hpz_partition_size": 8}
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({"zero_optimization": zero}))
    source = read(file)
    assert swap_text(convert(source), source).splitlines()[2:] == [
        "weights: auto  # zero_optimization.stage: 3; the weights are not offloaded: on the device if they fit there, "
        "else in RAM",
        "optimizer: nvme  # zero_optimization.offload_optimizer.device: nvme",
        "nvme:",
        '  paths: ["/a b"]  # zero_optimization.offload_optimizer.nvme_path',
        "ranks:",
        "  gather: node  # zero_optimization.zero_hpz_partition_size: 8",
    ]
