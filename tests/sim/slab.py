"""Device memory of the simulation: poisoned, with a copy of its declared contents, and protected while unused."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

POISON = 0xFF
"""Value of a poisoned byte. In every floating-point format, a number whose bytes all have this value is NaN."""
_PROT_NONE, _PROT_ALL = 0, mmap.PROT_READ | mmap.PROT_WRITE
_libc = ctypes.CDLL(None, use_errno=True)


class Slab:
    """One allocation.

    Attributes:
        begin, end: addresses of the first byte and of the end.
        tensor: uint8 [nbytes]; the simulation keeps no reference to the tensor's storage, so torch alone decides the
            storage's lifetime.

    Args:
        shut: whether the pages are accessible only inside `opened`; an undeclared use then ends the process.
    """

    def __init__(self, nbytes: int, *, shut: bool = False) -> None:
        self._map = mmap.mmap(-1, max(nbytes, 1))
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)[:nbytes]
        self._bytes.fill(POISON)
        self._told = self._bytes.copy()
        self.begin = int(self._bytes.ctypes.data)
        self.end = self.begin + nbytes
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)[:nbytes]
        self._shut = shut
        self._open = 0
        self._lock = threading.Lock()
        self._protect(_PROT_NONE)

    def _protect(self, how: int) -> None:
        if self._shut and _libc.mprotect(ctypes.c_void_p(self.begin), ctypes.c_size_t(len(self._map)), how):
            raise OSError(ctypes.get_errno(), "mprotect")

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Allow access to the slab within the context, for a declared use."""
        with self._lock:
            self._open += 1
            if self._open == 1:
                self._protect(_PROT_ALL)
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1
                if self._open == 0:
                    self._protect(_PROT_NONE)

    def reopen(self) -> None:
        """Allow access to the slab from now on, so that the end of the test may use the memory without declaring the
        use.
        """
        self._protect(_PROT_ALL)
        self._shut = False

    def told(self, begin: int, end: int) -> None:
        """Record a declared write to addresses [begin, end)."""
        first, last = max(begin, self.begin) - self.begin, min(end, self.end) - self.begin
        with self.opened():
            self._told[first:last] = self._bytes[first:last]

    def poison(self, begin: int, end: int) -> None:
        with self.opened():
            self._bytes[begin - self.begin : end - self.begin] = POISON
        self._told[begin - self.begin : end - self.begin] = POISON

    def changed_untold(self, begin: int, end: int) -> int | None:
        """Return the first address in [begin, end) that an undeclared write changed."""
        first, last = max(begin, self.begin) - self.begin, min(end, self.end) - self.begin
        with self.opened():
            if np.array_equal(self._bytes[first:last], self._told[first:last]):
                return None
            differing = np.flatnonzero(self._bytes[first:last] != self._told[first:last])
        return self.begin + first + int(differing[0])
