"""The flow of a step waits for what the engine waits for, and for nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from infinity.plan.step_flow import StepFlow, UnitSeconds

IDLE = UnitSeconds(
    forward_s=0, backward_s=0, on_device=0, beside=0, fetch_forward=0, fetch_backward=0, read_forward=0,
    read_backward=0, down=0, land=0, spill=0, update=0, read=0, write=0, slot_bytes=1, ring_bytes=1, speculates=False,
)  # fmt: skip
COMPUTES = replace(IDLE, forward_s=1, backward_s=2)


def seconds(units: list[UnitSeconds], slots: int = 100, ring: int = 100, norm: float = 0) -> float:
    return StepFlow(units, slots, ring, norm).seconds()


def test_a_step_takes_as_long_as_the_device_computes() -> None:
    assert seconds(4 * [COMPUTES]) == pytest.approx(12)
    assert seconds(4 * [replace(COMPUTES, on_device=0.5)], norm=0.25) == pytest.approx(12 + 2 + 0.25)


def test_updates_of_a_speculating_unit_are_hidden_by_the_backward() -> None:
    early = replace(COMPUTES, down=0.1, update=1.5, fetch_forward=0.1, speculates=True)
    late = replace(early, speculates=False)
    assert seconds(8 * [early]) < 24 + 2.5
    assert seconds(8 * [late]) > 24 + 4  # the first forward waits for updates, which are slower than it


def test_a_fetch_waits_for_slots() -> None:
    units = 8 * [replace(COMPUTES, fetch_forward=1, fetch_backward=1)]
    assert seconds(units, slots=1) == pytest.approx(8 * 5, rel=0.1)
    assert seconds(units, slots=3) < 8 * 4


def test_a_backward_waits_for_room_in_the_ring() -> None:
    units = 4 * [replace(COMPUTES, down=3)]
    assert seconds(units, ring=1) == pytest.approx(4 * (1 + 2 + 3))
    assert seconds(units, ring=2) < 4 * (1 + 2 + 3) - 4


def test_the_unit_whose_update_ends_last_is_fetched_last() -> None:
    """All fetches are queued when the step is decided; the first unit's update ends a little later."""
    early = replace(COMPUTES, down=0.1, update=0.5, fetch_forward=0.5, speculates=True)
    late = seconds(8 * [early])
    in_time = seconds(8 * [early], norm=0.6)  # the sums of squares give the update the time that it needs
    assert late == pytest.approx(24 + 0.1 + 8 * 0.5)
    assert in_time == pytest.approx(24 + 0.1 + 0.6 + 0.5)


def test_reads_and_writes_of_updates_share_the_disks() -> None:
    units = 4 * [replace(COMPUTES, down=0.1, update=0.1, read=2, write=3)]
    assert seconds(units) == pytest.approx(4 * 5, rel=0.35)
    assert seconds(units) >= 4 * 5


def test_updates_on_the_device_beside_computing_delay_only_what_needs_their_weights() -> None:
    beside = replace(COMPUTES, beside=2)
    assert seconds([COMPUTES] * 3) == 9
    assert seconds([replace(COMPUTES, on_device=2)] * 3) == 15
    assert seconds([COMPUTES, COMPUTES, beside]) == 9
    assert seconds([beside, COMPUTES, COMPUTES]) == 11
