"""The arena: one aligned mapping, lent out as views, absent from forked children and core dumps."""

from __future__ import annotations

import gc
import mmap
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from infinity import _native
from tests.native.children import run_child

HUGE_PAGE = 2 << 20


def mapping_flags(address: int) -> set[str]:
    """Return the kernel's flags of the mapping that contains `address`: 'dc' not copied on fork, 'dd' not dumped, 'hg'
    huge."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(maxsplit=1)[0]
        if "-" in head and not head.endswith(":"):
            begin, end = (int(part, 16) for part in head.split("-"))
            inside = begin <= address < end
        elif inside and head == "VmFlags:":
            return set(line.split()[1:])
    raise LookupError(hex(address))


def is_resident(address: int) -> bool:
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(address // mmap.PAGESIZE * 8)
        return bool(struct.unpack("<Q", pagemap.read(8))[0] >> 63)


@pytest.mark.parametrize("nbytes", [1, 4096, HUGE_PAGE, HUGE_PAGE + 4096, 3 * HUGE_PAGE + 1])
def test_an_arena_starts_on_a_huge_page_border_and_holds_exactly_what_was_asked_for(nbytes: int) -> None:
    arena = _native.Arena(nbytes)
    assert arena.address % HUGE_PAGE == 0
    assert arena.nbytes == nbytes
    assert arena.view(0, nbytes).nbytes == nbytes


def test_a_view_is_writable_bytes_at_its_offset() -> None:
    arena = _native.Arena(3 * 4096)
    view = arena.view(4096, 100)
    assert (view.format, view.ndim, view.readonly, view.contiguous) == ("B", 1, False, True)
    assert np.frombuffer(view, np.uint8).ctypes.data == arena.address + 4096
    view[:3] = b"abc"
    assert bytes(arena.view(0, 3 * 4096)[4095:4100]) == b"\0abc\0"


def test_a_view_keeps_the_mapping_alive() -> None:
    view = _native.Arena(1 << 20).view(4096, 4096)
    gc.collect()
    view[:] = b"x" * 4096
    assert bytes(view[-2:]) == b"xx"


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, 8193), (8192, 1), (8193, 0), (4096, (1 << 64) - 4096), ((1 << 64) - 1, 1)]
)
def test_a_view_outside_the_arena_is_refused(offset: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="outside the arena"):
        _native.Arena(8192).view(offset, nbytes)


def test_an_empty_arena_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        _native.Arena(0)


@pytest.mark.parametrize("nbytes", [1 << 60, (1 << 64) - 1])
def test_an_arena_larger_than_the_address_space_is_an_os_error(nbytes: int) -> None:
    with pytest.raises(OSError, match="cannot map"):
        _native.Arena(nbytes)


def test_pages_are_touched_on_first_use_only() -> None:
    arena = _native.Arena(4 * 4096, huge_pages=False)
    pages = [arena.address + page * 4096 for page in range(4)]
    assert not any(is_resident(page) for page in pages)
    arena.view(2 * 4096, 1)[0] = 1
    assert [is_resident(page) for page in pages] == [False, False, True, False]


def test_the_mapping_is_kept_out_of_forks_and_core_dumps() -> None:
    arena = _native.Arena(HUGE_PAGE, huge_pages=False)
    flags = mapping_flags(arena.address)
    assert {"dc", "dd"} <= flags
    assert "hg" not in flags


def test_huge_pages_are_reported_as_the_kernel_took_the_advice() -> None:
    arena = _native.Arena(HUGE_PAGE)
    assert arena.huge_pages == ("hg" in mapping_flags(arena.address))


def test_a_forked_child_drops_its_arena_without_touching_what_now_lies_there() -> None:
    """The child has no such mapping, so that address may hold memory of its own by then."""
    run_child(
        """
        import ctypes, os

        arena = _native.Arena(1 << 20)
        arena.view(0, 1)[0] = 7
        child = os.fork()
        if child == 0:
            libc = ctypes.CDLL(None, use_errno=True)
            libc.mmap.restype = ctypes.c_void_p
            libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
            read_write, private_anonymous_fixed_noreplace = 3, 0x2 | 0x20 | 0x100000
            own = libc.mmap(arena.address, 1 << 20, read_write, private_anonymous_fixed_noreplace, -1, 0)
            assert own == arena.address
            ctypes.memset(own, 9, 4096)
            del arena
            os._exit(0 if ctypes.string_at(own, 1) == b"\\x09" else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert arena.view(0, 1)[0] == 7
        """
    )


def test_memory_for_shared_pages_is_taken_before_it_is_used() -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, 8 * 4096)
    arena = _native.Arena.shared(fd, 8 * 4096)
    arena.view(0, 1)[:] = b"x"
    arena.populate(4096, 2 * 4096)
    assert os.fstat(fd).st_blocks * 512 == 3 * 4096
    assert bytes(arena.view(0, 1)) == b"x"
    with pytest.raises(IndexError, match="outside the arena"):
        arena.populate(7 * 4096, 2 * 4096)
    os.close(fd)
