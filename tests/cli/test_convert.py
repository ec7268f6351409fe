"""`infinity convert` as it is typed: what it writes where, what it never overwrites, and its page in docs."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.cli.main import main
from tests.cli.test_finetune import TEXT, tokenizer
from tests.docs.pages import tool
from tests.models import llama

DS_CONFIG = {
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 2e-5, "warmup_num_steps": 100}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True, "buffer_count": 4},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "stage3_max_live_parameters": 1e9,
        "zero_quantized_gradients": True,
    },
    "aio": {"block_size": 262144, "queue_depth": 32, "single_submit": False, "overlap_events": True},
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 16,
    "gradient_clipping": 1.0,
    "flops_profiler": {"enabled": False},
}
"""The example of docs/deepspeed.md."""
PAGE = Path(infinity.__file__).parents[1] / "docs" / "deepspeed.md"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a DeepSpeed config."""
    monkeypatch.chdir(tmp_path)
    Path("ds_config.json").write_text(json.dumps(DS_CONFIG))
    return tmp_path


def test_the_swap_config_goes_to_stdout_and_the_report_to_stderr(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", "ds_config.json"]) == 0
    printed = capsys.readouterr()
    (here / "swap.yaml").write_text(printed.out)
    config = infinity.load_config("swap.yaml")
    assert (config.weights, config.optimizer, config.nvme.block) == ("host", "nvme", 262144)
    assert "No counterpart, costs time or memory:\n  zero_optimization.zero_quantized_gradients: true" in printed.err
    assert "infinity run swap.yaml train.py ITS ARGUMENTS" in printed.err
    assert "Remove `--deepspeed ds_config.json` from ITS ARGUMENTS" in printed.err


def test_with_output_the_report_goes_to_stdout(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "ds_config.json", "-o", "mine.yaml"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "mine.yaml was written" in printed.out
    assert "infinity run mine.yaml train.py" in printed.out
    assert infinity.load_config("mine.yaml").weights == "host"


def test_a_file_that_names_a_config_is_refused_with_a_command_that_converts_that(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command quotes a long name, which the shell would otherwise split."""
    named = here / "its $configs" / ("deep" * 40) / "ds_config.json"
    named.parent.mkdir(parents=True)
    Path("ds_config.json").rename(named)
    Path("train.json").write_text(json.dumps({"deepspeed": str(named)}))
    assert main(["convert", "train.json"]) == 2
    line = capsys.readouterr().err.partition("it names one: infinity ")[2]
    assert main(shlex.split(line)) == 0
    made = capsys.readouterr().out
    assert "\nweights: host" in made
    assert main(shlex.split(made.partition("`infinity ")[2].partition("`")[0])) == 0
    assert capsys.readouterr().out == made


SCRIPT = """
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
model = AutoModelForCausalLM.from_pretrained("model")
rows = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 4
Trainer(model, arguments, train_dataset=rows).train()
"""


@pytest.mark.parametrize("of", ["deepspeed", "fsdp", "accelerate"])
def test_training_starts_as_the_report_says(of: str, here: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script of Trainer, without the option of its launcher, and `infinity finetune` on a text."""
    monkeypatch.setattr(sys, "argv", ["infinity"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    values: dict[str, Any] = {
        "deepspeed": {"zero_optimization": zero, "gradient_clipping": 0.5, "bf16": {"enabled": True}},
        "fsdp": {"cpu_offload": True, "sharding_strategy": "FULL_SHARD"},
        "accelerate": {"deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": "cpu"}},
    }[of]
    file = "its config.json"
    Path(file).write_text(json.dumps(values))
    assert main(["convert", file, "-o", "swap.yaml"]) == 0
    said = capsys.readouterr().out
    option = {"deepspeed": "Remove `--deepspeed {}`", "fsdp": "Remove `--fsdp_config {}` and `--fsdp`"}.get(of)
    assert (option or "accelerate launch --config_file {} train.py").format(shlex.quote(file)) in said
    lines = dict(line.strip().split(" ", 2)[1:] for line in said.splitlines() if line.startswith("  infinity "))
    llama(1)[0].save_pretrained("model")
    tokenizer().save_pretrained("model")
    Path("train.py").write_text(SCRIPT)
    Path("text.txt").write_text(TEXT)
    its = "--output_dir ran --max_steps 1 --report_to none --use_cpu"
    assert main(["run", *shlex.split(lines["run"].replace("ITS ARGUMENTS", its))]) == 0
    tuned = lines["finetune"].replace("MODEL", "model").replace("DATA", "text.txt").replace("OUT", "out")
    assert main(["finetune", *shlex.split(tuned), "--steps", "1", "--sequence-length", "16"]) == 0
    assert "activations" not in capsys.readouterr().err
    assert main(["run", "--verbose", *shlex.split(lines["run"].replace("ITS ARGUMENTS", its))]) == 0
    assert {"activations", "memory.host", "updates"} <= set(capsys.readouterr().err.split())


def test_a_swap_config_is_refused_and_infinity_run_takes_it(
    here: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["infinity"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("swap.yaml").write_text("weights: host\n")
    Path("train.py").write_text("print('trained')\n")
    assert main(["convert", "swap.yaml"]) == 2
    assert "it looks like a swap config, which `infinity run` takes" in capsys.readouterr().err
    assert main(["run", "swap.yaml", "train.py"]) == 0
    assert "trained" in capsys.readouterr().out


def test_nothing_is_overwritten_without_force(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine.yaml").write_text("mine")
    (here / "link.yaml").symlink_to("nowhere")
    for name in ("mine.yaml", "link.yaml"):
        assert main(["convert", "ds_config.json", "-o", name]) == 2
        assert capsys.readouterr().err == f"error: --output: {name} exists already; give --force to replace it\n"
    assert (here / "mine.yaml").read_text() == "mine"
    assert (here / "link.yaml").is_symlink()
    assert main(["convert", "ds_config.json", "-o", "mine.yaml", "--force"]) == 0
    assert infinity.load_config("mine.yaml").weights == "host"


@pytest.mark.parametrize("line", ["ds_config.json -o /dev/full --force", "ds_config.json -o no/where", "missing.json"])
def test_what_cannot_be_read_or_written_is_an_error(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", *line.split()]) == 2
    assert re.fullmatch(r"error: [^\n]+\n", capsys.readouterr().err)


def test_force_alone_does_nothing_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "ds_config.json", "--force"]) == 2
    assert "--force does nothing without --output" in capsys.readouterr().err


def test_a_bad_config_leaves_no_output(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "ds_config.json").write_text('{"zero_optimization": {"stage": 9}}')
    assert main(["convert", "ds_config.json", "-o", "mine.yaml"]) == 2
    assert not (here / "mine.yaml").exists()


# -- docs/deepspeed.md -------------------------------------------------------------------------------------------------


def part(name: str) -> str:
    """Return the part of the page between two comments."""
    match = re.search(f"<!-- {name} -->\n(.*?)<!-- /{name} -->", PAGE.read_text(), re.S)
    assert match is not None, name
    return match[1]


def test_the_table_of_the_page_is_the_table_of_the_code() -> None:
    assert part("keys").strip() == tool("deepspeed_keys").key_tables().strip()


def test_the_example_of_the_page_is_what_is_printed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```\w*\n(.*?)```", part("example"), re.S)
    assert json.loads(blocks[0]) == DS_CONFIG
    assert main(["convert", "ds_config.json", "-o", "swap.yaml"]) == 0
    assert blocks[1] == "infinity convert ds_config.json -o swap.yaml\n"
    assert blocks[2] == (here / "swap.yaml").read_text()
    assert blocks[3] == capsys.readouterr().out
