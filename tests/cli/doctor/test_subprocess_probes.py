"""Probes that hang, crash, raise or leave files cost a row, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from infinity.cli.doctor import subprocess_probes
from infinity.cli.doctor.command import _terminate
from infinity.cli.doctor.probes import Probe, ProbeFinding, ProbeGroup
from infinity.cli.doctor.subprocess_probes import ends, look, new_name
from tests.processes import Forked

LONG_S = 60


def good() -> ProbeFinding:
    return ProbeFinding("ok", "well")


def fails() -> ProbeFinding:
    raise RuntimeError("two\nlines")


def hangs() -> ProbeFinding:
    signal.pause()
    return good()


def crashes() -> ProbeFinding:
    os.kill(os.getpid(), signal.SIGKILL)
    return hangs()


def group(*looks: Any, limit_s: float = LONG_S, leaves: Path | None = None) -> ProbeGroup:
    return ProbeGroup([Probe("section", f"probe {at}", each) for at, each in enumerate(looks)], limit_s, leaves)


def states(rows: Sequence[ProbeFinding]) -> list[tuple[str, str]]:
    return [(row.state, row.finding) for row in rows]


def test_rows_come_in_order_from_all_processes() -> None:
    def several() -> list[ProbeFinding]:
        return [ProbeFinding("ok", "a", what="first"), ProbeFinding("slower", "b", "mend it", what="second")]

    rows = look([group(good, several), group(good), ProbeGroup([], LONG_S)])
    assert [row.what for row in rows] == ["probe 0", "first", "second", "probe 0"]
    assert rows[2] == ProbeFinding("slower", "b", "mend it", "second", "section")


def test_an_error_is_an_unknown_row_and_the_next_probe_goes_on() -> None:
    assert states(look([group(fails, good)])) == [("unknown", "RuntimeError: two lines"), ("ok", "well")]


def test_what_ends_the_process_costs_the_probes_that_are_not_done() -> None:
    assert states(look([group(good, crashes, good), group(good)])) == [
        ("ok", "well"),
        ("unknown", "the process that checked was ended by SIGKILL"),
        ("unknown", "not checked, because 'probe 1' did not end"),
        ("ok", "well"),
    ]
    assert states(look([group(lambda: os._exit(0))])) == [("unknown", "the process that checked ended too early")]


def test_what_hangs_is_given_up() -> None:
    rows = look([group(good, hangs, limit_s=0.3), group(good)])
    assert states(rows) == [("ok", "well"), ("unknown", "no answer within 0.3 s"), ("ok", "well")]


def test_a_process_that_does_not_die_is_left_and_its_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess_probes, "_DEATH_S", 0.0)
    kill = os.kill
    pids: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: pids.append(pid))
    (row,) = look([group(hangs, limit_s=0.2, leaves=tmp_path / "left")])
    assert row.finding.startswith("no answer within 0.2 s; the disk still blocks")
    assert str(tmp_path / "left") in row.finding
    kill(pids[0], signal.SIGKILL)
    os.waitpid(pids[0], 0)


def test_the_file_of_a_process_that_was_ended_is_removed(tmp_path: Path) -> None:
    left = new_name(tmp_path)

    def leaves() -> ProbeFinding:
        left.touch()
        return hangs()

    look([group(leaves, limit_s=0.5, leaves=left)])
    assert list(tmp_path.iterdir()) == []


def test_nothing_that_a_probe_prints_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    def prints() -> ProbeFinding:
        os.write(1, b"out")
        os.write(2, b"err")
        return good()

    assert states(look([group(prints)])) == [("ok", "well")]
    assert capfd.readouterr() == ("", "")


def test_no_process_and_no_descriptor_is_left() -> None:
    before, there = len(os.listdir("/proc/self/fd")), children()
    look([group(good), group(crashes), group(hangs, limit_s=0.2)])
    assert len(os.listdir("/proc/self/fd")) == before
    assert children() == there


def children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def test_a_large_answer_is_taken_whole() -> None:
    (row,) = look([group(lambda: ProbeFinding("ok", "x" * 3000))])
    assert len(row.finding) == 3000


def test_whether_something_ends_is_asked_in_a_process_of_its_own() -> None:
    assert ends(good, LONG_S)
    assert ends(fails, LONG_S)
    assert not ends(hangs, 0.2)


def _is_asked_to_end(left: Path, begun: Path) -> int:
    """In a session of its own. Exit code 77 if a signal arrives while a probe runs, which `begun` tells."""
    os.setsid()
    signal.signal(signal.SIGTERM, _terminate)

    def leaves() -> ProbeFinding:
        left.touch()
        signal.pause()
        return good()

    def begins() -> ProbeFinding:
        begun.touch()
        return good()

    try:
        look([ProbeGroup([Probe("a", "b", leaves)], LONG_S, left), ProbeGroup([Probe("a", "c", begins)], LONG_S)])
    except KeyboardInterrupt:
        return 77
    return 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_probes_and_removes_their_files(number: signal.Signals, tmp_path: Path) -> None:
    left, begun = tmp_path / "probed" / "left", tmp_path / "begun"
    left.parent.mkdir()
    process = Forked(_is_asked_to_end, left, begun)
    until = time.monotonic() + LONG_S
    while not (left.exists() and begun.exists()) and time.monotonic() < until:
        time.sleep(0.01)
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    process.finished(within_s=LONG_S)
    assert process.returncode == 77
    assert list(left.parent.iterdir()) == []
    while _is_there(process.pid) and time.monotonic() < until:  # until init has taken them in
        time.sleep(0.01)
    assert not _is_there(process.pid)


def _is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
