"""The walk that `infinity plan` takes through a step brings and evicts what the engine's room does."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from infinity.plan.slot_simulator import SlotSimulator
from infinity.plan.visit_trace import VisitTrace
from infinity.sizes import PAGE_BYTES
from infinity.units.unit import OffloadedUnit
from tests.tiers.fakes import few
from tests.units.rooms import STAYS, alone

COUNT, STEPS = 8, 3
SIZES = st.lists(st.integers(1, 4), min_size=COUNT, max_size=COUNT)
VISITS = st.lists(st.integers(0, COUNT - 1).filter(lambda index: index != STAYS), min_size=1, max_size=24)


def evicted_by_the_engine(sizes: list[int], room_pages: int, order: list[int]) -> list[list[int]]:
    """Units, in each step. The one that stays is there from the beginning."""
    room, _ = alone(room_pages + sizes[STAYS], sizes)
    room._traces[True] = VisitTrace(order)
    room.fetch(room.units[STAYS])
    evict, evicted, steps = room._evict, list[int](), list[list[int]]()

    def evict_and_tell(unit: OffloadedUnit) -> None:
        evicted.append(unit.index)
        evict(unit)

    told: Any = room
    told._evict = evict_and_tell
    for _ in range(STEPS):
        for index in order:
            room.units[index].weights.use()
            room.fetch(room.units[index])
            room.units[index].weights.unuse()
        room.end_iteration()
        steps.append([*evicted])
        evicted.clear()
    return steps


def evicted_by_the_walk(sizes: list[int], room_pages: int, order: list[int]) -> list[list[int]]:
    nbytes = {index: sizes[index] * PAGE_BYTES for index in range(COUNT) if index != STAYS}
    simulator = SlotSimulator([(index, True) for index in order], nbytes, room_pages * PAGE_BYTES, None)
    leave, evicted, steps = simulator._slots.leave, list[int](), list[list[int]]()

    def leave_and_tell(index: int) -> None:
        evicted.append(index)
        leave(index)

    told: Any = simulator._slots
    told.leave = leave_and_tell
    for _ in range(STEPS):
        simulator._step()
        steps.append([*evicted])
        evicted.clear()
    return steps


@few
@given(SIZES, st.integers(4, 20), VISITS)
def test_the_walk_and_the_engine_evict_the_same_units(sizes: list[int], room_pages: int, order: list[int]) -> None:
    assert evicted_by_the_walk(sizes, room_pages, order) == evicted_by_the_engine(sizes, room_pages, order)
