"""Freed memory goes back to the system, when there is much of it and not before."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

import pytest

from infinity.base import heap
from infinity.base.heap import HeapTrimmer

MIB = 1 << 20
BLOCK = 64 << 10  # below what glibc maps by itself
BLOCKS = 1024

Block = ctypes.Array[ctypes.c_char]

glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="not glibc 2.33 or later")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.fixture
def blocks() -> list[Block | None]:
    """Many blocks, one after the other in the heap."""
    return [_filled(BLOCK) for _ in range(BLOCKS)]


def _filled(nbytes: int) -> Block:
    return ctypes.create_string_buffer(b"x" * nbytes, nbytes)


def free_every_second(blocks: list[Block | None]) -> int:
    """Leave holes between the blocks in use. Return the bytes of the holes."""
    blocks[::2] = [None] * (BLOCKS // 2)
    return BLOCKS // 2 * BLOCK


@glibc
def test_holes_between_what_is_used_go_back(blocks: list[Block | None]) -> None:
    holes, before = free_every_second(blocks), resident()
    HeapTrimmer(64 * MIB).check()
    assert before - resident() > holes * 3 // 4


@glibc
def test_a_large_budget_keeps_what_will_be_used_again(blocks: list[Block | None]) -> None:
    holes, before = free_every_second(blocks), resident()
    HeapTrimmer(1 << 40).check()
    assert before - resident() < holes // 4


@glibc
def test_holes_stay_until_the_process_outgrows_what_was_in_use(blocks: list[Block | None]) -> None:
    trimmer = HeapTrimmer(64 * MIB)
    trimmer.check()
    holes, before = free_every_second(blocks), resident()
    trimmer.check()
    assert before - resident() < holes // 4
    more = _filled(holes)  # glibc maps it by itself
    trimmer.check()
    assert before + len(more) - resident() > holes * 3 // 4


@glibc
def test_a_restart_returns_all_holes(blocks: list[Block | None]) -> None:
    trimmer = HeapTrimmer(1 << 40)
    trimmer.check()
    holes, before = free_every_second(blocks), resident()
    trimmer.restart()
    assert before - resident() > holes * 3 // 4


@glibc
def test_a_restart_forgets_what_was_in_use() -> None:
    trimmer, large = HeapTrimmer(64 * MIB), _filled(256 * MIB)
    trimmer.check()
    del large
    trimmer.restart()
    blocks: list[Block | None] = [_filled(BLOCK) for _ in range(BLOCKS)]
    trimmer.check()
    holes, more = free_every_second(blocks), _filled(BLOCKS * BLOCK)  # less than the large block
    before = resident()
    trimmer.check()
    assert before - resident() > holes * 3 // 4
    del more


@glibc
def test_holes_that_went_back_are_not_counted_again(
    blocks: list[Block | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    holes = free_every_second(blocks)
    trimmer = HeapTrimmer(64 * MIB)
    trimmer.check()
    trims = _count_trims(monkeypatch)
    more = [_filled(holes) for _ in range(3)]  # the process is beyond its ceiling
    trimmer.check()
    assert not trims
    del more


def _count_trims(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    trims: list[int] = []

    class Counted:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
        malloc_trim = staticmethod(trims.append)

    Counted.mallinfo2.restype = heap._MallInfo
    monkeypatch.setattr(heap, "_LIBC", Counted)
    return trims


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Musl:
        pass

    monkeypatch.setattr(heap, "_LIBC", Musl())
    HeapTrimmer(8).check()
