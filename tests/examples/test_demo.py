"""`make demo` does not throw away a run that it told the user to go on with."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    """A directory for demos whose programs only write down how they are called."""
    for name in ("python", "infinity"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/called\n')
        program.chmod(0o755)
    return tmp_path


def demo(directory: Path) -> list[str]:
    (directory / "called").unlink(missing_ok=True)
    command = [
        "make",
        "-f",
        ROOT / "Makefile",
        "-o",
        "runtime",
        "demo",
        f"BIN={directory}/bin",
        f"PYTHON={directory}/bin/python",
    ]
    subprocess.run(command, cwd=directory, check=True, capture_output=True)
    return (directory / "called").read_text().splitlines()


def test_a_demo_that_was_stopped_goes_on(calls: Path) -> None:
    generation = calls / "demo" / "swap" / "generation-000000000007.infinity"
    generation.parent.mkdir(parents=True)
    generation.touch()
    first = demo(calls)[0]
    assert first.startswith("infinity finetune --resume demo/swap")
    assert "--keep-store" in first, "its generations are verified afterwards"
    assert generation.exists()


@pytest.mark.parametrize("left", ["demo/input/text", "demo/output/config.json"])
def test_one_that_never_began_or_ended_begins_anew(left: str, calls: Path) -> None:
    (calls / left).mkdir(parents=True)
    if "output" in left:
        (calls / "demo" / "swap").mkdir()
        (calls / "demo" / "swap" / "generation-000000000060.infinity").touch()
    called = demo(calls)
    assert called[0] == "python examples/make_demo_checkpoint.py demo/input"
    (trained,) = (call for call in called if call.startswith("infinity finetune --model demo/input/checkpoint "))
    assert "--keep-store" in trained
    assert not (calls / left).exists()
