"""The directory beside an output: options that need it and cannot have it are refused before the run."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infinity.cli import run_directory
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
            r"--save-every: 5 models .* Save less often, keep fewer \(--save-limit\), or choose an --output on another",
            [{"save_every": 5}, {"save_limit": 2}, {"output": Path("other/out")}],
        ),
        (
            {"save_best": True},
            1,
            "--save-best: 1 models .* Leave --save-best out, or choose an --output on another disk",
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
