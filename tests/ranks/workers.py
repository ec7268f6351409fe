"""Ranks for tests: processes with gloo on this machine. Each process has one torch thread and lives for one call.

The processes are forked from a server that has imported torch and infinity, so starting four ranks takes a fraction of
a second. Killed or broken processes of one test do not affect the next test.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from tests.processes import server

LIMIT_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """End of one rank.

    Attributes:
        value: result of the function; None: the function did not return.
        error: exception of the function.
        told: traceback of the exception; if the process died, its stderr.
        exitcode: exit code of the process; -N for signal N.
    """

    value: Any
    error: BaseException | None
    told: str
    exitcode: int


class RankError(AssertionError):
    """A rank raised an exception or died unexpectedly; the message names the rank."""


class HangError(AssertionError):
    """Ranks did not end within the limit; the message has the stacks of all ranks."""


def run(n: int, function: Callable[..., Any], *arguments: Any, limit_s: float = LIMIT_S) -> list[Any]:
    """Run `function(*arguments)` on each of n ranks; return the results by rank.

    Args:
        n: number of ranks.
        function: importable function.
        arguments: its arguments.
        limit_s: seconds after which the ranks count as hanging.

    Raises:
        RankError: a rank raised an exception or died. The message names each such rank, with its traceback. The cause
            of the error is the first rank's exception.
        HangError: the ranks did not end within the limit.
    """
    outcomes = ended(n, function, *arguments, limit_s=limit_s)
    failed = [(rank, each) for rank, each in enumerate(outcomes) if each.error is not None or each.exitcode]
    if failed:
        told = "\n".join(f"rank {rank} (exit code {each.exitcode}):\n{each.told}" for rank, each in failed)
        raise RankError(told) from failed[0][1].error
    return [each.value for each in outcomes]


def ended(n: int, function: Callable[..., Any], *arguments: Any, limit_s: float = LIMIT_S) -> list[Outcome]:
    """Run `function(*arguments)` on each of n ranks, which may raise or die; return the outcomes by rank.

    Args:
        n: number of ranks.
        function: importable function.
        arguments: its arguments.
        limit_s: seconds after which the ranks count as hanging.

    Raises:
        HangError: the ranks did not end within the limit.
    """
    ranks = [_Rank(rank, n, function, arguments) for rank in range(n)]
    try:
        _hand_out_port(ranks)
        end = time.monotonic() + limit_s
        running = list(ranks)
        while running and time.monotonic() < end:
            wait([handle for each in running for handle in each.handles], end - time.monotonic())
            for each in running:
                each.take()
            running = [each for each in running if each.running]
        if running:
            raise HangError("\n".join(each.stacks() for each in ranks))
        return [each.outcome() for each in ranks]
    finally:
        for each in ranks:
            each.end()


def _hand_out_port(ranks: list[_Rank]) -> None:
    with contextlib.suppress(EOFError, BrokenPipeError):
        port = ranks[0].results.recv()
        for each in ranks[1:]:
            each.results.send(port)


class _Rank:
    """The process of a rank, seen from the test."""

    def __init__(self, rank: int, n: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._rank = rank
        self._stderr = os.memfd_create(f"stderr of rank {rank}")
        self.results, theirs = server().Pipe()
        with theirs:
            stderr = f"/proc/{os.getpid()}/fd/{self._stderr}"
            given = rank, n, function, arguments, dict(os.environ), theirs, stderr
            self._process = server().Process(target=_main, args=given, daemon=True)
            self._process.start()
        self._told_all = False
        self._result: tuple[Any, bytes | None, str] | None = None

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    @property
    def handles(self) -> list[Any]:
        """Handles to wait for: the end of the process, and the arrival of its result. The result may be longer than a
        pipe's buffer.
        """
        return [self._process.sentinel] if self._told_all else [self._process.sentinel, self.results]

    def take(self) -> None:
        """Receive the result, if the result is available or the pipe is closed."""
        if self._told_all or not self.results.poll():
            return
        self._told_all = True
        with contextlib.suppress(EOFError, ConnectionError):
            self._result = self.results.recv()

    def _told(self) -> str:
        with open(os.dup(self._stderr), errors="replace") as stderr:
            stderr.seek(0)
            return stderr.read()

    def outcome(self) -> Outcome:
        self._process.join()
        exitcode = self._process.exitcode or 0
        self.take()
        if self._result is None:
            return Outcome(None, None, self._told(), exitcode)
        value, raised, told = self._result
        return Outcome(value, pickle.loads(raised) if raised is not None else None, told, exitcode)

    def stacks(self) -> str:
        if self._process.is_alive():
            os.kill(self._process.pid or 0, signal.SIGUSR1)
            self._process.join(1.0)
        state = "hangs" if self._process.is_alive() else f"ended with {self._process.exitcode}"
        return f"rank {self._rank} {state}:\n{self._told()}"

    def end(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self.results.close()
        os.close(self._stderr)


def _main(
    rank: int,
    n: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    environment: dict[str, str],
    results: Connection,
    stderr: str,
) -> None:
    """Run a rank in its process."""
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_APPEND), 2)
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    limit = timedelta(seconds=LIMIT_S)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, n, True, limit, wait_for_workers=False)
        results.send(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", results.recv(), n, False, limit, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=limit)
    try:
        value, raised, told = function(*arguments), None, ""
    except BaseException as error:
        value, raised, told = None, _pickled(error), traceback.format_exc()
    with contextlib.suppress(BrokenPipeError):
        results.send((value, raised, told))
    if dist.is_initialized():
        dist.destroy_process_group()


def _pickled(error: BaseException) -> bytes:
    """Return the pickled error. If the error cannot be pickled, return another error with the same text."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
        return data
    except Exception:
        return pickle.dumps(RankError(f"{type(error).__name__}: {error}"))
