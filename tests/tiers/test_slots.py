"""Slots: fetches come and go in any order, and what is free of the arena, or of a device's slab, is the budget."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from infinity import _native
from infinity.errors import DeviceCopyError, SwapIOError, SwapTimeoutError
from infinity.sizes import PAGE_BYTES
from infinity.state.codec import parts_of
from infinity.state.unit import FlatParameterGroup, ParameterSpec, Unit
from infinity.tiers.destination import StateDestination
from infinity.tiers.home import StateHome, WeightsHome
from infinity.tiers.slab import Slab
from infinity.tiers.slots import Fetch, HostSlotPool, SlabSlotPool, Slot
from tests.sim.queues import EAGER, LAZY, Policy, random_policy
from tests.tiers.fakes import TIMEOUT, Failure, Future, Store, extent, few, pages, transfer
from tests.tiers.rig import Rig
from tests.units.fakes import homes_of, unit_of

PAGES = 8
GROUPS = [(1,), (2, 1), (1, 1), (4,)]


def pool_of(arena: Any) -> tuple[HostSlotPool, Store]:
    store = Store()
    below: Any = SimpleNamespace(transfers=arena, require_store=lambda: store)
    return HostSlotPool(below), store


class SlotsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.arena = pages(PAGES)
        self.pool, self.store = pool_of(self.arena)
        self.homes = [homes_of(unit_of(index, groups)).weights for index, groups in enumerate(GROUPS)]
        for index, groups in enumerate(GROUPS):
            for group, count in enumerate(groups):
                self.store.stored[f"{index}.{group}.weight", 0] = bytes([16 * index + group]) * count * PAGE_BYTES
        self.fetches: list[tuple[int, Fetch]] = []
        self.slots: list[tuple[int, Slot]] = []

    @rule(index=st.integers(0, len(GROUPS) - 1))
    def start(self, index: int) -> None:
        before = self.arena.free_bytes
        fetch = self.pool.start(self.homes[index], {}, 0)
        if fetch is not None:
            self.fetches.append((index, fetch))
        else:
            longest = max((view.nbytes for view in self.arena.free_views()), default=0)
            assert longest < self.homes[index].nbytes
            assert self.arena.free_bytes == before

    @precondition(lambda self: self.store.under_way)
    @rule(data=st.data(), fails=st.sampled_from([False, False, True]))
    def a_read_ends(self, data: Any, fails: bool) -> None:
        data.draw(st.sampled_from(self.store.under_way)).end(Failure() if fails else None)

    @precondition(lambda self: self.fetches)
    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        index, fetch = self.fetches.pop(data.draw(st.integers(0, len(self.fetches) - 1)))
        fetch.wait()
        try:
            slot = fetch.finish()
        except SwapIOError:
            return
        expected = [bytes([16 * index + group]) * count * PAGE_BYTES for group, count in enumerate(GROUPS[index])]
        assert slot.tensor.numpy().tobytes() == b"".join(expected)
        self.slots.append((index, slot))

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def free(self, data: Any) -> None:
        _, slot = self.slots.pop(data.draw(st.integers(0, len(self.slots) - 1)))
        self.pool.free(slot)

    @invariant()
    def what_is_free_is_the_budget(self) -> None:
        used = sum(self.homes[index].nbytes for index, _ in [*self.fetches, *self.slots])
        assert self.arena.free_bytes == PAGES * PAGE_BYTES - used

    @invariant()
    def slots_are_apart(self) -> None:
        ranges = sorted((slot.tensor.data_ptr(), slot.tensor.numel()) for _, slot in self.slots)
        for (first, nbytes), (second, _) in itertools.pairwise(ranges):
            assert first + nbytes <= second


TestSlots = SlotsMachine.TestCase
TestSlots.settings = few


def home_of(index: int, count: int) -> WeightsHome:
    return homes_of(unit_of(index, (count,))).weights


def brought(pool: HostSlotPool, home: WeightsHome) -> Any:
    fetch = pool.start(home, {}, 0)
    assert fetch is not None
    return fetch.finish()


def test_weights_in_ram_are_used_where_they_are_and_never_given_back() -> None:
    space, arena = pages(2), pages(1)
    pool, _ = pool_of(arena)
    home = homes_of(unit_of(0, (2,)), space).weights
    slot = brought(pool, home)
    assert slot.tensor.numel() == 2 * PAGE_BYTES
    assert not pool.counts(home)
    pool.free(slot)
    assert (space.free_bytes, arena.free_bytes) == (0, PAGE_BYTES)
    assert pool.counts(home_of(1, 1))


def test_long_units_come_from_the_top_so_that_they_do_not_break_up_the_space_of_short_ones() -> None:
    pool, _ = pool_of(pages(8))
    short, long = brought(pool, home_of(0, 2)), brought(pool, home_of(1, 3))
    assert (short.lease.offset, long.lease.offset) == (0, 5 * PAGE_BYTES)


def test_memory_that_a_device_may_still_write_to_is_never_given_back() -> None:
    arena = pages(2)
    pool, store = pool_of(arena)
    fetch = pool.start(home_of(0, 1), {}, 0)
    assert fetch is not None
    store.under_way[0].fate = TIMEOUT
    with pytest.raises(SwapTimeoutError):
        fetch.finish()
    assert arena.free_bytes == PAGE_BYTES


def test_a_fetch_waits_for_all_its_groups_and_tells_the_failure_of_any() -> None:
    arena = pages(2)
    pool, store = pool_of(arena)
    fetch = pool.start(homes_of(unit_of(0, (1, 1))).weights, {}, 0)
    assert fetch is not None
    first, second = store.under_way
    first.fate = Failure("corruption")
    with pytest.raises(SwapIOError):
        fetch.finish()
    assert first.done()
    assert second.done()
    assert arena.free_bytes == 2 * PAGE_BYTES


def test_new_weights_are_read_from_where_they_go_once_they_are_there() -> None:
    pool, store = pool_of(pages(1))
    store.stored["0.0.weight", 0], written = b"\1" * PAGE_BYTES, Future()
    written._at_end = lambda failure: store.stored.update({("0.0.weight", 1): b"\2" * PAGE_BYTES})
    home = home_of(0, 1)
    fetch = pool.start(home, {0: StateDestination(home.groups[0], copy_index=1, written=transfer(written))}, 0)
    assert fetch is not None
    assert set(fetch.finish().tensor.tolist()) == {2}
    assert written.done()


# -- slots of a device -------------------------------------------------------------------------------------------------


class OnDevice:
    """SlabSlotPool over the slab of a simulated device, for units of so many pages each, whose weights rest in RAM or
    in the store."""

    def __init__(
        self,
        rig: Rig,
        folder: Path | None,
        sizes: tuple[int, ...],
        faults: tuple[Any, ...] = (),
        stays: int | None = None,
        decoding: int = 0,
    ) -> None:
        """Args: stays: the unit that does; its slab is the first page of the memory. decoding: pages behind it, for
        encoded weights."""
        self.rig = rig
        store = None if folder is None else rig.open_store(folder, faults)
        space = None if store is not None else rig.arena.lease(sum(sizes) * PAGE_BYTES, "weights").space()
        self.homes = [homes_of(unit_of(index, (count,)), space).weights for index, count in enumerate(sizes)]
        for index, home in enumerate(self.homes):
            if home.lease is not None:
                home.lease.tensor().fill_(index + 1)
        layouts = [SimpleNamespace(full=SimpleNamespace(stays=index == stays)) for index in range(len(sizes))]
        below: Any = SimpleNamespace(
            units=[SimpleNamespace(weights=home) for home in self.homes],
            plan=SimpleNamespace(layout=SimpleNamespace(units=layouts)),
            require_store=lambda: store,
        )
        staying, memory = 0 if stays is None else PAGE_BYTES, rig.slab._memory
        cut = staying + decoding * PAGE_BYTES
        device: Any = SimpleNamespace(
            accelerator=rig.sim,
            staying=Slab(rig.sim, memory[:staying]),
            decoding=Slab(rig.sim, memory[staying:cut]),
            slots=Slab(rig.sim, memory[cut:]) if cut else rig.slab,
            uploads=rig.uploads(),
            weights=rig.weights(),
        )
        self.pool = SlabSlotPool(below, device, self.homes)

    def bring(self, index: int) -> Slot:
        fetch = self.pool.start(self.homes[index], {}, 0)
        assert fetch is not None
        fetch.wait()
        return fetch.finish()

    def offset(self, slot: Slot) -> int:
        return (slot.tensor.data_ptr() - self.rig.slab._memory.data_ptr()) // PAGE_BYTES


def test_units_of_the_usual_size_get_the_same_addresses_and_others_come_from_the_top(rig: Callable[..., Rig]) -> None:
    device = OnDevice(rig(), None, (2, 2, 2, 3, 1))
    usual = [device.bring(index) for index in (0, 1)]
    others = [device.bring(index) for index in (3, 4)]
    assert [device.offset(slot) for slot in usual] == [0, 2]
    assert [device.offset(slot) for slot in others] == [5, 4]
    assert device.pool.start(device.homes[2], {}, 0) is None
    for slot in [*others, *usual]:
        device.pool.free(slot)
    assert [device.offset(device.bring(index)) for index in (1, 2, 0)] == [0, 2, 4]


@pytest.mark.parametrize("policy", [LAZY, EAGER, random_policy(0)], ids=str)
@pytest.mark.parametrize("stored", [False, True])
def test_a_slot_that_is_given_back_is_reused_only_behind_its_last_uses(
    rig: Callable[..., Rig], tmp_path: Path, policy: Policy, stored: bool
) -> None:
    """The checker finds it where nothing orders the upload behind the streams that read the slot."""
    device = OnDevice(rig(policy), tmp_path if stored else None, (8, 8))
    side = device.rig.sim.stream("side")
    for index in (0, 1, 0):
        slot = device.bring(index)
        slot.wait()
        found = slot.tensor.clone()
        with device.rig.sim.on(side):
            slot.wait()
            assert torch.equal(slot.tensor.clone(), found)
        expected = device.rig.store.bytes[: 8 * PAGE_BYTES] if device.rig.store else torch.full_like(found, index + 1)
        assert torch.equal(found, expected)
        device.pool.free(slot)


def encoded_home(index: int, rig: Rig, stored: bool) -> WeightsHome:
    """Return a home of 4096 weights in int8, two pages, in the store or in RAM, where each of them decodes to (index +
    1) / 2."""
    spec = ParameterSpec("weight", torch.Size([1, PAGE_BYTES]), PAGE_BYTES, 0, 0)
    group = FlatParameterGroup(torch.float32, False, "fp32", (spec,), spec.numel, 0, 4 * spec.numel, "int8")
    unit = Unit(index, str(index), (group,), group.weight_bytes)
    if stored:
        place = extent(unit.name, "weight", count=unit.home_bytes // PAGE_BYTES)
        return WeightsHome((StateHome(None, 0, unit.home_bytes, place),), unit.home_bytes, unit)
    lease = rig.arena.lease(unit.home_bytes, "weights")
    for part, (begin, nbytes) in parts_of("int8", spec.shape).items():
        data = lease.tensor()[begin : begin + nbytes]
        _ = data.fill_(index + 1) if part == "codes" else data.view(torch.bfloat16).fill_(0.5)
    return WeightsHome((StateHome(lease, 0, unit.home_bytes, None),), unit.home_bytes, unit)


@pytest.mark.parametrize("policy", [LAZY, EAGER, random_policy(0)], ids=str)
@pytest.mark.parametrize("stored", [False, True])
def test_memory_of_encoded_weights_is_reused_only_behind_their_decoding(
    rig: Callable[..., Rig], tmp_path: Path, policy: Policy, stored: bool
) -> None:
    """Each unit has a slot of its own, so only the decoding orders the uploads of the encoded weights."""
    device = OnDevice(rig(policy, slab_pages=3 * 4 + 2), tmp_path if stored else None, (), decoding=2)
    device.homes += [encoded_home(index, device.rig, stored) for index in range(3)]
    for index in range(3):
        slot = device.bring(index)
        slot.wait()
        assert stored or (slot.tensor.view(torch.float32) == (index + 1) / 2).all()


@pytest.mark.parametrize("policy", [LAZY, EAGER, random_policy(0)], ids=str)
def test_a_slot_that_nobody_used_is_reused_only_behind_its_decoding(rig: Callable[..., Rig], policy: Policy) -> None:
    device = OnDevice(rig(policy, slab_pages=4 + 2), None, (4,), decoding=2)
    device.homes += [encoded_home(1, device.rig, stored=False)]
    device.pool.free(device.bring(1))
    slot = device.bring(0)
    slot.wait()
    assert torch.equal(slot.tensor.clone(), torch.full_like(slot.tensor, 1))


def test_a_stream_waits_for_an_upload_once_and_another_stream_waits_too(rig: Callable[..., Rig]) -> None:
    device = OnDevice(rig(), None, (1,))
    sim, slot = device.rig.sim, device.bring(0)
    for _ in range(2):
        slot.wait()
        assert slot.rest()
    side = sim.stream()
    with sim.on(side):
        slot.wait()
        slot.wait()
    assert [stream for stream, _ in device.rig.waits] == [sim.current(), side]


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("stored", [False, True])
def test_a_copy_without_memory_leaks_nothing(rig: Callable[..., Rig], tmp_path: Path, stored: bool, at: int) -> None:
    device = OnDevice(rig(), tmp_path if stored else None, (2, 2))
    device.rig.sim.out_of_memory_at = 1 + at  # the first was the slab
    failed = 0
    for _ in range(4):
        try:
            slot = device.bring(0)
        except torch.OutOfMemoryError:
            failed += not stored
        except DeviceCopyError as error:
            told = "copying of weight of unit '0' failed at step 1: device 0: the device's runtime returned error 2. "
            assert str(error).startswith(told)
            assert "lower memory.device" in str(error)
            failed += stored
        else:
            slot.wait()
            device.pool.free(slot)
        assert device.rig.slab.free_bytes == device.rig.slab.nbytes
    assert failed == 1


def test_weights_that_cannot_be_read_give_the_slot_back_with_its_last_uses(
    rig: Callable[..., Rig], tmp_path: Path
) -> None:
    """The upload that fails has waited for nobody, so the next one in these bytes has to."""
    fault = _native.Fault(8, "error", errno.EIO, operation="read")  # behind the pages of the first
    device = OnDevice(rig(), tmp_path, (8,), (fault,))
    slot = device.bring(0)
    slot.wait()
    slot.tensor.clone()
    device.pool.free(slot)
    with pytest.raises(SwapIOError, match="weight of unit '0'"):
        device.bring(0)
    assert device.rig.slab.free_bytes == device.rig.slab.nbytes
    slot = device.bring(0)
    slot.wait()
    assert torch.equal(slot.tensor, device.rig.store.bytes[: 8 * PAGE_BYTES])  # type: ignore[union-attr]


@pytest.mark.parametrize("policy", [LAZY, EAGER, random_policy(0)], ids=str)
def test_weights_that_go_down_are_the_slots_though_it_is_given_back_at_once(
    rig: Callable[..., Rig], policy: Policy
) -> None:
    device = OnDevice(rig(policy), None, (8, 8))
    slot = device.bring(0)
    slot.wait()
    copy = slot.copy_down()
    assert copy is not None
    assert slot.copy_down() is None  # there is memory for one
    device.pool.free(slot)
    device.bring(1).wait()
    copy.landed.wait()
    assert (copy.lease.tensor() == 1).all()
    copy.release()


def test_a_unit_that_stays_has_a_place_of_its_own_and_another_while_that_is_viewed(rig: Callable[..., Rig]) -> None:
    device = OnDevice(rig(), None, (1, 2, 1), stays=0)
    begin = device.rig.slab._memory.data_ptr()
    device.bring(1)
    slot = device.bring(0)
    assert slot.tensor.data_ptr() == begin
    other = device.bring(0)  # the first is given back later
    assert other.tensor.data_ptr() > begin
    device.pool.free(other)
    device.pool.free(slot)
    assert device.bring(2).tensor.data_ptr() > begin, "that of a unit that does not stay"
    assert device.bring(0).tensor.data_ptr() == begin


def test_references_to_a_slot_are_counted(rig: Callable[..., Rig]) -> None:
    device = OnDevice(rig(), None, (1,))
    slot = device.bring(0)
    assert not slot.outstanding()
    view = slot.tensor[:8]
    assert slot.outstanding()
    slot.expect(1)
    assert not slot.outstanding()
    del view
    assert device.pool.counts(device.homes[0])
