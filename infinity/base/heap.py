"""Return of freed heap memory to the system while a model runs.

Without a GPU, torch's tensors are in glibc's heap. The heap keeps the largest size that it ever had, because the holes
that activations and gradients leave are between tensors in use. glibc can instead map each tensor above a size
threshold separately, but then every such tensor page-faults all its pages again.
"""

from __future__ import annotations

import ctypes

_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
_LIBC = ctypes.CDLL(None)
_SHARE = 8
"""Divisor of the budget: unused memory in the heap may be up to this fraction of the budget."""


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS.split()]


class HeapTrimmer:
    """Heap of this process, whose holes are returned to the system when they are too large.

    The heap is checked when weights of `budget` / 8 bytes have been used since the last check. If the holes together
    have more than `budget` / 8 bytes, the check returns the holes to the system. glibc does not report which holes
    still have pages, so such a check returns all holes again.

    With a C library other than glibc, or glibc before 2.33, this class does nothing.

    Args:
        budget: bytes of RAM that the process should not exceed.
    """

    def __init__(self, budget: int) -> None:
        self._keeps = budget // _SHARE
        self._used = 0
        self._known = hasattr(_LIBC, "mallinfo2") and hasattr(_LIBC, "malloc_trim")
        if self._known:
            _LIBC.mallinfo2.restype = _MallInfo

    def used(self, nbytes: int) -> None:
        """Count weights of `nbytes` that are about to be used, and check the heap if a check is due."""
        self._used += nbytes
        if self._used < self._keeps:
            return
        self._used = 0
        if self._known and _LIBC.mallinfo2().fordblks > self._keeps:
            _LIBC.malloc_trim(0)
