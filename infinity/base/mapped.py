"""Files that are mapped into memory, as safetensors gives a checkpoint's tensors."""

from __future__ import annotations

import ctypes
import mmap

import torch

_AHEAD_BYTES = 64 << 20
_WORTHWHILE_BYTES = 1 << 20
_libc = ctypes.CDLL(None, use_errno=True)


def read_ahead(value: torch.Tensor) -> None:
    """Have the kernel read a tensor, and what follows it in its file, while something else is done. Only advice: a
    kernel that does not take it costs time alone. Of memory that is no file's, pages that were swapped out come back.

    Args:
        value: contiguous, on the CPU.
    """
    if value.nbytes < _WORTHWHILE_BYTES or not hasattr(mmap, "MADV_WILLNEED"):
        return
    begin = value.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    nbytes = value.data_ptr() + value.nbytes + _AHEAD_BYTES - begin
    _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(nbytes), mmap.MADV_WILLNEED)
