"""Gradients that stay on the device add up, and have the sums of squares, of gradients in host memory, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from infinity import _native
from infinity.errors import PlanError
from infinity.io.arena import PinnedArena
from infinity.state.unit import FlatParameterGroup, ParameterSpec, Unit
from infinity.tiers.resident import ResidentMemory, ResidentUses
from infinity.units import resident_gradients
from infinity.units.gradients import GroupGradients
from infinity.units.resident_gradients import ResidentGradients, ResidentSums
from tests.sampling import number
from tests.sim.accelerator import SimAccelerator
from tests.sim.watch import watched
from tests.units.test_gradients import pool

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def unit_of(numels: Sequence[int], dtype: torch.dtype) -> Unit:
    specs, offset = [], 0
    for index, numel in enumerate(numels):
        specs.append(ParameterSpec(f"p{index}", torch.Size([numel]), numel, offset, offset))
        offset += numel + index  # gaps between the parameters
    group = FlatParameterGroup(dtype, True, "fp32", tuple(specs), offset, 0, -(-offset * dtype.itemsize // 4096) * 4096)
    return Unit(0, "unit", (group,), group.weight_bytes)


class Both:
    """The gradients of one group in host memory, and on a device."""

    def __init__(self, unit: Unit, *, itemsize: int = 4, sums: ResidentSums | None = None) -> None:
        (self.group,) = unit.groups
        nbytes = -(-self.group.numel * itemsize // 4096) * 4096
        self.there = memory_of(nbytes)
        self.sums = sums or ResidentSums(memory_of(1 << 16))
        self.resident = ResidentGradients(unit, self.group, self.there, self.sums)
        lease = PinnedArena(nbytes).lease(nbytes, "gradients")
        self.host = GroupGradients(unit, self.group, lease, None, None, None, pool())

    def land(self, spec: ParameterSpec, seed: int, *, accumulate: bool, more: bool = False) -> None:
        values = torch.randn(spec.numel, generator=torch.Generator().manual_seed(seed)).to(self.group.dtype)
        for each in (self.resident, self.host):
            each.land(spec, values, accumulate=accumulate, more=more)

    def require_same(self) -> None:
        assert self.resident.present == self.host.present
        assert self.resident.dtype == self.host.dtype
        for spec in self.group.specs:
            if spec.name in self.host.present:
                assert torch.equal(self.resident.value(spec), self.host.value(spec))
                assert list(self.resident.partials(spec)) == list(self.host.partials(spec))
        assert self.resident.finite == self.host.finite


def memory_of(nbytes: int) -> ResidentMemory:
    return ResidentMemory(torch.empty(nbytes, dtype=torch.uint8), ResidentUses(SimAccelerator()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_add_up_as_in_host_memory(dtype: torch.dtype) -> None:
    both = Both(unit_of([65_536, 3, 70_001, 1], dtype))
    for turn in range(3):
        for index, spec in enumerate(both.group.specs):
            for each in range(1 + (index + turn) % 3):
                both.land(spec, 10 * turn + each, accumulate=each > 0, more=turn == 2)
                both.require_same()
        both.resident.forget()
        both.host.forget()


def test_gradients_of_two_streams_add_up_in_order() -> None:
    sim = SimAccelerator()
    memory = ResidentMemory(sim.slab(4096), ResidentUses(sim))
    unit = unit_of([1000], torch.float32)
    scratch = ResidentMemory(sim.slab(4096), ResidentUses(sim))
    gradients, spec = ResidentGradients(unit, unit.groups[0], memory, ResidentSums(scratch)), unit.groups[0].specs[0]
    streams = [sim.stream(), sim.stream()]
    with watched(sim):
        for index in range(4):
            with sim.on(streams[index % 2]):
                gradients.land(spec, torch.full((1000,), float(index)), accumulate=index > 0)
        assert gradients.value(spec).tolist() == [6.0] * 1000
        assert gradients.sum_squares(spec) == 36_000.0
    sim.check()


def test_a_gradient_is_replaced_or_dropped() -> None:
    both = Both(unit_of([100, 200], torch.bfloat16))
    for seed in range(2):
        both.land(both.group.specs[0], seed, accumulate=False)
        both.land(both.group.specs[1], seed, accumulate=False)
        both.require_same()
    for each in (both.resident, both.host):
        each.drop("p0")
    both.require_same()
    assert both.resident.present == {"p1"}


def test_a_second_gradient_without_room_is_refused() -> None:
    both = Both(unit_of([5000], torch.bfloat16), itemsize=2)
    both.resident.land(both.group.specs[0], torch.ones(5000), accumulate=False)
    with pytest.raises(PlanError, match=r"fp32 gradients for unit 'unit' .* Leave accumulation_steps out"):
        both.resident.land(both.group.specs[0], torch.ones(5000), accumulate=True)


def test_gradients_for_whose_conversion_there_is_no_memory_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Both(unit_of([5000], torch.bfloat16))
    (spec,) = both.group.specs
    both.land(spec, 1, accumulate=False)
    taken: list[int] = []

    def exhausted(tensor: torch.Tensor) -> torch.Tensor:
        taken.append(tensor.numel())
        raise torch.OutOfMemoryError("no memory, as the test wanted")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", exhausted)
        with pytest.raises(torch.OutOfMemoryError):
            both.resident.land(spec, torch.ones(5000), accumulate=True)
    both.require_same()
    both.land(spec, 2, accumulate=True)
    both.require_same()
    assert taken == [1]


def test_a_gradient_that_is_not_finite_is_known() -> None:
    both = Both(unit_of([300], torch.float32))
    spec = both.group.specs[0]
    both.resident.land(spec, torch.full((300,), float("inf")), accumulate=False)
    assert both.resident.finite  # the sum is not known yet
    assert both.resident.sum_squares(spec) == float("inf")
    assert not both.resident.finite


def test_sums_of_random_shapes_are_the_native_ones() -> None:
    """The sums of all groups are computed at once, in one storage."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(number(10, 100)):
        sums, groups, storage = ResidentSums(memory_of(1 << 20)), [], torch.empty(1 << 21, dtype=torch.uint8)
        begin = 0
        for dtype in DTYPES:
            numels = (10 ** torch.empty(3).uniform_(0, 4.9, generator=draw)).long().tolist()
            unit = unit_of(numels, dtype)
            both = Both(unit, sums=sums)
            nbytes = both.there.nbytes
            both.there.memory = storage[begin : begin + nbytes]
            begin += nbytes
            groups.append(both)
        for seed, both in enumerate(groups):
            for spec in both.group.specs:
                both.land(spec, seed, accumulate=False)
        for both in groups:
            both.require_same()


def test_the_native_core_counts_partials_the_same_way() -> None:
    for offset, numel in ((0, 1), (0, 65_536), (1, 65_536), (65_535, 2), (70_000, 0), (3, 200_000)):
        spec = ParameterSpec("p", torch.Size([numel]), numel, offset, offset)
        values = torch.ones(numel)
        native = _native.sums_of_squares(values.view(torch.uint8).numpy(), "fp32", pool(), first=offset)
        assert resident_gradients._partials(spec) == len(native)
