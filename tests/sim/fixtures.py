"""Fixture `simulate`: offloaded models on a simulated device, with a check at the end that all uses were ordered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from infinity.plan import planner
from infinity.plan.gradient_ring import RingSize, rings_of
from infinity.plan.placement import TierSplit
from infinity.plan.plan_input import WEIGHT_SHARE_OF_DEVICE, PlanInput
from infinity.state.discover import HookedModule
from infinity.tiers import resources
from tests.sim.accelerator import Misuse, SimAccelerator
from tests.sim.host import follow_the_host
from tests.sim.queues import LAZY, Policy
from tests.sim.watch import watch_every_thread, watched

Simulate = Callable[..., SimAccelerator]


class Simulation:
    """A simulation that `simulate` set up.

    Args:
        gradients_apart: whether the ring for gradients is left out of memory.device, so that a config leaves as much
            memory for weights as on the CPU.

    Attributes:
        sim: the device.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, policy: Policy, *, gradients_apart: bool = False, **options: Any
    ) -> None:
        self.sim = SimAccelerator(policy, **options)
        self._entered = ExitStack()
        follow_the_host(monkeypatch, self.sim)
        watch_every_thread(monkeypatch, self.sim)
        monkeypatch.setattr(resources, "open_accelerator", lambda device: self.sim)
        limits_of = planner.limits_of
        monkeypatch.setattr(planner, "limits_of", lambda *given: replace(limits_of(*given), in_place=False))
        if gradients_apart:
            _leave_memory_for_gradients(monkeypatch)
        self._follow_leases(monkeypatch)
        self._entered.enter_context(watched(self.sim))

    def _follow_leases(self, monkeypatch: pytest.MonkeyPatch) -> None:
        close = resources.ModelResources.close

        def closed(opened: resources.ModelResources, **options: Any) -> None:
            close(opened, **options)
            device = opened.device
            if device is None:
                return
            unsent = sum(packed.lease.lease.nbytes for packed in device.gradients._open)  # discarded gradients
            lost = device.ring.nbytes - device.ring.free_bytes - unsent
            if lost:
                self.sim.errors.append(Misuse(f"{lost} bytes of the gradients' ring were never given back"))

        monkeypatch.setattr(resources.ModelResources, "close", closed)

    def finish(self) -> None:
        """Close the simulation. Raise the first error that was found but not raised, or whose exception the caller
        swallowed.
        """
        self._entered.close()
        self.sim.check()


def _leave_memory_for_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    device_bytes = planner.device_bytes

    def with_gradients(
        problem: PlanInput, sites: Sequence[HookedModule], weights: TierSplit
    ) -> tuple[int, RingSize, int]:
        for ring in rings_of(problem, sites):
            more = int(ring.nbytes / WEIGHT_SHARE_OF_DEVICE)
            limits = replace(problem.limits, device=problem.limits.device + more)
            slots, taken, longest = device_bytes(replace(problem, limits=limits), sites, weights)
            if taken == ring:
                break
        return slots, taken, longest

    monkeypatch.setattr(planner, "device_bytes", with_gradients)


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulate]:
    """Provide a function that simulates a device, with the arguments of SimAccelerator.

    After the call of this function, models that are offloaded to the CPU use a device's code path. Request this fixture
    before the fixture `offload`: its models must be closed before the final check.
    """
    made: list[Simulation] = []

    def make(policy: Policy = LAZY, **options: Any) -> SimAccelerator:
        made.append(Simulation(monkeypatch, policy, **options))
        return made[-1].sim

    yield make
    for each in made:
        each.finish()
