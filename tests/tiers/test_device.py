"""Models that are trained over a device's tier: the CPU's bits, nothing leaks, and nothing grows."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.coordinator import registry
from infinity.errors import PlanError
from infinity.tiers.device import DeviceTier
from infinity.tiers.slots import SlabSlotPool
from tests.conftest import states_of, weights_of
from tests.sim.fixtures import Simulate
from tests.sim.queues import EAGER, LAZY, Policy

TIGHT = {"device": "64KiB", "host": "64MiB"}
"""Slots for half of the blocks, or less, and a ring for two units' gradients."""


class Blocks(nn.Module):
    """Eight blocks of 8 KiB in bf16, reduced to a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return (x.float() ** 2).mean()


def batch() -> torch.Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def train(model: nn.Module, micro_batches: int = 1) -> list[float]:
    optim, losses = infinity.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0), []
    for _ in range(4):
        for _ in range(micro_batches):
            loss = model(batch())
            loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def evaluate(model: nn.Module, passes: int) -> None:
    with torch.no_grad():
        for _ in range(passes):
            model(batch())


def tier_of(model: nn.Module) -> DeviceTier:
    tier = registry.coordinator_of(model).resources.device
    assert tier is not None
    return tier


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize(
    ("weights", "optimizer", "micro_batches", "gradients"),
    [
        ("host", "host", 1, "host"),
        ("host", "host", 2, "nvme"),
        ("host", "nvme", 2, "host"),
        ("host", "nvme", 1, "nvme"),
        ("nvme", "nvme", 1, "host"),
        ("nvme", "nvme", 2, "nvme"),
    ],
)
def test_the_way_over_a_device_ends_in_the_cpus_bits(
    weights: str, optimizer: str, micro_batches: int, gradients: str, simulate: Simulate, offload: Any
) -> None:
    results: list[Any] = []
    for simulated in (False, True):
        if simulated:
            simulate(LAZY)
        torch.manual_seed(0)
        model = Blocks().bfloat16()
        model = offload(model, weights=weights, optimizer=optimizer, gradients=gradients, memory=TIGHT)
        losses = train(model, micro_batches)
        assert registry.coordinator_of(model).resources.plan.budgets.limits.in_place is not simulated
        results.append((losses, weights_of(model), states_of(model)))
        infinity.close(model)
    assert results[1][0] == results[0][0]
    for now, expected in zip(results[1][1:], results[0][1:], strict=True):
        assert now.keys() == expected.keys()
        assert all(torch.equal(now[name], expected[name]) for name in expected)


def test_all_device_memory_is_one_slab_of_the_plans_size(simulate: Simulate, offload: Any) -> None:
    sim = simulate(LAZY)
    model = offload(Blocks().bfloat16(), "nvme", memory=TIGHT)
    train(model)
    budgets, tier = registry.coordinator_of(model).resources.plan.budgets, tier_of(model)
    assert (tier.slots.nbytes, tier.ring.nbytes) == (budgets.slot_bytes, budgets.ring_bytes)
    assert [slab.end - slab.begin for slab in sim._slabs] == [budgets.slot_bytes + budgets.ring_bytes]
    assert budgets.slot_bytes + budgets.ring_bytes <= budgets.limits.device


def test_another_stream_that_asks_for_weights_waits_for_their_upload(
    simulate: Simulate, offload: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = simulate(LAZY)
    model = offload(Blocks().bfloat16(), "host", memory=TIGHT | {"device": "1MiB"})
    coordinator = registry.coordinator_of(model)
    coordinator.begin_use(3)
    coordinator.end_use(3)
    side, waiting = sim.stream(), []
    wait = sim.wait
    monkeypatch.setattr(sim, "wait", lambda on, event: (waiting.append(on), wait(on, event)))
    with sim.on(side):
        coordinator.weights_view(3)
    assert waiting == [side]


@pytest.mark.parametrize("weights", ["host", "nvme"])
def test_evaluation_keeps_no_more_events_however_long_it_goes(weights: str, simulate: Simulate, offload: Any) -> None:
    sim = simulate(EAGER)
    model = offload(Blocks().bfloat16(), weights, memory=TIGHT)
    evaluate(model, passes=8)
    alive = sim.events_alive
    evaluate(model, passes=16)
    assert sim.events_alive <= alive
    assert len(tier_of(model).uploads._reading) <= 1


def test_a_slab_that_does_not_fit_the_device_is_told_and_the_next_offload_succeeds(
    simulate: Simulate, offload: Any
) -> None:
    sim = simulate(LAZY, out_of_memory_at=0)
    with pytest.raises(PlanError, match=r"no free block of 3\d.00 KiB, .* Lower memory.device"):
        offload(Blocks().bfloat16(), "nvme", memory=TIGHT)
    assert sim._pinned == {}
    train(offload(Blocks().bfloat16(), "nvme", memory=TIGHT))


def test_the_first_use_of_the_slab_waits_for_those_who_had_the_memory_before(simulate: Simulate, offload: Any) -> None:
    sim = simulate(LAZY)
    device = registry.coordinator_of(offload(Blocks().bfloat16(), "nvme", memory=TIGHT)).resources.device
    assert device is not None
    for slab in (device.slots, device.ring):
        lease = slab.try_lease(4096)
        assert lease is not None
        assert [event.last.stream for event in lease.after] == [sim.current()]
        slab.give_back(lease, lease.after)


class Unequal(nn.Module):
    """Three modules; two of the smaller ones leave no room in one piece for the larger."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(32, 32 * count, bias=False) for count in (3, 3, 7)).requires_grad_(False)


@pytest.mark.parametrize("weights", ["host", "nvme"])
@pytest.mark.parametrize("policy", [LAZY, EAGER], ids=str)
def test_a_unit_in_use_that_has_to_move_is_used_behind_its_new_upload(
    policy: Policy, weights: str, simulate: Simulate, offload: Any
) -> None:
    simulate(policy)
    model = Unequal()
    value = model.parts[1].weight.detach().clone()
    coordinator = registry.coordinator_of(offload(model, weights, memory={"device": "40KiB", "host": "64MiB"}))
    coordinator.begin_use(0)
    coordinator.begin_use(1)
    coordinator.end_use(0)
    before = coordinator.units[1].weights.slot
    coordinator.begin_use(2)
    assert coordinator.units[1].weights.slot is not before
    (moved,) = coordinator.units[1].parameters.values()
    assert torch.equal(moved.detach().clone(), value)
    coordinator.end_use(1)
    coordinator.end_use(2)


@pytest.mark.covering(strength=1, most=3)
@pytest.mark.parametrize("at", range(1, 24, 5))
@pytest.mark.parametrize("weights", ["host", "nvme"])
def test_training_goes_on_after_the_device_had_no_memory(
    weights: str, at: int, simulate: Simulate, offload: Any
) -> None:
    sim = simulate(LAZY)
    model = offload(Blocks().bfloat16(), weights=weights, optimizer="host", memory=TIGHT)
    sim.out_of_memory_at = at
    with pytest.raises((torch.OutOfMemoryError, infinity.SwapIOError)):
        evaluate(model, passes=4)
    train(model)
    require_all_slots_known(model)


def require_all_slots_known(model: nn.Module) -> None:
    coordinator = registry.coordinator_of(model)
    assert isinstance(coordinator.fetcher._slots, SlabSlotPool)
    fetched = sum(unit.full.weight_bytes for unit in coordinator.units if unit.weights.slot or unit.weights.fetch)
    tier = tier_of(model)
    assert tier.slots.free_bytes + tier.staying.free_bytes + fetched == tier.slots.nbytes + tier.staying.nbytes
    assert tier.ring.free_bytes == tier.ring.nbytes


@pytest.mark.parametrize("weights", ["host", "nvme"])
def test_closing_waits_for_copies_before_the_memory_goes(weights: str, simulate: Simulate, offload: Any) -> None:
    sim = simulate(LAZY)
    model = offload(Blocks().bfloat16(), weights, memory=TIGHT)
    coordinator = registry.coordinator_of(model)
    fetch = coordinator.fetcher._slots.start(coordinator.resources.units[0].weights, {}, 0)
    assert fetch is not None
    fetch.wait()
    assert sim.pending_copies()
    infinity.close(model)
    assert not sim.pending_copies()


def test_closing_waits_for_kernels_of_whatever_stream_before_the_memory_goes(simulate: Simulate, offload: Any) -> None:
    sim = simulate(LAZY)
    model = offload(Blocks().bfloat16(), "host", memory=TIGHT)
    side = sim.stream()
    with sim.on(side):
        weights = registry.coordinator_of(model).weights_view(3)
        sim.uses(weights.data_ptr(), weights.numel(), write=False, text="a kernel of the script")
        del weights
    used = sim.order.snapshot(side.actor)
    assert not sim.order.knows(sim.host, used)
    infinity.close(model)
    assert sim.order.knows(sim.host, used)


def test_memory_that_cannot_be_pinned_is_told_and_changes_no_bit(
    simulate: Simulate, offload: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = offload(Blocks().bfloat16(), "nvme", memory=TIGHT)
    expected = train(model), weights_of(model)
    infinity.close(model)
    torch.manual_seed(0)
    simulate(LAZY, refuse="the test refuses")
    with caplog.at_level(logging.WARNING, "infinity"):
        model = offload(Blocks().bfloat16(), "nvme", memory=TIGHT)
    assert "the test refuses; copies to and from the device are slower" in caplog.text
    assert train(model) == expected[0]
    assert all(torch.equal(weight, expected[1][name]) for name, weight in weights_of(model).items())


def test_a_device_that_waits_for_weights_says_so(simulate: Simulate, offload: Any) -> None:
    simulate(LAZY)
    model = offload(Blocks().bfloat16(), "nvme", memory=TIGHT)
    train(model)
    assert infinity.statistics(model).device_idle_s > 0


def test_a_pass_without_a_step_keeps_the_host_for_nothing(simulate: Simulate, offload: Any) -> None:
    sim = simulate(LAZY)
    model = offload(Blocks().bfloat16(), "host", memory=TIGHT)
    before = sim.counts["synchronize"]
    evaluate(model, passes=3)
    assert sim.counts["synchronize"] == before
