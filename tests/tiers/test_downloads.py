"""Gradients on their way down: what was packed lands, in the bits of land_gradient, and the ring is never short."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from infinity import _native
from infinity.errors import DeviceError
from infinity.io.arena import Lease
from infinity.sizes import PAGE_BYTES
from infinity.state.unit import FlatParameterGroup, ParameterSpec
from infinity.tiers.downloads import GradientBatch, GradientQueue
from tests.sim.queues import EAGER, LAZY, Policy, random_policy
from tests.tiers.rig import Rig

POLICIES = [LAZY, EAGER, *(random_policy(seed) for seed in range(3))]
every_policy = pytest.mark.parametrize("policy", POLICIES, ids=str)
PARTS = 4
NUMEL = PAGE_BYTES // 2 // PARTS  # of a parameter: four of them fill a page


def group_of(name: str = "a") -> FlatParameterGroup:
    specs = tuple(ParameterSpec(f"{name}.{part}", torch.Size([NUMEL]), NUMEL, NUMEL * part, 0) for part in range(PARTS))
    return FlatParameterGroup(torch.bfloat16, True, "fp32", specs, PARTS * NUMEL, 0, PAGE_BYTES)


def gradient(seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)).bfloat16()


def target_of(rig: Rig, dtype: torch.dtype = torch.bfloat16) -> Lease:
    lease = rig.arena.lease(PARTS * NUMEL * dtype.itemsize, "gradients")
    lease.tensor().zero_()
    return lease


def begin(
    queue: GradientQueue, target: Lease, group: FlatParameterGroup | None = None, dtype: torch.dtype = torch.bfloat16
) -> GradientBatch:
    return queue.begin(group or group_of(), target.view(0, PARTS * NUMEL * dtype.itemsize), dtype)


def values(target: Lease, spec: ParameterSpec, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return target.tensor().view(dtype)[spec.offset : spec.offset + spec.numel]


def sums_of_squares(flat: torch.Tensor, spec: ParameterSpec, rig: Rig) -> list[float]:
    name = "fp32" if flat.dtype == torch.float32 else "bf16"
    return _native.sums_of_squares(flat.clone().view(torch.uint8).numpy(), name, rig.pool, first=spec.offset)


@every_policy
def test_a_group_goes_down_in_one_copy_with_its_sums(rig: Callable[..., Rig], policy: Policy) -> None:
    made = rig(policy)
    queue, target, group = made.gradients(), target_of(made), group_of()
    packed = begin(queue, target, group)
    for index, spec in enumerate(group.specs):
        queue.pack(packed, spec, gradient(index), add=False)
    landing = queue.send(packed)
    sums = landing.sums()
    assert made.sim.counts["copies down"] == 1
    for index, spec in enumerate(group.specs):
        assert torch.equal(values(target, spec), gradient(index))
        assert sums[spec.name] == sums_of_squares(gradient(index), spec, made)
    assert made.slab.free_bytes == made.slab.nbytes


@pytest.mark.parametrize(("which", "copies"), [((1,), 1), ((0, 1), 1), ((0, 2), 2), ((3, 0), 2), ((2, 1), 1)])
def test_of_a_part_only_what_was_packed_is_copied(rig: Callable[..., Rig], which: tuple[int, ...], copies: int) -> None:
    made = rig()
    queue, target, group = made.gradients(), target_of(made), group_of()
    target.tensor().fill_(5)
    packed = begin(queue, target, group)
    for index in which:
        queue.pack(packed, group.specs[index], gradient(index), add=False)
    assert set(queue.send(packed).sums()) == {group.specs[index].name for index in which}
    assert made.sim.counts["copies down"] == copies
    assert made.sim.counts["bytes down"] == len(which) * NUMEL * 2
    for index, spec in enumerate(group.specs):
        if index in which:
            assert torch.equal(values(target, spec), gradient(index))
        else:
            assert set(values(target, spec).view(torch.uint8).tolist()) == {5}


def test_what_lies_between_the_parameters_of_a_whole_group_goes_with_them(rig: Callable[..., Rig]) -> None:
    made = rig()
    queue, target, group = made.gradients(), target_of(made), group_of()
    gapped = tuple(replace(spec, numel=NUMEL - 8, shape=torch.Size([NUMEL - 8])) for spec in group.specs)
    packed = begin(queue, target, replace(group, specs=gapped))
    for index, spec in enumerate(gapped):
        queue.pack(packed, spec, gradient(index)[:-8], add=False)
    queue.send(packed).sums()
    assert made.sim.counts["copies down"] == 1
    for index, spec in enumerate(gapped):
        assert torch.equal(values(target, spec), gradient(index)[:-8])


@every_policy
def test_what_is_added_goes_through_the_bounce_buffer_to_the_bits_of_land_gradient(
    rig: Callable[..., Rig], policy: Policy
) -> None:
    made = rig(policy)
    queue, target, group = made.gradients(), target_of(made, torch.float32), group_of()
    expected = torch.zeros(PARTS * NUMEL)
    for turn in range(3):
        packed = begin(queue, target, group, torch.float32)
        sums = {}
        for index, spec in enumerate(group.specs):
            given = gradient(PARTS * turn + index)
            queue.pack(packed, spec, given, add=turn > 0)
            sums[spec.name] = _native.land_gradient(
                expected[spec.offset : spec.offset + spec.numel].view(torch.uint8).numpy(),
                "fp32",
                given.view(torch.uint8).numpy(),
                "bf16",
                add=turn > 0,
                pool=made.pool,
                first=spec.offset,
            )
        assert queue.send(packed).sums() == sums
    assert torch.equal(target.tensor().view(torch.float32), expected)


def test_a_bounce_buffer_that_is_full_is_used_again_once_it_has_landed(rig: Callable[..., Rig]) -> None:
    made = rig()
    queue, group = made.gradients(bounce_pages=1), group_of()
    targets = [target_of(made, torch.float32) for _ in range(3)]
    landings = []
    for index, target in enumerate(targets):
        packed = begin(queue, target, group, torch.float32)
        queue.pack(packed, group.specs[0], gradient(index), add=False)
        landings.append(queue.send(packed))
    for index, (target, landing) in enumerate(zip(targets, landings, strict=True)):
        landing.sums()
        assert torch.equal(values(target, group.specs[0], torch.float32), gradient(index).float())


def test_a_full_ring_sends_what_was_packed_first(rig: Callable[..., Rig]) -> None:
    made = rig()
    queue = made.gradients(ring_pages=2)
    groups = [group_of(name) for name in "abc"]
    targets = [target_of(made) for _ in groups]
    packed = []
    for index, (group, target) in enumerate(zip(groups, targets, strict=True)):
        packed.append(begin(queue, target, group))
        queue.pack(packed[-1], group.specs[0], gradient(index), add=False)
    assert [each.landing is not None for each in packed] == [True, False, False]
    assert made.sim.counts["synchronize"] == 0  # the device waits, not the host
    for index, (each, group, target) in enumerate(zip(packed, groups, targets, strict=True)):
        landing = queue.send(each)
        assert queue.send(each) is landing
        landing.sums()
        assert torch.equal(values(target, group.specs[0]), gradient(index))


def test_who_packs_into_the_ring_next_waits_for_the_copy_before(rig: Callable[..., Rig]) -> None:
    made = rig()
    queue, group = made.gradients(ring_pages=1), group_of()
    landings = []
    for turn in range(3):
        packed = begin(queue, target_of(made), group)
        queue.pack(packed, group.specs[0], gradient(turn), add=False)
        landings.append(queue.send(packed))
    assert [stream for stream, _ in made.waits] == [made.sim.current()] * 2  # the first piece was nobody's
    for landing in landings:
        landing.sums()


def test_what_nobody_wants_gives_the_ring_back(rig: Callable[..., Rig]) -> None:
    made = rig()
    queue, group = made.gradients(ring_pages=1), group_of()
    packed = begin(queue, target_of(made), group)
    queue.pack(packed, group.specs[0], gradient(0), add=False)
    queue.drop(packed)
    assert queue._ring.free_bytes == queue._ring.nbytes
    assert made.sim.counts["copies down"] == 0
    with made.sim.on(made.sim.stream("side")):  # it is ordered behind what was packed on the other stream
        sent = begin(queue, target_of(made), group)
        queue.pack(sent, group.specs[0], gradient(1), add=False)
    landing = queue.send(sent)
    queue.drop(sent)  # it is on its way: nothing is given back twice
    landing.sums()
    assert queue._ring.free_bytes == queue._ring.nbytes


def test_a_ring_that_a_group_does_not_fit_is_our_own_error(rig: Callable[..., Rig]) -> None:
    made = rig()
    queue = made.gradients(ring_pages=1)
    large = replace(group_of(), numel=PAGE_BYTES)
    with pytest.raises(AssertionError, match="a ring of 4096 bytes has no room for 4096 gradients"):
        queue.begin(large, target_of(made, torch.float32).view(), torch.bfloat16)


def test_closing_waits_for_what_is_on_its_way(rig: Callable[..., Rig]) -> None:
    made = rig()
    queue, target, group = made.gradients(), target_of(made), group_of()
    packed = begin(queue, target, group)
    queue.pack(packed, group.specs[0], gradient(0), add=False)
    landing = queue.send(packed)
    queue.close()
    assert landing.done()
    assert not made.sim.pending_copies()
    target.release()


def test_gradients_that_are_lost_are_an_error_that_names_them(rig: Callable[..., Rig]) -> None:
    made = rig()
    made.refuse_to_wait(719)
    queue, group = made.gradients(), group_of()
    packed = begin(queue, target_of(made), group)
    for spec in group.specs[:2]:
        queue.pack(packed, spec, gradient(0), add=False)
    landing = queue.send(packed)
    for _ in range(2):
        with pytest.raises(DeviceError, match=r"gradients of a\.0, a\.1 were lost .* error 719"):
            landing.sums()
