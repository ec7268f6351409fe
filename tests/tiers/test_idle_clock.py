"""Time without work is told by the device's clock, as far as the device has got."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from infinity.tiers.idle_clock import IdleClock
from tests.sim.accelerator import SimAccelerator
from tests.sim.queues import LAZY
from tests.tiers.rig import Rig

TICK = 1e-6
"""Time that each queued operation takes in the simulation."""


@pytest.fixture
def sim(rig: Callable[..., Rig]) -> SimAccelerator:
    return rig(LAZY).sim


def pass_all(sim: SimAccelerator) -> None:
    """Make the device do all work that is queued on the compute stream."""
    sim.synchronize(sim.record(sim.current()))


def test_time_without_work_is_counted_once_the_device_has_passed_it(sim: SimAccelerator) -> None:
    clock = IdleClock(sim)
    clock.begins()
    for _ in range(6):
        sim.record(sim.current())
    clock.ends()
    assert clock.seconds == 0.0  # it is behind
    pass_all(sim)
    assert clock.seconds == pytest.approx(7 * TICK)
    assert clock.seconds == pytest.approx(7 * TICK)  # once


def test_what_an_exception_left_open_is_not_counted(sim: SimAccelerator) -> None:
    clock = IdleClock(sim)
    clock.begins()  # and something is raised
    for _ in range(100):
        sim.record(sim.current())
    clock.begins()
    clock.ends()
    clock.ends()
    pass_all(sim)
    assert clock.seconds == pytest.approx(TICK)


def test_the_pairs_add_up_in_their_order(sim: SimAccelerator) -> None:
    clock = IdleClock(sim)
    for _ in range(3):
        clock.begins()
        clock.ends()
    pass_all(sim)
    clock.begins()
    clock.ends()  # this one the device has not passed
    assert clock.seconds == pytest.approx(3 * TICK)


def test_where_models_compute_in_host_memory_nothing_is_counted() -> None:
    clock = IdleClock(None)
    clock.begins()
    clock.ends()
    assert clock.seconds == 0.0
