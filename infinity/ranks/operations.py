"""Operations of several ranks: gather slices, exchange pieces between all ranks, and send bytes to all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch


class SharedExchange(Protocol):
    """Exchange of pieces through memory that all ranks share."""

    def exchange(self, places: Sequence[int], pieces: Sequence[torch.Tensor], check: Callable[[], None]) -> None:
        """Receive pieces from other ranks, and wait until all ranks have received theirs.

        Args:
            places: place in the shared memory of the piece that each rank has for this rank.
            pieces: for each rank, uint8 to which its piece is written.
            check: function that is called several times a second while this rank waits, and raises an error if a rank
                has failed.
        """


class SharedPlace(NamedTuple):
    """Place of pieces in memory that all ranks share.

    Attributes:
        place: bytes from the start of the shared memory; -1 if the pieces are elsewhere. If they are elsewhere on any
            rank, the ranks send them.
        through: the shared memory.
    """

    place: int
    through: SharedExchange


@dataclass(frozen=True)
class AllGather:
    """In-place gather of the slices of all ranks of W, or of all ranks of G (groups of ranks: see ranks.py).

    Args:
        buffer: uint8, contiguous, `sum(slices)` bytes. This rank's slice is already at its place. The gather writes the
            other slices.
        slices: bytes of each rank's slice, in the order of the ranks. The sizes may differ, and a rank without a slice
            has 0.
        near: whether the ranks of G gather; False: the ranks of W gather.
    """

    buffer: torch.Tensor
    slices: Sequence[int]
    near: bool = False


@dataclass(frozen=True)
class AllToAll:
    """Exchange in which each rank of W sends one piece to each rank, and receives one piece from each rank.

    Args:
        send: uint8, contiguous, `sum(send_splits)` bytes: the pieces for ranks 0, 1, … of W, one after the other.
        send_splits: bytes of each piece in `send`.
        receive: uint8, contiguous, `sum(receive_splits)` bytes, to which the pieces from ranks 0, 1, … of W are
            written, one after the other.
        receive_splits: bytes of each piece in `receive`.
        shared: place of `send` in memory that all ranks share; None if the ranks share no memory. With `shared`,
            `send_splits` are the same on all ranks.
    """

    send: torch.Tensor
    send_splits: Sequence[int]
    receive: torch.Tensor
    receive_splits: Sequence[int]
    shared: SharedPlace | None = None


@dataclass(frozen=True)
class ControlMessage:
    """Operation that sends bytes of any length to all ranks of the world. `OperationFuture.result()` returns a list
    with the bytes of each rank."""

    payload: bytes


@dataclass(frozen=True)
class CollectiveOperation:
    """One collective, with its identity and its callbacks.

    Args:
        collective: the data to move. Until the ticket is done, only the queue may use the memory of the data.
        subject: number that is the same on all ranks, such as the index of a unit. The ranks compare this number before
            any data is moved.
        name: name of the subject, for messages: "unit 'layers.3'", "step 7".
        after: functions that are called in this order before the collective is started. They wait until this rank's
            slice is filled, for example by a read. If such a function raises an exception, this rank has failed.
        arrived: function that is called on the queue's thread when the bytes have arrived, before the ticket is done.
            The function must be short, because the next operation waits for it. With a device, the function makes the
            stream that uses the bytes wait for the stream of the collectives.
    """

    collective: AllGather | AllToAll | ControlMessage
    subject: int
    name: str
    after: Sequence[Callable[[], object]] = ()
    arrived: Callable[[], None] | None = None
