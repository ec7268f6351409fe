"""Freed memory goes back to the system while a model runs.

Without a GPU torch's tensors lie in glibc's heap. The heap keeps the largest size that it ever had, because the holes
that activations and gradients leave lie between tensors in use. glibc's own remedy is a low threshold for mapping
tensors one by one: every such tensor then faults its pages anew.
"""

from __future__ import annotations

import ctypes

_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
_LIBC = ctypes.CDLL(None)
_SHARE = 8
"""Freed memory may be as large as one part in so many of the budgets."""


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS.split()]


class Heap:
    """The heap of this process, which is looked at after every `budget` / 8 bytes of weights that were used. Once its
    holes are larger than that, they are given back each time: glibc does not tell which of them still have pages.

    Nothing happens where the C library is another one, or a glibc before 2.33.

    Args:
        budget: bytes of RAM that the process is to stay within.
    """

    def __init__(self, budget: int) -> None:
        self._keeps = budget // _SHARE
        self._used = 0
        self._known = hasattr(_LIBC, "mallinfo2") and hasattr(_LIBC, "malloc_trim")
        if self._known:
            _LIBC.mallinfo2.restype = _MallInfo

    def used(self, nbytes: int) -> None:
        """Weights of `nbytes` are about to be used."""
        self._used += nbytes
        if self._used < self._keeps:
            return
        self._used = 0
        if self._known and _LIBC.mallinfo2().fordblks > self._keeps:
            _LIBC.malloc_trim(0)
