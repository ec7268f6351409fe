"""Operations of several ranks: gather slices, exchange pieces between all ranks, and send bytes to all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch


class PieceCopies(Protocol):
    """Copies of the pieces of one exchange from the shared memory."""

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a piece, or start to copy it."""

    def wait(self, check: Callable[[], None]) -> None:
        """Wait until all copies have ended. `check` is called several times a second meanwhile, and may raise."""


class HostCopies:
    """Copies to host memory (PieceCopies)."""

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        into.copy_(source)

    def wait(self, check: Callable[[], None]) -> None:
        return


class SharedExchange(Protocol):
    """Exchange of pieces through memory that all ranks share."""

    def exchange(
        self,
        places: Sequence[int],
        pieces: Sequence[torch.Tensor],
        copies: PieceCopies,
        check: Callable[[], None],
    ) -> None:
        """Receive pieces from other ranks, and wait until all ranks have received theirs.

        Args:
            places: place in the shared memory of the piece that each rank has for this rank.
            pieces: for each rank, uint8 to which its piece is written.
            copies: copies to the memory of `pieces`.
            check: function that is called several times a second while this rank waits, and raises an error if a rank
                has failed.
        """


class SharedPlace(NamedTuple):
    """Place of pieces in memory that all ranks share.

    Attributes:
        place: bytes from the start of the shared memory; -1 if the pieces are elsewhere. If they are elsewhere on any
            rank, the ranks send them.
        through: the shared memory.
        copies: copies from the shared memory to this rank's buffer.
    """

    place: int
    through: SharedExchange
    copies: PieceCopies = HostCopies()


@dataclass(frozen=True)
class AllGather:
    """Gather of the slices of all ranks of W, or of all ranks of G (groups of ranks: see ranks.py).

    Args:
        buffer: uint8, contiguous, `sum(slices)` bytes. The gather writes the other slices, and this rank's slice unless
            this is already at its place.
        slices: bytes of each rank's slice, in the order of the ranks. The sizes may differ, and a rank without a slice
            has 0.
        near: whether the ranks of G gather; False: the ranks of W gather.
        shared: place of this rank's slice in memory that all ranks share; None if the ranks share no memory.
        in_buffer: whether this rank's slice is at its place in `buffer`.
    """

    buffer: torch.Tensor
    slices: Sequence[int]
    near: bool = False
    shared: SharedPlace | None = None
    in_buffer: bool = True

    def shared_pieces(self, rank: int) -> tuple[int, Sequence[torch.Tensor]]:
        """Return where a rank finds its pieces, and where it puts them.

        Returns:
            The offset of the rank's piece from the place that each rank has told, and the rank's memory for the piece
            of each rank; an empty tensor if the rank needs no piece.
        """
        pieces = list(self.buffer.split(list(self.slices)))
        if self.in_buffer:
            pieces[rank] = pieces[rank][:0]
        return 0, pieces


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
            `send_splits` are the same on all ranks, and `receive` has no room for this rank's own piece, which is in
            `send`.
    """

    send: torch.Tensor
    send_splits: Sequence[int]
    receive: torch.Tensor
    receive_splits: Sequence[int]
    shared: SharedPlace | None = None

    def shared_pieces(self, rank: int) -> tuple[int, Sequence[torch.Tensor]]:
        """See AllGather.shared_pieces."""
        return sum(self.send_splits[:rank]), self.receive.split(list(self.receive_splits))

    def over_sockets(self, rank: int) -> AllToAll:
        """Return the same exchange with room for all pieces in memory of its own, for ranks whose pieces are not all in
        the shared memory."""
        sizes = list(self.receive_splits)
        sizes[rank] = self.send_splits[rank]
        return AllToAll(self.send, self.send_splits, self.send.new_empty(sum(sizes)), sizes)

    def take(self, whole: AllToAll, rank: int) -> None:
        """Copy the pieces that `over_sockets` has received."""
        pieces = whole.receive.split(list(whole.receive_splits))
        for other, into in enumerate(self.receive.split(list(self.receive_splits))):
            if other != rank:
                into.copy_(pieces[other])


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
            The function must be short, because the next operation waits for it.
    """

    collective: AllGather | AllToAll | ControlMessage
    subject: int
    name: str
    after: Sequence[Callable[[], object]] = ()
    arrived: Callable[[], None] | None = None
