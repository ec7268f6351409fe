"""The work of a run between its steps: models of steps, samples and logs. An interrupted run ends
with the same ones."""

from __future__ import annotations

import csv
import json
import math
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations import TensorBoardCallback

from infinity.cli import run_directory, training
from infinity.cli.history import GeneratedText, RunHistory
from infinity.cli.main import main
from infinity.cli.ownership_mark import DirectoryOwner
from infinity.cli.progress import StepFacts
from infinity.cli.trainers import FinetuneSFTTrainer
from infinity.errors import InfinityError
from tests.cli.test_evaluation import _job, evaluated, evaluations
from tests.cli.test_evaluation import job as job  # a run with dropout, evaluated after 5, 10 and 12 steps
from tests.cli.test_finetune import arguments_of, run
from tests.cli.test_resume import _losses, _same, _stop_after

PROMPTS = ["the quick brown", "a red fox"]


MARK = "run.infinity"
FLAGS = ["--save-every", "2", "--save-limit", "2", "--save-best", "--sample", *PROMPTS, "--sample-tokens", "6"]
FLAGS += ["--logger", "tensorboard", "--log-every", "2"]


def of_tensorboard(output: Path) -> dict[str, list[Any]]:
    """By name its steps and values; of texts the steps alone."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(output.with_name(f"{output.name}-steps")))
    read.Reload()
    found: dict[str, Any] = {
        name: [(each.step, each.value) for each in read.Scalars(name)] for name in read.Tags()["scalars"]
    }
    texts = (name for name in read.Tags()["tensors"] if name.endswith("/text_summary"))
    return found | {name.removesuffix("/text_summary"): [each.step for each in read.Tensors(name)] for name in texts}


def saved(output: Path) -> set[str]:
    """Return the names of the saved models of steps."""
    return {path.name for path in output.with_name(f"{output.name}-steps").glob("checkpoint-*")}


def require_all_of_it(output: Path, resumed: int = 0) -> None:
    """Check that everything that FLAGS ask for exists and agrees with the report. Args: resumed: step after which the
    run was resumed, where a Trainer begins its mean of losses."""
    found = evaluations(output)
    best, lowest = min(found, key=lambda each: each[1])
    assert saved(output) == {"checkpoint-8", "checkpoint-10"} | ({f"checkpoint-{best}"} - {"checkpoint-12"})
    losses = [float(loss) for loss in _losses(output)]
    means = [(step, (losses[step - 2] + losses[step - 1]) / 2) for step in range(2, 13, 2)]
    means = [(step, losses[resumed]) if step == resumed + 1 else (step, mean) for step, mean in means]
    read = of_tensorboard(output)
    assert read["train/loss"] == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in means]
    evaluated = dict(read["eval/loss"])  # a run that goes on may have evaluated a step twice
    assert evaluated == {step: pytest.approx(loss, rel=1e-6) for step, loss in found}
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
    assert f"step 8: the model is saved in {tmp_path / 'out-a-steps' / 'checkpoint-8'}" in out
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
    assert _same(tmp_path / "out-a-steps" / "checkpoint-5", tmp_path / "out-b")
    assert AutoTokenizer.from_pretrained(tmp_path / "out-a-steps" / "checkpoint-5")("the fox")["input_ids"]


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
    time.sleep(1.0)  # TensorBoard reads its files in the order of the seconds in their names
    assert main(["finetune", "--resume", str(tmp_path / "swap-b")]) == 0
    require_all_of_it(tmp_path / "out-b", resumed=5 if "step 5" in at else 1)
    assert _losses(tmp_path / "out-b") == _losses(tmp_path / "out-a")
    assert _same(tmp_path / "out-a", tmp_path / "out-b")
    samples = [(tmp_path / f"out-{name}" / "samples.jsonl").read_text() for name in "ab"]
    assert samples[0] == samples[1]


def test_a_model_that_a_kill_left_half_is_saved_again(job: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    assert _stop_after(job, signal.SIGINT, "--save-every", "2").returncode == 130
    steps = tmp_path / "out-a-steps"
    assert saved(tmp_path / "out-a") == {"checkpoint-2"}
    for name in (".checkpoint-4-x1y2", "checkpoint-4", "checkpoint-mine"):
        (steps / name).mkdir()
    assert main(["finetune", "--resume", str(tmp_path / "swap-a")]) == 0
    assert f"step 4: the model is saved in {steps / 'checkpoint-4'}" in capsys.readouterr().out
    assert saved(tmp_path / "out-a") == {f"checkpoint-{name}" for name in (2, 4, 6, 8, 10, "mine")}
    assert (steps / "checkpoint-4" / "model.safetensors").is_file()
    assert not list(steps.glob(".checkpoint-*"))


def test_trackers_have_the_last_step_and_what_only_this_program_knows(job: dict[str, Any], tmp_path: Path) -> None:
    assert run(job, "--logger", "tensorboard", "--log-every", "5", "--sample", "the quick", "--sample-tokens", "2") == 0
    read = of_tensorboard(tmp_path / "out-a")
    losses = [float(loss) for loss in _losses(tmp_path / "out-a")]
    assert read["train/loss"][-1] == (12, pytest.approx(sum(losses[10:]) / 2, rel=1e-6))
    for name in ("loss", "learning_rate", "grad_norm", "seconds", "tokens_per_s"):
        assert [step for step, _ in read[f"train/{name}"]] == [5, 10, 12]
    speed = zip(read["train/tokens_per_s"], read["train/seconds"], strict=True)
    assert [each * seconds for (_, each), (_, seconds) in speed] == pytest.approx([160, 160, 64], rel=1e-4)
    with (tmp_path / "out-a" / "loss.csv").open() as file:
        norms = [float(row["grad_norm"]) for row in csv.DictReader(file)]
    assert [norm for _, norm in read["train/grad_norm"]] == pytest.approx([norms[4], norms[9], norms[11]], rel=1e-6)
    assert read["eval/sample 1"] == [5, 10, 12]


def test_a_loss_that_is_not_finite_is_in_one_entry_of_trackers_and_one_that_fails_does_not_end_the_run(
    job: dict[str, Any], tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, told = FinetuneSFTTrainer.compute_loss, TensorBoardCallback.on_log

    def computed(self: FinetuneSFTTrainer, *given: Any, **named: Any) -> torch.Tensor:
        return compute(self, *given, **named) * (math.nan if self.state.global_step == 1 else 1)

    kept: list[int] = []

    def failing(self: Any, args: Any, state: Any, *given: Any, **named: Any) -> None:
        kept.append(len(state.log_history))
        if state.global_step == 4:
            raise ConnectionError("503 Service Unavailable")
        told(self, args, state, *given, **named)

    monkeypatch.setattr(FinetuneSFTTrainer, "compute_loss", computed)
    monkeypatch.setattr(TensorBoardCallback, "on_log", failing)
    assert run(job | {"--steps": 5}, "--logger", "tensorboard", "--log-every", "1") == 0
    losses = [float(loss) for loss in _losses(tmp_path / "out-a")]
    entries = [loss for step, loss in enumerate(losses, 1) if step != 4]
    assert max(kept) == 1, "a run of many steps would keep an entry of each"
    read = of_tensorboard(tmp_path / "out-a")
    assert [loss for _, loss in read["train/loss"]] == pytest.approx(entries, rel=1e-6, nan_ok=True)
    assert [math.isnan(loss) for loss in entries] == [False, True, False, False]
    assert (
        "warning: the tracker tensorboard failed: ConnectionError: 503 Service Unavailable; the run continues"
        in capfd.readouterr().err
    )


def test_a_model_that_cannot_be_saved_does_not_end_the_run(
    job: dict[str, Any], tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise InfinityError("saving to there: no space left on device")

    monkeypatch.setattr(training, "save_model", full)
    assert run(job, "--save-every", "5") == 0
    said = capfd.readouterr()
    assert "warning: step 5: the model is not saved in" in said.err
    assert "step 10: the model is not saved in" in said.out  # again at the end
    assert (tmp_path / "out-a" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--save-limit", "2"], "--save-limit does nothing without --save-every"),
        (["--sample-tokens", "3"], "--sample-tokens does nothing without --sample"),
        (["--logger", "aim"], "invalid choice: 'aim'"),
        (["--logger", "comet_ml"], "--logger comet_ml needs its library: pip install comet-ml"),
    ],
)
def test_options_that_do_nothing_are_refused(flags: list[str], says: str, job: dict[str, Any], capsys: Any) -> None:
    assert run(job, *flags) == 2
    assert says in capsys.readouterr().err


def test_a_prompt_that_the_model_cannot_take_is_refused_at_the_start(job: dict[str, Any], capsys: Any) -> None:
    assert run(job, "--sample", "the fox " * 1024) == 2
    error = capsys.readouterr().err
    assert "--sample: " in error
    assert "of the prompt and 64 tokens to write are more than the model's 2048 positions" in error


@pytest.mark.parametrize("flags", [["--save-best"], ["--sample", "the fox"]])
def test_options_that_need_held_out_data_say_so(flags: list[str], tmp_path: Path, job: Any, capsys: Any) -> None:
    assert run(_job(tmp_path, "b"), *flags) == 2
    assert f"{flags[0]} does nothing without --eval-data or --eval-split" in capsys.readouterr().err


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("flags", [["--save-every", "5"], ["--logger", "tensorboard"]])
@pytest.mark.parametrize("resumed", [False, True])
def test_what_another_run_has_left_is_not_mixed_with(
    resumed: bool, flags: list[str], job: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    more = ["finetune", "--resume", str(tmp_path / "swap-a"), "--steps", "14", "--output", str(tmp_path / "more")]
    place = tmp_path / ("more-steps" if resumed else "out-a-steps")
    if resumed:
        assert run(job, "--keep-store") == 0
    mine = [place / "checkpoint-1" / "mine", place / "events"]
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
    assert saved(tmp_path / "out-a") == {"checkpoint-3", "checkpoint-6", "checkpoint-9"}
    (tmp_path / "out-a").rename(tmp_path / "elsewhere")
    more = ["finetune", "--resume", str(tmp_path / "swap-a"), "--steps", "16", "--save-every", "4"]
    assert main(more) == 0
    assert saved(tmp_path / "out-a") == {"checkpoint-3", "checkpoint-6", "checkpoint-9", "checkpoint-12"}


def test_a_command_that_begins_anew_goes_on_in_what_it_left(job: dict[str, Any], tmp_path: Path) -> None:
    always = [*(str(part) for item in job.items() for part in item), "--resume", "--save-every", "4"]
    DirectoryOwner("before", str(tmp_path / "swap-a"), begins_anew=False).make(tmp_path / "out-a-steps")
    assert main(["finetune", *always]) == 0
    assert saved(tmp_path / "out-a") == {"checkpoint-4", "checkpoint-8"}


def evaluating(monkeypatch: pytest.MonkeyPatch, losses: list[float]) -> None:
    """Make the evaluations return these losses."""
    given, evaluate = iter(losses), FinetuneSFTTrainer.evaluation_loop

    def loop(*arguments: Any, **options: Any) -> Any:
        output = evaluate(*arguments, **options)
        output.metrics["eval_loss"] = next(given)
        return output

    monkeypatch.setattr(FinetuneSFTTrainer, "evaluation_loop", loop)


def test_a_best_model_that_could_not_be_saved_is_not_claimed(
    job: dict[str, Any], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves, save = iter([True, False]), training.save_model

    def sometimes(*given: Any) -> None:
        if not next(saves):
            raise InfinityError("no space left on device")
        save(*given)

    evaluating(monkeypatch, [3.0, 2.0, 2.5])
    monkeypatch.setattr(training, "save_model", sometimes)
    assert run(job, "--save-best") == 0
    assert "lowest held-out loss: 2.0000, of step 10: its model could not be saved" in capsys.readouterr().out
    assert saved(tmp_path / "out-a") == {"checkpoint-5"}


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
    assert (
        "warning: --sample: transformers cannot generate text with the model (ValueError: " in capsys.readouterr().err
    )
    assert len(evaluations(tmp_path / "out-a")) == 3


def test_room_for_the_models_of_steps_is_asked_for_at_the_start(
    job: dict[str, Any], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run_directory.require_room
    monkeypatch.setattr(run_directory, "require_room", lambda *given: before(*given[:-1], 1 << 50))
    assert run(job, "--save-every", "2", "--save-limit", "2") == 2
    error = capsys.readouterr().err
    assert "--save-every: 3 models of 1048576.00 GiB and the output take 4194304.00 GiB" in error


def test_the_last_steps_model_is_the_output_and_is_not_saved_twice(
    job: dict[str, Any], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluating(monkeypatch, [3.0, 2.0, 1.0])
    assert run(job, "--save-every", "6", "--save-best") == 0
    assert saved(tmp_path / "out-a") == {"checkpoint-6", "checkpoint-10"}
    assert f"lowest held-out loss: 1.0000, of step 12: {tmp_path / 'out-a'}" in capsys.readouterr().out


def test_the_facts_of_steps_are_kept_with_their_samples() -> None:
    made = RunHistory()
    made.facts.append(StepFacts(1, 2.5, 1e-3, math.nan, 0.5, 7, 8, 9))
    made.samples.append(GeneratedText(1, "a", "b"))
    again = RunHistory()
    again.load_state_dict(made.state_dict())
    assert again.samples == made.samples
    assert again.facts[0].tokens == 7
    assert again.facts[0].skipped
