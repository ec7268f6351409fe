"""Gradients of a unit, alone: they land, add up in fp32 over micro-batches, and their norm and finiteness are exact."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from infinity import _native
from infinity.errors import DeviceError, PlanError
from infinity.sizes import PAGE_BYTES
from infinity.state.unit import ParameterPlace, Unit
from infinity.tiers.downloads import GradientLanding
from infinity.tiers.landing_window import LandingWindow
from infinity.units.gradients import GroupGradients, SingleProcessGradients, UnitGradients
from tests.sim.host import follow_the_host
from tests.sim.queues import EAGER, LAZY, Policy, random_policy
from tests.sim.watch import watched
from tests.tiers.fakes import Failure, Store, extent, few, pages
from tests.tiers.rig import Rig
from tests.units.fakes import unit_of

INFINITE = float("inf")
SOME = random_policy(0)


def bf16_unit(index: int = 0) -> Unit:
    """Return a unit with a group of one page of bf16 weights, with two parameters."""
    unit = unit_of(index)
    group = unit.groups[0]
    specs = tuple(
        replace(spec, shape=torch.Size([PAGE_BYTES // 4]), numel=PAGE_BYTES // 4, offset=PAGE_BYTES // 4 * part)
        for part, spec in enumerate(group.specs)
    )
    return replace(unit, groups=(replace(group, dtype=torch.bfloat16, specs=specs, numel=PAGE_BYTES // 2),))


UNIT = bf16_unit()
SPECS = UNIT.groups[0].specs


@functools.cache
def pool() -> _native.ThreadPool:
    return _native.ThreadPool(1)


def group_of(unit: Unit = UNIT, *, home: int = 0, window: int = 0) -> GroupGradients:
    """Args: home, window: pages of RAM they wait in, and land in where they spill."""
    landing, native = None, Store()
    if window:
        store: Any = native
        landing = LandingWindow(pages(window), store)
    lease = pages(home).lease(home * PAGE_BYTES, "gradients") if home else None
    place = extent(unit.name, "grad", count=2, copies=1) if window else None
    return GroupGradients(unit, unit.groups[0], lease, place, landing, None, pool())


def gradient(value: float) -> torch.Tensor:
    return torch.full(SPECS[0].shape, value, dtype=torch.bfloat16)


def queued(rig: Rig, unit: Unit = UNIT, *, home: int = 0, window: int = 0) -> GroupGradients:
    """Return a group as group_of does, whose gradients come through a queue from a simulated device."""
    landing, native = None, Store()
    if window:
        store: Any = native
        landing = LandingWindow(rig.arena.lease(window * PAGE_BYTES, "a window").space(), store)
    lease = rig.arena.lease(home * PAGE_BYTES, "gradients") if home else None
    place = extent(unit.name, "grad", count=2, copies=1) if window else None
    queue = rig.gradients(ring_pages=2)
    return GroupGradients(unit, unit.groups[0], lease, place, landing, queue, pool())


class GradientsMachine(RuleBasedStateMachine):
    """Gradients of two parameters, in RAM, in the window, or grown out of RAM into the window; from the CPU, or from a
    device."""

    rig: Rig | None = None

    def __init__(self) -> None:
        super().__init__()
        self.entered = ExitStack()

    @initialize(home=st.integers(0, 2), spills=st.booleans(), policy=st.sampled_from([None, LAZY, EAGER, SOME]))
    def open(self, home: int, spills: bool, policy: Policy | None) -> None:
        self.spills = spills or home < 2  # there is always room to add up
        self.rig = None if policy is None else Rig(policy, host_pages=16)
        if self.rig is not None:
            follow_the_host(self.entered.enter_context(pytest.MonkeyPatch.context()), self.rig.sim)
            self.entered.enter_context(watched(self.rig.sim))
        window = 2 if self.spills else 0
        self.group = (
            group_of(home=home, window=window) if self.rig is None else queued(self.rig, home=home, window=window)
        )
        self.sums: dict[str, float] = {}
        self.zeros: set[str] = set()

    def teardown(self) -> None:
        with self.entered:
            if self.rig is not None:
                self.group.forget()
                assert all(queue._ring.free_bytes == queue._ring.nbytes for queue in self.rig.downloads)
                self.rig.close()
                self.rig.sim.check()

    @rule()
    def send(self) -> None:
        self.group.send()

    @rule(
        which=st.integers(0, 1),
        value=st.sampled_from([1.0, -3.0, 0.00390625]),
        accumulate=st.booleans(),
        more=st.booleans(),
    )
    def land(self, which: int, value: float, accumulate: bool, more: bool) -> None:
        spec = SPECS[which]
        adds = accumulate and spec.name in self.sums
        self.group.land(spec, gradient(value), accumulate=accumulate, more=more)
        self.sums[spec.name] = self.sums.get(spec.name, 0.0) * adds + value
        assert self.group.dtype is torch.float32 or not adds or spec.name in self.zeros
        self.zeros.discard(spec.name)

    @rule(which=st.integers(0, 1), accumulate=st.booleans())
    def land_zeros(self, which: int, accumulate: bool) -> None:
        spec = SPECS[which]
        zeros = torch.sparse_coo_tensor(size=spec.shape, dtype=torch.bfloat16, check_invariants=False)
        self.group.land(spec, zeros, accumulate=accumulate)
        if not (accumulate and spec.name in self.sums):
            self.sums[spec.name] = 0.0
            self.zeros.add(spec.name)
        assert self.zeros == self.group.zeros

    @rule()
    def leave(self) -> None:
        self.group.begin_spill()

    @rule()
    def backward_begins(self) -> None:
        self.group.backward_begins()

    @rule(which=st.integers(0, 1))
    def drop(self, which: int) -> None:
        self.group.drop(SPECS[which].name)
        self.sums.pop(SPECS[which].name, None)
        self.zeros.discard(SPECS[which].name)

    @rule()
    def forget(self) -> None:
        self.group.forget()
        self.sums.clear()
        self.zeros.clear()

    @precondition(lambda self: self.sums)
    @rule()
    def the_values_are_known(self) -> None:
        for spec in SPECS:
            if spec.name in self.sums:
                assert (self.group.value(spec) == self.sums[spec.name]).all()

    @precondition(lambda self: self.sums.keys() > self.zeros)
    @rule()
    def the_values_are_there(self) -> None:
        self.group._write_zeros()
        self.zeros.clear()
        self.group.wait_landed()
        flat = torch.frombuffer(self.group._view(), dtype=self.group.dtype)
        for spec in SPECS:
            if spec.name in self.sums:
                assert (flat[spec.offset : spec.offset + spec.numel] == self.sums[spec.name]).all()

    @invariant()
    def what_is_present_is_known(self) -> None:
        assert self.group.present == self.sums.keys()
        assert self.group.finite

    @rule()
    def the_norm_is_known(self) -> None:
        for spec in SPECS:
            if spec.name in self.sums:
                assert self.group.sum_squares(spec) == spec.numel * self.sums[spec.name] ** 2

    @invariant()
    def what_spills_has_a_place_in_the_window_or_in_the_store(self) -> None:
        assert not self.group.spilled or self.spills


TestGradients = GradientsMachine.TestCase
TestGradients.settings = few


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    rig = Rig(LAZY)
    follow_the_host(monkeypatch, rig.sim)
    with watched(rig.sim):
        yield rig
        rig.close()
    rig.sim.check()


def test_gradients_of_a_unit_go_down_in_one_copy_and_the_host_waits_for_none(rig: Rig) -> None:
    group = queued(rig, home=2)
    for index, spec in enumerate(SPECS):
        group.land(spec, gradient(index + 1.0), accumulate=False)
    assert rig.sim.counts["copies down"] == 0
    group.send()
    assert (rig.sim.counts["copies down"], rig.sim.counts["synchronize"]) == (1, 0)
    assert [group.sum_squares(spec) for spec in SPECS] == [SPECS[0].numel, 4.0 * SPECS[0].numel]


@pytest.mark.parametrize("window", [0, 2])
def test_an_update_with_gradients_of_zeros_reads_no_gradient(rig: Rig, window: int) -> None:
    group = queued(rig, home=2 - window, window=window)
    for spec in SPECS:
        group.land(
            spec,
            torch.sparse_coo_tensor(size=spec.shape, dtype=torch.bfloat16, check_invariants=False),
            accumulate=False,
        )
    group.begin_spill()
    group.send()
    group.stream()
    assert (rig.sim.counts["copies down"], group.landing_futures()) == (0, [])
    assert [group.sum_squares(spec) for spec in SPECS] == [0.0, 0.0]
    group.land(SPECS[0], gradient(2.0), accumulate=True)
    assert (group.dtype, group.sum_squares(SPECS[0])) == (torch.bfloat16, 4.0 * SPECS[0].numel)
    assert (group.value(SPECS[1]) == 0).all()


def test_a_second_gradient_of_a_parameter_sends_the_first(rig: Rig) -> None:
    group = queued(rig, home=2)
    group.land(SPECS[0], gradient(1.0), accumulate=False)
    group.land(SPECS[0], gradient(2.0), accumulate=True)
    group.land(SPECS[0], gradient(3.0), accumulate=True)
    assert group.sum_squares(SPECS[0]) == 36.0 * SPECS[0].numel
    assert rig.sim.counts["copies down"] == 3


GREAT = 2.0**24
"""Number to which fp32 can add no 1: sums show the order in which they were made."""


def test_gradients_that_follow_one_another_add_up_in_the_ring(rig: Rig) -> None:
    group = queued(rig, home=2)
    for value in (GREAT, 1.0, -GREAT, 3.0):
        for spec in SPECS:
            group.land(spec, gradient(value), accumulate=True, more=True)
    assert rig.sim.counts["copies down"] == 0
    assert [group.sum_squares(spec) for spec in SPECS] == [9.0 * spec.numel for spec in SPECS]
    assert (rig.sim.counts["copies down"], rig.sim.counts["bytes down"]) == (1, 2 * PAGE_BYTES)


def test_what_had_to_make_room_is_added_to_in_host_memory_in_the_same_order(rig: Rig) -> None:
    group = queued(rig, home=2)
    group.land(SPECS[0], gradient(GREAT), accumulate=True, more=True)
    group.send()
    for value in (1.0, -GREAT):  # first together they would come to another sum
        group.land(SPECS[0], gradient(value), accumulate=True, more=True)
    assert group.sum_squares(SPECS[0]) == 0.0
    assert rig.sim.counts["copies down"] == 3


def test_what_is_in_host_memory_is_not_added_to_in_a_piece_that_adds_up(rig: Rig) -> None:
    group = queued(rig, home=2)
    group.land(SPECS[0], gradient(GREAT), accumulate=True, more=True)
    group.send()
    group.land(SPECS[1], gradient(1.0), accumulate=True, more=True)
    for value in (1.0, -GREAT):
        group.land(SPECS[0], gradient(value), accumulate=True, more=True)
    assert [group.sum_squares(spec) for spec in SPECS] == [0.0, 1.0 * SPECS[1].numel]


def test_streams_that_add_to_the_same_gradient_take_turns(rig: Rig) -> None:
    group = queued(rig, home=2)
    group.land(SPECS[0], gradient(1.0), accumulate=True, more=True)
    with rig.sim.on(rig.sim.stream("another")):
        group.land(SPECS[0], gradient(2.0), accumulate=True, more=True)
    assert group.sum_squares(SPECS[0]) == 9.0 * SPECS[0].numel


def test_a_ring_without_room_for_fp32_adds_up_in_host_memory(rig: Rig) -> None:
    lease = rig.arena.lease(2 * PAGE_BYTES, "gradients")
    group = GroupGradients(UNIT, UNIT.groups[0], lease, None, None, rig.gradients(ring_pages=1), pool())
    for value in (1.0, 2.0):
        group.land(SPECS[0], gradient(value), accumulate=True, more=True)
    assert group.sum_squares(SPECS[0]) == 9.0 * SPECS[0].numel
    assert rig.sim.counts["copies down"] == 2


@pytest.mark.parametrize("dropped", [False, True])
def test_a_gradient_takes_the_place_of_another_once_that_has_landed(rig: Rig, dropped: bool) -> None:
    group = queued(rig, home=2)
    group.land(SPECS[1], gradient(1.0), accumulate=False)
    group.land(SPECS[0], gradient(2.0), accumulate=False)
    group.send()
    if dropped:
        group.drop(SPECS[0].name)
    group.land(SPECS[0], gradient(3.0), accumulate=False)
    assert [group.sum_squares(spec) for spec in SPECS] == [9.0 * SPECS[0].numel, SPECS[1].numel]


def test_what_reads_the_gradients_is_told_what_to_wait_for(rig: Rig) -> None:
    group = queued(rig, home=2)
    assert group.landing_futures() == []
    group.land(SPECS[0], gradient(1.0), accumulate=False)
    (future,) = group.landing_futures()
    assert group.landing_futures() == [future]
    group.wait_landed()
    assert future.done()
    assert group.landing_futures() == []


def test_a_gradient_that_is_dropped_gives_the_ring_back(rig: Rig) -> None:
    group = queued(rig, home=2)
    ring = rig.downloads[0]._ring
    group.land(SPECS[0], gradient(1.0), accumulate=False)
    assert ring.free_bytes < ring.nbytes
    group.drop(SPECS[0].name)
    assert ring.free_bytes == ring.nbytes
    assert rig.sim.counts["copies down"] == 0


def test_a_gradient_that_was_dropped_on_its_way_counts_for_nothing(rig: Rig) -> None:
    group = queued(rig, home=2)
    group.land(SPECS[0], gradient(INFINITE), accumulate=False)
    group.land(SPECS[1], gradient(1.0), accumulate=False)
    group.send()
    group.drop(SPECS[0].name)
    group.wait_landed()
    assert group.finite


def test_gradients_that_leave_for_the_store_are_written_once_they_have_landed(rig: Rig) -> None:
    group = queued(rig, window=2)
    group.land(SPECS[0], gradient(3.0), accumulate=False)
    group.begin_spill()
    assert group.spilled
    group.backward_begins()
    assert (torch.frombuffer(group._view(), dtype=torch.bfloat16)[: SPECS[0].numel] == 3.0).all()


def test_a_lost_gradient_is_named_by_every_question_until_it_is_forgotten(rig: Rig) -> None:
    rig.refuse_to_wait(719)
    group = queued(rig, home=2)
    for spec in SPECS:
        group.land(spec, gradient(1.0), accumulate=False)
    names = ", ".join(spec.name for spec in SPECS)
    for ask in (group.wait_landed, lambda: group.sum_squares(SPECS[0]), group.wait_landed):
        with pytest.raises(DeviceError, match=f"gradients of {names} were lost .* error 719"):
            ask()
    group.forget()
    group.wait_landed()


def test_one_micro_batch_costs_two_bytes_and_the_next_step_begins_in_fp32_after_two() -> None:
    group = group_of(home=2)
    seen = []
    for accumulate in (False, True, False, False):
        if not accumulate:
            group.forget()
        group.land(SPECS[0], gradient(1.0), accumulate=accumulate)
        seen.append(group.dtype)
    assert seen == [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]


def test_a_second_gradient_without_room_for_fp32_says_what_to_do() -> None:
    group = group_of(home=1)
    group.land(SPECS[0], gradient(1.0), accumulate=True)
    group.land(SPECS[0], gradient(2.0), accumulate=False)
    with pytest.raises(PlanError, match=r"unit '0' \(8\.00 KiB\), but memory\.host has room for only 4\.00 KiB"):
        group.land(SPECS[0], gradient(1.0), accumulate=True)


@pytest.mark.parametrize("bad", [INFINITE, -INFINITE, float("nan")])
def test_what_is_not_finite_is_named(bad: float) -> None:
    group = group_of(home=1)
    group.land(SPECS[0], gradient(1.0), accumulate=False)
    broken = gradient(1.0)
    broken[-1] = bad
    group.land(SPECS[1], broken, accumulate=False)
    assert [group.sum_squares(spec) < float("inf") for spec in SPECS] == [True, False]
    assert not group.finite
    gradients = SingleProcessGradients([UnitGradients(UNIT, {0: group})], None, lambda _: None)
    places = [ParameterPlace(UNIT, 0, spec) for spec in SPECS]
    assert gradients.sum_squares(places[:1]) == (SPECS[0].numel, "")
    assert gradients.sum_squares(places)[1] == SPECS[1].name
    assert all(gradients.has(place) for place in places)
    group.drop(SPECS[1].name)
    assert group.finite
    assert not gradients.has(places[1])


@pytest.fixture
def spilling() -> SimpleNamespace:
    """Three units whose gradients land in a window that two of them fill."""
    native = Store()
    store: Any = native
    landing = LandingWindow(pages(4), store)
    units, groups = [bf16_unit(index) for index in range(3)], []
    for unit in units:
        place = extent(unit.name, "grad", count=2, copies=1)
        groups.append(GroupGradients(unit, unit.groups[0], None, place, landing, None, pool()))
    of_units = [UnitGradients(unit, {0: group}) for unit, group in zip(units, groups, strict=True)]
    gradients = SingleProcessGradients(of_units, landing, lambda _: None)
    return SimpleNamespace(store=native, landing=landing, units=units, groups=groups, all=gradients, of_units=of_units)


def test_gradients_leave_when_the_backward_of_another_unit_begins(spilling: SimpleNamespace) -> None:
    for index in (2, 1):
        spilling.groups[index].land(spilling.units[index].groups[0].specs[0], gradient(1.0), accumulate=False)
    assert not spilling.store.under_way
    spilling.all.backward_begins([1], [])
    assert len(spilling.store.under_way) == 1
    spilling.all.backward_begins([0], [1])
    assert len(spilling.store.under_way) == 1
    spilling.all.synchronize()
    assert spilling.landing.space.free_bytes == spilling.landing.space.nbytes
    assert set(spilling.store.stored) == {("1.0.grad", 0), ("2.0.grad", 0)}
    assert not any(unit.in_ram for unit in spilling.of_units)


def test_gradients_that_will_be_added_to_are_read_when_their_backward_begins(spilling: SimpleNamespace) -> None:
    spec = spilling.units[2].groups[0].specs[0]
    spilling.groups[2].land(spec, gradient(1.0), accumulate=False)
    spilling.all.synchronize()
    spilling.all.backward_begins([2], [])
    assert len(spilling.store.under_way) == 1
    spilling.groups[2].land(spec, gradient(2.0), accumulate=True)
    assert spilling.groups[2].sum_squares(spec) == 9.0 * spec.numel


def test_gradients_that_were_lost_are_told_when_the_step_needs_them(spilling: SimpleNamespace) -> None:
    spilling.groups[2].land(spilling.units[2].groups[0].specs[0], gradient(1.0), accumulate=False)
    spilling.all.backward_begins([1], [])
    spilling.store.under_way[0].fate = Failure()
    with pytest.raises(OSError, match="grad of unit '2' failed"):
        spilling.all.synchronize()
    spilling.groups[2].forget()
    spilling.all.synchronize()


def test_what_was_sent_to_make_room_is_waited_for_when_it_is_forgotten(rig: Rig) -> None:
    """The native thread still adds to the memory: what comes next must not be overtaken there."""
    queue = rig.gradients(ring_pages=1)
    one, other = (
        GroupGradients(UNIT, UNIT.groups[0], rig.arena.lease(2 * PAGE_BYTES, "gradients"), None, None, queue, pool())
        for _ in range(2)
    )
    one.land(SPECS[0], gradient(1.0), accumulate=False)
    one.land(SPECS[0], gradient(2.0), accumulate=True)
    other.land(SPECS[0], gradient(7.0), accumulate=False)  # the ring is full
    assert one._down is not None
    packed = one._down.packed
    assert packed is not None
    assert packed.landing is not None
    waited: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientLanding, "wait", lambda landing: waited.append(landing is packed.landing))
        one.forget()
    assert waited == [True]
    other.wait_landed()
