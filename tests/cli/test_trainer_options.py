"""Options that TRL's configs have are options of `infinity finetune` by their own names."""

from __future__ import annotations

import csv
import inspect
import re
from dataclasses import fields
from typing import Any

import pytest
import trl
import yaml
from transformers import SchedulerType

from infinity.cli import trainer_options
from infinity.cli.finetune_options import build_finetune_parser
from infinity.cli.main import main
from infinity.errors import ConfigError
from tests.cli.test_finetune import run


def rates_of(job: dict[str, Any]) -> list[float]:
    with (job["--output"] / "loss.csv").open() as file:
        return [float(row["learning_rate"]) for row in csv.DictReader(file)]


@pytest.mark.parametrize("method", trainer_options.CONFIGS)
def test_every_field_is_found_without_importing_the_library(method: str) -> None:
    config = getattr(trl, trainer_options.CONFIGS[method])
    assert {each.name for each in fields(config) if each.init} <= trainer_options.names(method)


def test_a_name_that_is_decided_otherwise_is_a_fields_name() -> None:
    refused = [name for names in trainer_options._REFUSED.values() for name in names]
    assert set(refused) | set(trainer_options.OURS) <= trainer_options.names()
    assert len(refused) == len(set(refused))
    assert not set(refused) & set(trainer_options.OURS)


@pytest.mark.parametrize("name", trainer_options.VALUES)
def test_the_values_of_a_field_are_those_of_the_library(name: str) -> None:
    there = re.findall(rf'{name} == "(\w+)"', inspect.getsource(trl.DPOTrainer._compute_loss))
    assert set(there) == trainer_options.VALUES[name]


DO_SOMETHING = {
    *("lr_scheduler_kwargs", "neftune_noise_alpha"),
    *("tf32", "full_determinism", "torch_empty_cache_steps", "per_device_eval_batch_size", "log_level"),
    *("log_level_replica", "logging_first_step", "logging_nan_inf_filter", "include_num_input_tokens_seen", "run_name"),
    *("loss_type", "loss_weights", "ld_alpha", "f_divergence_type", "f_alpha_divergence_coef", "label_smoothing"),
    *("beta", "use_weighting", "discopop_tau", "disable_dropout", "center_rewards_coefficient"),
    *("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
}
"""Fields that are passed on as they are."""


def test_a_field_that_is_no_option_here_is_refused_or_known_to_do_something() -> None:
    here = {action.dest for action in build_finetune_parser()._actions} | trainer_options.OURS.keys()
    refused = {name for names in trainer_options._REFUSED.values() for name in names}
    assert trainer_options.names() - here - refused <= DO_SOMETHING


@pytest.mark.parametrize(("theirs", "ours"), trainer_options.OURS.items())
def test_a_field_with_a_short_name_here_is_that_option(theirs: str, ours: str) -> None:
    value = {"output": "out", "logger": "wandb", "schedule": "inverse_sqrt"}.get(
        ours, "0.5" if ours in ("lr", "beta1", "beta2", "eps") else "3"
    )
    parser = build_finetune_parser()
    short = parser.parse_args([f"--{ours.replace('_', '-')}", value])
    for name in (theirs, theirs.replace("_", "-")):
        assert parser.parse_args([f"--{name}", value]) == parser.parse_args([f"--{name}={value}"]) == short
    assert getattr(short, ours) is not None


def test_every_schedule_of_the_library_is_one_here() -> None:
    (action,) = (each for each in build_finetune_parser()._actions if each.dest == "schedule")
    assert {each.value for each in SchedulerType} <= set(action.choices or ())


def test_what_asks_for_nothing_on_the_command_line_of_a_trainer_does_so_here(job: dict[str, Any]) -> None:
    some = {name: value for name, value in job.items() if name not in ("--steps", "--epochs")}
    line = ["--max_steps", "-1", "--num_train_epochs", "1.0", "--report_to", "none", "--sequence-length", "64"]
    assert run(some, *line) == 0
    assert not job["--output"].with_name("out-steps").exists()
    kept = yaml.safe_load((job["--output"] / "run.yaml").read_text())
    assert (kept.get("steps"), kept["epochs"], kept.get("logger")) == (None, 1, None)


def test_underscores_are_as_dashes() -> None:
    assert build_finetune_parser().parse_args(["--weight_decay", "0.5"]).weight_decay == 0.5


def test_values_are_what_the_library_makes_of_them() -> None:
    line = ["--neftune_noise_alpha", "5", "--logging-first-step", "--lr", "1", "--torch_empty_cache_steps=-3"]
    given = build_finetune_parser().parse_args(line)
    assert given.lr == 1
    assert trainer_options.typed(given.trainer, "sft") == {
        "neftune_noise_alpha": 5.0,
        "logging_first_step": True,
        "torch_empty_cache_steps": -3,
    }


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--bf16", "true"], "TRL's bf16 is not an option of infinity finetune: give --dtype"),
        (["--packing"], "TRL's packing is not an option of infinity finetune: infinity itself reads"),
        (["--neftune_noise_alphas", "5"], "unknown argument '--neftune_noise_alphas'"),
        (["--neftune_noise_alpha", "high"], "argument --neftune_noise_alpha/--neftune-noise-alpha: invalid"),
        (["--lr_scheduler_type", "square"], "argument --schedule: invalid choice: 'square'"),
        (["--learning_rate", "0"], "--lr: must be positive"),
        (["--loss_type", "dft"], "--loss_type does nothing with --method sft: the loss is the model's own"),
        (["--beta", "0.2"], "--beta does nothing with --method sft: leave it out, or give --method dpo"),
        (["--method", "reward", "--beta", "0.2"], "--beta does nothing with --method reward"),
        (["--method", "dpo", "--discopop_tau", "0.2"], "--discopop_tau does nothing without --loss_type discopop"),
        (["--method", "dpo", "--loss_type", "dpo"], "--loss_type dpo: it must be one of aot, "),
        (["--method", "dpo", "--precompute_ref_log_probs"], "the reference is computed beside each batch"),
        (["--method", "dpo", "--sync_ref_model"], "the reference stays the model that --model names"),
        (["--method", "dpo", "--loss-on", "all"], "--loss-on does nothing with --method dpo: leave it out"),
        (["--method", "reward", "--no-packing"], "--no-packing does nothing with --method reward: leave it out"),
        (["--router_aux_loss_coef", "0.1"], "output_router_logits and router_aux_loss_coef in the model's config.json"),
        (
            ["--lr_scheduler_type", "cosine", "--lr_scheduler_kwargs", '{"cycles": 2}'],
            "--schedule cosine with --lr_scheduler_kwargs {'cycles': 2} cannot be used for this run: ",
        ),
        (
            ["--lr_scheduler_type", "cosine", "--lr_scheduler_kwargs", '{"num_cycles": "a"}', "--warmup-steps", "2"],
            "cannot be used for this run: ",
        ),
        (["--schedule", "inverse_sqrt", "--min-lr", "1e-6"], "--min-lr does nothing with --schedule inverse_sqrt"),
        (
            ["--lr_scheduler_kwargs", '{"num_cycles": 2}', "--min-lr", "1e-6"],
            "--min-lr does nothing with --lr_scheduler_kwargs: leave it out",
        ),
        (
            ["--report_to", "none", "wandb"],
            "--logger none wandb: 'none' excludes trackers; leave out 'none', or the trackers",
        ),
        (["--dataloader_num_workers", "2"], "infinity itself reads, cuts and packs the data"),
        (["--gradient_checkpointing"], "`recompute` of the swap config says what is computed again"),
        (["--label_smoothing_factor", "0.1"], "each learned token has the same weight: leave it out"),
        (["--use_cache"], "packed examples would attend to each other: leave it out"),
        (["--debug", "underflow_overflow"], "it would do nothing: leave it out"),
    ],
)
def test_what_cannot_be_passed_on_is_one_line_before_anything_is_loaded(
    flags: list[str], says: str, job: dict[str, Any], capsys: Any
) -> None:
    assert run(job | {"--model": "nowhere"}, *flags) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("field", "says", "flags"),
    [
        ("bf16", "infinity finetune: give --dtype", ["--dtype", "bf16"]),
        ("save_strategy", "give --save-every or --save-best", ["--save-every", "1"]),
        ("load_best_model_at_end", "--save-best", ["--eval-split", "0.1", "--eval-steps", "1", "--save-best"]),
        ("eval_delay", "give --eval-steps", ["--eval-split", "0.1", "--eval-steps", "1"]),
        ("logging_strategy", "give --log-every", ["--log-every", "1"]),
    ],
)
def test_the_option_that_a_refusal_names_does_what_was_asked(
    field: str, says: str, flags: list[str], job: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=says):
        trainer_options.take([f"--{field}"])
    assert run(job | {"--steps": 2}, *flags) == 0


def test_a_schedule_of_the_library_is_kept_by_the_run(job: dict[str, Any]) -> None:
    some = job | {"--steps": 3}
    assert run(some, "--lr_scheduler_type", "polynomial", "--lr_scheduler_kwargs", '{"lr_end": 1e-3, "power": 1}') == 0
    assert rates_of(some) == pytest.approx([3e-3, 3e-3 - 2e-3 / 3, 3e-3 - 4e-3 / 3])
    again = ["finetune", "--options", str(job["--output"] / "run.yaml"), "--config", str(job["--config"])]
    other = job["--output"].with_name("again")
    assert main([*again, "--output", str(other)]) == 0
    assert rates_of({"--output": other}) == rates_of(some)


def test_the_command_line_chooses_another_schedule_than_the_file(job: dict[str, Any]) -> None:
    some = job | {"--steps": 2}
    assert run(some, "--schedule", "linear", "--min-lr", "1e-4") == 0
    again = ["finetune", "--options", str(job["--output"] / "run.yaml"), "--config", str(job["--config"])]
    other = job["--output"].with_name("again")
    flags = ["--output", str(other), "--lr_scheduler_type", "inverse_sqrt", "--min-lr", "0"]
    assert main([*again, *flags]) == 0
    assert yaml.safe_load((other / "run.yaml").read_text())["schedule"] == "inverse_sqrt"


def test_a_rate_that_rises_until_the_end_falls_by_no_schedule(job: dict[str, Any]) -> None:
    some = job | {"--steps": 3, "--warmup-steps": 3, "--schedule": "linear"}
    assert run(some) == 0
    assert rates_of(some) == pytest.approx([0.0, 1e-3, 2e-3])
