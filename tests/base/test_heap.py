"""Freed memory goes back to the system, when there is much of it and not before."""

from __future__ import annotations

import ctypes
import resource
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from infinity.base import heap
from infinity.base.heap import HeapTrimmer

MIB = 1 << 20
BLOCK = 64 << 10  # below what glibc maps by itself
BLOCKS = 1024

glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="not glibc 2.33 or later")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.fixture
def holes() -> Iterator[int]:
    """Every second one of many blocks was freed. Gives the bytes of the holes."""
    blocks = [ctypes.create_string_buffer(b"x" * BLOCK, BLOCK) for _ in range(BLOCKS)]
    freed = [weakref.ref(block) for block in blocks[::2]]
    del blocks[::2]
    assert not any(each() for each in freed)
    yield BLOCKS // 2 * BLOCK
    del blocks


@glibc
def test_holes_between_what_is_used_go_back(holes: int) -> None:
    before = resident()
    HeapTrimmer(64 * MIB).used(64 * MIB)
    assert before - resident() > holes * 3 // 4


@glibc
def test_memory_is_looked_at_once_in_a_while(holes: int) -> None:
    before, kept = resident(), HeapTrimmer(64 * MIB)
    kept.used(7 * MIB)
    assert before - resident() < holes // 4
    kept.used(1 * MIB)
    assert before - resident() > holes * 3 // 4


@glibc
def test_a_large_budget_keeps_what_will_be_used_again(holes: int) -> None:
    before, budget = resident(), 1 << 40
    HeapTrimmer(budget).used(budget)
    assert before - resident() < holes // 4


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Musl:
        pass

    monkeypatch.setattr(heap, "_LIBC", Musl())
    HeapTrimmer(8).used(8)
