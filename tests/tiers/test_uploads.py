"""Weights on their way up: right, behind the last use of where they go, and forgotten once they are there."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from infinity import _native
from infinity.errors import SwapIOError
from infinity.io.arena import Lease
from infinity.sizes import PAGE_BYTES
from infinity.tiers.destination import StateDestination
from infinity.tiers.home import StateHome, WeightsHome
from infinity.tiers.slab import SlabLease
from tests.sim.queues import EAGER, LAZY, Copy, Policy, random_policy
from tests.tiers.fakes import extent
from tests.tiers.rig import PIECES, Rig, aligned

POLICIES = [LAZY, EAGER, *(random_policy(seed) for seed in range(3))]
every_policy = pytest.mark.parametrize("policy", POLICIES, ids=str)


def slot_of(rig: Rig, pages: int = 1) -> SlabLease:
    made = rig.slab.try_lease(pages * PAGE_BYTES)
    assert made is not None
    return made


def home_of(rig: Rig, value: int, pages: int = 1) -> Lease:
    made = rig.arena.lease(pages * PAGE_BYTES, "weights")
    made.tensor().fill_(value)
    return made


@every_policy
def test_weights_in_ram_arrive_behind_the_last_use_of_their_slot(rig: Callable[..., Rig], policy: Policy) -> None:
    made = rig(policy)
    sim, uploads = made.sim, made.uploads()
    for value in (7, 8):
        slot = slot_of(made)
        sim.wait(sim.current(), uploads.from_ram(slot, home_of(made, value)))
        assert (slot.memory == value).all()
        made.slab.give_back(slot, [sim.record(sim.current())])


def test_an_upload_into_memory_that_nobody_uses_waits_for_nothing(rig: Callable[..., Rig]) -> None:
    made = rig()
    uploads = made.uploads()
    slot_of(made).memory.fill_(1)  # compute is queued
    uploads.from_ram(slot_of(made), home_of(made, 7))
    assert made.waits == []
    first = uploads._stream.queue[0]
    assert isinstance(first, Copy)


def test_uploads_from_ram_are_forgotten_once_they_are_reached(rig: Callable[..., Rig]) -> None:
    made = rig(EAGER)
    uploads, home, slot = made.uploads(), home_of(made, 7), slot_of(made)
    for _ in range(50):
        uploads.from_ram(slot, home)
    assert len(uploads._reading) <= 1


@every_policy
def test_a_home_may_change_once_no_copy_reads_it(rig: Callable[..., Rig], policy: Policy) -> None:
    made = rig(policy)
    uploads, home = made.uploads(), home_of(made, 7)
    slots = [slot_of(made) for _ in range(3)]
    events = [uploads.from_ram(slot, home) for slot in slots]
    uploads.synchronize()
    home.tensor().fill_(8)
    uploads.synchronize()
    for slot, event in zip(slots, events, strict=True):
        made.sim.wait(made.sim.current(), event)
        assert (slot.memory == 7).all()


def test_closing_waits_until_no_copy_reads_a_home(rig: Callable[..., Rig]) -> None:
    made = rig()
    uploads, home = made.uploads(), home_of(made, 7)
    uploads.from_ram(slot_of(made), home)
    assert made.sim.pending_copies()
    uploads.close()
    assert not made.sim.pending_copies()
    home.release()  # is poisoned: a copy that still read it would be found


# -- from the store ----------------------------------------------------------------------------------------------------


def stored(*groups: int, unit: str = "a") -> WeightsHome:
    """Return a home of groups of so many pages, all of them at the store's beginning."""
    homes = [
        StateHome(
            None, sum(groups[:index]) * PAGE_BYTES, pages * PAGE_BYTES, extent(unit, "weight", count=pages, copies=1)
        )
        for index, pages in enumerate(groups)
    ]
    return WeightsHome(tuple(homes), sum(groups) * PAGE_BYTES)


@every_policy
def test_weights_in_the_store_arrive_in_pieces_behind_the_last_use_of_their_slot(
    rig: Callable[..., Rig], tmp_path: Path, policy: Policy
) -> None:
    made = rig(policy)
    sim, store = made.sim, made.open_store(tmp_path)
    uploads = made.uploads()
    for _ in range(3):
        slot = slot_of(made, 8)  # the same bytes each time, of more pieces than the bounce buffer holds
        transfer, ready = uploads.from_store(slot, stored(5, 3), {}, store)
        transfer.result()
        sim.wait(sim.current(), ready)
        assert torch.equal(slot.memory, torch.cat([store.bytes[: 5 * PAGE_BYTES], store.bytes[: 3 * PAGE_BYTES]]))
        slot.memory.add_(1)
        made.slab.give_back(slot, [sim.record(sim.current())])


def test_landing_memory_is_taken_by_the_first_upload_from_the_store(rig: Callable[..., Rig], tmp_path: Path) -> None:
    made = rig()
    store, uploads, free = made.open_store(tmp_path), made.uploads(), made.arena.free_bytes
    home = home_of(made, 7)
    uploads.from_ram(slot_of(made), home)
    assert made.arena.free_bytes == free - PAGE_BYTES
    for _ in range(3):
        done, ready = uploads.from_store(slot_of(made), stored(1), {}, store)
        done.result()
        made.sim.synchronize(ready)
    assert made.arena.free_bytes == free - PAGE_BYTES - PIECES * PAGE_BYTES


def test_a_copy_of_new_weights_is_read_once_it_is_written(rig: Callable[..., Rig], tmp_path: Path) -> None:
    made = rig()
    store = made.open_store(tmp_path)
    where = extent("a", "weight", count=2)  # the second copy lies behind the first
    new = aligned(2 * PAGE_BYTES).fill_(9)
    landings = _native.Landings(made.gate, made.pool)
    reached = made.sim.record(made.sim.stream())
    landed = landings.land(reached.handle, [])  # it takes a while until the device has got there, and longer to write
    written = store.transfer(store.engine.write(store.file, 2 * PAGE_BYTES, new.numpy(), after=landed), where)
    slot = slot_of(made, 2)
    home = StateHome(None, 0, new.numel(), where)
    after = {0: StateDestination(home, copy_index=1, written=written)}
    done, ready = made.uploads().from_store(slot, WeightsHome((home,), home.nbytes), after, store)
    done.result()
    made.sim.wait(made.sim.current(), ready)
    assert (slot.memory == 9).all()
    landings.close()


def test_a_read_that_fails_names_the_unit_and_leaves_no_copy_behind(rig: Callable[..., Rig], tmp_path: Path) -> None:
    made = rig()
    store = made.open_store(tmp_path, [_native.Fault(2, "error", errno.EIO, operation="read")])
    uploads, slot = made.uploads(), slot_of(made, 8)
    done, _ = uploads.from_store(slot, stored(8, unit="broken"), {}, store)
    with pytest.raises(SwapIOError, match="unit 'broken'"):
        done.result()
    assert not made.sim.pending_copies()
    again, ready = uploads.from_store(slot, stored(8), {}, store)
    again.result()
    made.sim.wait(made.sim.current(), ready)
    assert torch.equal(slot.memory, store.bytes[: 8 * PAGE_BYTES])
