"""Probes in separate processes.

A driver may hang, a disk may not respond, or a library may end its process. In each case the report lacks only the
result of one probe.

[Note: probes apart] Each group of probes runs in a forked process of its own, and all processes run at the same time. A
process sends the rows of each finished probe to the parent. If the process dies or exceeds its time limit, the parent
makes an "unknown" row for each probe that has not finished. Output of libraries in these processes is not shown. Only
the parent handles Ctrl-C, and then ends the processes. The multiprocessing module is not used, because at exit it would
wait for every process, even for a process that a dead disk blocks.
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

from infinity.cli.doctor.probes import Probe, ProbeFinding, ProbeGroup
from infinity.quoting import one_line, raised

_ENDING = (signal.SIGINT, signal.SIGTERM)
_GRACE_S = 5
"""Seconds after the time limit until a process ends itself, in case the parent has died."""
_DEATH_S = 1.0
"""Seconds that a killed process may take to end. A process that waits for a dead disk never ends."""


def look(groups: Sequence[ProbeGroup]) -> list[ProbeFinding]:
    """Return the rows of all probes, in the order of the probes.

    All processes are ended and all files are removed, even after an error.
    """
    with _watched(groups) as children:
        return [row for child in children for row in child.rows()]


def ends(act: Callable[[], object], within_s: float) -> bool:
    """Return whether a call ends, with or without an error, in a separate process within the limit."""

    def end() -> ProbeFinding:
        act()
        return ProbeFinding("ok", "")

    with _watched([ProbeGroup([Probe("", "", end)], within_s)]) as (child,):
        return not child.late


@contextlib.contextmanager
def _watched(groups: Sequence[ProbeGroup]) -> Iterator[list[_ProbeProcess]]:
    """Yield each process when it has finished its probes or has exceeded its time limit."""
    children: list[_ProbeProcess] = []
    try:
        for group in groups:
            children.append(_ProbeProcess(group))
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


class _ProbeProcess:
    """A process that runs a group of probes, and the rows that it has sent so far.

    Attributes:
        deadline: end of the time limit, by time.monotonic().
        ended: whether the process has closed its end of the pipe. A process does this last.
        late: whether the process has exceeded its time limit.
        pipe: the parent's end of the pipe.
    """

    def __init__(self, group: ProbeGroup) -> None:
        self.group, self.deadline, self.ended, self.late = group, time.monotonic() + group.limit_s, False, False
        self._found: list[list[ProbeFinding]] = []  # the rows of each finished probe, in the order of the probes
        self._status: int | None = None
        self.pipe, writer = Pipe(duplex=False)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # the child must not raise KeyboardInterrupt
        try:
            self._pid = os.fork()
            if self._pid == 0:
                _work(group, writer)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        writer.close()

    def read(self) -> None:
        """Receive the rows of a probe, or note that the pipe has ended."""
        try:
            self._found.append(self.pipe.recv())
        except (EOFError, OSError):  # the child has closed the pipe, or has died while it sent a message
            self.ended = True

    def rows(self) -> list[ProbeFinding]:
        """End the process.

        Return the rows that the process reported, and a row with the state 'unknown' for each probe that did not
        finish.
        """
        self._end()
        why, rows = "", list(itertools.chain.from_iterable(self._found))
        for probe in self.group.probes[len(self._found) :]:
            rows += probe.rows(ProbeFinding("unknown", why or self._problem()))
            why = why or f"not checked, because '{probe.what}' did not end"
        return rows

    def close(self) -> None:
        """End the process, and remove the file that its probe may have left. Later calls do nothing."""
        self._end()
        self.pipe.close()
        if self._status not in (None, 0) and self.group.leaves is not None:
            self.group.leaves.unlink(missing_ok=True)

    def _end(self) -> None:
        """Kill the process if it has not ended, and read its exit status.

        The status is None if the process does not die even after the kill.
        """
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
                stuck = f"; the disk still blocks the process that checked, which may leave {self.group.leaves} behind"
            return f"no answer within {self.group.limit_s:g} s{stuck}"
        if self._status is not None and os.WIFSIGNALED(self._status):
            return f"the process that checked was ended by {signal.Signals(os.WTERMSIG(self._status)).name}"
        return "the process that checked ended too early"


def _work(group: ProbeGroup, writer: Connection) -> NoReturn:
    """Run the probes in the new process, and exit."""
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
        os._exit(0)  # no message is sent, because the parent knows which probes did not finish


def rows_of(probe: Probe) -> list[ProbeFinding]:
    """Return the rows of a probe. If the probe fails, return a row with the state 'unknown'."""
    try:
        found = probe.look()
    except (Exception, SystemExit) as error:  # a driver or a malformed file may raise anything
        found = ProbeFinding("unknown", raised(error))
    return [row._replace(finding=one_line(row.finding)) for row in probe.rows(found)]


def new_name(directory: Path) -> Path:
    """Return a path in the directory at which no file exists."""
    return directory / f".infinity-doctor-{os.getpid()}-{os.urandom(6).hex()}"
