"""Where the new values of a state go: the rows of the note, and what a fetch and a commit find there."""

from __future__ import annotations

from typing import Any

import pytest

from infinity.io.arena import Lease
from infinity.sizes import PAGE_BYTES
from infinity.tiers.destination import StateDestination, destination_of
from infinity.tiers.home import StateHome
from tests.tiers.fakes import Store, extent, imitate_streams, pages

WITHIN, NBYTES = PAGE_BYTES, PAGE_BYTES
"""Offset of the state in its home's lease, and its size in bytes."""


@pytest.fixture(autouse=True)
def _readable_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    imitate_streams(monkeypatch)


def memory(content: int) -> Lease:
    """Two pages, of which the second has the state."""
    lease = pages(8).lease(8 * PAGE_BYTES, "memory").split([2 * PAGE_BYTES] * 4)[content]
    lease.view()[:] = bytes(PAGE_BYTES) + bytes([content]) * PAGE_BYTES
    return lease


HOME, SHADOW, CURRENT = range(1, 4)


def home(*, in_ram: bool) -> StateHome:
    return StateHome(memory(HOME) if in_ram else None, WITHIN, NBYTES, extent("a", "exp_avg"))


def contents(view: memoryview | None) -> int | None:
    """Return the value that all bytes of the memory have; None without memory."""
    if view is None:
        return None
    (content,) = set(bytes(view))
    return content


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("in_ram", [False, True])
@pytest.mark.parametrize("beside", [False, True])
def test_every_row_of_the_note(in_ram: bool, speculative: bool, written: bool, beside: bool) -> None:
    current = memory(CURRENT) if beside and not in_ram else None
    shadow = memory(SHADOW) if in_ram and speculative else None
    copy = int(speculative) if written or not in_ram else None
    made = destination_of(home(in_ram=in_ram), current or shadow, copy, speculative=speculative)
    store: Any = Store()
    stream: Any = made.stream(store)
    has = None if current is None else CURRENT
    computed, read = {
        (True, False): (HOME, None),
        (True, True): (SHADOW, HOME),
        (False, False): (has, None),
        (False, True): (None, has),
    }[in_ram, speculative]
    assert (contents(stream.memory), contents(stream.source)) == (computed, read)
    assert (stream.file, stream.offset) == (None if copy is None else Store.file, 0)
    assert stream.write_offset == (None if copy is None else copy * NBYTES)
    assert made.elsewhere == (speculative or (in_ram and written))
    assert made.moves == (in_ram and speculative)
    assert made.rests_in is (None if not in_ram else shadow or made.home.lease)


def test_what_rests_in_ram_is_never_overwritten_on_speculation() -> None:
    with pytest.raises(AssertionError, match="would overwrite"):
        destination_of(home(in_ram=True), None, None, speculative=True)


def test_a_copy_is_of_a_store() -> None:
    with pytest.raises(AssertionError, match="without a store"):
        destination_of(home(in_ram=False), None, 0, speculative=False).stream(None)


def test_a_copy_that_is_not_the_newest_is_another_place() -> None:
    state = home(in_ram=False)
    state.stored().turn_to(1)
    assert not StateDestination(state, copy_index=1).elsewhere
    assert StateDestination(state, copy_index=0).elsewhere


def test_a_home_that_has_moved_moves_no_more() -> None:
    state, shadow = home(in_ram=True), memory(SHADOW)
    made = destination_of(state, shadow, None, speculative=True)
    state.move(shadow)
    assert not made.moves
    assert made.rests_in is shadow


def test_finishing_turns_a_state_to_what_was_written() -> None:
    kept, changed, stored = home(in_ram=True), home(in_ram=True), home(in_ram=False)
    for made in (
        StateDestination(kept, kept.lease, copy_index=0),
        StateDestination(changed, changed.lease),
        StateDestination(stored, copy_index=1),
    ):
        made.finish()
    assert (kept.dirty, changed.dirty) == (False, True)
    assert (kept.stored().newest_copy, stored.stored().newest_copy) == (0, 1)


def test_a_state_that_no_update_changes_is_where_it_rests() -> None:
    held, stored = StateDestination(home(in_ram=True)), StateDestination(home(in_ram=False))
    assert held.rests_in is held.home.lease
    assert stored.rests_in is None
    for made in (held, stored):
        assert (made.copy_index, made.written, made.moves) == (None, None, False)
