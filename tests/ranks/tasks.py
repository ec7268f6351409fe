"""Helpers of the tests of several ranks: a queue on each rank, and operations whose bytes identify the sender."""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import Any

import torch
import torch.distributed as dist

from infinity.errors import PeerError
from infinity.ranks import ranks as ranks_module
from infinity.ranks.collective_queue import CollectiveQueue
from infinity.ranks.operations import AllGather, AllToAll, CollectiveOperation, ControlMessage
from infinity.ranks.ranks import Ranks

KINDS = ("gather", "exchange", "control")


def opened(*, apart: bool = False, **options: Any) -> CollectiveQueue:
    """Return a collective queue on this rank.

    Args:
        apart: whether each rank appears to be on its own machine; ranks then do not detect the end of another rank's
            process.
        options: options of Ranks.of_world.
    """
    if apart:
        ranks_module._boot = lambda: f"boot of rank {dist.get_rank()}"  # not restored: a process runs one test
    ranks = Ranks.of_world(**({"deadline_s": 30.0, "even_alone": True} | options))
    assert ranks is not None
    return CollectiveQueue(ranks)


def operation(kind: str, subject: int, nbytes: int = 64, **options: Any) -> CollectiveOperation:
    """Return an operation of a kind with even sizes: `nbytes` per pair of ranks. Each byte is the sender's rank + 1."""
    rank, n = dist.get_rank(), dist.get_world_size()
    name = f"unit 'layers.{subject}'"
    if kind == "gather":
        buffer = torch.zeros(n * nbytes, dtype=torch.uint8)
        buffer[rank * nbytes : (rank + 1) * nbytes] = rank + 1
        return CollectiveOperation(AllGather(buffer, [nbytes] * n), subject, name, **options)
    if kind == "exchange":
        send = torch.full((n * nbytes,), rank + 1, dtype=torch.uint8)
        moved = AllToAll(send, [nbytes] * n, torch.zeros_like(send), [nbytes] * n)
        return CollectiveOperation(moved, subject, name, **options)
    return CollectiveOperation(ControlMessage(bytes([rank + 1]) * nbytes), subject, name, **options)


def received(operation: CollectiveOperation, told: list[bytes]) -> bytes:
    """Return the bytes that a finished operation received."""
    moved = operation.collective
    if isinstance(moved, AllGather):
        return moved.buffer.numpy().tobytes()
    return moved.receive.numpy().tobytes() if isinstance(moved, AllToAll) else b"".join(told)


def done(collectives: CollectiveQueue, operation: CollectiveOperation) -> bytes:
    return received(operation, collectives.submit(operation).result())


def kill() -> None:
    """Kill this process. Tests use this function as a task that other ranks wait for."""
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


class Lines(logging.Handler):
    """The messages of a log."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def told_by(collectives: CollectiveQueue, *operations: CollectiveOperation) -> tuple[tuple[int, ...], str]:
    """Submit operations until a PeerError, and return the ranks and the text of the error. Require that the queue
    accepts no operation after the error.
    """
    try:
        for each in operations:
            collectives.submit(each).result()
    except PeerError as error:
        try:
            collectives.submit(operation("control", 99))
        except PeerError as again:
            assert (again.ranks, str(again)) == (error.ranks, str(error))
        else:
            raise AssertionError("a broken queue took an operation") from None
        collectives.close()
        return error.ranks, str(error)
    raise AssertionError("no rank was at fault")
