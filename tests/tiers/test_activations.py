"""Pieces in host memory and scratch files, with copies and transfers that end when the test says so."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from infinity import _native
from infinity.errors import SwapIOError
from infinity.io.arena import ArenaRegion
from infinity.tiers import activations
from infinity.tiers.activations import ActivationTier, HostCopies, Piece, PieceState

PIECE = 64 << 10


class Event:
    """A copy."""

    def __init__(self) -> None:
        self.reached = False


class Copies:
    """Copies that are done at once, and whose events are reached later."""

    copies_ahead = True

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.waited: list[tuple[str, Event]] = []
        self.full = False

    def down(self, into: memoryview, source: torch.Tensor) -> Event:
        torch.frombuffer(into, dtype=torch.uint8).copy_(source)
        return self._event()

    def up(self, into: torch.Tensor, source: memoryview) -> Event:
        into.copy_(torch.frombuffer(source, dtype=torch.uint8))
        return self._event()

    def _event(self) -> Event:
        self.events.append(Event())
        return self.events[-1]

    def landed(self, event: Event) -> None:
        pass

    def empty(self, nbytes: int) -> torch.Tensor:
        if self.full:
            raise torch.OutOfMemoryError
        return torch.empty(nbytes, dtype=torch.uint8)

    def reached(self, event: Event) -> bool:
        return event.reached

    def synchronize(self, event: Event) -> None:
        self.waited.append(("host", event))
        event.reached = True

    def current(self) -> str:
        return "compute"

    def order(self, stream: str, event: Event) -> None:
        self.waited.append((stream, event))

    def lend(self, memory: torch.Tensor, stream: str) -> None:
        assert stream == "compute"

    def close(self) -> None:
        for event in self.events:
            event.reached = True


class Transfer:
    """A write or a read."""

    def __init__(self, scratch: Scratch, *, wrong: bool) -> None:
        self._scratch, self._wrong = scratch, wrong
        self.future = self

    def done(self) -> bool:
        return not self._scratch.busy

    def failure(self) -> object:
        return self if self._wrong else None

    def result(self) -> None:
        if self._scratch.interrupts:
            self._scratch.interrupts = False
            raise KeyboardInterrupt
        if self._wrong:
            raise SwapIOError("writing", path="/scratch", errno=5, state="activations")


class Place:
    """A place in a scratch file."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch, self.lease, self.data = scratch, self, b""

    def release(self) -> None:
        self._scratch.places.remove(self)


class Scratch:
    """Scratch files in a dictionary."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.busy = self.wrong = self.interrupts = False
        self.reads = 0

    def take(self, nbytes: int) -> Place:
        self.places.append(Place(self))
        return self.places[-1]

    def write(self, place: Place, data: memoryview, *, after: object) -> Transfer:
        place.data = bytes(data)
        return Transfer(self, wrong=self.wrong)

    def read(self, place: Place, into: memoryview) -> Transfer:
        self.reads += 1
        into[:] = place.data
        return Transfer(self, wrong=False)

    def close(self) -> None:
        assert self.places == []


@pytest.fixture
def arena() -> Any:
    return _native.Arena(8 * PIECE, huge_pages=False)


@pytest.fixture
def scratch() -> Scratch:
    return Scratch()


@pytest.fixture
def copies() -> Copies:
    return Copies()


@pytest.fixture
def tier(arena: Any, scratch: Scratch, copies: Copies, monkeypatch: pytest.MonkeyPatch) -> Iterator[ActivationTier]:
    """Provide a tier whose ring has room for four pieces, of a model without room on the device."""
    monkeypatch.setattr(activations, "_CHUNK_BYTES", PIECE // 2)
    made = ActivationTier(ArenaRegion(arena, 0, 4 * PIECE), scratch, copies, 0)  # type: ignore[arg-type]
    yield made
    scratch.busy = False
    made.close()
    assert made._space.free_bytes == made._space.nbytes


def kept(tier: ActivationTier, value: int) -> Any:
    moved = tier.keep(torch.full((PIECE,), value, dtype=torch.uint8))
    assert moved is not None
    return moved


def test_pieces_come_back_from_memory_and_from_the_scratch_files(
    tier: ActivationTier, scratch: Scratch, copies: Copies
) -> None:
    moved = [kept(tier, value) for value in range(8)]
    tier.end_forward()
    assert [each.piece.state for each in moved[:4]] == [PieceState.AWAY] * 4
    for value in reversed(range(8)):
        assert torch.equal(tier.back(moved[value]), torch.full((PIECE,), value, dtype=torch.uint8))
        moved.pop()
    assert 0 < scratch.reads <= 2 * 8


def test_the_event_of_a_copy_lives_until_the_write_behind_it_has_ended(
    tier: ActivationTier, scratch: Scratch, copies: Copies
) -> None:
    scratch.busy = True
    moved = kept(tier, 1)
    down = weakref.ref(copies.events[0])
    for event in copies.events:
        event.reached = True
    copies.events.clear()
    del event
    tier.end_forward()
    tier.back(moved)  # another copy reads the chunk
    gc.collect()
    assert down() is not None
    scratch.busy = False
    del moved
    for event in copies.events:
        event.reached = True
    tier.advance()
    copies.waited.clear()
    assert down() is None


def test_memory_that_leaves_is_held_until_the_copy_is_reached(tier: ActivationTier, copies: Copies) -> None:
    tier._moving_bytes_max = 1 << 30
    moved = kept(tier, 1)
    tier.end_forward()
    assert moved.piece.state is PieceState.LEAVING
    memory = weakref.ref(moved.piece.source.untyped_storage())
    piece = moved.piece
    del moved
    tier.advance()
    assert piece.state is PieceState.GONE
    assert memory() is not None
    assert copies.waited == []  # nobody waits for a tensor that nobody needs
    for event in copies.events:
        event.reached = True
    tier.advance()
    assert memory() is None


def test_a_copy_ahead_without_memory_on_the_device_is_left_for_later(tier: ActivationTier, copies: Copies) -> None:
    moved = [kept(tier, value) for value in range(3)]
    tier.end_forward()
    copies.full = True
    tier.advance()
    assert [each.piece.tensor for each in moved] == [None] * 3
    with pytest.raises(torch.OutOfMemoryError):
        tier.back(moved[0])
    copies.full = False
    assert tier.back(moved[0])[0] == 0


def test_a_failed_write_loses_only_what_is_no_longer_in_memory(tier: ActivationTier, scratch: Scratch) -> None:
    scratch.wrong = True
    moved = [kept(tier, value) for value in range(6)]
    scratch.wrong = False
    tier.end_forward()
    assert tier.back(moved[5])[0] == 5
    for _ in range(2):
        with pytest.raises(SwapIOError, match="writing of activations failed"):
            tier.back(moved[0])


def test_a_tensor_in_host_memory_borrows_the_memory_of_its_chunk(arena: Any, scratch: Scratch) -> None:
    tier = ActivationTier(ArenaRegion(arena, 0, 4 * PIECE), scratch, HostCopies(), 0)  # type: ignore[arg-type]
    moved = [kept(tier, value) for value in range(8)]
    tier.end_forward()
    held = [tier.back(moved[value]) for value in (7, 6)]
    assert [(each.data_ptr() - arena.address) // PIECE in range(4) for each in held] == [True] * 2
    copied = tier.back(moved[5])  # half of the memory is borrowed
    assert not arena.address <= copied.data_ptr() < arena.address + 4 * PIECE
    for value in range(5):  # their chunks need memory
        assert torch.equal(tier.back(moved[value]), torch.full((PIECE,), value, dtype=torch.uint8))
    assert [int(each.min()) for each in held] == [int(each.max()) for each in held] == [7, 6]
    moved.clear()
    tier.close()
    assert tier.borrowed
    assert int(held[0].max()) == 7
    held.clear()
    assert not tier.borrowed
    assert tier._space.free_bytes == tier._space.nbytes


def test_a_small_part_of_a_large_storage_stays(tier: ActivationTier) -> None:
    storage = torch.zeros(8 * PIECE, dtype=torch.uint8)
    assert tier.keep(storage[:PIECE]) is None
    assert tier.keep(storage[: 2 * PIECE]) is not None


def test_nothing_moves_twice_in_the_table_of_states() -> None:
    piece = Piece(None, 0, PIECE, None, None)  # type: ignore[arg-type]
    piece.move(PieceState.AWAY)
    piece.move(PieceState.GONE)
    with pytest.raises(AssertionError, match="a piece that is freed cannot be in RAM or on NVMe"):
        piece.move(PieceState.AWAY)


def test_ctrl_c_in_a_wait_leaves_the_memory_to_the_transfer(tier: ActivationTier, scratch: Scratch) -> None:
    moved = [kept(tier, value) for value in range(4)]
    for _ in range(2):  # a write whose memory is needed, and then that of a tensor that nobody needs any more
        scratch.busy = scratch.interrupts = True
        free = tier._space.free_bytes
        with pytest.raises(KeyboardInterrupt):
            tier._make_room()
        assert tier._space.free_bytes == free
        moved = moved[:0]
        tier._collect()
        assert not any(map(tier._is_idle, tier._ending))
