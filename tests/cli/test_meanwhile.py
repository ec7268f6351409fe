"""What a run does between its steps: models of steps, samples, logs; and a run that was interrupted has the same."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from infinity.cli import saved_steps
from infinity.cli.loggers import Entries
from infinity.cli.main import main
from infinity.cli.marked import Owner
from infinity.cli.meanwhile import History, Sample
from infinity.cli.progress import StepFacts
from infinity.cli.saved_steps import SavedSteps
from infinity.durable.records import parse_body
from infinity.errors import InfinityError
from infinity.io.manifest import read_manifest
from tests.cli.test_evaluation import _job, evaluated, evaluations
from tests.cli.test_evaluation import job as job  # a run with dropout, evaluated after 5, 10 and 12 steps
from tests.cli.test_finetune import arguments_of, run
from tests.cli.test_resume import _losses, _same, _stop_after

PROMPTS = ["the quick brown", "a red fox"]


MARK = "run.infinity"
FLAGS = ["--save-every", "2", "--save-limit", "2", "--save-best", "--sample", *PROMPTS, "--sample-tokens", "6"]
FLAGS += ["--logger", "tensorboard", "csv", "jsonl", "--log-every", "2"]


def logged(output: Path) -> list[dict[str, Any]]:
    lines = (output.with_name(f"{output.name}-logs") / "log.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def without_times(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: each[key] for key in each if key not in ("seconds", "tokens_per_s")} for each in entries]


def of_tensorboard(output: Path) -> dict[str, list[tuple[int, float]]]:
    """By name its steps and values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(output.with_name(f"{output.name}-logs") / "tensorboard"))
    read.Reload()
    return {name: [(each.step, each.value) for each in read.Scalars(name)] for name in read.Tags()["scalars"]}


def require_all_of_it(output: Path) -> None:
    """What FLAGS ask for is there, and agrees with the report."""
    steps = output.with_name(f"{output.name}-steps")
    found = evaluations(output)
    best, lowest = min(found, key=lambda each: each[1])
    named = {12: output, 10: steps / "step-10"}.get(best, steps / f"best-{best}")
    assert set(os.listdir(steps)) == {"step-8", "step-10", "best", MARK} | ({named.name} if best < 10 else set())
    assert (steps / "best").resolve() == named.resolve()
    entries = logged(output)
    assert [(each["step"], each["eval_loss"]) for each in entries if "eval_loss" in each] == found
    losses = [float(loss) for loss in _losses(output)]
    means = [(step, (losses[step - 2] + losses[step - 1]) / 2) for step in range(2, 13, 2)]
    assert [(each["step"], each["loss"]) for each in entries if "loss" in each] == means
    read = of_tensorboard(output)
    assert read["train/loss"] == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in means]
    assert read["eval/loss"] == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in found]
    with (output.with_name(f"{output.name}-logs") / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(int(row["step"]), float(row["eval_loss"])) for row in rows if row["eval_loss"]] == found
    assert [float(row["loss"]) for row in rows if row["loss"]] == [loss for _, loss in means]
    assert f"lowest is {lowest:.4f}, after step {best}" in (output / "report.txt").read_text()


def test_models_of_steps_samples_and_logs_change_nothing_of_the_training(
    job: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    assert run(job, *FLAGS) == 0
    out = capsys.readouterr().out
    require_all_of_it(tmp_path / "out-a")
    assert run(_job(tmp_path, "b")) == 0
    assert _losses(tmp_path / "out-b") == _losses(tmp_path / "out-a")
    assert _same(tmp_path / "out-a", tmp_path / "out-b")
    assert f"step 8: the model is saved in {tmp_path / 'out-a-steps' / 'step-8'}" in out
    assert "step 6/12" in out
    assert "step 7/12" not in out
    samples = [json.loads(line) for line in (tmp_path / "out-a" / "samples.jsonl").read_text().splitlines()]
    assert [(each["step"], each["prompt"]) for each in samples] == [(s, p) for s in (5, 10, 12) for p in PROMPTS]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out-a").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out-a")
    for each in samples[-2:]:
        ids = tokenizer(each["prompt"], return_tensors="pt")["input_ids"]
        written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        assert tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True) == each["text"]
        assert f"step 12: {each['prompt']!r} → {each['text']!r}" in out


def test_the_model_of_a_step_is_that_of_a_run_which_ends_there(job: dict[str, Any], tmp_path: Path) -> None:
    assert run(job | {"--schedule": "constant"}, "--save-every", "5") == 0
    assert run(_job(tmp_path, "b") | {"--schedule": "constant", "--steps": 5}) == 0
    assert _same(tmp_path / "out-a-steps" / "step-5", tmp_path / "out-b")
    assert AutoTokenizer.from_pretrained(tmp_path / "out-a-steps" / "step-5")("the fox")["input_ids"]


@pytest.mark.parametrize(
    ("number", "at"),
    [
        pytest.param(signal.SIGINT, "left", marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, "left", marks=pytest.mark.long),
        pytest.param(
            signal.SIGKILL,
            "step 5: the model is saved",
            marks=pytest.mark.long(kept="only here a run with saved models, samples and logs is killed"),
        ),
    ],
)
def test_an_interrupted_run_has_all_of_it(number: int, at: str, job: dict[str, Any], tmp_path: Path) -> None:
    assert run(job, *FLAGS) == 0
    other = evaluated(tmp_path, "b")
    stopped = _stop_after(other, number, *FLAGS, at=at)
    assert stopped.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    assert "--logger" not in stopped.stdout, "no logger fails in a process that has used nothing of its library"
    time.sleep(1.0)  # TensorBoard reads its files in the order of the seconds in their names
    assert main(["finetune", "--resume", str(tmp_path / "swap-b")]) == 0
    require_all_of_it(tmp_path / "out-b")
    assert _losses(tmp_path / "out-b") == _losses(tmp_path / "out-a")
    assert _same(tmp_path / "out-a", tmp_path / "out-b")
    assert without_times(logged(tmp_path / "out-b")) == without_times(logged(tmp_path / "out-a"))
    samples = [(tmp_path / f"out-{name}" / "samples.jsonl").read_text() for name in "ab"]
    assert samples[0] == samples[1]


def test_a_model_that_cannot_be_saved_does_not_end_the_run(
    job: dict[str, Any], tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise InfinityError("saving to there: no space left on device")

    monkeypatch.setattr("infinity.cli.saved_steps.save_model", full)
    assert run(job, "--save-every", "5") == 0
    said = capfd.readouterr()
    assert "warning: step 5: the model is not saved in" in said.err
    assert "step 10: the model is not saved in" in said.out  # again at the end
    assert (tmp_path / "out-a" / "model.safetensors").exists()


def test_a_logger_that_fails_does_not_end_the_run(
    job: dict[str, Any], tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.tracking import TensorBoardTracker

    log = TensorBoardTracker.log

    def fails(self: Any, values: dict[str, Any], step: int) -> None:
        if "train/loss" in values:
            raise OSError("the network is gone")
        log(self, values, step)

    monkeypatch.setattr(TensorBoardTracker, "log", fails)
    assert run(job, "--logger", "tensorboard", "jsonl") == 0
    said = capfd.readouterr().err
    assert said.count("warning: --logger tensorboard could not log (OSError: the network is gone)") == 1
    assert [each["step"] for each in logged(tmp_path / "out-a") if "loss" in each] == list(range(1, 13))


def test_what_a_logger_draws_of_random_numbers_changes_nothing(
    job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelerate.tracking.TensorBoardTracker.log", lambda *_, **__: torch.rand(3))
    assert run(job, "--logger", "tensorboard") == 0
    monkeypatch.undo()
    assert run(_job(tmp_path, "b")) == 0
    assert _losses(tmp_path / "out-b") == _losses(tmp_path / "out-a")


def test_wandb_is_given_the_run_that_goes_on(job: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []

    class Imitation:
        def __init__(self, run_name: str, **options: Any) -> None:
            calls.append((run_name, options))
            self.tracker = SimpleNamespace(resumed=False)

        def start(self) -> None:
            calls.append(("start", None))

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            assert all(isinstance(value, str | int | float | bool) for value in values.values())

        def log(self, values: dict[str, Any], step: int) -> None:
            calls.append(("log", (step, sorted(values))))

        def finish(self) -> None:
            calls.append(("finish", None))

    monkeypatch.setattr("accelerate.tracking.WandBTracker", Imitation)
    monkeypatch.setattr("infinity.cli.loggers._MODULES", {})
    assert run(job | {"--steps": 5}, "--logger", "wandb", "--log-every", "5") == 0
    name, options = calls[0]
    assert (name, options["name"], options["resume"]) == ("infinity", "out-a", "allow")
    assert len(options["id"]) > 8
    figures = sorted(f"train/{each}" for each in ("loss", "learning_rate", "grad_norm", "tokens_per_s", "seconds"))
    assert calls[1:] == [("start", None), ("log", (5, figures)), ("log", (5, ["eval/loss"])), ("finish", None)]


def test_an_entry_has_the_mean_of_the_finite_losses_since_the_one_before() -> None:
    entries = Entries(3, last=5)
    made = [StepFacts(step, loss, 1e-3, 1.0, 2.0, 10, 0, 0) for step, loss in enumerate([1, math.nan, 3, 5, 7], 1)]
    found = [entry for each in made for entry in entries.of(each)]
    assert [(each.step, each.values["loss"], each.values["tokens_per_s"]) for each in found] == [
        (3, 2.0, 5.0),
        (5, 6.0, 5.0),
    ]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--save-limit", "2"], "--save-limit does nothing without --save-every"),
        (["--log-dir", "x"], "--log-dir does nothing without --logger"),
        (["--sample-tokens", "3"], "--sample-tokens does nothing without --sample"),
        (["--logger", "aim"], "invalid choice: 'aim'"),
        (["--logger", "wandb"], "--logger wandb needs its library: pip install no_such_module"),
    ],
)
def test_options_that_do_nothing_are_refused(
    flags: list[str], says: str, job: dict[str, Any], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinity.cli.loggers._MODULES", {"wandb": ("no_such_module",)})
    assert run(job, *flags) == 2
    assert says in capsys.readouterr().err


def test_a_prompt_that_the_model_cannot_take_is_refused_at_the_start(job: dict[str, Any], capsys: Any) -> None:
    assert run(job, "--sample", "the fox " * 1024) == 2
    error = capsys.readouterr().err
    assert "--sample: " in error
    assert "of the prompt and 64 to write are more than the model's 2048 positions" in error


@pytest.mark.parametrize("flags", [["--save-best"], ["--sample", "the fox"]])
def test_options_that_need_held_out_data_say_so(flags: list[str], tmp_path: Path, job: Any, capsys: Any) -> None:
    assert run(_job(tmp_path, "b"), *flags) == 2
    assert f"{flags[0]} does nothing without --eval-data or --eval-split" in capsys.readouterr().err


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize(("flags", "name"), [(["--save-every", "5"], "steps"), (["--logger", "csv"], "logs")])
@pytest.mark.parametrize("resumed", [False, True])
def test_what_another_run_has_left_is_not_mixed_with(
    resumed: bool, flags: list[str], name: str, job: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    more = ["finetune", "--resume", str(tmp_path / "swap-a"), "--steps", "14", "--output", str(tmp_path / "more")]
    place = tmp_path / (f"more-{name}" if resumed else f"out-a-{name}")
    if resumed:
        assert run(job, "--keep-store") == 0
    mine = [place / "step-1" / "mine", place / "log.csv"]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    again = [*more, *flags] if resumed else arguments_of(job, *flags)
    assert main(again) == 2
    assert f"{place}, for " in capsys.readouterr().err
    assert [path.read_text() for path in mine] == ["mine"] * 2
    shutil.rmtree(place)
    assert main(again) == 0


def test_another_interval_of_saving_removes_nothing(job: dict[str, Any], tmp_path: Path) -> None:
    assert run(job, "--keep-store", "--save-every", "3") == 0
    steps = tmp_path / "out-a-steps"
    assert set(os.listdir(steps)) == {"step-3", "step-6", "step-9", MARK}
    (tmp_path / "out-a").rename(tmp_path / "elsewhere")
    more = ["finetune", "--resume", str(tmp_path / "swap-a"), "--steps", "16", "--save-every", "4"]
    assert main(more) == 0
    assert set(os.listdir(steps)) == {"step-3", "step-6", "step-9", "step-12", MARK}


def test_a_run_that_goes_on_removes_what_is_half_made_or_of_later_steps(job: dict[str, Any], tmp_path: Path) -> None:
    flags = ["--save-every", "2", "--save-best"]
    assert _stop_after(job, signal.SIGINT, *flags).returncode == 130
    steps = tmp_path / "out-a-steps"
    held = json.loads((steps / MARK).read_text()) if (steps / MARK).exists() else None
    if held is None:  # nothing was saved yet
        _mark(steps, tmp_path)
    for name in (".step-3-abc", "step-50", "best-60"):
        (steps / name).mkdir()
    (steps / "best").unlink(missing_ok=True)
    (steps / "best").symlink_to("best-60")
    assert main(["finetune", "--resume", str(tmp_path / "swap-a")]) == 0
    assert not {".step-3-abc", "step-50", "best-60"} & set(os.listdir(steps))
    assert (steps / "best").exists()


def _mark(directory: Path, folder: Path) -> None:
    """As the run whose store is in swap-a marks its directories."""
    newest = max((folder / "swap-a").glob("generation-*.infinity"))
    tracked = parse_body(read_manifest(newest).body, newest).tracked
    Owner(tracked["finetune"]["origin"]["run"], str(folder / "swap-a"), begins_anew=False).make(directory)


def test_a_command_that_begins_anew_goes_on_in_what_it_left(job: dict[str, Any], tmp_path: Path) -> None:
    always = [*(str(part) for item in job.items() for part in item), "--resume", "--logger", "csv", "--save-every", "4"]
    Owner("before", str(tmp_path / "swap-a"), begins_anew=False).make(tmp_path / "out-a-logs")
    Owner("before", str(tmp_path / "swap-a"), begins_anew=False).make(tmp_path / "out-a-steps")
    assert main(["finetune", *always]) == 0
    assert {"step-4", "step-8", MARK} <= set(os.listdir(tmp_path / "out-a-steps"))


@pytest.mark.parametrize("place", ["out-a", "out-a/logs", "swap-a", "out-a-steps"])
def test_logs_lie_apart_from_everything_else(place: str, job: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    assert run(job, "--logger", "csv", "--log-dir", str(tmp_path / place)) == 2
    assert f"--log-dir {tmp_path / place} is" in capsys.readouterr().err


def test_a_best_model_that_could_not_be_saved_is_not_claimed(
    job: dict[str, Any], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, saved = iter([3.0, 2.0, 2.5]), iter([True, False])
    save = saved_steps.save_model

    def sometimes(*given: Any) -> None:
        if not next(saved):
            raise InfinityError("no space left on device")
        save(*given)

    monkeypatch.setattr("infinity.cli.evaluation.Evaluation.loss_of", lambda *_: next(losses))
    monkeypatch.setattr(saved_steps, "save_model", sometimes)
    assert run(job, "--save-best") == 0
    assert "lowest held-out loss: 2.0000, of step 10: its model could not be saved" in capsys.readouterr().out
    assert (tmp_path / "out-a-steps" / "best").resolve().name == "best-5"


def test_a_model_with_odd_settings_of_its_own_still_writes(job: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    settings = {"num_beams": 2, "num_return_sequences": 2, "return_dict_in_generate": True, "do_sample": True}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(settings))
    assert run(job, "--sample", "the quick", "--sample-tokens", "4") == 0
    said = capsys.readouterr()
    assert "warning" not in said.err
    assert "step 12: 'the quick' → " in said.out


def test_a_model_that_cannot_write_a_sample_trains(job: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    """With a tokenizer of words transformers cannot look for strings to stop at."""
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"stop_strings": ["fox"]}))
    assert run(job, "--sample", "the quick", "--sample-tokens", "4") == 0
    assert "warning: --sample: transformers cannot let the model write (ValueError: " in capsys.readouterr().err
    assert len(evaluations(tmp_path / "out-a")) == 3


def test_room_for_the_models_of_steps_is_asked_for_at_the_start(
    job: dict[str, Any], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    before = SavedSteps.require_room

    def require(self: Any, model_bytes: int, done: int) -> None:
        asked.append(model_bytes)
        before(self, 1 << 50, done)

    monkeypatch.setattr(SavedSteps, "require_room", require)
    assert run(job, "--save-every", "2", "--save-limit", "2") == 2
    error = capsys.readouterr().err
    assert "--save-every: 3 models of 1048576.00 GiB and the output take 4194304.00 GiB" in error
    assert asked[0] > 1000


def test_the_last_steps_model_is_the_output_and_is_not_saved_twice(
    job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    falling = iter([3.0, 2.0, 1.0])
    monkeypatch.setattr("infinity.cli.evaluation.Evaluation.loss_of", lambda *_: next(falling))
    assert run(job, "--save-every", "6", "--save-best") == 0
    steps = tmp_path / "out-a-steps"
    assert set(os.listdir(steps)) == {"step-6", "best", MARK}
    assert (steps / "best").resolve() == tmp_path / "out-a"
    assert load_file(steps / "best" / "model.safetensors").keys()


def test_the_facts_of_steps_are_kept_with_their_samples() -> None:
    made = History()
    made.facts.append(StepFacts(1, 2.5, 1e-3, math.nan, 0.5, 7, 8, 9))
    made.samples.append(Sample(1, "a", "b"))
    again = History()
    again.load_state_dict(made.state_dict())
    assert again.samples == made.samples
    assert again.facts[0].tokens == 7
    assert again.facts[0].skipped
