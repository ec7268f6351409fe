"""--options takes options from a file; a run leaves the file, and the command, with which it is done again."""

from __future__ import annotations

import json
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from infinity.cli.main import main
from infinity.cli.options_file import with_file
from infinity.cli.subcommands import build_parser
from infinity.cli.trainer_options import typed
from infinity.errors import ConfigError
from tests.cli.test_evaluation import _job
from tests.cli.test_evaluation import job as job
from tests.cli.test_finetune import run
from tests.cli.test_resume import _losses, _same, _stop_after


def parsed(tmp_path: Path, values: Any, *flags: str) -> Any:
    text = values if isinstance(values, str) else yaml.safe_dump(values)
    (tmp_path / "run.yaml").write_text(text)
    return with_file(build_parser().parse_args(["finetune", "--options", str(tmp_path / "run.yaml"), *flags]))


def test_a_file_has_every_option_with_a_dash_or_an_underscore(tmp_path: Path) -> None:
    options = parsed(
        tmp_path,
        "model: m\ndata: [a.txt, b.txt]\neval-data: c.txt\nlr: 1e-3\nbatch_size: 2\nlora: 8\nsave-best: true\n"
        "no-packing: false\nlogger: tensorboard\nrevision: '12345'\nseed:\n",
    )
    assert (options.model, options.data, options.eval_data) == ("m", [Path("a.txt"), Path("b.txt")], [Path("c.txt")])
    assert (options.lr, options.batch_size, options.lora, options.save_best) == (1e-3, 2, 8, True)
    assert (options.no_packing, options.logger, options.revision, options.seed) == (
        None,
        ["tensorboard"],
        "12345",
        None,
    )


def test_a_file_of_a_trainers_arguments_may_say_that_it_asks_for_nothing(tmp_path: Path) -> None:
    nothing = {"report_to": "none", "max_steps": -1, "deepspeed": None, "run_name": None, "lr": None}
    options = parsed(tmp_path, nothing | {"num_train_epochs": 3.0, "neftune_noise_alpha": -1.0, "max_grad_norm": 1.0})
    assert (options.logger, options.steps, options.epochs, options.lr) == (["none"], None, 3, None)
    assert options.max_grad_norm == 1.0
    assert typed(options.trainer, "sft") == {"neftune_noise_alpha": -1.0}
    with pytest.raises(ConfigError, match="max_steps: must be at least 1, not -2"):
        parsed(tmp_path, {"max_steps": -2})


def test_the_command_line_goes_before_the_file(tmp_path: Path) -> None:
    file = {"lr": 1e-3, "steps": 5, "data": ["a.txt"], "verbose": True, "eval-split": 0.1}
    options = parsed(tmp_path, file, "--lr", "0.5", "--epochs", "2", "--data", "b.txt")
    assert (options.lr, options.epochs, options.steps) == (0.5, 2, None)
    assert (options.data, options.verbose, options.eval_split) == ([Path("b.txt")], True, 0.1)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ("base_model: a\n", "'base_model' is not an option of infinity finetune; did you mean model?"),
        ("packing: true\n", "TRL's packing is not an option of infinity finetune: infinity itself reads"),
        ("batch-sizes: 1\n", "did you mean batch-size?"),
        ("lr: -1\n", "run.yaml: lr: must be positive"),
        ("lr: high\n", "run.yaml: lr: 'high' is not a number"),
        ("revision: 1.10\n", "revision is the number 1.1, but a text is needed: put it in quotes"),
        ("dtype: int8\n", "dtype is 'int8', which is not one of bf16, fp16, fp32"),
        ("lr: [1, 2]\n", "lr is a list; it must be a number or a text"),
        ("lr: true\n", "lr is true or false; it must be a number or a text"),
        ("save-best: 1\n", "save-best is 1; it must be true or false"),
        ("resume: there\n", "--resume belongs on the command line"),
        ("options: other.yaml\n", "--options belongs on the command line"),
        ("steps: 1\nepochs: 1\n", "--steps and --epochs exclude each other; remove one of the two"),
        ("lr: 1\nlr: 2\n", "the key 'lr' is given twice"),
        ("lr: 1\nlearning_rate: 2\n", "run.yaml: lr and learning_rate are the same option; remove one of the two"),
        ("beta: 1\nweight-decay: 1\nweight_decay: 1\n", "weight-decay and weight_decay are the same option"),
        ("- lr\n", "expected options and values, such as `lr: 1e-5`, found list"),
    ],
)
def test_a_mistake_names_the_file_and_the_option(values: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        parsed(tmp_path, values)
    assert says in str(raised.value)
    assert "run.yaml" in str(raised.value)


def test_an_option_that_a_message_proposes_is_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not an option of infinity finetune; did you mean ") as raised:
        parsed(tmp_path, "batch-sizes: 2\n")
    name = str(raised.value).partition("did you mean ")[2].rstrip("?")
    assert parsed(tmp_path, f"{name}: 2\n").batch_size == 2


def test_a_file_that_is_not_there_is_an_error(job: dict[str, Any], capsys: Any) -> None:
    assert run(job, "--options", "nowhere.yaml") == 2
    assert "--options: cannot read nowhere.yaml: No such file or directory" in capsys.readouterr().err


def test_a_run_from_a_file_is_the_run_of_its_options_and_can_be_done_again(
    job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {"--steps": 4, "--eval-steps": 2}
    file = {
        name.removeprefix("--"): str(value) if isinstance(value, Path) else value for name, value in (job | few).items()
    }
    (tmp_path / "mine.yaml").write_text(
        yaml.safe_dump(file | {"lora-targets": ["q_proj"], "lora": 2, "beta1": 0.8, "full_determinism": True})
    )
    assert main(["finetune", "--options", str(tmp_path / "mine.yaml")]) == 0
    flags = ["--lora", "2", "--lora-targets", "q_proj", "--beta1", "0.8", "--full_determinism"]
    assert run(_job(tmp_path, "b") | {"--eval-data": tmp_path / "apart.txt"} | few, *flags) == 0
    assert _losses(tmp_path / "out-a") == _losses(tmp_path / "out-b")
    report = json.loads((tmp_path / "out-a" / "report.json").read_text())
    assert report["again"] in (tmp_path / "out-a" / "report.txt").read_text()
    again = shlex.split(report["again"])
    at = again.index("finetune")
    assert again[-1] == "DIRECTORY"
    assert main([*again[at:-1], str(tmp_path / "out-c")]) == 0
    assert _losses(tmp_path / "out-c") == _losses(tmp_path / "out-a")
    adapters = "adapter_model.safetensors"
    assert (tmp_path / "out-a" / adapters).read_bytes() == (tmp_path / "out-c" / adapters).read_bytes()
    mine, of_flags, others = ((tmp_path / f"out-{name}" / "run.yaml").read_text() for name in "abc")
    assert mine == others
    assert "full_determinism: true\n" in of_flags.replace("-", "_")


def test_a_run_that_went_on_from_a_copy_names_the_model_it_began_with(job: dict[str, Any], tmp_path: Path) -> None:
    few = {"--steps": 6}
    assert run(job | few) == 0
    _stop_after(_job(tmp_path, "b") | few, signal.SIGINT)
    assert main(["checkpoint", "export", str(tmp_path / "swap-b"), "--output", str(tmp_path / "copy")]) == 0
    _job(tmp_path, "c")
    goes_on = ["--from-checkpoint", str(tmp_path / "copy"), "--config", str(tmp_path / "c.yaml")]
    assert main(["finetune", *goes_on, "--output", str(tmp_path / "out-c")]) == 0
    again = shlex.split(json.loads((tmp_path / "out-c" / "report.json").read_text())["again"])
    assert main([*again[again.index("finetune") : -1], str(tmp_path / "out-d")]) == 0
    assert _losses(tmp_path / "out-d") == _losses(tmp_path / "out-a")


@pytest.mark.long
def test_a_run_that_was_extended_says_that_it_is_not_the_same_again(job: dict[str, Any], tmp_path: Path) -> None:
    short = {name: value for name, value in job.items() if name not in ("--steps", "--eval-steps")}
    assert run(short | {"--epochs": 1, "--sequence-length": 96}, "--keep-store") == 0
    first = json.loads((tmp_path / "out-a" / "report.json").read_text())
    assert "another number of steps" not in first["again"]
    resumed = ["finetune", "--resume", str(tmp_path / "swap-a")]
    assert main([*resumed, "--epochs", "2", "--output", str(tmp_path / "more")]) == 0
    report = json.loads((tmp_path / "more" / "report.json").read_text())
    assert report["steps"] > 2 * first["steps"] - 1
    assert "another number of steps" in report["again"]
    assert not _same(tmp_path / "out-a", tmp_path / "more")
    assert main([*resumed, "--epochs", "1", "--output", str(tmp_path / "less")]) == 2
