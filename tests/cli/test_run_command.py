"""Messages of `infinity run` before a script starts, and after one failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infinity.cli import run_command
from infinity.cli.main import main
from infinity.errors import PeerError
from tests import processes

Result = subprocess.CompletedProcess[str]


@pytest.fixture
def started(tmp_path: Path) -> Path:
    """A script that notes that it was started."""
    script = tmp_path / "script.py"
    script.write_text(f"open({str(tmp_path / 'started')!r}, 'w').close()\n")
    return script


def config(directory: Path, **values: Any) -> Path:
    path = directory / "swap.yaml"
    path.write_text(json.dumps(values))
    return path


def place(kind: str, directory: Path) -> str:
    """Make a path that is no swap directory, as `kind` says, and return it."""
    if kind == "misspelled":
        return str(directory / "mtn" / "nvme" / "swap")
    (directory / "file").touch()
    return str(directory / "file" if kind == "a file" else directory / "file" / "swap")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown key": ({"weigths": "nvme"}, "unknown key 'weigths'; did you mean 'weights'?"),
    "no paths for weights": ({"weights": "nvme"}, "states on nvme need a directory: add nvme: {paths:"),
    "no paths for generations": ({"commit_every": 1}, "commit_every: 1 needs a directory for the generations"),
    "a feature that is not there": ({"gradients": "device"}, "gradients: device is not available yet"),
}


@pytest.mark.parametrize("mistake", BAD)
def test_a_config_that_cannot_be_used_is_one_line_before_the_script_starts(
    mistake: str, started: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values, message = BAD[mistake]
    assert main(["run", str(config(tmp_path, **values)), str(started)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("kind", ["misspelled", "a file", "in a file"])
def test_a_path_that_cannot_be_used_is_one_line_before_the_script_starts(
    kind: str, started: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = place(kind, tmp_path)
    assert main(["run", str(config(tmp_path, nvme={"paths": [path]})), str(started)]) == 2
    error = capsys.readouterr().err
    assert str(Path(path).parent if kind == "misspelled" else tmp_path / "file") in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "started").exists()


def test_each_line_of_infinity_among_the_output_of_a_script_has_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = "a disk", "infinity: a model", "\ninfinity: b"
    lines = [f"logging.getLogger('infinity.io').warning({text!r})\n" for text in records]
    script = "".join(["import logging\n", *lines])
    assert main(["run", *arguments(tmp_path, script)]) == 0
    assert capsys.readouterr().err.startswith("infinity: a disk\ninfinity: a model\n\ninfinity: b\ninfinity: NOTHING")


def run(tmp_path: Path, script: str) -> Result:
    """In a process of its own, as its end is what is looked at."""
    return processes.run(_to_its_end, arguments(tmp_path, script), tmp_path)


def arguments(tmp_path: Path, script: str) -> list[str]:
    (tmp_path / "script.py").write_text(script)
    return [str(config(tmp_path)), str(tmp_path / "script.py")]


def _to_its_end(arguments: list[str], place: Path) -> int:
    """Run the command, and print an exception as Python does for one that nobody catches."""
    os.chdir(place)
    try:
        return main(["run", *arguments])
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1


FAILING = """
import sys, infinity
{hook}
raise {error}
"""


@pytest.mark.long
def test_a_message_of_infinity_is_the_last_line_of_a_script_that_failed(tmp_path: Path) -> None:
    error = "RuntimeError('the library says') from infinity.PlanError('too small. Raise memory.host to 2GiB.')"
    command = [sys.executable, "-m", "infinity.run", *arguments(tmp_path, FAILING.format(hook="", error=error))]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    lines = ended.stderr.splitlines()
    assert ended.returncode == 1
    assert "RuntimeError: the library says" in lines
    assert lines[-1] == "error: too small. Raise memory.host to 2GiB."


def test_it_is_the_last_line_also_where_the_script_prints_tracebacks_itself(tmp_path: Path) -> None:
    hook = "sys.excepthook = lambda kind, *rest: print('mine:', kind.__name__, file=sys.stderr)"
    ended = run(tmp_path, FAILING.format(hook=hook, error="infinity.PlanError('too small')"))
    assert ended.stderr.splitlines()[-2:] == ["mine: PlanError", "error: too small"]


def test_an_error_of_the_script_ends_as_it_does_in_python(tmp_path: Path) -> None:
    ended = run(tmp_path, FAILING.format(hook="", error="ValueError('its own')"))
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == "ValueError: its own"


@pytest.mark.parametrize(
    "arguments", [["swap.yaml"], ["train.py"], ["train.py", "--out", "x", "swap.yaml"], ["--resum"]]
)
def test_a_wrong_command_line_is_one_line(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *arguments]) == 2
    said = capfd.readouterr().err.strip()
    assert said.startswith("error: ")
    assert "\n" not in said
    assert ("infinity run swap.yaml train.py" in said) == ("swap.yaml" not in arguments)


@pytest.mark.parametrize(
    ("ranks", "rank", "shown"), [((1,), "0", False), ((1,), "1", True), ((0, 1), "0", True), ((), "0", True)]
)
def test_a_rank_that_another_rank_ended_shows_no_traceback_of_its_own(
    ranks: tuple[int, ...], rank: str, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    raised = RuntimeError("the training loop ended")
    raised.__cause__ = cause = PeerError("rank 1 failed: no memory", ranks)
    assert run_command._of_another_rank(raised) is (None if shown else cause)
