"""Checkpoint folders of a Trainer that knows nothing of infinity: they pin generations, rotate and resume."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

import infinity
from infinity.coordinator import registry
from infinity.io.generation_pins import read_pins
from infinity.runtime.pins import pinned
from tests.conftest import weights_of
from tests.integrations.conftest import Launch
from tests.integrations.training import SAVING, Rows, log_of, trainer


@pytest.mark.covering(strength=1, most=2)
@pytest.mark.parametrize("limit", [None, 1, 2])
def test_a_run_goes_on_from_its_checkpoint_folder(
    limit: int | None, checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder of an earlier step, of which another generation is the newest."""
    with launch():
        whole = trainer(checkpoint, rows, tmp_path / "out", save_total_limit=limit, **SAVING)
        whole.train()
        folders = sorted(path.name for path in (tmp_path / "out").iterdir())
        assert [path.name for path in pinned(whole.model)] == folders[-2:]
        assert [(tmp_path / "out" / name / "portable").exists() for name in folders[:-2]] == [True] * len(folders[:-2])
        assert "portable copy" not in caplog.text  # this has the level info
    steps = [int(name.split("-")[1]) for name in folders]
    assert steps == {None: [2, 4, 6], 1: [6], 2: [4, 6]}[limit]
    with launch():
        again = trainer(checkpoint, rows, tmp_path / "out", save_total_limit=limit, **(SAVING | {"max_steps": 8}))
        again.train(resume_from_checkpoint=True)
        assert again.state.global_step == 8
    expected = {entry["step"]: entry["loss"] for entry in whole.state.log_history if "loss" in entry}
    found = {entry["step"]: entry["loss"] for entry in again.state.log_history if "loss" in entry}
    assert all(found[step] == loss for step, loss in expected.items())


@pytest.mark.parametrize(
    ("before", "after", "folders", "with_a_copy"),
    [
        pytest.param(
            1, 3, 3, 1, marks=pytest.mark.long(kept="only here more folders are kept than the store has room for")
        ),
        *(pytest.param(*each, marks=pytest.mark.long) for each in [(3, 1, 1, 0), (2, None, 5, 2), (None, 2, 2, 0)]),
    ],
)
def test_a_run_goes_on_with_another_limit_in_the_room_that_its_store_has(
    before: int | None,
    after: int | None,
    folders: int,
    with_a_copy: int,
    checkpoint: Path,
    rows: Rows,
    launch: Launch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ways: dict[str, Any] = SAVING | {"lr_scheduler_type": "constant"}
    with launch():
        whole = trainer(checkpoint, rows, tmp_path / "whole", **(ways | {"max_steps": 10, "save_strategy": "no"}))
        whole.train()
    with launch():
        trainer(checkpoint, rows, tmp_path / "out", save_total_limit=before, **(ways | {"max_steps": 4})).train()
    assert "room for" not in caplog.text
    with launch():
        again = trainer(checkpoint, rows, tmp_path / "out", save_total_limit=after, **(ways | {"max_steps": 10}))
        again.train(resume_from_checkpoint=True)
        assert log_of(again) == log_of(whole)
        there = sorted((tmp_path / "out").iterdir(), key=lambda path: int(path.name.split("-")[1]))
        assert len(there) == folders
        assert [(path / "portable").exists() for path in there] == [True] * with_a_copy + [False] * (
            folders - with_a_copy
        )
        assert list(pinned(again.model)) == there[with_a_copy:]
    had, wished = ({None: 2, 1: 2, 2: 3, 3: 4}[limit] for limit in (before, after))
    assert (
        f"has room for {had} pinned generations, and this number does not change, although "
        f"the config now says {wished}" in caplog.text
    )
    assert ("the older folders get a portable copy" in caplog.text) == (had < wished)


def test_room_is_made_for_as_many_pins_as_a_store_can_have(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    with launch():
        one = trainer(checkpoint, rows, tmp_path / "out", save_total_limit=1000, **(SAVING | {"max_steps": 2}))
        one.train()
        assert registry.coordinator_of(one.model).plan.placement.pins == 64


def test_what_is_resumed_in_the_middle_ends_as_the_run_that_was_not_stopped(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    ends = []
    for folder in (None, tmp_path / "out" / "checkpoint-4"):
        with launch():
            one = trainer(checkpoint, rows, tmp_path / "out", save_total_limit=3, **SAVING)
            one.train(resume_from_checkpoint=folder and str(folder))
            ends.append((log_of(one), weights_of(one.model)))
    torch.testing.assert_close(ends[1][0], ends[0][0], rtol=0, atol=0)
    assert all(torch.equal(value, ends[0][1][name]) for name, value in ends[1][1].items())


def test_a_checkpoint_folder_loads_in_plain_transformers(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    with launch():
        one = trainer(checkpoint, rows, tmp_path / "out", **SAVING)
        one.train()
        expected = weights_of(one.model)
        one.save_model(str(tmp_path / "last"))
    for folder in ("out/checkpoint-6", "last"):
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert all(torch.equal(plain.get_parameter(name), value) for name, value in expected.items())


def test_the_best_model_is_there_at_the_end(checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path) -> None:
    ends = []
    for context in (nullcontext(), launch()):
        with context as run:
            best = SAVING | {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
            one = trainer(checkpoint, rows, tmp_path / f"out{len(ends)}", greater_is_better=True, **best)
            one.train()
            assert one.state.best_global_step < 6
            ends.append(one.evaluate()["eval_loss"])
            best_loss = max(entry["eval_loss"] for entry in one.state.log_history if "eval_loss" in entry)
            assert run is None or ends[-1] == best_loss
    assert ends[1] == pytest.approx(ends[0], rel=1e-5)


def test_a_second_train_goes_on(checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path) -> None:
    logs = []
    for context in (nullcontext(), launch()):
        with context:
            one = trainer(checkpoint, rows, tmp_path / "out")
            one.train()
            one.train()
            logs.append(log_of(one))
    torch.testing.assert_close(logs[1], logs[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "saves",
    [
        pytest.param(False, marks=pytest.mark.long),
        pytest.param(True, marks=pytest.mark.long(kept="only here a second Trainer trains what the first one trained")),
    ],
)
def test_two_trainers_train_one_model_one_after_the_other(
    saves: bool, checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    """The second has an optimizer of its own, which begins anew."""
    logs = []
    for context in (nullcontext(), launch(pins=2 if saves else 0)):
        with context:
            first = trainer(checkpoint, rows, tmp_path / "out")
            first.train()
            options = {"learning_rate": 5e-4, "report_to": [], "use_cpu": True, "logging_steps": 1, "max_steps": 6}
            options |= SAVING if saves else {"save_strategy": "no"}
            arguments = TrainingArguments(str(tmp_path / f"second{len(logs)}"), **options)
            second = Trainer(first.model, arguments, train_dataset=rows)
            second.train()
            logs.append(log_of(first) + log_of(second))
    torch.testing.assert_close(logs[1], logs[0], rtol=1e-5, atol=1e-6)
    assert (tmp_path / "second1" / "checkpoint-6" / "infinity.json").exists() == saves


def test_a_second_trainer_that_saves_needs_pins_and_says_so_before_it_trains(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    with launch():
        first = trainer(checkpoint, rows, tmp_path / "out")
        first.train()
        arguments = TrainingArguments(str(tmp_path / "out"), report_to=[], use_cpu=True, **SAVING)
        second = Trainer(first.model, arguments, train_dataset=rows)
        with pytest.raises(infinity.PlanError, match="Set `pins: 2` in the swap config"):
            second.train()
        assert second.state.global_step == 0


class Rotation(TrainerCallback):  # type: ignore[misc]
    """A script's own: one folder stays."""

    def __init__(self, remove: Callable[[Path], object]) -> None:
        self._remove = remove

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        for folder in Path(args.output_dir).glob("checkpoint-*"):
            if folder.name != f"checkpoint-{state.global_step}":
                self._remove(folder)


def test_folders_that_the_script_removes_itself_let_their_generations_go(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    with launch():
        one = trainer(checkpoint, rows, tmp_path / "out", **(SAVING | {"save_steps": 1}))
        one.add_callback(Rotation(lambda folder: shutil.rmtree(folder)))
        one.train()
    last = tmp_path / "out" / "checkpoint-6"
    assert [pin.folder for pin in read_pins(tmp_path / "swap")] == [str(last)]
    with launch():
        again = trainer(checkpoint, rows, tmp_path / "out", **(SAVING | {"max_steps": 8}))
        again.train(resume_from_checkpoint=str(last))
        shutil.rmtree(tmp_path / "out")
        assert pinned(again.model) == {}
    assert not list((tmp_path / "swap").glob("*.infinity*"))


def test_a_folder_that_vanished_otherwise_stays_pinned_and_is_named(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with launch(pins=3):
        one = trainer(checkpoint, rows, tmp_path / "out", **SAVING)
        one.add_callback(Rotation(lambda folder: subprocess.run(["rm", "-r", folder], check=True)))
        one.train()
    folders = [Path(pin.folder).name for pin in read_pins(tmp_path / "swap")]
    assert folders[-1] == "checkpoint-6"
    assert len(folders) == 3
    for folder in folders[:-1]:
        assert f"{folder} pin generations and do not exist" in caplog.text or f"{folder}, " in caplog.text
    assert f"infinity checkpoint unpin {tmp_path / 'swap'} --all-gone" in caplog.text


def test_what_is_removed_after_the_model_was_closed_stays_pinned_and_the_store_stays(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    with launch():
        one = trainer(checkpoint, rows, tmp_path / "out", **SAVING)
        one.train()
        infinity.close(one.model)
        shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    assert [Path(pin.folder).name for pin in read_pins(tmp_path / "swap")] == ["checkpoint-4", "checkpoint-6"]


def test_a_folder_that_is_not_infinitys_is_refused(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    trainer(checkpoint, rows, tmp_path / "out", **SAVING).train()
    with launch(), pytest.raises(infinity.ResumeError, match=r"checkpoint-6.*infinity\.json"):
        trainer(checkpoint, rows, tmp_path / "out", **SAVING).train(resume_from_checkpoint=True)


def test_resuming_a_model_that_was_used_is_refused(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    with launch():
        one = trainer(checkpoint, rows, tmp_path / "out", **SAVING)
        one.train()
        with pytest.raises(infinity.ModelError, match="Resume in a new process"):
            one.train(resume_from_checkpoint=True)


def test_without_generations_a_folder_holds_weights_only_and_says_so(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with launch(commit_every=0):
        trainer(checkpoint, rows, tmp_path / "out", **SAVING).train()
    assert "will contain weights and no optimizer states: commit_every is 0" in caplog.text
    assert not (tmp_path / "out" / "checkpoint-6" / "infinity.json").exists()
    with launch(), pytest.raises(infinity.ResumeError):
        trainer(checkpoint, rows, tmp_path / "out", **SAVING).train(resume_from_checkpoint=True)


def test_a_run_that_ended_well_leaves_the_store_only_where_folders_need_it(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    with launch():
        trainer(checkpoint, rows, tmp_path / "out").train()
    assert not list((tmp_path / "swap").glob("*.infinity*"))
    with launch():
        trainer(checkpoint, rows, tmp_path / "out", **SAVING).train()
    with launch(), pytest.raises(infinity.StoreNotEmptyError, match="checkpoint-6"):
        trainer(checkpoint, rows, tmp_path / "out").train()
