"""The standard streams of both programs. Failed writes do not end the work; Ctrl-C ends the work with one line.

[Note: when the reader of the output is gone]
`infinity finetune … | head` closes the pipe while the run has days to go, and the run must not end. So the first write
that fails is reported on stderr, and further output of that stream is discarded. The exit code is that of the run.
`infinity checkpoint … | head` does the same without a report, because `remove` must not end half-way. If its output was
lost for another reason than a closed pipe, such as a full disk, its exit code is 1. `infinity doctor` behaves like
`checkpoint`. The only purpose of infinity-bench is its output, so it ends silently with exit code 141, like a program
that SIGPIPE ends.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

PIPE_CLOSED = 128 + signal.SIGPIPE
INTERRUPTED = 128 + signal.SIGINT


class ReaderGoneError(Exception):
    """The reader has closed the output of a command whose only purpose is to print."""


class Outlet:
    """A stream that records failures instead of raising them.

    Args:
        stream: stream that is written to.
        go_on: whether a closed pipe is only recorded. If `go_on` is False, a closed pipe raises ReaderGoneError once.

    Attributes:
        failure: the first failure; None if nothing has failed.
    """

    def __init__(self, stream: Any, *, go_on: bool) -> None:
        self._stream = stream
        self._go_on = go_on
        self._of_a_run = False
        self.failure: OSError | None = None

    def begin_run(self) -> None:
        """From now on, report a closed pipe in a line on stderr. Other failures are always reported."""
        self._of_a_run = True

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._lose(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lose(self, error: OSError) -> None:
        first, self.failure = self.failure is None, self.failure or error
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, self._stream.fileno())  # the stream's buffered text is discarded, too
        os.close(nowhere)
        if not first:
            return
        closed = error.errno == errno.EPIPE
        if closed and not self._go_on:
            raise ReaderGoneError
        if self is not sys.stderr and (self._of_a_run or not closed):
            print(
                f"the output cannot be written any more ({error.strerror}); the work continues without it",
                file=sys.stderr,
            )


@contextmanager
def outlets(*, go_on: bool) -> Iterator[Outlet]:
    """Replace sys.stdout and sys.stderr by outlets in the block, and yield the outlet of stdout. Characters that the
    encoding lacks are escaped.

    Args:
        go_on: whether a closed pipe of stdout is only recorded (see Outlet).
    """
    _open_closed_streams()
    streams = sys.stdout, sys.stderr
    for stream in streams:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    out = Outlet(sys.stdout, go_on=go_on)
    sys.stdout, sys.stderr = out, Outlet(sys.stderr, go_on=True)
    try:
        yield out
        out.flush()
    finally:
        sys.stdout, sys.stderr = streams


def _open_closed_streams() -> None:
    """Open /dev/null for each standard stream that is closed (`>&-`). Otherwise the next file that is opened, perhaps a
    swap file, would get the stream's descriptor, and text would be printed into it."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        nowhere = os.open(os.devnull, os.O_RDWR)
        if nowhere > number and not os.path.exists(f"/proc/self/fd/{number}"):
            os.dup2(nowhere, number)
            os.close(nowhere)
            nowhere = number
        setattr(sys, name, open(nowhere, "w" if number else "r", closefd=False))  # noqa: SIM115 (as long as the process)


@contextmanager
def interruptible_imports() -> Iterator[None]:
    """Let Ctrl-C end the process in the block at once, with one line.

    A KeyboardInterrupt that is raised inside an import might be swallowed or reported as another error. Nothing is
    lost, because no work has begun.
    """
    mine = threading.current_thread() is threading.main_thread()
    previous = signal.getsignal(signal.SIGINT)
    if not mine or previous is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _quit)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _quit(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)
