"""Separate processes for tests that kill, limit or interrupt a process. The processes are forked from a server that has
only made imports.

The reason for the server is that importing torch and transformers takes seconds. The server has not used infinity or
torch's threads.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any


@cache
def server() -> ForkServerContext:
    """Return the server that forks processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.quick_imports", "tests.preloaded"])
    return context


class Forked:
    """A process that calls `function(*arguments)` with this process's environment; the result is its exit code.

    Attributes:
        stdout: stream of the process's output, including stderr unless stderr is `apart`. A test may close the stream,
            so that nobody reads the output.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any, apart: bool = False) -> None:
        self._errors = os.memfd_create("stderr") if apart else None
        errors = None if self._errors is None else f"/proc/{os.getpid()}/fd/{self._errors}"
        reader, writer = server().Pipe(duplex=False)
        with reader, writer:
            given = function, arguments, dict(os.environ), writer, errors
            self._process = server().Process(target=_call, args=given, daemon=True)
            self._process.start()
            self.stdout = os.fdopen(os.dup(reader.fileno()))

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code: -N for signal N; None while the process runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def finished(self, within_s: float = 240.0) -> tuple[str, str]:
        """Wait for the end of the process. Return the output that was not read yet, and stderr if stderr is apart. A
        process that hangs is killed, and its exit code shows this.
        """
        deadline = threading.Timer(within_s, self._process.kill)
        deadline.start()
        try:
            out = "" if self.stdout.closed else self.stdout.read()
            self.stdout.close()
            self._process.join()
        finally:
            deadline.cancel()
        if self._errors is None:
            return out, ""
        with os.fdopen(self._errors) as errors:
            return out, errors.read()


def run(function: Callable[..., Any], *arguments: Any) -> subprocess.CompletedProcess[str]:
    """Run `function(*arguments)` to its end in a separate process."""
    process = Forked(function, *arguments, apart=True)
    out, errors = process.finished()
    return subprocess.CompletedProcess(function.__name__, process.returncode or 0, out, errors)


def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script like `python -c script arguments`."""
    return run(_execute, script, arguments)


def _execute(script: str, arguments: tuple[str, ...]) -> None:
    sys.argv[1:] = arguments
    exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})


def _call(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    environment: dict[str, str],
    out: Connection,
    errors: str | None,
) -> None:
    """Call the function in the new process. First bring the process into the state in which a shell
    starts a process.
    """
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    os.dup2(out.fileno(), 1)
    os.dup2(1 if errors is None else os.open(errors, os.O_WRONLY | os.O_APPEND), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.getLogger("infinity").setLevel(logging.NOTSET)
    sys.exit(function(*arguments))
