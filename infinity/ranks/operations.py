"""What ranks do together: gathering slices, an all-to-all, and telling each other bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Gather:
    """Put the slices of all ranks of W together, in place, or of those of G.

    Args:
        buffer: uint8, contiguous, `sum(slices)` bytes. This rank's slice is in its place; the others arrive.
        slices: bytes of each rank, in the order of the ranks. May be uneven; 0 for a rank that holds nothing.
        near: of the ranks of G.
    """

    buffer: torch.Tensor
    slices: Sequence[int]
    near: bool = False


@dataclass(frozen=True)
class AllToAll:
    """Send a piece to each rank of W, and receive one from each.

    Args:
        send: uint8, contiguous, `sum(send_splits)` bytes: the pieces for rank 0, 1, … of W behind each other.
        receive: uint8, contiguous, `sum(receive_splits)` bytes: the pieces from rank 0, 1, … arrive behind each other.
    """

    send: torch.Tensor
    send_splits: Sequence[int]
    receive: torch.Tensor
    receive_splits: Sequence[int]


@dataclass(frozen=True)
class Control:
    """Tell all ranks of the world bytes of any length; `Ticket.result()` is a list with the bytes of each rank."""

    payload: bytes


@dataclass(frozen=True)
class Operation:
    """One collective, and where it stands in the run.

    Args:
        collective: what is moved. Its memory belongs to the exchange until the ticket is done.
        subject: a number that is the same on all ranks, such as the index of a unit; compared before anything is moved.
        name: of the subject, for messages: "unit 'layers.3'", "step 7".
        after: called in their order before the collective is issued, to wait for what fills this rank's slice, such as
            a read. What one of them raises is this rank's failure.
        arrived: called on the exchange's thread when the bytes are there and before the ticket is done. Short: the next
            operation waits. On a device it is where the exchange's stream is told to the one that uses the bytes.
    """

    collective: Gather | AllToAll | Control
    subject: int
    name: str
    after: Sequence[Callable[[], object]] = ()
    arrived: Callable[[], None] | None = None
