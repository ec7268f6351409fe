"""Homes of weights in RAM that all ranks of a machine share: one copy of all weights. Each rank owns its slices of it.

[Note: who may write]
Only a rank's own updates, and the functions that fill the model, write to its slices. (infinity.gathered with
write=True writes the same new values on all ranks.) For each unit, each rank publishes the version of its slice in a
counter. A fetch waits until the counters of all ranks have the unit's version. So a fetch is no collective, and a rank
can fetch alone.

A rank writes the new weights of a step after the ranks have agreed on the step. Before that, each rank has ended its
backward, its fetches and its uploads. So nobody reads weights that are being written, and one copy is enough. A
speculative update begins earlier and writes to a shadow of the rank's slice (units/speculative_update_buffers.py).
After the agreement, the shadow is copied to the slice.

[Note: the shared memory]

    counters │ weights of unit 0 │ weights of unit 1 │ … │ gradients of rank 0 │ gradients of rank 1 │ …

There is one counter for each rank and unit, one for the ranks that have closed, and two for the gradients of each rank
(mailboxes.py).

The weights of a unit have the layout of the home of a complete unit: encoded groups follow the other groups. A page
belongs to the NUMA node of the rank that first writes it, which is its owner.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import torch

from infinity import _native
from infinity.base.accelerator import Accelerator
from infinity.errors import NotAvailableError
from infinity.io.arena import ArenaRegion, Lease, PinnedArena
from infinity.io.store import Extent
from infinity.plan.layout import UnitLayout
from infinity.ranks.shared_memory import SharedMemory
from infinity.ranks.world import World
from infinity.sharded.mailboxes import Mailboxes
from infinity.sizes import PAGE_BYTES, format_bytes, round_up
from infinity.state.shard import RankPartition
from infinity.state.unit import Unit
from infinity.tiers.destination import Written
from infinity.tiers.home import StateHome, WeightsHome

_COUNTER_BYTES = 64
_CLOSE_S = 5.0


class Publication:
    """Publication of a version of a unit's weights, which this rank has changed (BackgroundWork).

    Args:
        unit, version: the version of the unit's weights.
        changed: destinations of the new weights of this rank's slice, by group.
    """

    def __init__(self, unit: int, version: int, changed: Written) -> None:
        self.unit, self.version = unit, version
        self._changed = changed
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def copy(self) -> None:
        """Wait for the new weights, and copy those in shadows to this rank's slice.

        Raises:
            SwapIOError: the update has failed.
        """
        for each in self._changed.values():
            if each.written is not None:
                each.written.result()
            if each.memory is not None and each.moves:
                new = torch.frombuffer(each.home.view_in(each.memory), dtype=torch.uint8)
                torch.frombuffer(each.home.view(), dtype=torch.uint8).copy_(new)

    def end(self, error: BaseException | None = None) -> None:
        self._error = error
        self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        self._ended.wait()

    def result(self) -> None:
        self.wait()
        if self._error is not None:
            raise self._error


class SharedHomes:
    """The shared memory, as this rank has mapped it (WeightsMemory). All ranks make it at the same time.

    Args:
        memory: the memory, which this object closes.
        units: the complete units.
        cut: this rank's slice of every unit.
        world: the ranks.
        exchange_bytes: bytes of each rank's gradients on their way to other ranks, the same on all ranks.

    Attributes:
        arena: the mapping.
        mailboxes: the gradients.
        complete: homes of the complete units, which slots are filled from.

    Raises:
        NotAvailableError: there is too little memory. All ranks raise an error.
        PeerError: another rank failed.
    """

    def __init__(
        self, memory: SharedMemory, units: Sequence[Unit], cut: RankPartition, world: World, exchange_bytes: int
    ) -> None:
        counters = round_up((cut.count * len(units) + 1) * _COUNTER_BYTES, PAGE_BYTES)
        of_mail = round_up(2 * cut.count * _COUNTER_BYTES, PAGE_BYTES)
        sizes = [round_up(unit.home_bytes, PAGE_BYTES) for unit in units]
        nbytes = counters + of_mail + sum(sizes) + cut.count * exchange_bytes
        try:
            memory.size(nbytes)
            self.arena = PinnedArena(nbytes, fd=memory.fileno())
        finally:
            memory.close()
        self._cut = cut
        self._world = world
        self._count = len(units)
        self._counters = _native.SharedCounters(self.arena.lease(counters, "the counters of the ranks").view())
        mail = _native.SharedCounters(self.arena.lease(of_mail, "the counters of the gradients").view())
        leases = [
            self.arena.lease(nbytes, f"the weights of '{unit.name}'") for unit, nbytes in zip(units, sizes, strict=True)
        ]
        self.complete = [_complete(unit, lease) for unit, lease in zip(units, leases, strict=True)]
        regions = [self.arena.lease(exchange_bytes, "gradients between ranks") for _ in range(cut.count)]
        self.mailboxes = Mailboxes(self.arena, mail, regions, cut.index)
        self._ends = [lease.offset + lease.nbytes for lease in (*leases, *regions)]
        world.each("taking the shared memory", lambda: self._take(self._populate))
        self._queue = queue.SimpleQueue[Publication | None]()
        self._thread: threading.Thread | None = None

    def open(self, layout: UnitLayout, extents: Sequence[Extent | None], resting: ArenaRegion) -> WeightsHome:
        """Return the home of this rank's slices of a unit, which take no memory of `resting`."""
        whole, mine, beside = self.complete[layout.full.index], [], 0
        shard = self._cut.of(layout.full)
        for index, (group, extent) in enumerate(zip(layout.local.groups, extents, strict=True)):
            begin, _ = shard.weight_range(index, self._cut.index)
            start = begin + _encoded_begin(layout.full) * (group.codec is not None)
            mine.append(StateHome(whole.lease, start, group.home_bytes, extent, dirty=True, beside=beside))
            beside += group.home_bytes
        return WeightsHome(tuple(mine), layout.local.home_bytes, layout.local, shared=True)

    def publish(self, unit: int, version: int, changed: Written) -> Publication:
        """Tell the other ranks that this rank's slice of a unit has a version of the weights, as soon as the slice has
        it. A thread does this, in the order of these calls.

        Args:
            unit: index of the unit.
            version: the version.
            changed: destinations of new weights that are not complete yet, or that are in a shadow, by group.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="infinity-publisher", daemon=True)
            self._thread.start()
        publication = Publication(unit, version, changed)
        self._queue.put(publication)
        return publication

    def _run(self) -> None:
        while (publication := self._queue.get()) is not None:
            try:
                publication.copy()
                self._counters.advance(self._at(self._cut.index, publication.unit), publication.version + 1)
                publication.end()
            except BaseException as error:
                self._world.fail(error)  # the other ranks wait for these weights
                publication.end(error)

    def pin(self, accelerator: Accelerator) -> str:
        """Pin the shared memory (PinnedArena.pin). All ranks call this.

        The ranks pin one after the other, because two registrations of the same pages at the same time may fail. Each
        rank has taken the memory of its own slices before, on its own NUMA node.

        Raises:
            PeerError: another rank failed.
        """
        self._world.each("taking memory for gradients", lambda: self._take(self.mailboxes.populate))
        refused = ""
        for turn in range(self._cut.count):
            self._world.tell("pinning the shared memory", turn)
            if turn == self._cut.index:
                refused = self.arena.pin(accelerator, ends=self._ends)
        return refused

    def _populate(self) -> None:
        """Take memory for this rank's slices, which it will fill. Raises OSError."""
        for complete in self.complete:
            if complete.unit is None or complete.lease is None:
                raise AssertionError("a home of no unit")
            shard = self._cut.of(complete.unit)
            for index, group in enumerate(complete.unit.groups):
                begin, end = shard.weight_range(index, self._cut.index)
                start = begin + _encoded_begin(complete.unit) * (group.codec is not None)
                self.arena.memory.populate(complete.lease.offset + start, end - begin)

    def _take(self, populate: Callable[[], None]) -> None:
        """Take memory for pages.

        Raises:
            NotAvailableError: there is too little memory.
        """
        try:
            populate()
        except OSError as error:
            raise NotAvailableError(
                f"there is no memory for this rank's share of {format_bytes(self.arena.nbytes)} that the ranks share "
                f"({error.strerror}). Lower memory.host, or set ranks.wire: gloo."
            ) from error

    def close(self) -> None:
        """End the thread, after all updates have ended. A second call does nothing."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_CLOSE_S)  # a disk that never answers keeps an update, and with it the thread

    def behind(self, unit: int, version: int) -> list[int]:
        """Return the ranks whose slices of a unit are older than a version."""
        ranks = range(self._cut.count)
        return [rank for rank in ranks if self._counters.load(self._at(rank, unit)) <= version]

    def wait(self, unit: int, version: int, rank: int, timeout_s: float) -> bool:
        """Wait until a rank has published a version of a unit, and return whether it has."""
        return self._counters.wait(self._at(rank, unit), version + 1, timeout_s)

    def _at(self, rank: int, unit: int) -> int:
        return rank * self._count + unit

    def give_back(self) -> None:
        """Free the memory, even while references to it exist, once all ranks have called this.

        If a rank never calls this, the memory is freed when the last process has let go of it.
        """
        self.arena.unpin()
        if self._counters.add(self._cut.count * self._count) == self._cut.count - 1:
            self.arena.give_all_back()


def _encoded_begin(unit: Unit) -> int:
    """Return the offset of the encoded groups in the home of a complete unit."""
    return unit.home_bytes - unit.encoded_bytes


def _complete(unit: Unit, lease: Lease) -> WeightsHome:
    groups, begin = [], 0
    for group in unit.groups:
        groups.append(StateHome(lease, begin, group.home_bytes, None))
        begin += group.home_bytes
    return WeightsHome(tuple(groups), unit.home_bytes, unit)
