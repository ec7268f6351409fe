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

[Note: the weights in the shared memory]
The memory in common (shared_arena.py) has one counter for each rank and unit, and then the weights of one unit after
the other. The weights of a unit have the layout of the home of a complete unit: encoded groups follow the other groups.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

import torch

from infinity import _native
from infinity.base.accelerator import Accelerator
from infinity.io.arena import ArenaRegion, Lease
from infinity.io.store import Extent
from infinity.plan.layout import UnitLayout
from infinity.ranks.shared_memory import SharedMemory
from infinity.ranks.world import World
from infinity.sharded.shared_arena import COUNTER_BYTES, SharedArena
from infinity.sizes import PAGE_BYTES, round_up
from infinity.state.shard import RankPartition
from infinity.state.unit import Unit
from infinity.tiers.destination import Written
from infinity.tiers.home import StateHome, WeightsHome

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
    """The weights that all ranks share (WeightsMemory). All ranks make this object at the same time.

    Args:
        memory: the memory, which this object closes.
        units: the complete units.
        cut: this rank's slice of every unit.
        world: the ranks.
        exchange_bytes: bytes of this rank's gradients on their way to other ranks.

    Attributes:
        shared: the shared memory.
        mailboxes: exchanges of gradients between the ranks.
        gradients: memory for this rank's gradients on their way to other ranks.
        complete: homes of the complete units, which slots are filled from.

    Raises:
        NotAvailableError: there is too little memory. All ranks raise an error.
        PeerError: another rank failed.
    """

    def __init__(
        self, memory: SharedMemory, units: Sequence[Unit], cut: RankPartition, world: World, exchange_bytes: int
    ) -> None:
        counters = round_up(cut.count * len(units) * COUNTER_BYTES, PAGE_BYTES)
        sizes = [round_up(unit.home_bytes, PAGE_BYTES) for unit in units]
        self.shared = SharedArena(memory, cut, world, counters + sum(sizes), exchange_bytes)
        self._cut = cut
        self._world = world
        self._count = len(units)
        common = self.shared.common
        self._counters = _native.SharedCounters(common.lease(counters, "the counters of the weights").view())
        leases = [
            common.lease(nbytes, f"the weights of '{unit.name}'") for unit, nbytes in zip(units, sizes, strict=True)
        ]
        self.complete = [_complete(unit, lease) for unit, lease in zip(units, leases, strict=True)]
        self._ends = [lease.offset + lease.nbytes for lease in leases]
        self.mailboxes = self.shared.mailboxes
        self.gradients = self.shared.own
        world.each("taking the shared memory", lambda: self.shared.take(self._populate))
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

    def transfers(self, arena: ArenaRegion) -> ArenaRegion:
        return arena

    def pin(self, accelerator: Accelerator) -> str:
        return self.shared.pin(accelerator, self._ends)

    def _populate(self) -> None:
        """Take memory for this rank's slices, which it will fill. Raises OSError."""
        for complete in self.complete:
            if complete.unit is None or complete.lease is None:
                raise AssertionError("a home of no unit")
            shard = self._cut.of(complete.unit)
            for index, group in enumerate(complete.unit.groups):
                begin, end = shard.weight_range(index, self._cut.index)
                start = begin + _encoded_begin(complete.unit) * (group.codec is not None)
                self.shared.arena.memory.populate(complete.lease.offset + start, end - begin)

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
        self.shared.give_back()


def _encoded_begin(unit: Unit) -> int:
    """Return the offset of the encoded groups in the home of a complete unit."""
    return unit.home_bytes - unit.encoded_bytes


def _complete(unit: Unit, lease: Lease) -> WeightsHome:
    groups, begin = [], 0
    for group in unit.groups:
        groups.append(StateHome(lease, begin, group.home_bytes, None))
        begin += group.home_bytes
    return WeightsHome(tuple(groups), unit.home_bytes, unit)
