"""Probes in processes of their own: a driver that hangs, a disk that does not answer, or a library that ends its
process costs the doctor a row and not the report.

[Note: probes apart]
Each group of probes has a forked process, and all of them work at once. It writes a line of JSON for each row that it
finds, and one when a probe is done; what is not done when the process has died, or its time has passed, is unknown.
Nothing that a library prints meanwhile is shown. Ctrl-C is for the parent alone, which ends them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from infinity.cli.doctor.rows import Found, Probe, Probes, Row
from infinity.echo import one_line, raised

_ENDING = (signal.SIGINT, signal.SIGTERM)
_GRACE_S = 5
"""After its limit a process that nobody ended, because the parent died, ends itself."""
_DEATH_S = 1.0
"""How long a process may take to die. One that waits for a dead disk takes for ever."""


def look(groups: Sequence[Probes]) -> list[Row]:
    """The rows of all probes, in their order. Leaves no process and no file behind, whatever happens."""
    with _watched(groups) as children:
        return [row for child in children for row in child.rows()]


def ends(act: Callable[[], object], within_s: float) -> bool:
    """Whether something comes to an end, by an error or without one, in a process of its own."""

    def end() -> Found:
        act()
        return Found("ok", "")

    with _watched([Probes([Probe("", "", end)], within_s)]) as (child,):
        return not child.late


@contextlib.contextmanager
def _watched(groups: Sequence[Probes]) -> Iterator[list[_Child]]:
    """Processes that have looked at the probes, or are late."""
    began = time.monotonic()
    children: list[_Child] = []
    try:
        with selectors.DefaultSelector() as waiting:
            for group in groups:
                children.append(_Child(group, began + group.limit_s))
                waiting.register(children[-1].pipe, selectors.EVENT_READ, children[-1])
            _wait(waiting)
        yield children
    finally:
        for child in children:
            child.close()


def _wait(waiting: selectors.BaseSelector) -> None:
    """Take what the processes say until each has ended or is late."""
    while waiting.get_map():
        first = min(key.data.deadline for key in waiting.get_map().values())
        for key, _ in waiting.select(max(first - time.monotonic(), 0)):
            if not key.data.read():
                waiting.unregister(key.fileobj)
        for key in list(waiting.get_map().values()):
            if time.monotonic() >= key.data.deadline:
                key.data.give_up()
                waiting.unregister(key.fileobj)


class _Child:
    """A process that looks at a group of probes, and what it has said so far.

    Attributes:
        late: its time passed before it was done.
    """

    def __init__(self, group: Probes, deadline: float) -> None:
        self.group, self.deadline, self.late = group, deadline, False
        self._said = b""
        self._status: int | None = None
        self.pipe, writer = os.pipe()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # no KeyboardInterrupt in the child
        try:
            self._pid = os.fork()
            if self._pid == 0:
                _work(group, writer)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(writer)

    def give_up(self) -> None:
        self.late = True

    def read(self) -> bool:
        """Take what it says now; False at its end."""
        said = os.read(self.pipe, 1 << 16)
        self._said += said
        return bool(said)

    def rows(self) -> list[Row]:
        """What it found, and for each probe that is not done an unknown row. Ends the process."""
        self._end()
        found: dict[int, list[Row]] = {at: [] for at in range(len(self.group.probes))}
        done: set[int] = set()
        for line in self._said.splitlines(keepends=True):
            if not line.endswith(b"\n"):  # it died within the line
                continue
            at, values = json.loads(line)
            if values is None:
                done.add(at)
            else:
                found[at].append(Row(**values))
        why, rows = "", []
        for at, probe in enumerate(self.group.probes):
            rows += found[at]
            if at not in done:
                rows += probe.rows(Found("unknown", why or self._problem()))
                why = why or f"not looked at, because '{probe.what}' came to no end"
        return rows

    def close(self) -> None:
        """End the process, and remove what it left. Idempotent."""
        if self.pipe < 0:
            return
        self._end()
        os.close(self.pipe)
        self.pipe = -1
        if self._status not in (None, 0) and self.group.leaves is not None:
            with contextlib.suppress(FileNotFoundError):
                self.group.leaves.unlink()

    def _end(self) -> None:
        """Kill it unless it has ended, and take its status; None if it does not die."""
        if self._status is not None:
            return
        until = time.monotonic() + _DEATH_S
        if not self._ended_by_itself():
            os.kill(self._pid, signal.SIGKILL)
        while self._status is None and time.monotonic() < until:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._status = status if pid else None
            if not pid:
                time.sleep(0.005)

    def _ended_by_itself(self) -> bool:
        """Whether its end of the pipe is closed, which is the last thing it does."""
        with selectors.DefaultSelector() as waiting:
            waiting.register(self.pipe, selectors.EVENT_READ)
            return bool(waiting.select(0)) and not self.read() and not self.late

    def _problem(self) -> str:
        if self.late:
            stuck = "" if self._status is not None or not self.group.leaves else self._left()
            return f"no answer within {self.group.limit_s:g} s{stuck}"
        if self._status is not None and os.WIFSIGNALED(self._status):
            return f"the process that looked was ended by {signal.Signals(os.WTERMSIG(self._status)).name}"
        return "the process that looked ended too early"

    def _left(self) -> str:
        return f"; the disk does not let go of the process that looked, which may leave {self.group.leaves} behind"


def _work(group: Probes, writer: int) -> NoReturn:
    """In the new process."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        signal.alarm(int(group.limit_s) + _GRACE_S)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        for at, probe in enumerate(group.probes):
            for row in rows_of(probe):
                _say(writer, [at, dataclasses.asdict(row)])
            _say(writer, [at, None])
    finally:
        os._exit(0)  # with no word of what ended it: the parent sees which probes are not done


def _say(writer: int, message: Any) -> None:
    left = json.dumps(message).encode() + b"\n"
    while left:
        left = left[os.write(writer, left) :]


def rows_of(probe: Probe) -> list[Row]:
    """What the probe finds; an unknown row if it fails."""
    try:
        found = probe.look()
    except (Exception, SystemExit) as error:  # whatever a driver or an odd file makes of it
        found = Found("unknown", raised(error))
    return [dataclasses.replace(row, finding=one_line(row.finding)) for row in probe.rows(found)]


def new_name(directory: Path) -> Path:
    """A name in the directory that no file has."""
    return directory / f".infinity-doctor-{os.getpid()}-{os.urandom(6).hex()}"
