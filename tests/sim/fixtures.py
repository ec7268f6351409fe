"""Offloaded models on a simulated device: `simulate` takes them there, and checks at the end that all was ordered."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

import infinity
from infinity.coordinator import registry
from infinity.plan import planner
from infinity.sizes import PAGE_BYTES, round_up
from infinity.tiers import resources
from infinity.units.weights import Residency
from tests.sim.accelerator import Misuse, SimAccelerator
from tests.sim.host import follow_the_host
from tests.sim.queues import LAZY, Policy
from tests.sim.watch import watch_every_thread, watched

Simulate = Callable[..., SimAccelerator]


class Simulation:
    """What `simulate` set up.

    Attributes:
        sim: the device.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, policy: Policy, **options: Any) -> None:
        self.sim = SimAccelerator(policy, **options)
        self._opened: list[tuple[resources.Resources, tuple[int, ...]]] = []
        self._entered = ExitStack()
        follow_the_host(monkeypatch, self.sim)
        watch_every_thread(monkeypatch, self.sim)
        monkeypatch.setattr(resources, "open_accelerator", lambda device: self.sim)
        limits_of = planner.limits_of
        monkeypatch.setattr(planner, "limits_of", lambda *given: replace(limits_of(*given), in_place=False))
        self._follow_leases(monkeypatch)
        self._entered.enter_context(watched(self.sim))

    def _follow_leases(self, monkeypatch: pytest.MonkeyPatch) -> None:
        close = resources.Resources.close

        def closed(opened: resources.Resources, **options: Any) -> None:
            close(opened, **options)
            device = opened.device
            if device is None:
                return
            unsent = sum(packed.lease.lease.nbytes for packed in device.gradients._open)  # what nobody wants any more
            lost = device.ring.nbytes - device.ring.free_bytes - unsent
            if lost:
                self.sim.errors.append(Misuse(f"{lost} bytes of the gradients' ring were never given back"))

        monkeypatch.setattr(resources.Resources, "close", closed)

    def finish(self) -> None:
        """Raises what was found and not told, or swallowed."""
        self._entered.close()
        self.sim.check()


def require_no_device_leaks(model: nn.Module) -> None:
    """Between steps the ring is free, and of the slots' memory what the units that are on the device have."""
    infinity.synchronize(model)
    gc.collect()  # what an exception ended may hang in cycles
    coordinator = registry.coordinator_of(model)
    device = coordinator.resources.device
    assert device is not None
    assert device.ring.free_bytes == device.ring.nbytes
    fetched = sum(
        round_up(record.unit.weight_bytes, PAGE_BYTES)
        for record in coordinator.units
        if record.weights.residency is not Residency.RELEASED
    )
    viewed = coordinator.room._viewed  # they are freed when room is wanted
    assert not any(slot.outstanding() for slot in viewed)
    fetched += sum(round_up(slot.tensor.numel(), PAGE_BYTES) for slot in viewed)
    assert device.slots.free_bytes + fetched == device.slots.nbytes


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulate]:
    """simulate(policy, **options of SimAccelerator): from then on models that are offloaded to the CPU take a device's
    way. Ask for it before `offload`, whose models must be closed when the end is checked."""
    made: list[Simulation] = []

    def make(policy: Policy = LAZY, **options: Any) -> SimAccelerator:
        made.append(Simulation(monkeypatch, policy, **options))
        return made[-1].sim

    yield make
    for each in made:
        each.finish()
