"""One update under way: the states of the note and no others, its milestones, and the memory it holds."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from infinity.errors import SwapIOError
from infinity.sharded.shared_homes import Publication
from infinity.sizes import PAGE_BYTES
from infinity.tiers.destination import StateDestination
from infinity.units.update import UnitUpdate, UpdateState
from tests.tiers.fakes import Failure, UpdateFuture, nobody_waits, pages
from tests.units.fakes import homes_of, under_way, unit_of, wanted

SPECULATIVE, DECIDED, APPLIED, FINISHED, UNDONE = UpdateState
NOTE = {(SPECULATIVE, DECIDED), (SPECULATIVE, UNDONE), (DECIDED, APPLIED), (APPLIED, FINISHED)}
WAY = {SPECULATIVE: [], DECIDED: [DECIDED], UNDONE: [UNDONE]}
WAY |= {APPLIED: [DECIDED, APPLIED], FINISHED: [DECIDED, APPLIED, FINISHED]}
UNIT = unit_of(0)


def update(*futures: UpdateFuture, **options: Any) -> UnitUpdate:
    made = UnitUpdate("a", wanted(UNIT), {}, committed=False, **options)
    made.transfers = {index: under_way(future) for index, future in enumerate(futures)}
    return made


@pytest.mark.parametrize(
    ("before", "after"), [*itertools.product(UpdateState, UpdateState)], ids=lambda each: each.value
)
def test_every_transition_of_the_note_and_no_other(before: UpdateState, after: UpdateState) -> None:
    made = update(speculated=True)
    for state in WAY[before]:
        made.to(state)
    if (before, after) in NOTE:
        made.to(after)
        assert made.state is after
    else:
        with pytest.raises(AssertionError, match="the update of 'a' cannot go from"):
            made.to(after)
        assert made.state is before


def test_an_update_is_speculative_or_decided_from_its_beginning() -> None:
    assert update(speculated=True).is_speculative
    assert update().state is DECIDED


def test_a_milestone_is_reached_when_every_group_has_reached_it_well_or_not() -> None:
    first, second = UpdateFuture(), UpdateFuture()
    made = update(first, second)
    first.advance()
    assert not made.reached("computed")
    second.end(Failure())
    with nobody_waits(first, second):
        assert made.reached("computed")
        assert not made.reached("weights")
    made.wait("weights")
    assert made.reached("weights")
    assert not made.reached("written")
    made.wait("written")
    assert made.reached("written")


def test_a_milestone_is_reached_when_the_publication_has_ended() -> None:
    future = UpdateFuture()
    made, publication = update(future), Publication(0, 1, {})
    made.end_after(publication)
    future.advance()
    assert not made.reached("computed")
    assert made.until("computed")[-1] is publication
    publication.end()
    assert made.reached("computed")


def test_an_update_reads_its_slot_until_it_is_computed_and_writes_from_it_until_the_weights_are_there() -> None:
    one, other, elsewhere = UpdateFuture(), UpdateFuture(), UpdateFuture()
    speculative = update(one, speculated=True, uses_slot=True)
    decided = update(other, uses_slot=True)
    without = update(elsewhere)
    assert (speculative.reads_slot(), speculative.writes_from_slot()) == (True, False)
    assert (decided.reads_slot(), decided.writes_from_slot()) == (False, True)
    assert (without.reads_slot(), without.writes_from_slot()) == (False, False)
    one.advance(), other.advance()
    assert (speculative.reads_slot(), decided.writes_from_slot()) == (False, True)
    other.advance()
    assert not decided.writes_from_slot()


def test_a_failure_is_told_once_it_is_known() -> None:
    future = UpdateFuture()
    made = update(UpdateFuture(), future)
    with nobody_waits(future):
        made.require_well()
    future.end(Failure())
    with pytest.raises(SwapIOError, match="optimizer states of unit 'a unit' failed at step 1"):
        made.require_well()


def test_shadows_are_those_of_homes_that_have_not_moved_each_once() -> None:
    space, unit = pages(8), unit_of(0, (1, 1))
    homes = homes_of(unit, space, space)
    state, stays = homes.all_states()[:2]
    weights, moment = space.lease(2 * PAGE_BYTES, "a shadow"), pages(1).lease(PAGE_BYTES, "a shadow")
    destinations = {
        index: {"weight": StateDestination(home, weights, home.lease)}
        for index, home in enumerate(homes.weights.groups)
    }
    destinations[0] |= {"exp_avg": StateDestination(state, moment, state.lease), "exp_avg_sq": StateDestination(stays)}
    made = UnitUpdate("a", wanted(unit), destinations, committed=False, speculated=True)
    assert made.moves_weights
    assert made.shadows() == {weights: homes.weights.groups[1], moment: state}
    homes.weights.move(weights)
    assert made.shadows() == {moment: state}
    state.move(moment)
    assert made.shadows() == {}
    assert made.moves_weights
