"""Queue of collectives. One thread starts the collectives in the order in which they were submitted.

[Note: one operation]
Only this thread uses the process groups, so that collectives have the same order on all ranks:

    header of k → functions in `after` of k → headers compared → k issued → header of k + 1 → k awaited → ticket of k
    done

If operation k + 1 is submitted while k is in flight, its header is sent at once, unless k is a `ControlMessage`, which
uses the same group as headers. Every wait has a limit: several times a second the thread asks the watch for a failure
(see watch.py), and after the deadline the thread asks which rank is missing. The functions in `after` must limit their
own waits.

For a header, each rank sends a message to each other rank. On two busy cores this took 1 to 1.5 ms with 2 processes,
and 2 to 4 ms with 4 processes. Nearly all of this time was spent waiting for a core.

A gloo collective cannot be aborted. If another rank never joins a collective, gloo's threads wait in the collective
until the process of this other rank closes the connection. The result of `close` says whether this is the case.
"""

from __future__ import annotations

import json
import logging
import math
import re
import struct
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from infinity.base.fork import close_in_children, refuse_in_forked_child
from infinity.base.interrupt import interruptible, interrupts_deferred
from infinity.errors import PeerError
from infinity.ranks import collectives, headers
from infinity.ranks.headers import OperationHeader
from infinity.ranks.operations import AllGather, AllToAll, CollectiveOperation, ControlMessage
from infinity.ranks.ranks import Ranks
from infinity.ranks.watch import Trouble

logger = logging.getLogger(__name__)

_POLL_S = 0.25
_CLOSE_S = 5.0
_ASKED_SHARE = 0.6
"""Fraction of the deadline after which a rank that waits asks the others how far they are. If one of them has gone on
when the deadline passes, because it uses the model alone, the rank waits for another deadline."""
_SILENT_SHARE = 0.25
"""Fraction of the deadline after which a rank that waits says so."""
_OTHER_PATH_S = 2.0
"""Seconds for which a rank waits for a work with the same path, before it takes one with another path for it."""
_LAST_BYTES_S = 1.0  # seconds to wait for the last bytes of a rank that has closed
_PLACE = re.compile(r"^\[\S+:\d+\] ")  # file and line in gloo's sources
_OF_GLOO = re.compile(r"^\[\S*\bgloo/\S+:\d+\] |^Gloo ")

# Progress of a rank in an operation, which the rank reports when another rank asks (PeerWatch.note).
_ELSEWHERE, _BEFORE, _AGREEING, _MOVING = range(4)


class OperationFuture:
    """Result of a submitted operation. Any thread may wait for the result."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._told: list[bytes] = []
        self._error: BaseException | None = None

    def _finish(self, told: list[bytes], error: BaseException | None) -> None:
        if not self._done.is_set():
            self._told, self._error = told, error
            self._done.set()

    def done(self) -> bool:
        """Return whether the operation has ended, successfully or with an error. Does not raise."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the operation has ended, and return whether it has ended.

        Ctrl-C interrupts the wait. An error of the operation is not raised.
        """
        with interruptible():
            return self._done.wait(timeout_s)

    def result(self) -> list[bytes]:
        """Wait for the operation. If it failed, raise its error. Return the bytes of each rank for a `ControlMessage`;
        otherwise [].

        Raises:
            PeerError: a rank failed, died, did not join the operation, or is at another operation. The message names
                the rank and the reason.
            Exception: a function in the operation's `after`, or its function `arrived`, raised an exception on this
                rank.
        """
        self.wait()
        if isinstance(self._error, PeerError):
            raise self._error.again() from self._error.__cause__
        if self._error is not None:
            raise self._error
        return self._told


class _OperationInFlight:
    """Operation whose header was sent, and the headers of all ranks for this operation."""

    def __init__(
        self, operation: CollectiveOperation, ticket: OperationFuture, index: int, ranks: Ranks, says: int
    ) -> None:
        self.operation, self.ticket, self.index = operation, ticket, index
        self.header = OperationHeader.of(operation, index, ranks.gather, ranks.shard, says)
        self._arriving = torch.empty(ranks.world * headers.NBYTES, dtype=torch.uint8)
        self.works: list[Work] = []
        if ranks.world > 1:
            self.works = collectives.begin_header(self.header.encode(), self._arriving, ranks.talking)

    @property
    def what(self) -> str:
        return f"{self.header.noun} {self.operation.name}"

    def headers(self) -> list[OperationHeader]:
        """Return the headers of ranks 0, 1, …. The `works` must be done."""
        data = self._arriving.numpy().tobytes()
        return [OperationHeader.decode(data[at : at + headers.NBYTES]) for at in range(0, len(data), headers.NBYTES)]


class CollectiveQueue:
    """The collectives of one offloaded model, which have the same order on all ranks.

    Every rank must submit the same operations in the same order, but not at the same time. Before each operation the
    ranks check that the operation is the same on all ranks. After the first failure of any rank, the queue is broken
    and cannot be used again: operations that wait, and all operations that are submitted later, raise this failure.

    The queue owns `ranks`, and `close` closes them.

    Attributes:
        heard: for each rank, the last number that the rank announced (`say`).
    """

    # Invariant: after `_broken` is set, no operation is started any more, and every ticket is done or will be done
    # soon.

    def __init__(self, ranks: Ranks) -> None:
        refuse_in_forked_child()
        self.heard: Sequence[int] = [0] * ranks.world
        self._says = 0
        self._ranks = ranks
        self._changed = threading.Condition()
        self._queue: deque[tuple[CollectiveOperation, OperationFuture]] = deque()
        self._index = 0
        self._begun: deque[_OperationInFlight] = deque()  # the operation in flight, perhaps also the next header
        self._works: list[Work] = []  # works of the operation in flight, which use its memory
        self._awaited: Sequence[Work] = ()
        self._broken: PeerError | None = None
        self._closed = self._forked = False
        self._quiet = True  # the result of `close`
        self._thread = threading.Thread(target=self._run, name="infinity-collectives", daemon=True)
        close_in_children(self)
        # A daemon thread that wakes while the interpreter ends may abort the process. Python runs the finalizers of
        # later objects first, so the model is closed before its queue, and can still tell the ranks why it ends.
        self._at_exit = weakref.finalize(ranks, self.close)
        self._thread.start()

    def close_in_child(self) -> None:
        """Mark this process as a forked child, which has no thread for collectives and must not use the parent's
        connections."""
        self._forked = True
        self._at_exit.detach()

    # Methods for any thread.

    @property
    def rank(self) -> int:
        """Number of this process's rank."""
        return self._ranks.rank

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self._ranks.world

    @property
    def deadline_s(self) -> float:
        """Seconds for which each rank waits for each other rank."""
        return self._ranks.deadline_s

    def submit(self, operation: CollectiveOperation) -> OperationFuture:
        """Append an operation to the queue, without waiting.

        Raises:
            PeerError: the queue is broken.
            ValueError: the sizes do not match the buffers.
            NotAvailableError: a buffer is not in host memory.
            ForkError: the process is a forked child.
        """
        refuse_in_forked_child()
        collectives.check(operation, self._ranks.gather, self._ranks.shard)
        ticket = OperationFuture()
        with self._changed:
            self.raise_if_broken()
            self._queue.append((operation, ticket))
            self._changed.notify_all()
        return ticket

    def all_gather(self, subject: int, name: str, payload: bytes) -> list[bytes]:
        """Submit a `ControlMessage`, wait for it, and return the payload of each rank."""
        return self.submit(CollectiveOperation(ControlMessage(payload), subject, name)).result()

    def all_gather_at(self, name: str, payload: bytes) -> list[bytes]:
        """Do the work of all_gather, with a subject that is derived from `name`.

        All ranks must pass the same name, except for the part after the first "/", which may differ.
        """
        return self.all_gather(zlib.crc32(name.partition("/")[0].encode()), name, payload)

    def tell(self, name: str, told: Any) -> list[Any]:
        """Do the work of all_gather_at, for a value that JSON can represent."""
        return [json.loads(each) for each in self.all_gather_at(name, json.dumps(told, sort_keys=True).encode())]

    def act(self) -> None:
        """Count an act of this rank that needs no other rank. While a rank goes on alone, the others wait for it beyond
        the deadline."""
        self._ranks.watch.act()

    def tell_work(self, what: str, at: int, ended: tuple[str, str] | None = None) -> None:
        """Tell the other ranks, outside of the queue, about a work of this rank.

        Args:
            what: description of the work.
            at: number of steps so far.
            ended: class and text of the error that ended the work, both "" if it succeeded; None: the work begins.
        """
        self._ranks.watch.tell("work", what=what, at=at, ended=ended)

    def wait_for_work(self, what: str, at: int, number: int) -> tuple[str, str]:
        """Wait for the end of a work of another rank, without a deadline.

        Args:
            what: description of the work.
            at: number of steps so far.
            number: number of such works for which this rank has waited, including this one.

        Returns:
            Class and text of the error that ended the work, both "" if it succeeded. If no rank begins such a work
            within a short time, or before rank 0 leaves, but one has ended a work whose description differs from its
            first "/" on, the error of that work.

        Raises:
            PeerError: a rank failed, or left without this work.
        """
        began, head, told = time.monotonic(), what.partition("/")[0], False
        while True:
            known = self._ranks.watch.works(at, _POLL_S)
            same = [entry["ended"] for entry in known if entry["what"] == what]
            ends = [ended for ended in same if ended is not None]
            alike = [entry["ended"] for entry in known if entry["what"].partition("/")[0] == head and entry["ended"]]
            if len(ends) >= number:
                return tuple(ends[number - 1])
            waited = time.monotonic() - began
            if len(same) < 2 * number - 1 and alike and (waited > _OTHER_PATH_S or self._ranks.watch.has_left(0)):
                return tuple(alike[-1])
            self.raise_if_broken()
            if self._ranks.watch.left and waited > _LAST_BYTES_S:
                raise self._inquire("connection", what, "but its connections are still open")
            if not told and waited > self.deadline_s * _SILENT_SHARE:
                told = True
                logger.warning("rank %d has waited %.0f s for the end of %s on rank 0", self.rank, waited, what)

    def say(self, number: int) -> None:
        """Set the number that is sent to the other ranks with the header of each later operation."""
        self._says = number

    def fail(self, error: BaseException) -> None:
        """Tell all ranks that this rank cannot continue. Does not raise.

        Returns when the other ranks can know the failure, or after a short time. Only the first call has an effect. On
        this rank, later operations raise a PeerError whose cause is `error`.
        """
        if self._forked:
            return
        with interrupts_deferred():
            first = self._break(error)
            if first and self._ranks.watch.verdict is None:
                self._ranks.watch.fail(error)

    def explain(self, error: RuntimeError, what: str) -> PeerError:
        """Return why a collective that did not pass through this queue has failed, with the error of the rank at fault.

        This takes a few seconds at most. All ranks then know that the run ends.

        Args:
            error: error of torch.distributed.
            what: description of the collective, for messages.
        """
        return self._inquire("connection", what, _first_words(error))

    def raise_if_broken(self) -> None:
        """Raise PeerError if any rank is known to have failed.

        This method is for loops that wait for something other than a ticket.
        """
        error = self._broken or self._ranks.watch.verdict
        if error is not None:
            raise error.again() from error.__cause__

    def close(self) -> bool:
        """End the thread, and wait for its work for a limited time. Needs no communication. A second call does nothing.

        Returns:
            Whether nothing uses the memory of operations any more. If False, this memory must not be freed.
        """
        if self._closed or self._forked:
            return self._quiet
        with interrupts_deferred():
            self._closed = True
            self._at_exit.detach()
            self._break(PeerError("this rank has closed the model", (self._ranks.rank,), ""))
            if self._thread is not threading.current_thread():  # garbage collection may run this on any thread
                self._thread.join(_CLOSE_S)
            ended = not self._thread.is_alive()
            self._drop_all()
            self._quiet = ended and all(work.is_completed() for work in self._works)
            others = [*self._awaited, *(work for begun in self._begun for work in begun.works)]
            self._ranks.close(idle=self._quiet and all(work.is_completed() for work in others))
        return self._quiet

    def _break(self, error: BaseException) -> bool:
        """Start no operation from now on. Return whether `error` is the first error."""
        with self._changed:
            if self._broken is not None:
                return False
            if isinstance(error, PeerError):
                self._broken = error
            else:
                self._broken = PeerError(f"rank {self._ranks.rank}, this one, failed: {error}", (self._ranks.rank,))
                self._broken.__cause__ = error
            self._changed.notify_all()
        return True

    def _drop_all(self) -> None:
        """End the tickets of all operations that will not be started."""
        with self._changed:
            assert self._broken is not None
            tickets = [begun.ticket for begun in self._begun] + [ticket for _, ticket in self._queue]
            self._queue.clear()
            for ticket in tickets:
                ticket._finish([], self._broken)

    # Methods of the queue's thread.

    def _run(self) -> None:
        try:
            while self._begun or self._begin_next(wait=True):
                self._carry_out(self._begun[0])
                self._begun.popleft()
        except PeerError as error:
            self._break(error)
        except BaseException as error:
            if self._begun:
                self._begun[0].ticket._finish([], error)
            self.fail(error)
        self._drop_all()

    def _begin_next(self, *, wait: bool) -> bool:
        """Send the header of the next operation. Return whether there was a next operation.

        If `wait` is set and the queue is empty, wait until an operation is submitted.
        """
        with self._changed:
            while wait and not self._queue and self._broken is None:
                self._changed.wait()
            if not self._queue or self._broken is not None:
                return False
            operation, ticket = self._queue.popleft()
        try:
            self._begun.append(_OperationInFlight(operation, ticket, self._index, self._ranks, self._says))
        except RuntimeError as error:
            ticket._finish([], trouble := self._inquire("connection", operation.name, _first_words(error)))
            raise trouble from error
        self._index += 1
        return True

    def _carry_out(self, begun: _OperationInFlight) -> None:
        operation, watch, index = begun.operation, self._ranks.watch, begun.index
        for each in operation.after:
            watch.note(index, _BEFORE, f"the work before {begun.what}")
            each()
        self.raise_if_broken()
        watch.note(index, _AGREEING, begun.what)
        told = self._move(begun) if self._ranks.world > 1 else self._alone(begun)
        if operation.arrived is not None:
            operation.arrived()
        watch.note(index + 1, _ELSEWHERE, f"its own work after {begun.what}")
        begun.ticket._finish(told, None)

    def _alone(self, begun: _OperationInFlight) -> list[bytes]:
        self.heard = [begun.header.says]
        return collectives.alone(begun.operation)

    def _move(self, begun: _OperationInFlight) -> list[bytes]:
        self._await(begun.works, begun.what)
        said = begun.headers()
        self.heard = [header.says for header in said]
        try:
            headers.require_same(said)
            if not headers.sizes_fit(said):
                sizes = self._tell_all(json.dumps(headers.sizes_of(begun.operation)).encode(), begun.what)
                raise headers.misfit(said, [json.loads(each) for each in sizes])
        except PeerError as error:
            self._ranks.watch.announce(error)
            raise
        self._ranks.watch.note(begun.index, _MOVING, begun.what)
        moved = begun.operation.collective
        if isinstance(moved, ControlMessage):
            return self._tell_all(moved.payload, begun.what, [header.sent for header in said])
        group = self._ranks.gather if isinstance(moved, AllGather) and moved.near else self._ranks.shard
        if group.size == 1:
            return collectives.alone(begun.operation)
        self.raise_if_broken()
        if moved.shared is not None and all(header.place >= 0 for header in said):
            self._begin_next(wait=False)
            begin, pieces = moved.shared_pieces(self._ranks.rank)
            places = [header.place + begin for header in said]
            moved.shared.through.exchange(places, pieces, moved.shared.copies, self._patience(begun.what))
            return []
        talking = self._ranks.group_of(group)
        try:
            if isinstance(moved, AllGather):
                self._works = collectives.begin_gather(moved, group, talking)
            else:
                whole = moved if moved.shared is None else moved.over_sockets(self._ranks.rank)
                self._works = collectives.begin_all_to_all(whole, talking)
        except RuntimeError as error:
            raise self._inquire("connection", begun.what, _first_words(error)) from error
        self._begin_next(wait=False)
        self._await(self._works, begun.what)
        self._works = []
        if isinstance(moved, AllToAll) and moved.shared is not None:
            moved.take(whole, self._ranks.rank)
        return []

    def _tell_all(self, payload: bytes, what: str, lengths: list[int] | None = None) -> list[bytes]:
        """Send a payload to all ranks, and return the payloads of all ranks. If `lengths` is None, first exchange the
        lengths of the payloads."""
        ranks = self._ranks
        if lengths is None:
            each = torch.empty(ranks.world, 8, dtype=torch.uint8)
            self._await(collectives.begin_telling(struct.pack("<q", len(payload)), each, ranks.talking), what)
            lengths = [int(length) for (length,) in struct.iter_unpack("<q", each.numpy().tobytes())]
        if not any(lengths):
            return [b""] * ranks.world
        into = torch.empty(ranks.world, max(lengths), dtype=torch.uint8)
        self._await(collectives.begin_telling(payload, into, ranks.talking), what)
        return [row.numpy().tobytes()[:length] for row, length in zip(into, lengths, strict=True)]

    def _await(self, works: Sequence[Work], what: str) -> None:
        """Wait until works have ended, a rank has failed or the deadline has passed.

        Args:
            works: works of one collective.
            what: description of the operation, for messages.

        Raises:
            PeerError: not all works succeeded.
        """
        self._awaited, check = works, self._patience(what)
        for work in works:
            while not self._ended(work, what):
                check()

    def _patience(self, what: str) -> Callable[[], None]:
        """Return a function to call several times a second during a wait for other ranks. It raises PeerError if a rank
        has failed or left, or the deadline has passed.

        Args:
            what: description of the operation, for messages.
        """
        deadline_s, watch = self._ranks.deadline_s, self._ranks.watch
        began, left_at = time.monotonic(), 0.0
        says_at, asks_at = began + deadline_s * _SILENT_SHARE, began + deadline_s * _ASKED_SHARE
        ends_at, acts = began + deadline_s, dict[int, int]()

        def check() -> None:
            nonlocal left_at, says_at, asks_at, ends_at, acts
            self.raise_if_broken()
            now = time.monotonic()
            left_at = left_at or (now if watch.left else 0.0)
            if now > says_at:
                says_at = math.inf
                logger.warning(
                    "rank %d has waited %.0f s for the other ranks at %s; all ranks must call the model equally often. "
                    "After %g s (ranks.deadline_s) this is an error",
                    self._ranks.rank,
                    now - began,
                    what,
                    deadline_s,
                )
            if left_at and now > left_at + _LAST_BYTES_S:
                raise self._inquire("connection", what, "but its connections are still open")
            if now > asks_at:
                asks_at, acts = math.inf, watch.acts_of_others()
            if now > ends_at:
                before, acts = acts, watch.acts_of_others()
                self.raise_if_broken()
                if all(acts[rank] == before.get(rank, acts[rank]) for rank in acts):
                    raise self._inquire("deadline", what, f"within {deadline_s:g} s")
                ends_at = time.monotonic() + deadline_s

        return check

    def _ended(self, work: Work, what: str) -> bool:
        """Wait for a short time, and return whether the work is done."""
        try:
            work.wait(timedelta(seconds=_POLL_S))
            return True
        except RuntimeError:
            if not work.is_completed():
                return False
        try:
            work.wait()
            return True
        except RuntimeError as error:
            raise self._inquire("connection", what, _first_words(error)) from error

    def _inquire(self, trouble: Trouble, what: str, detail: str) -> PeerError:
        if self._broken is not None:  # this rank has closed the queue
            return self._broken.again()
        return self._ranks.watch.inquire(trouble, what, detail).again()


def is_peer_error(error: Exception) -> bool:
    """Return whether torch.distributed raised an error because another rank failed."""
    return isinstance(error, torch.distributed.DistError) or _OF_GLOO.search(str(error)) is not None


def _first_words(error: BaseException) -> str:
    """Return the first sentence of gloo's message, without the file and line in gloo's sources."""
    return _PLACE.sub("", str(error)).partition(". ")[0]
