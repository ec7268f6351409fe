"""Options for models of steps that cannot be done are said before the run."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infinity.cli import saved_steps
from infinity.cli.saved_steps import SavedSteps
from infinity.errors import ConfigError


class Unowned:
    """An owner of directories that refuses none."""

    def require(self, *_: object) -> None:
        pass


def options(**given: Any) -> Namespace:
    free = {"eval_data": None, "eval_split": None, "eval_steps": None, "save_limit": None, "save_every": None}
    return Namespace(**(free | {"save_best": False} | given))


def test_the_best_model_needs_evaluations_on_the_way() -> None:
    saved_steps.check(options(save_best=True, eval_split=0.5, eval_steps=2))
    with pytest.raises(ConfigError, match="--save-best needs --eval-steps"):
        saved_steps.check(options(save_best=True, eval_split=0.5))


def test_a_place_that_cannot_be_written_is_named_before_the_run(tmp_path: Path) -> None:
    owner: Any = Unowned()
    saved_steps.prepare(options(output=tmp_path / "missing" / "out"), owner)  # nothing is to be saved
    saved_steps.prepare(options(output=tmp_path / "out", save_every=1), owner)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="for the models of --save-every and --save-best, cannot be made: No such"):
        saved_steps.prepare(options(output=tmp_path / "missing" / "out", save_every=1), owner)


@pytest.mark.parametrize(
    ("given", "free", "says", "ways"),
    [
        (
            {"save_every": 2},
            4,
            r"--save-every: 5 models .* Save less often, keep fewer \(--save-limit\), or choose an --output on another",
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
        world: Any = None
        saved = SavedSteps(options(**({"output": Path("disk/out")} | given | changes)), None, 12, world, None)
        saved.require_room(1, 0)

    disks = {Path("disk"): free, Path("other"): 100}
    monkeypatch.setattr(saved_steps.shutil, "disk_usage", lambda path: SimpleNamespace(free=disks[path]))
    with pytest.raises(ConfigError, match=says):
        require_room()
    for way in ways:
        require_room(**way)
