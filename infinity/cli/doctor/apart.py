"""Probes in processes of their own: a driver that hangs, a disk that does not answer, or a library that ends its
process costs the doctor a row and not the report.

[Note: probes apart]
Each group of probes has a forked process, and all of them work at once. It sends the rows of each probe; what is not
done when the process has died, or its time has passed, is unknown. Nothing that a library prints meanwhile is shown.
Ctrl-C is for the parent alone, which ends them. The processes are not those of multiprocessing, which waits at its end
for one that a dead disk holds.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import NoReturn

from infinity.cli.doctor.rows import Probe, Probes, Row
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

    def end() -> Row:
        act()
        return Row("ok", "")

    with _watched([Probes([Probe("", "", end)], within_s)]) as (child,):
        return not child.late


@contextlib.contextmanager
def _watched(groups: Sequence[Probes]) -> Iterator[list[_Child]]:
    """Processes that have looked at the probes, or are late."""
    children: list[_Child] = []
    try:
        for group in groups:
            children.append(_Child(group))
        while waiting := [child for child in children if not (child.ended or child.late)]:
            first = min(child.deadline for child in waiting)
            ready = wait([child.pipe for child in waiting], max(first - time.monotonic(), 0))
            for child in waiting:
                if child.pipe in ready:
                    child.read()
                child.late = not child.ended and time.monotonic() >= child.deadline
        yield children
    finally:
        for child in children:
            child.close()


class _Child:
    """A process that looks at a group of probes, and what it has said so far.

    Attributes:
        ended: by itself: it has closed its end of the pipe, which is the last thing it does.
        late: its time passed before it was done.
    """

    def __init__(self, group: Probes) -> None:
        self.group, self.deadline, self.ended, self.late = group, time.monotonic() + group.limit_s, False, False
        self._found: list[list[Row]] = []  # of the probes that are done, in their order
        self._status: int | None = None
        self.pipe, writer = Pipe(duplex=False)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # no KeyboardInterrupt in the child
        try:
            self._pid = os.fork()
            if self._pid == 0:
                _work(group, writer)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        writer.close()

    def read(self) -> None:
        """Take the rows of a probe, or the end."""
        try:
            self._found.append(self.pipe.recv())
        except (EOFError, OSError):  # it closed the pipe, or died within a message
            self.ended = True

    def rows(self) -> list[Row]:
        """What it found, and for each probe that is not done an unknown row. Ends the process."""
        self._end()
        why, rows = "", list(itertools.chain.from_iterable(self._found))
        for probe in self.group.probes[len(self._found) :]:
            rows += probe.rows(Row("unknown", why or self._problem()))
            why = why or f"not looked at, because '{probe.what}' came to no end"
        return rows

    def close(self) -> None:
        """End the process, and remove what it left. Idempotent."""
        self._end()
        self.pipe.close()
        if self._status not in (None, 0) and self.group.leaves is not None:
            self.group.leaves.unlink(missing_ok=True)

    def _end(self) -> None:
        """Kill it unless it has ended, and take its status; None if it does not die."""
        until = time.monotonic() + _DEATH_S
        if self._status is None and not self.ended:
            os.kill(self._pid, signal.SIGKILL)
        while self._status is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._status = status if pid else None
            if time.monotonic() >= until:
                return
            time.sleep(0 if pid else 0.005)

    def _problem(self) -> str:
        if self.late:
            stuck = ""
            if self._status is None and self.group.leaves:
                stuck = (
                    f"; the disk does not let go of the process that looked, which may leave {self.group.leaves} behind"
                )
            return f"no answer within {self.group.limit_s:g} s{stuck}"
        if self._status is not None and os.WIFSIGNALED(self._status):
            return f"the process that looked was ended by {signal.Signals(os.WTERMSIG(self._status)).name}"
        return "the process that looked ended too early"


def _work(group: Probes, writer: Connection) -> NoReturn:
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
        for probe in group.probes:
            writer.send(rows_of(probe))
    finally:
        os._exit(0)  # with no word of what ended it: the parent sees which probes are not done


def rows_of(probe: Probe) -> list[Row]:
    """What the probe finds; an unknown row if it fails."""
    try:
        found = probe.look()
    except (Exception, SystemExit) as error:  # whatever a driver or an odd file makes of it
        found = Row("unknown", raised(error))
    return [row._replace(finding=one_line(row.finding)) for row in probe.rows(found)]


def new_name(directory: Path) -> Path:
    """A name in the directory that no file has."""
    return directory / f".infinity-doctor-{os.getpid()}-{os.urandom(6).hex()}"
