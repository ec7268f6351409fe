"""The verdict, the table and the JSON."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest

from infinity.cli.doctor.doctor_report import is_ready, ordered, to_issue, to_json, to_text, verdict
from infinity.cli.doctor.probes import ProbeFinding, State


def rows(*states: State) -> list[ProbeFinding]:
    return [ProbeFinding(state, "found", "", f"row {at}", "section") for at, state in enumerate(states)]


@pytest.mark.parametrize(
    ("states", "said", "ready"),
    [
        (["ok", "ok"], "ready: 2 checks, 2 ok", True),
        (["slower", "slower", "unknown", "ok"], "ready: 4 checks, 1 ok, 2 slower, 1 unknown", True),
        (["missing", "ok"], "not ready: 2 checks, 1 ok, 1 missing", False),
        (["unknown", "missing", "missing", "slower"], "not ready: 4 checks, 1 slower, 2 missing, 1 unknown", False),
    ],
)
def test_the_verdict_is_one_sentence(states: list[State], said: str, ready: bool) -> None:
    assert (verdict(rows(*states)), is_ready(rows(*states))) == (said, ready)
    assert to_text(rows(*states), 120).splitlines()[0] == said


def test_rows_of_one_section_stand_together() -> None:
    mixed = [ProbeFinding("ok", "", "", name, section) for section, name in ("b1", "a2", "b3")]
    assert [row.what for row in ordered(mixed)] == ["1", "3", "2"]


def test_a_long_finding_is_wrapped_and_a_command_is_not() -> None:
    row = ProbeFinding("slower", "word " * 60, "command " * 30, "free space", "disk")
    lines = to_text([row], 80).splitlines()
    assert lines[2] == "disk"
    assert lines[3].startswith("  slower   free space            word word")
    assert all(len(line) <= 80 for line in lines[:-1])
    assert lines[-1].strip().startswith("→ command command")
    assert len(lines[-1]) > 200


def test_a_narrow_terminal_does_not_break_words() -> None:
    row = ProbeFinding("ok", "found", "", "a name that is longer than its column", "disk")
    assert "a name that is longer than its column found" in to_text([row], 5)


def test_escape_sequences_of_names_are_spelled_out() -> None:
    text = to_text([ProbeFinding("ok", "\x1b]0;x\x07", "echo \x1b", "what", "disk /\x1b[2J")], 120)
    assert "\x1b" not in text
    assert "\\x1b" in text


def test_the_json_has_every_row() -> None:
    found = json.loads(json.dumps(to_json(rows("ok", "missing"), "1.2")))
    assert (found["schema"], found["version"], found["infinity"]) == ("infinity-doctor", 1, "1.2")
    assert (found["ready"], found["verdict"]) == (False, "not ready: 2 checks, 1 ok, 1 missing")
    assert found["rows"][1] == {
        "section": "section",
        "what": "row 1",
        "finding": "found",
        "state": "missing",
        "mend": "",
    }


@pytest.mark.parametrize(
    ("finding", "told"),
    [
        ("the file /mnt/cluster/eve/x.py is odd", "the file PATH is odd"),
        ("the file /mnt/old data/of eve/x.py is odd", "the file PATH is odd"),
        ("no directory /swaps/its disk (eve); `sudo fstrim '/swaps'`", "no directory PATH; `sudo fstrim 'PATH'`"),
        ("/swaps/its disk (eve)/other one/x: full", "PATH: full"),
        ("3.00 GB/s up, of /dev/nvme0 and /proc/cpuinfo", "3.00 GB/s up, of /dev/nvme0 and /proc/cpuinfo"),
        ("/swaps/its disk (eve)/a b: node 0; eve@box7 asked", "SWAP_DIR_1: node 0; USER@HOST asked"),
        ("/home/eve/.cache: full", "HOME/.cache: full"),
        ("eventually; the drive reports its wear only to root", "eventually; the drive reports its wear only to root"),
    ],
)
def test_what_is_pasted_into_an_issue_names_nobody(finding: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("HOME", "/home/eve"), ("USER", "eve")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(platform, "node", lambda: "box7")
    swap = Path("/swaps/its disk (eve)/a b")
    said = to_issue([ProbeFinding("missing", finding, "rm /home/eve/x", "what", f"disk {swap}")], [swap], "1.0", 200)
    assert "\ndisk SWAP_DIR_1\n" in said
    assert f"  missing  what                  {told}\n```" in said
    assert f"infinity 1.0 on Linux {platform.machine()}: not ready: 1 checks, 1 missing" in said
