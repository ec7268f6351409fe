"""A stage's process may hang, die, or print what is no measurement: its line says so, and keeps what was measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu.record import Options
from gpu.runner import Budget, Stage, run_stage

_BEGIN = """
import os, signal, subprocess, sys, threading
from gpu.record import Record, Options, run

def stage(record, options):
    record.measure("first", "two", lambda: 2, good=lambda value: value == 2)
"""
_END = """
if __name__ == "__main__":
    run(stage)
"""


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a stage whose body is given; returns its line."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(body: str, *, seconds: float = 60.0, whole: bool = False) -> dict[str, Any]:
        (tmp_path / "played.py").write_text(body if whole else _BEGIN + body + _END)
        stage = Stage(3, "played", seconds, "played", False, "a test")
        options = Options(seconds, tmp_path / "out", tmp_path / "work")
        line = run_stage(stage, Path(sys.executable), options, tmp_path / "log")
        json.dumps(line)
        return line

    return make


def test_a_line_has_what_was_expected_beside_what_was_seen(play: Any) -> None:
    line = play("    record.note('second', [1], expected='anything')\n")
    assert (line["stage"], line["name"], line["rc"], line["verdict"]) == (3, "played", 0, "ok")
    assert line["measured"] == {"first": 2, "second": [1]}
    assert line["expected"] == {"first": "two", "second": "anything"}


def test_a_stage_that_hangs_is_killed_and_its_traceback_reported(play: Any) -> None:
    body = (
        "    record.measure('for ever', 'an end', wait_in_vain)\n\ndef wait_in_vain():\n    threading.Event().wait()\n"
    )
    line = play(body, seconds=5)
    assert line["verdict"] == "failed"
    assert line["rc"] == -9
    assert line["died"] == "killed after 5 s during 'for ever'"
    assert "in wait_in_vain" in line["traceback"]
    assert line["measured"] == {"first": 2}


def test_a_stage_that_dies_by_a_signal_keeps_what_it_measured(play: Any) -> None:
    line = play("    record.measure('death', 'life', lambda: os.kill(os.getpid(), signal.SIGSEGV))\n")
    assert line["verdict"] == "failed"
    assert line["died"] == "by SIGSEGV during 'death'"
    assert line["measured"] == {"first": 2}
    assert "Segmentation fault" in line["stderr"]


def test_a_stage_that_prints_garbage_fails_and_shows_it(play: Any) -> None:
    line = play("print('hello'); print('[1]')", whole=True)
    assert (line["verdict"], line["rc"]) == ("failed", 0)
    assert line["garbage"] == ["hello", "[1]"]


def test_what_a_library_prints_is_no_measurement(play: Any) -> None:
    assert play("    print('hello')\n")["verdict"] == "ok"


def test_a_measurement_that_raises_does_not_lose_the_others(play: Any) -> None:
    line = play("    record.measure('ratio', '1', lambda: 1 / 0)\n    record.note('last', 3)\n")
    assert line["verdict"] == "failed"
    assert line["measured"] == {"first": 2, "last": 3}
    assert "ZeroDivisionError" in line["errors"]["ratio"]


@pytest.mark.parametrize(
    ("arguments", "verdict"),
    [
        ("known='by design'", "known"),
        ("speed=True", "missed"),
        ("known='by design', speed=True", "known"),
        ("", "failed"),
    ],
)
def test_what_is_not_as_expected_is_told_apart(play: Any, arguments: str, verdict: str) -> None:
    line = play(f"    record.measure('second', '3', lambda: 2, good=lambda value: value == 3, {arguments})\n")
    assert line["verdicts"] == {"first": "ok", "second": verdict}
    assert line["verdict"] == verdict
    assert line.get("reasons", {}) == ({"second": "by design"} if verdict == "known" else {})


def test_an_exception_is_a_failure_where_a_bad_value_is_known(play: Any) -> None:
    line = play("    record.measure('second', '3', lambda: 1 / 0, good=bool, known='by design')\n")
    assert line["verdict"] == "failed"


def test_a_stage_without_a_measurement_fails(play: Any) -> None:
    assert play("", whole=True)["verdict"] == "failed"


def test_what_a_stage_started_ends_with_it(play: Any) -> None:
    body = "    record.note('child', subprocess.Popen(['sleep', '1000']).pid)\n"
    child = Path("/proc") / str(play(body)["measured"]["child"])
    assert not child.exists() or "\nState:\tZ" in (child / "status").read_text()


def test_a_stage_gets_what_is_left_of_the_budget_or_nothing() -> None:
    stage = Stage(1, "played", 45.0, "played", True, "a test", least_s=10.0)
    assert Budget(1000.0, reserve_s=0.0).limit_of(stage, gpu=True) == 45.0
    assert 0.0 < Budget(30.0, reserve_s=0.0).limit_of(stage, gpu=True) <= 30.0
    assert Budget(9.0, reserve_s=0.0).limit_of(stage, gpu=True) == 0.0
