"""Advice to the kernel about the pages of files that are mapped into memory, such as the tensors of a checkpoint that
safetensors opened."""

from __future__ import annotations

import ctypes
import mmap

import torch

_AHEAD_BYTES = 64 << 20
_WORTHWHILE_BYTES = 1 << 20
_libc = ctypes.CDLL(None, use_errno=True)


def preload_pages(value: torch.Tensor) -> None:
    """Make the kernel read a tensor, and the 64 MiB after it in the file, in the background.

    The call is only advice: if the kernel ignores the advice, only time is lost. If the memory belongs to no file,
    pages that were swapped out are read back.

    Args:
        value: contiguous tensor on the CPU.
    """
    if value.nbytes < _WORTHWHILE_BYTES or not hasattr(mmap, "MADV_WILLNEED"):
        return
    begin = value.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    nbytes = value.data_ptr() + value.nbytes + _AHEAD_BYTES - begin
    _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(nbytes), mmap.MADV_WILLNEED)
