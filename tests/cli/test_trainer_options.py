"""Options that TRL's SFTConfig has are options of `infinity finetune` by its own names."""

from __future__ import annotations

import csv
from dataclasses import fields
from typing import Any

import pytest
from trl import SFTConfig

from infinity.cli import trainer_options
from infinity.cli.arguments import build_finetune_parser
from infinity.cli.main import main
from infinity.errors import ConfigError
from tests.cli.test_finetune import run


def rates_of(job: dict[str, Any]) -> list[float]:
    with (job["--output"] / "loss.csv").open() as file:
        return [float(row["learning_rate"]) for row in csv.DictReader(file)]


def test_every_field_is_found_without_importing_the_library() -> None:
    assert {each.name for each in fields(SFTConfig) if each.init} <= trainer_options.names()


def test_a_name_that_is_decided_otherwise_is_a_fields_name() -> None:
    refused = [name for names in trainer_options._REFUSED.values() for name in names]
    assert set(refused) | set(trainer_options.OURS) <= trainer_options.names()
    assert len(refused) == len(set(refused))
    assert not set(refused) & set(trainer_options.OURS)


@pytest.mark.parametrize(("theirs", "ours"), trainer_options.OURS.items())
def test_a_field_with_a_short_name_here_is_that_option(theirs: str, ours: str) -> None:
    value = {"output": "out", "logger": "wandb"}.get(ours, "0.5" if ours in ("lr", "beta1", "beta2", "eps") else "3")
    parser = build_finetune_parser()
    short = parser.parse_args([f"--{ours.replace('_', '-')}", value])
    for name in (theirs, theirs.replace("_", "-")):
        assert parser.parse_args([f"--{name}", value]) == parser.parse_args([f"--{name}={value}"]) == short
    assert getattr(short, ours) is not None


def test_underscores_are_as_dashes() -> None:
    assert build_finetune_parser().parse_args(["--weight_decay", "0.5"]).weight_decay == 0.5


def test_values_are_what_the_library_makes_of_them() -> None:
    line = ["--neftune_noise_alpha", "5", "--logging-first-step", "--lr", "1", "--label_smoothing_factor=0.1"]
    given = build_finetune_parser().parse_args(line)
    assert given.lr == 1
    assert trainer_options.typed(given.trainer) == {
        "neftune_noise_alpha": 5.0,
        "logging_first_step": True,
        "label_smoothing_factor": 0.1,
    }


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--bf16", "true"], "bf16 of TRL's SFTConfig is no option of infinity finetune: give --dtype"),
        (["--packing"], "packing of TRL's SFTConfig is no option of infinity finetune: the data are read"),
        (["--neftune_noise_alphas", "5"], "unknown argument '--neftune_noise_alphas'"),
        (["--neftune_noise_alpha", "high"], "argument --neftune_noise_alpha/--neftune-noise-alpha: invalid"),
        (["--lr_scheduler_type", "square"], "'square'"),
        (["--learning_rate", "0"], "--lr: must be positive"),
    ],
)
def test_what_cannot_be_passed_on_is_one_line(flags: list[str], says: str, job: dict[str, Any], capsys: Any) -> None:
    assert run(job, *flags) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("field", "says", "flags"),
    [
        ("bf16", "infinity finetune: give --dtype", ["--dtype", "bf16"]),
        ("save_strategy", "give --save-every or --save-best", ["--save-every", "1"]),
        ("load_best_model_at_end", "--save-best", ["--eval-split", "0.1", "--eval-steps", "1", "--save-best"]),
    ],
)
def test_the_option_that_a_refusal_names_does_what_was_asked(
    field: str, says: str, flags: list[str], job: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=says):
        trainer_options.take([f"--{field}"])
    assert run(job | {"--steps": 2}, *flags) == 0


def test_a_schedule_of_the_library_is_kept_by_the_run(job: dict[str, Any], capsys: Any) -> None:
    some = job | {"--steps": 3}
    assert run(some, "--lr_scheduler_type", "polynomial", "--lr_scheduler_kwargs", '{"lr_end": 1e-3, "power": 1}') == 0
    assert rates_of(some) == pytest.approx([3e-3, 3e-3 - 2e-3 / 3, 3e-3 - 4e-3 / 3])
    again = ["finetune", "--options", str(job["--output"] / "run.yaml"), "--config", str(job["--config"])]
    other = job["--output"].with_name("again")
    assert main([*again, "--output", str(other)]) == 0
    assert rates_of({"--output": other}) == rates_of(some)
