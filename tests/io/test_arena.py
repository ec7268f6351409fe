"""Leases never overlap, and what is given back can be leased again."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from infinity.errors import PlanError
from infinity.io import arena as arena_module
from infinity.io.arena import Lease, PinnedArena
from infinity.sizes import PAGE_BYTES
from tests.sampling import number

PAGES = 64


class ArenaMachine(RuleBasedStateMachine):
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.arena = PinnedArena(PAGES * 4096)
        self.out: list[Lease] = []

    @rule(
        target=leases,
        nbytes=st.integers(1, 20 * 4096),
        top=st.booleans(),
        tightest=st.booleans(),
        behind=st.sampled_from([0, 4096, 30 * 4096, PAGES * 4096]),
    )
    def lease(self, nbytes: int, top: bool, tightest: bool, behind: int) -> Lease | None:
        fits = self.arena.fits(nbytes)
        lease = self.arena.try_lease(nbytes, from_top=top, tightest=tightest, behind=0 if top else behind)
        assert (lease is not None) == fits
        if lease is not None:
            self.out.append(lease)
            lease.view()[:] = bytes([len(self.out) % 251]) * lease.nbytes
        return lease

    @rule(lease=consumes(leases))
    def release(self, lease: Lease | None) -> None:
        if lease is not None:
            self.out.remove(lease)
            lease.release()

    @invariant()
    def leases_are_apart_and_add_up(self) -> None:
        ranges = sorted((lease.offset, lease.offset + lease.nbytes) for lease in self.out)
        for (_, end), (start, _) in itertools.pairwise(ranges):
            assert end <= start
        assert self.arena.free_bytes == PAGES * 4096 - sum(lease.nbytes for lease in self.out)


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=number(20, 60), stateful_step_count=40, deadline=None)


def test_the_first_place_behind_an_offset_is_taken_and_else_the_first_of_all() -> None:
    arena = PinnedArena(8 * 4096)
    taken = [arena.try_lease(pages * 4096, behind=behind * 4096) for pages, behind in ((2, 3), (2, 4), (2, 6), (1, 0))]
    assert [lease.offset // 4096 for lease in taken if lease is not None] == [3, 5, 0, 2]


def test_the_tightest_piece_is_taken_and_long_ones_stay() -> None:
    arena = PinnedArena(8 * 4096)
    first, _, third, _ = (arena.try_lease(pages * 4096) for pages in (3, 1, 2, 2))
    assert first is not None
    assert third is not None
    first.release()
    third.release()
    for from_top in (False, True):
        lease = arena.try_lease(2 * 4096, from_top=from_top, tightest=True)
        assert lease is not None
        assert lease.offset == third.offset
        lease.release()
    lease = arena.try_lease(3 * 4096, tightest=True)
    assert lease is not None
    assert lease.offset == 0


def test_the_parts_of_a_lease_are_released_one_by_one() -> None:
    arena = PinnedArena(8 * 4096)
    whole = arena.try_lease(6 * 4096)
    assert whole is not None
    parts = whole.split([2 * 4096, 0, 4096, 3 * 4096])
    assert [(part.offset, part.nbytes) for part in parts] == [(0, 8192), (8192, 0), (8192, 4096), (12288, 12288)]
    parts[2].release()
    assert arena.free_bytes == 3 * 4096
    parts[0].release()
    parts[3].release()
    assert arena.free_bytes == arena.nbytes
    for sizes in ([4096], [6 * 4096 - 1, 1]):
        with pytest.raises(AssertionError, match="cannot be split"):
            whole.split(sizes)


def test_releasing_twice_is_a_bug_that_shows() -> None:
    arena = PinnedArena(8 * 4096)
    lease = arena.try_lease(4096)
    assert lease is not None
    lease.release()
    with pytest.raises(AssertionError, match="released twice"):
        lease.release()


def test_an_arena_that_is_too_small_names_what_did_not_fit() -> None:
    with pytest.raises(PlanError, match="no room in the arena for the tiles"):
        PinnedArena(4096).lease(8192, "the tiles")


def test_each_tensor_of_a_lease_has_a_storage_of_its_own() -> None:
    lease = PinnedArena(4096).lease(4096, "a test")
    first, second = lease.tensor(), lease.tensor()
    first[0] = 7
    assert second[0] == 7
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata


class Pins:
    """An accelerator that notes what it pins and unpins. Args: refuses_after: number of pieces that it pins."""

    pins_resident = False

    def __init__(self, refuses_after: int = 1 << 30) -> None:
        self.pinned: list[tuple[int, int]] = []
        self.unpinned: list[int] = []
        self._refuses_after = refuses_after

    def pin(self, address: int, nbytes: int) -> str:
        if len(self.pinned) == self._refuses_after:
            return "no more"
        self.pinned.append((address, nbytes))
        return ""

    def unpin(self, address: int) -> None:
        self.unpinned.append(address)


def test_a_forked_child_leaves_the_pages_of_its_parent_pinned() -> None:
    pins: Any = Pins()
    arena = PinnedArena(4096)
    address = arena.memory.address
    arena.pin(pins)
    child = os.fork()
    if child == 0:
        del arena
        os._exit(len(pins.unpinned))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    del arena
    assert pins.unpinned == [address]


def test_a_large_arena_is_pinned_in_pieces_that_end_where_no_copy_crosses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "REGISTRATION_BYTES", 3 * PAGE_BYTES)
    pins: Any = Pins()
    arena = PinnedArena(9 * PAGE_BYTES)
    arena.pin(pins, ends=[PAGE_BYTES, 2 * PAGE_BYTES, 4 * PAGE_BYTES, 8 * PAGE_BYTES])
    first = arena.memory.address
    pieces = [(at - first) // PAGE_BYTES for at, _ in pins.pinned]
    assert pieces == [0, 2, 4, 8]
    assert [nbytes // PAGE_BYTES for _, nbytes in pins.pinned] == [2, 2, 4, 1]
    arena.unpin()
    assert sorted(pins.unpinned) == [at for at, _ in pins.pinned]


def test_after_a_refusal_no_piece_stays_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "REGISTRATION_BYTES", PAGE_BYTES)
    pins: Any = Pins(refuses_after=2)
    arena = PinnedArena(4 * PAGE_BYTES)
    assert arena.pin(pins, ends=[PAGE_BYTES, 2 * PAGE_BYTES, 3 * PAGE_BYTES]) == "no more"
    assert not arena.pinned
    assert sorted(pins.unpinned) == [at for at, _ in pins.pinned]
    assert len(pins.pinned) == 2
