"""The directory beside an output: options that need it and cannot have it are refused before the run, and which of its
models stay."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers.trainer

from infinity.cli import run_directory
from infinity.cli.history import EvaluationLoss
from infinity.errors import ConfigError


class Unowned:
    """An owner of directories that refuses none."""

    def require(self, *_: object) -> None:
        pass


def options(**given: Any) -> Namespace:
    free = {
        "eval_data": None,
        "eval_split": None,
        "eval_steps": None,
        "save_limit": None,
        "save_every": None,
        "logger": None,
    }
    return Namespace(**(free | {"save_best": False} | given))


def test_the_best_model_needs_evaluations_on_the_way() -> None:
    run_directory.check(options(save_best=True, eval_split=0.5, eval_steps=2))
    with pytest.raises(ConfigError, match="--save-best needs --eval-steps"):
        run_directory.check(options(save_best=True, eval_split=0.5))


def test_a_place_that_cannot_be_written_is_named_before_the_run(tmp_path: Path) -> None:
    owner: Any = Unowned()
    run_directory.prepare(options(output=tmp_path / "missing" / "out"), owner)  # nothing is to be saved
    run_directory.prepare(options(output=tmp_path / "out", save_every=1), owner)
    assert not list(tmp_path.iterdir())
    with pytest.raises(
        ConfigError,
        match="--save-best and the files of --logger, cannot be made: No such",
    ):
        run_directory.prepare(options(output=tmp_path / "missing" / "out", save_every=1), owner)


@pytest.mark.parametrize(
    ("given", "free", "says", "ways"),
    [
        (
            {"save_every": 2},
            4,
            r"--save-every: 5 models .* Save less often, keep fewer models \(--save-limit\), or choose an --output",
            [{"save_every": 5}, {"save_limit": 2}, {"output": Path("other/out")}],
        ),
        (
            {"save_best": True},
            2,
            "--save-best: 2 models .* Leave --save-best out, or choose an --output on another disk",
            [{"save_best": False}, {"output": Path("other/out")}],
        ),
    ],
    ids=["every", "best"],
)
def test_without_room_for_models_each_way_on_has_room(
    given: dict[str, Any], free: int, says: str, ways: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def require_room(**changes: Any) -> None:
        run_directory.require_room(options(**({"output": Path("disk/out")} | given | changes)), 12, 0, 1)

    disks = {Path("disk"): free, Path("other"): 100}
    monkeypatch.setattr(run_directory.shutil, "disk_usage", lambda path: SimpleNamespace(free=disks[path]))
    with pytest.raises(ConfigError, match=says):
        require_room()
    for way in ways:
        require_room(**way)


def saved(directory: Path, step: int, every: int | None) -> None:
    """Make the folder of a model that was saved with this --save-every."""
    folder = directory / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").touch()
    (folder / "trainer_state.json").write_text(json.dumps({"save_steps": every or 1000}))


def there(directory: Path) -> set[str]:
    return {path.name.removeprefix("checkpoint-") for path in directory.iterdir()}


EVALUATED = [EvaluationLoss(5, 3.0), EvaluationLoss(6, math.nan), EvaluationLoss(7, 1.0), EvaluationLoss(10, 2.0)]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"save_every": 2}, ["2", "4", "5", "6", "7", "8", "10"]),
        ({"save_every": 2, "save_best": True}, ["2", "4", "6", "7", "8", "10"]),
        ({"save_every": 2, "save_best": True, "save_limit": 1}, ["7", "10"]),
        ({"save_every": 2, "save_limit": 2}, ["5", "7", "8", "10"]),
        ({"save_best": True}, ["2", "4", "6", "7", "8", "10"]),
        ({"save_every": 3}, ["2", "4", "5", "6", "7", "8", "10"]),
        ({"save_every": 3, "save_limit": 9, "save_best": True}, ["2", "4", "6", "7", "8", "10"]),
    ],
    ids=str,
)
def test_the_newest_of_every_and_the_best_stay(given: dict[str, Any], kept: list[str], tmp_path: Path) -> None:
    """Each even step was saved by --save-every 2; those of 5 and 7 because they were the best."""
    place = tmp_path / "out-steps"
    for step in range(2, 11, 2):
        saved(place, step, 2)
    for step in (5, 7):
        saved(place, step, None if step == 5 else 2)
    (place / "checkpoint-9").mkdir()  # it could not be saved whole
    (place / "checkpoint-mine").mkdir()
    run_directory.rotate(options(output=tmp_path / "out", **given), EVALUATED)
    assert there(place) == {*kept, "mine"}


def test_the_best_of_those_that_are_there_stays(tmp_path: Path) -> None:
    saved(tmp_path / "out-steps", 5, None)
    saved(tmp_path / "out-steps", 10, None)
    given = options(output=tmp_path / "out", save_best=True)
    run_directory.rotate(given, EVALUATED)
    assert there(tmp_path / "out-steps") == {"10"}
    lines = run_directory.said(given, EVALUATED, [])
    assert lines[-1] == "lowest held-out loss: 1.0000, of step 7: its model could not be saved"


def test_what_an_interruption_left_goes_before_a_run_goes_on(tmp_path: Path) -> None:
    place = tmp_path / "out-steps"
    for step in (2, 4, 6):
        saved(place, step, 2)
    (place / "checkpoint-2" / "trainer_state.json").unlink()
    for name in (".checkpoint-4-x1y2", "checkpoint-mine"):
        (place / name).mkdir()
    run_directory.tidy(options(output=tmp_path / "out"), 4)
    assert len(there(place)) == 5, "no option asks for the directory"
    run_directory.tidy(options(output=tmp_path / "out", save_every=2), 4)
    assert there(place) == {"4", "mine"}


def test_room_is_asked_for_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = options(output=tmp_path / "out", save_every=1, save_limit=3)
    monkeypatch.setattr(run_directory.shutil, "disk_usage", lambda _: SimpleNamespace(free=2))
    with pytest.raises(ConfigError, match="4 models"):
        run_directory.require_room(given, 12, 0, 1)
    for step in (3, 4, 5):
        saved(tmp_path / "out-steps", step, 1)
    run_directory.require_room(given, 12, 5, 1)


def test_names_are_those_of_transformers() -> None:
    assert transformers.trainer.TRAINER_STATE_NAME == run_directory.TRAINER_STATE_NAME
    assert transformers.trainer_utils.PREFIX_CHECKPOINT_DIR == run_directory.PREFIX_CHECKPOINT_DIR
