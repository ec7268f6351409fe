"""Shadows: what is free, in use and lent adds up to what the plan has for them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from infinity.io.arena import Lease
from infinity.sizes import PAGE_BYTES
from infinity.units.speculative_update_buffers import SpeculativeUpdateBuffers
from tests.tiers.fakes import few, pages
from tests.units.fakes import Pipeline, homes_of, unit_of

PAGES = 6
SIZES = [2 * PAGE_BYTES, PAGE_BYTES, 3 * PAGE_BYTES]


def shadows_of(pipeline: Any) -> SpeculativeUpdateBuffers:
    return SpeculativeUpdateBuffers(pages(PAGES), pipeline, PAGES * PAGE_BYTES, SIZES)


class ShadowsMachine(RuleBasedStateMachine):
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.pipeline = Pipeline()
        self.shadows = shadows_of(self.pipeline)
        self.used: list[Lease] = []
        self.lost_bytes = 0

    @rule(target=leases, nbytes=st.sampled_from([*SIZES, (PAGES + 1) * PAGE_BYTES]))
    def lease(self, nbytes: int) -> Any:
        lease = self.shadows.try_lease(nbytes)
        if lease is None:
            return multiple()
        assert lease.nbytes == nbytes
        self.used.append(lease)
        return lease

    @rule(lease=consumes(leases))
    def give_back(self, lease: Lease) -> None:
        self.used.remove(lease)
        self.shadows.give_back(lease)

    @rule()
    def lend(self) -> None:
        self.shadows.lend()
        assert self.shadows.free_bytes < min(SIZES) or self.shadows.lent_bytes

    @rule(lost=st.booleans())
    def reclaim(self, lost: bool) -> None:
        self.pipeline.lost = lost
        if lost:
            self.lost_bytes += self.shadows.lent_bytes
        self.shadows.reclaim()
        assert not self.shadows.lent_bytes

    @invariant()
    def the_bytes_add_up(self) -> None:
        used = sum(lease.nbytes for lease in self.used)
        free, lent = self.shadows.free_bytes, self.shadows.lent_bytes
        assert free + used + lent + self.lost_bytes == PAGES * PAGE_BYTES
        assert self.shadows._space.free_bytes == free

    @invariant()
    def the_staging_has_what_is_lent(self) -> None:
        assert sum(view.nbytes for view in self.pipeline.lent) == self.shadows.lent_bytes


TestShadows = ShadowsMachine.TestCase
TestShadows.settings = few


def test_what_is_lent_is_what_weights_will_need() -> None:
    pipeline = Pipeline()
    shadows = shadows_of(pipeline)
    assert shadows.try_lease(PAGE_BYTES) is not None
    shadows.lend()
    assert [view.nbytes for view in pipeline.lent] == SIZES[:2]
    shadows.reclaim()
    assert shadows.free_bytes == 5 * PAGE_BYTES


def test_there_is_no_shadow_where_the_plan_has_none_though_the_space_has_room() -> None:
    native: Any = Pipeline()
    shadows = SpeculativeUpdateBuffers(pages(4), native, PAGE_BYTES, [])
    assert shadows.try_lease(2 * PAGE_BYTES) is None
    assert shadows.try_lease(PAGE_BYTES) is not None
    assert shadows.try_lease(PAGE_BYTES) is None


def test_a_shadow_is_one_piece_of_which_each_home_gets_its_part() -> None:
    """So when the homes move their memory is one piece again, which fits the next shadow."""
    native: Any = Pipeline()
    space = pages(PAGES)
    unit = unit_of(0)
    homes = homes_of(unit, space, space)
    shadows = SpeculativeUpdateBuffers(space, native, 3 * PAGE_BYTES, [])
    states = homes.all_states()
    for _ in range(5):
        shadow = shadows.try_shadow(homes.weights, states)
        assert shadow is not None
        assert list(shadow) == [*homes.weights.groups, *states]
        begins = [lease.offset for lease in shadow.values()]
        assert [begin - begins[0] for begin in begins] == [0, PAGE_BYTES, 2 * PAGE_BYTES]
        assert shadows.try_shadow(None, states[:1]) is None  # the plan has no more
        shadows.give_back(homes.weights.move(shadow[homes.weights.groups[0]]))
        for home in states:
            shadows.give_back(home.move(shadow[home]))
    weightless = shadows.try_shadow(None, states)
    assert weightless is not None
    assert list(weightless) == states


def test_the_groups_of_a_unit_have_one_shadow_as_they_have_one_home() -> None:
    native: Any = Pipeline()
    weights = homes_of(unit_of(0, (1, 2)), pages(PAGES)).weights
    shadow = shadows_of(native).try_shadow(weights, [])
    assert shadow is not None
    assert set(shadow) == set(weights.groups)
    assert {lease.nbytes for lease in shadow.values()} == {3 * PAGE_BYTES}
    assert len(set(shadow.values())) == 1


def test_free_memory_in_pieces_is_no_shadow() -> None:
    native: Any = Pipeline()
    space = pages(PAGES)
    shadows = SpeculativeUpdateBuffers(space, native, PAGES * PAGE_BYTES, [])
    leases = [shadows.try_lease(PAGE_BYTES) for _ in range(PAGES)]
    for lease in leases[::2]:
        assert lease is not None
        shadows.give_back(lease)
    states = homes_of(unit_of(0), states=pages(2)).all_states()
    assert shadows.free_bytes == 3 * PAGE_BYTES
    assert shadows.try_shadow(None, states) is None
    assert shadows.free_bytes == 3 * PAGE_BYTES
