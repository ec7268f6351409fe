"""Return of freed heap memory to the system while a model runs.

Without a GPU, torch's tensors are in glibc's heap. Small objects that live long, such as the nodes of autograd's graph,
lie between the tensors. A new tensor often does not fit the hole of a freed tensor of the same size, as glibc needs
a larger hole for aligned memory. So the heap grows while tensors come and go. glibc can instead map each tensor above a
size threshold separately, but then every such tensor page-faults all its pages again, which takes processor time in
each step.
"""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
_LIBC = ctypes.CDLL(None)
_SHARE = 16
"""Divisor of the budget: the process may have this fraction of the budget more than the most that was in use."""


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS.split()]


class HeapTrimmer:
    """Heap of this process, whose holes are returned to the system before the process grows too large.

    The ceiling is the largest number of bytes in use at any check, plus `budget` / 16. A process below the ceiling
    keeps its holes, because new tensors there cause no page faults. If a process above the ceiling has holes of more
    than `budget` / 16 bytes, the check returns them; otherwise the bytes in use have grown, and the ceiling rises.

    glibc does not report which holes have pages. Their size is therefore the growth of the process since holes were
    last returned, minus the growth of the bytes in use.

    With a C library other than glibc, or glibc before 2.33, this class does nothing.

    Args:
        budget: bytes of RAM that the process should not exceed.
    """

    def __init__(self, budget: int) -> None:
        self._keeps = budget // _SHARE
        self._ceiling = 0
        self._elsewhere: int | None = None  # bytes of the process that are not malloc's
        self._known = hasattr(_LIBC, "mallinfo2") and hasattr(_LIBC, "malloc_trim")
        if self._known:
            _LIBC.mallinfo2.restype = _MallInfo

    def check(self) -> None:
        """Return the holes to the system if the process is too large."""
        if not self._known or (anonymous := _anonymous_bytes()) <= self._ceiling:
            return
        heap = _LIBC.mallinfo2()
        in_use = heap.uordblks + heap.hblkhd
        if self._elsewhere is None:
            self._elsewhere = anonymous - in_use - heap.fordblks
        holes = anonymous - in_use - self._elsewhere
        if holes > self._keeps:
            _LIBC.malloc_trim(0)
            anonymous, holes = _anonymous_bytes(), 0
        self._elsewhere = anonymous - in_use - max(holes, 0)
        self._ceiling = max(self._ceiling, anonymous - max(holes, 0) + self._keeps)

    def restart(self) -> None:
        """Return all holes to the system, and forget how much was in use before.

        Call this when something large has been freed for good, such as the original weights of a model.
        """
        if self._known:
            _LIBC.malloc_trim(0)
            heap = _LIBC.mallinfo2()
            self._elsewhere = _anonymous_bytes() - heap.uordblks - heap.hblkhd
            self._ceiling = 0


def _anonymous_bytes() -> int:
    """Return the bytes of this process's memory that is in RAM and belongs to no file."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * resource.getpagesize()
