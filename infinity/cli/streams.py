"""The standard streams of `infinity` and `infinity-bench`.

A failed write does not end the work. Ctrl-C ends the work with one line of text.

[Note: when the reader of the output is gone]
In `infinity finetune … | head`, head closes the pipe, but the run may have days of work left and must not end.
Therefore the first write that fails is reported on stderr, and further output of the stream is discarded. The exit code
is the exit code of the run. In `infinity checkpoint … | head` the command also continues, because `remove` must not
stop before its end, but a closed pipe is not reported. If the output cannot be written for another reason, such as a
full disk, the exit code is 1. `infinity doctor` does the same as `checkpoint`. If the reader of infinity-bench closes
the pipe, infinity-bench ends without a message, because its only purpose is its output. The exit code is 141, as after
SIGPIPE.
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


class ClosedOutputError(Exception):
    """The reader has closed the output of a command that only prints."""


class OutputStream:
    """A stream that records failures instead of raising them.

    Args:
        stream: stream that is written to.
        go_on: whether to record a closed pipe without an error. If `go_on` is False, a closed pipe raises
            ClosedOutputError once.

    Attributes:
        failure: the first failure; None if nothing has failed.
    """

    def __init__(self, stream: Any, *, go_on: bool) -> None:
        self._stream = stream
        self._go_on = go_on
        self._of_a_run = False
        self.failure: OSError | None = None

    def begin_run(self) -> None:
        """From now on, report a closed pipe on stderr. Other failures are reported in any case."""
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
            raise ClosedOutputError
        if self is not sys.stderr and (self._of_a_run or not closed):
            print(
                f"the output cannot be written any more ({error.strerror}); the work continues without it",
                file=sys.stderr,
            )


@contextmanager
def output_streams(*, go_on: bool) -> Iterator[OutputStream]:
    """Replace sys.stdout and sys.stderr by OutputStreams in the `with` block, and yield the OutputStream of stdout.

    Characters that the encoding lacks are escaped.

    Args:
        go_on: whether to record a closed pipe of stdout without an error (see OutputStream).
    """
    _open_closed_streams()
    streams = sys.stdout, sys.stderr
    for stream in streams:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    out = OutputStream(sys.stdout, go_on=go_on)
    sys.stdout, sys.stderr = out, OutputStream(sys.stderr, go_on=True)
    try:
        yield out
        out.flush()
    finally:
        sys.stdout, sys.stderr = streams


def _open_closed_streams() -> None:
    """Open /dev/null for each standard stream that is closed (`>&-`).

    Otherwise the next file that is opened, perhaps a swap file, would get the stream's file descriptor, and printed
    text would be written into this file.
    """
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

    Inside an import, a KeyboardInterrupt might be ignored or reported as another error. No work has begun yet, so
    nothing is lost.
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
