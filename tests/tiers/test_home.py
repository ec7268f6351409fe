"""Where states rest: what counts as newest, and what moves together."""

from __future__ import annotations

import pytest

from infinity.sizes import PAGE_BYTES
from infinity.tiers.home import StateHome, WeightsHome
from tests.tiers.fakes import extent, pages
from tests.units.fakes import homes_of, unit_of


def test_what_changes_in_ram_is_newer_than_the_store_until_it_is_written_or_read() -> None:
    home = StateHome(pages(1).lease(PAGE_BYTES, "a state"), 0, PAGE_BYTES, extent("a", "exp_avg"))
    assert not home.dirty
    home.mark_changed()
    assert home.dirty
    home.mark_written(1)
    assert (home.dirty, home.stored().newest_copy, home.stored().offset) == (False, 1, PAGE_BYTES)
    home.mark_changed()
    home.mark_read()
    assert (home.dirty, home.stored().newest_copy) == (False, 1)


def test_a_state_is_asked_for_where_it_is() -> None:
    stored, held = (
        StateHome(None, 0, 1, extent("a", "b")),
        StateHome(pages(2).lease(2 * PAGE_BYTES, "a state"), PAGE_BYTES, 8, None),
    )
    assert (stored.in_memory, held.in_memory) == (False, True)
    assert held.view().nbytes == 8
    with pytest.raises(AssertionError, match="not in RAM has no view"):
        stored.view()
    with pytest.raises(AssertionError, match="without a place in the store"):
        held.stored()


def test_the_weights_of_all_groups_move_together() -> None:
    space = pages(6)
    weights = homes_of(unit_of(0, (1, 2)), space).weights
    before, after = weights.lease, space.lease(3 * PAGE_BYTES, "a shadow")
    after.view()[:] = b"\1" * PAGE_BYTES + b"\2" * (2 * PAGE_BYTES)
    assert weights.move(after) is before
    assert [set(bytes(home.view())) for home in weights.groups] == [{1}, {2}]
    assert weights.lease is after
    with pytest.raises(AssertionError, match="have no other memory"):
        WeightsHome((), 0).move(after)


def test_states_are_in_the_store_only_when_all_of_them_are() -> None:
    unit = unit_of(0, (1, 1))
    homes = homes_of(unit)
    assert len(homes.states_in_store()) == 4
    assert len(list(homes)) == 6
    homes.states[1].homes()[0].lease = pages(1).lease(PAGE_BYTES, "a state")
    assert homes.states_in_store() == []
