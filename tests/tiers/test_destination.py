"""Where the new values of a state go: the rows of the note, and what a fetch and a commit find there."""

from __future__ import annotations

from typing import Any

import pytest

from infinity.io.arena import Lease
from infinity.sizes import PAGE_BYTES
from infinity.tiers.destination import Destination, destination
from infinity.tiers.home import Home
from tests.tiers.fakes import Store, extent, imitate_streams, pages
from tests.units.fakes import resources

WITHIN, NBYTES = PAGE_BYTES, PAGE_BYTES
"""Where the state is in its home's lease, and in all memory that has it."""


@pytest.fixture(autouse=True)
def _readable_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    imitate_streams(monkeypatch)


def memory(content: int) -> Lease:
    """Two pages, of which the second has the state."""
    lease = pages(8).lease(8 * PAGE_BYTES, "memory").split([2 * PAGE_BYTES] * 4)[content]
    lease.view()[:] = bytes(PAGE_BYTES) + bytes([content]) * PAGE_BYTES
    return lease


HOME, SHADOW, CURRENT = range(1, 4)


def home(*, in_ram: bool, copies: int = 2) -> Home:
    return Home(memory(HOME) if in_ram else None, WITHIN, NBYTES, extent("a", "exp_avg", copies=copies))


def of(state: Home, beside: Lease | None = None, *, speculative: bool = False, committed: bool = False) -> Destination:
    return destination(resources(), state, beside, speculative=speculative, committed=committed)


def contents(view: memoryview | None) -> int | None:
    """What the memory has, all over."""
    if view is None:
        return None
    (content,) = set(bytes(view))
    return content


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("in_ram", [False, True])
@pytest.mark.parametrize("beside", [False, True])
def test_every_row_of_the_note(in_ram: bool, speculative: bool, committed: bool, beside: bool) -> None:
    current = memory(CURRENT) if beside and not in_ram else None
    shadow = memory(SHADOW) if in_ram and speculative else None
    made = of(home(in_ram=in_ram), current or shadow, speculative=speculative, committed=committed)
    stream: Any = made.stream(resources())
    has = CURRENT if current is not None else None
    computed, read = {
        (True, False): (HOME, None),
        (True, True): (SHADOW, HOME),
        (False, False): (has, None),
        (False, True): (None, has),
    }[in_ram, speculative]
    assert (contents(stream.memory), contents(stream.source)) == (computed, read)
    writes = committed or not in_ram
    assert made.copy == (int(speculative) if writes else None)
    assert (stream.file, stream.offset) == ((Store.file, 0) if writes else (None, 0))
    assert stream.write_offset == (made.copy * NBYTES if made.copy is not None else None)
    assert made.elsewhere == (speculative or (in_ram and committed))
    assert made.moves == (in_ram and speculative)
    assert made.rests_in is (None if not in_ram else shadow or made.home.lease)


def test_what_rests_in_ram_is_never_overwritten_on_speculation() -> None:
    with pytest.raises(AssertionError, match="would overwrite"):
        of(home(in_ram=True), speculative=True)


def test_a_speculative_update_needs_a_spare_copy() -> None:
    for in_ram in (False, True):
        with pytest.raises(AssertionError, match="no spare copy for exp_avg of unit 'a'"):
            of(home(in_ram=in_ram, copies=1), memory(SHADOW), speculative=True, committed=True)


def test_a_copy_that_is_not_the_newest_is_another_place() -> None:
    state = home(in_ram=False)
    state.stored().turn_to(1)
    assert not of(state).elsewhere
    assert Destination(state, copy=0).elsewhere


def test_a_home_that_has_moved_moves_no_more() -> None:
    state, shadow = home(in_ram=True), memory(SHADOW)
    made = of(state, shadow, speculative=True)
    state.move(shadow)
    assert not made.moves
    assert made.rests_in is shadow


def test_finishing_turns_a_state_to_what_was_written() -> None:
    kept, changed, stored = home(in_ram=True), home(in_ram=True), home(in_ram=False)
    for made in (of(kept, committed=True), of(changed), Destination(stored, copy=1)):
        made.finish()
    assert (kept.dirty, changed.dirty) == (False, True)
    assert (kept.stored().copy, stored.stored().copy) == (0, 1)


def test_a_state_that_no_update_changes_is_where_it_rests() -> None:
    held, stored = Destination(home(in_ram=True)), Destination(home(in_ram=False))
    assert held.rests_in is held.home.lease
    assert stored.rests_in is None
    for made in (held, stored):
        assert (made.copy, made.written, made.moves) == (None, None, False)
