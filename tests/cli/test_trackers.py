"""A tracker that can go on with a run does."""

from __future__ import annotations

import importlib.machinery
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import TrainerState
from transformers.integrations import WandbCallback, integration_utils

from infinity.cli import trackers
from infinity.cli.main import main
from tests.cli.test_finetune import run
from tests.cli.test_resume import job as job


class Wandb(ModuleType):
    """The part of the library that a Trainer's callback and infinity use."""

    class Run(dict[str, Any]):
        def __init__(self) -> None:
            super().__init__()
            self.logged: list[dict[str, Any]] = []
            self.ended = False
            self.summary: dict[str, Any] = {}

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: object) -> None:
            self.ended = True

        def _label(self, **_: Any) -> None:
            pass

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
        self.begun: list[dict[str, Any]] = []
        self.runs: list[Wandb.Run] = []
        self.config = Config()

    @property
    def run(self) -> Run | None:
        return self.runs[-1] if self.runs and not self.runs[-1].ended else None

    def init(self, **how: Any) -> Run:
        assert self.run is None, "the callback goes on with the run that is there"
        self.begun.append(how)
        self.runs.append(self.Run())
        return self.runs[-1]

    def log(self, values: dict[str, Any]) -> None:
        assert self.run is not None
        self.run.logged.append(values)


class Config(dict[str, Any]):
    def update(self, values: Any, **_: Any) -> None:  # type: ignore[override]
        super().update(values)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    made = Wandb()
    within = ModuleType("wandb.sdk.lib.config_util")
    vars(within)["ConfigError"] = ValueError
    for name in ("wandb", "wandb.sdk", "wandb.sdk.lib"):
        monkeypatch.setitem(sys.modules, name, made)
    monkeypatch.setitem(sys.modules, "wandb.sdk.lib.config_util", within)
    monkeypatch.setattr(integration_utils, "is_wandb_available", lambda: True)
    for name in ("WANDB_PROJECT", "WANDB_RUN_ID", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert WandbCallback()._wandb is made
    return made


def test_wandb_has_one_run_of_a_run_that_goes_on(job: dict[str, Any], tmp_path: Path, wandb: Wandb) -> None:
    short = job | {"--steps": 2}
    assert run(short, "--logger", "wandb", "--keep-store") == 0
    more = ["--steps", "3", "--output", str(tmp_path / "b")]
    assert main(["finetune", "--resume", str(tmp_path / "swap-a"), *more]) == 0
    first, second = wandb.begun
    assert first == {
        "project": "infinity",
        "name": "out-a",
        "dir": str(tmp_path / "out-a-steps"),
        "id": second["id"],
        "resume": "allow",
    }
    assert len(first["id"]) > 8
    steps = [[each["train/global_step"] for each in one.logged if "train/loss" in each] for one in wandb.runs]
    assert steps == [[1, 2], [3]]
    assert all(one.ended for one in wandb.runs)


def test_what_the_environment_says_of_wandb_counts(
    tmp_path: Path, wandb: Wandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_RUN_ID", "abc")
    options = Namespace(logger=["wandb"], output=tmp_path / "out", trainer={"run_name": ["this"]})
    with trackers.opened(options, "run", tmp_path, 0) as callbacks:
        assert len(callbacks) == 1
    assert [wandb.begun[0][name] for name in ("project", "id", "name")] == ["mine", "abc", "this"]


def test_a_tracker_that_fails_is_said_once_and_ends_no_run(
    job: dict[str, Any], wandb: Wandb, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WandbCallback, "setup", away)
    monkeypatch.setattr(WandbCallback, "on_train_end", away)
    assert run(job | {"--steps": 2}, "--logger", "wandb") == 0
    assert capfd.readouterr().err.count(GOES_ON) == 1


@pytest.mark.parametrize("event", ["init", "on_log", "__exit__"])
def test_a_tracker_may_fail_from_its_opening_to_its_end(
    event: str, tmp_path: Path, wandb: Wandb, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner: Any = {"init": Wandb, "__exit__": Wandb.Run}.get(event, WandbCallback)
    monkeypatch.setattr(owner, event, away)
    options: Any = Namespace(logger=["wandb"], output=tmp_path / "out", trainer=None)
    with trackers.opened(options, "run", tmp_path, 0) as (callback,):
        (callback.on_log if event == "on_log" else callback.on_step_end)(None, TrainerState(), None)
        assert not hasattr(callback, "state_dict"), "only its events are asked for"
    assert capsys.readouterr().err.count(GOES_ON) == 1


GOES_ON = "warning: the tracker wandb failed: ConnectionError: no route to host; the run continues"


def away(*_: Any, **__: Any) -> None:
    raise ConnectionError("no route to host")
