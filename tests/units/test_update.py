"""One update under way: the states of the note and no others, its milestones, and where its new values go."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from infinity.base.timeline import JobTag
from infinity.errors import DeviceError, SwapIOError
from infinity.sizes import PAGE_BYTES
from infinity.tiers.home import UnitHomes
from infinity.units.shadows import Shadow
from infinity.units.update import (
    UnitUpdate,
    UpdateState,
    UpdateTransfer,
    WeightsPlace,
    read_update_ahead,
    submit_update,
)
from tests.tiers.fakes import Failure, Future, Store, UpdateFuture, imitate_streams, nobody_waits, pages
from tests.units.fakes import Gradients, Pipeline, homes_of, resources, under_way, unit_of, wanted

SPECULATIVE, DECIDED, APPLIED, FINISHED, UNDONE = UpdateState
NOTE = {(SPECULATIVE, DECIDED), (SPECULATIVE, UNDONE), (DECIDED, APPLIED), (APPLIED, FINISHED)}
WAY = {SPECULATIVE: [], DECIDED: [DECIDED], UNDONE: [UNDONE]}
WAY |= {APPLIED: [DECIDED, APPLIED], FINISHED: [DECIDED, APPLIED, FINISHED]}
UNIT = unit_of(0)


def update(*futures: UpdateFuture, place: WeightsPlace | None = None) -> UnitUpdate:
    made = UnitUpdate("a", wanted(UNIT), place or WeightsPlace(), committed=False)
    made.transfers = {index: under_way(future) for index, future in enumerate(futures)}
    return made


@pytest.mark.parametrize(
    ("before", "after"), [*itertools.product(UpdateState, UpdateState)], ids=lambda each: each.value
)
def test_every_transition_of_the_note_and_no_other(before: UpdateState, after: UpdateState) -> None:
    made = update(place=WeightsPlace(speculative=True))
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
    assert update(place=WeightsPlace(speculative=True)).is_speculative
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


def test_an_update_reads_its_slot_until_it_is_computed_and_writes_from_it_until_the_weights_are_there() -> None:
    slot = pages(1).lease(PAGE_BYTES, "a slot")
    one, other, elsewhere = UpdateFuture(), UpdateFuture(), UpdateFuture()
    speculative = update(one, place=WeightsPlace(slot=slot, speculative=True))
    decided = update(other, place=WeightsPlace(slot=slot))
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


def test_finishing_turns_each_state_to_what_was_written() -> None:
    homes = homes_of(UNIT, pages(1))
    states = homes.states[0]
    transfer = under_way(UpdateFuture(), [(homes.weights.groups[0], None), (states.homes()[0], 1)])
    assert transfer.copy_of(states.homes()[0]) == 1
    assert transfer.copy_of(states.homes()[1]) is None
    transfer.finish()
    assert homes.weights.groups[0].dirty
    assert [home.stored().copy for home in states.homes()] == [1, 0]


# -- how a group is handed to the pipeline ----------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _readable_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    imitate_streams(monkeypatch)


def submit(homes: UnitHomes, place: WeightsPlace, *, committed: bool = False, **options: Any) -> UpdateTransfer:
    gradients: Any = Gradients(UNIT).groups
    request = replace(wanted(UNIT)[0], **options)
    return submit_update(
        resources(), UNIT, homes, 0, request, gradients, place, step=7, committed=committed, ahead=None
    )


def job(transfer: UpdateTransfer) -> dict[str, Any]:
    future: Any = transfer.future
    made: dict[str, Any] = future.job
    return made


def test_a_speculative_update_writes_beside_what_is_current() -> None:
    homes = homes_of(UNIT)
    slot = pages(1).lease(PAGE_BYTES, "a slot")
    transfer = submit(homes, WeightsPlace(slot=slot, speculative=True))
    made = job(transfer)
    for state in ("weight", "exp_avg", "exp_avg_sq"):
        stream = made[state]
        assert (stream.file, stream.offset, stream.write_offset, stream.memory) == (Store.file, 0, PAGE_BYTES, None)
    assert made["weight"].source == slot.view()
    assert made["speculative"]
    assert made["whole"]
    assert {move for _, move in transfer.moves} == {1}
    assert JobTag.unpack(made["tag"]) == JobTag(7, 0, 0)


def test_a_decided_update_may_overwrite() -> None:
    slot = pages(1).lease(PAGE_BYTES, "a slot")
    made = job(submit(homes_of(UNIT), WeightsPlace(slot=slot)))
    assert (made["weight"].memory, made["weight"].source) == (slot.view(), None)
    assert {made[state].write_offset for state in ("weight", "exp_avg", "exp_avg_sq")} == {0}
    assert (made["speculative"], made["whole"], made["grad"]) == (False, False, "gradients of 0.0")


def test_new_weights_in_ram_go_to_the_shadow_and_the_current_ones_stay() -> None:
    space = pages(2)
    homes = homes_of(UNIT, space)
    shadow = space.lease(PAGE_BYTES, "a shadow")
    transfer = submit(homes, WeightsPlace(speculative=True, shadow=Shadow(shadow, {})))
    weight = job(transfer)["weight"]
    assert (weight.memory, weight.source, weight.file) == (shadow.view(), homes.weights.groups[0].view(), None)
    assert (homes.weights.groups[0], None) in transfer.moves
    for missing in (None, Shadow(None, {})):
        with pytest.raises(AssertionError, match="would overwrite"):
            submit(homes, WeightsPlace(speculative=True, shadow=missing))


@pytest.mark.parametrize("committed", [False, True])
def test_new_states_in_ram_go_to_the_shadow_and_to_the_store_when_the_step_is_committed(committed: bool) -> None:
    space = pages(4)
    homes = homes_of(UNIT, None, space, kept=True)
    states = homes.all_states()
    leases = [space.lease(PAGE_BYTES, "a shadow") for _ in states]
    shadow = Shadow(None, dict(zip(states, leases, strict=True)))
    transfer = submit(homes, WeightsPlace(speculative=True, shadow=shadow), committed=committed)
    for name, home, lease in zip(("exp_avg", "exp_avg_sq"), states, leases, strict=True):
        stream = job(transfer)[name]
        assert (stream.memory, stream.source) == (lease.view(), home.view())
        assert (stream.file, stream.write_offset) == ((Store.file, PAGE_BYTES) if committed else (None, None))
        assert (home, 1 if committed else None) in transfer.moves
    assert (job(transfer)["whole"], job(transfer)["unit"]) == (True, UNIT.index)
    with pytest.raises(AssertionError, match="would overwrite"):
        submit(homes, WeightsPlace(speculative=True, shadow=Shadow(None, {states[0]: leases[0]})))


@pytest.mark.parametrize("committed", [False, True])
def test_states_in_ram_are_written_when_the_step_is_committed(committed: bool) -> None:
    space = pages(3)
    homes = homes_of(UNIT, space, space, kept=True)
    transfer = submit(homes, WeightsPlace(), committed=committed)
    exp_avg, home = job(transfer)["exp_avg"], homes.states[0].homes()[0]
    assert exp_avg.memory == home.view()
    assert exp_avg.file == (Store.file if committed else None)
    assert (home, 0 if committed else None) in transfer.moves


def test_a_speculative_update_needs_a_spare_copy_of_every_state() -> None:
    homes = homes_of(UNIT)
    homes.states[0].homes()[1].stored().offsets = (0,)
    with pytest.raises(AssertionError, match="no spare copy for exp_avg_sq"):
        submit(homes, WeightsPlace(speculative=True))


def test_moments_that_no_rule_uses_are_not_moved() -> None:
    transfer = submit(homes_of(UNIT), WeightsPlace(), moments=frozenset({"exp_avg"}))
    assert job(transfer)["exp_avg_sq"] is None
    assert len(transfer.moves) == 2


def test_states_are_read_ahead_and_weights_are_not() -> None:
    below = resources()
    read_update_ahead(below, UNIT, homes_of(UNIT), 0, step=2)
    pipeline: Pipeline = below.pipeline
    ahead = pipeline.ahead[0].job
    assert "weight" not in ahead
    assert ahead["exp_avg"].file == ahead["exp_avg_sq"].file == Store.file
    assert ahead["residual"] is None


@pytest.mark.parametrize(("lost", "state"), [("gradients", "grad"), ("weights", "weight"), ("", "optimizer states")])
def test_what_is_lost_on_its_way_from_a_device_is_named(lost: str, state: str) -> None:
    landing, copied, job = Future(), Future(), UpdateFuture()
    gradients, copy = Gradients(UNIT).groups, SimpleNamespace(landed=copied, lease=pages(1).lease(PAGE_BYTES, ""))
    gradients[0].on_their_way = lambda: [landing]
    below: Any = resources()
    below.pipeline.submit = lambda **_: job
    given: Any = copy
    place, homes = WeightsPlace(copy=given), homes_of(UNIT, pages(4))
    transfer = submit_update(
        below, UNIT, homes, 0, wanted(UNIT)[0], gradients, place, step=7, committed=False, ahead=None
    )
    landing.end(Failure("device") if lost == "gradients" else None)
    copied.end(Failure("device") if lost == "weights" else None)
    job.end(Failure("device"))
    with pytest.raises(DeviceError, match=f"{state} of unit '{UNIT.name}'"):
        transfer.result()


def test_each_group_waits_for_the_gradients_of_all() -> None:
    """Else a unit would begin with a small group, and the rest of it come after all later units."""
    unit, gradients = unit_of(0, (1, 1)), Gradients(unit_of(0, (1, 1))).groups
    for index, group in gradients.items():
        group.on_their_way = lambda index=index: [f"landing {index}"]
    given: Any = gradients
    for index in gradients:
        request, place = wanted(unit)[index], WeightsPlace()
        transfer = submit_update(
            resources(), unit, homes_of(unit), index, request, given, place, step=1, committed=False, ahead=None
        )
        assert job(transfer)["after"] == ["landing 0", "landing 1"]
        assert job(transfer)["grad"] == f"gradients of 0.{index}"
