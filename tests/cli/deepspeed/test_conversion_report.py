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
    assert titles[:7] == [
        "No counterpart, changes the training:",
        "No counterpart, costs time or memory:",
        "No counterpart, diagnostics only:",
        "Unknown keys, ignored:",
        "Notes:",
        "Belongs to the training script (TrainingArguments), or to `infinity finetune` (--options):",
        "Not needed:",
    ]


def test_every_key_of_a_public_config_is_named(tmp_path: Path) -> None:
    for public in PUBLIC:
        source = read(file_of(public, tmp_path))
        conversion = convert(source)
        said = report(conversion, source, None) + swap_text(conversion, source)
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
    said = told({"sparse_attention": {"mode": "fixed"}, "optimizer": {"params": {"freeze_step": 1}}}, tmp_path)
    assert "  sparse_attention: {'mode': 'fixed'} - the model's own attention is used\n" in said
    values = {"optimizer": {"params": {"freeze_step": 1, "var_freeze_step": 2}}}
    assert "  optimizer.params.freeze_step: 1, optimizer.params.var_freeze_step: 2 - no gradient " in told(
        values, tmp_path
    )


def test_settings_of_the_loss_scaler_are_not_needed_unless_the_scale_is_fixed(tmp_path: Path) -> None:
    values = {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2}
    said = told({"fp16": values}, tmp_path)
    assert "Not needed:\n  fp16.loss_scale, fp16.loss_scale_window, fp16.hysteresis\n" in said
    said = told({"fp16": values | {"loss_scale": 128}}, tmp_path)
    assert "changes the training:\n  fp16.loss_scale: 128 - the scale of the loss is not fixed" in said


def test_keys_that_need_no_action_take_one_line(tmp_path: Path) -> None:
    zero = {"stage": 3, "overlap_comm": True, "sub_group_size": 1e9, "offload_param": {"device": "cpu"}}
    said = told({"zero_optimization": zero}, tmp_path)
    assert "Not needed:\n  zero_optimization.overlap_comm, zero_optimization.sub_group_size\n" in said
    assert "offload_param" not in said  # the swap config names it in a comment


def test_finetune_is_told_what_the_config_leaves_to_the_script(tmp_path: Path) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": "auto"}}
    said = told({"optimizer": optimizer, "bf16": {"enabled": True}}, tmp_path)
    assert "on text or chats; add your own --lr, --warmup-steps, which this config does not set):\n" in said


def test_the_words_of_an_option_are_said(tmp_path: Path) -> None:
    values = {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}, "scheduler": {"type": "WarmupDecayLR"}}
    said = told(values, tmp_path)
    assert "optimizer.type: Adam -> --optimizer adam (" in said  # Trainer has none
    assert "scheduler.type: WarmupDecayLR -> lr_scheduler_type linear | --schedule linear\n" in said


def test_a_warmup_that_is_not_the_same_has_a_line_that_says_what_to_do(tmp_path: Path) -> None:
    def noted(**params: object) -> bool:
        said = told({"scheduler": {"type": "WarmupDecayLR", "params": params}}, tmp_path)
        return "\n  scheduler.params.warmup_type is not set, so DeepSpeed's warm-up is logarithmic. Here" in said

    assert noted()
    assert noted(warmup_num_steps="auto")
    assert not noted(warmup_type="linear")
    assert not noted(warmup_type="log"), "the key has a line of its own"
    assert not noted(warmup_num_steps=0)
    assert "logarithmic" not in told({"scheduler": {"type": "OneCycle"}}, tmp_path)


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
