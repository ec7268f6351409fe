"""Reading of safetensors files, tensor by tensor.

safetensors reads and checks the header of a file. The values of tensors are read directly: opening a file with
safetensors parses the whole header again, which takes longer than to read a small tensor.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from infinity import files
from infinity.errors import InfinityError, ModelError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_AHEAD_BYTES = 32 << 20
"""Bytes after a tensor that the kernel reads in advance. Most of the time they are the next tensors to read, and the
disk reads them while the tensor is encoded."""
_LARGE_BYTES = 1 << 20
"""Size from which on a tensor is one of the many large ones of a model, which are read one after the other."""
_HEADERS_KEPT = 8
"""The tensors of a unit are in one or two files, and a file of experts has hundreds of tensors."""


class _TensorPlace(NamedTuple):
    """Dtype (as safetensors names it), shape, and byte offset in the file of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


class _Headers:
    """Headers of the files that were read last. A file that was changed is another file."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], dict[str, _TensorPlace]] = {}
        self._lock = threading.Lock()

    def of(self, descriptor: int) -> dict[str, _TensorPlace]:
        """Return the places of the tensors of an open file. Raises SafetensorError and OSError."""
        facts = os.fstat(descriptor)
        key = (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
        known = self._kept.get(key) or self._read(descriptor)
        with self._lock:
            self._kept.pop(key, None)
            self._kept[key] = known  # the last one is the one that was used last
            if len(self._kept) > _HEADERS_KEPT:
                del self._kept[next(iter(self._kept))]
        return known

    def _read(self, descriptor: int) -> dict[str, _TensorPlace]:
        with safe_open(f"/proc/self/fd/{descriptor}", framework="pt", device="cpu"):  # it checks all of the header
            nbytes = int.from_bytes(files.read(descriptor, 8), "little")
        try:
            header = json.loads(files.read(descriptor, 8 + nbytes)[8:])
            return {
                name: _TensorPlace(of["dtype"], tuple(of["shape"]), 8 + nbytes + of["data_offsets"][0])
                for name, of in header.items()
                if name != "__metadata__"
            }
        except (ValueError, TypeError, LookupError) as error:
            raise OSError("the file was changed while it was opened") from error


_headers = _Headers()


@contextmanager
def _failing(
    file: str | Path, name: str = "", failure: type[InfinityError] = ModelError, then: str = "Is the file complete?"
) -> Iterator[None]:
    """Turn the errors of reading into `failure`. The arguments are those of open_tensor_file()."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        what = f"'{name}' " if name else ""
        problem = error.strerror or error if isinstance(error, OSError) else error
        raise failure(f"{file}: {what}cannot be read: {problem}. {then}") from error


@contextmanager
def open_tensor_file(file: str | Path, name: str = "", **failing: Any) -> Iterator[Any]:
    """Open a file with safetensors.

    The pages of tensors that are read leave RAM when the mapping of the file is closed.

    Args:
        file: a safetensors file.
        name: name of the tensor to read, for the error message.
        failing: `failure`, the class of the error (default ModelError), and `then`, the end of the error message.

    Raises:
        ModelError, or `failure`: the file cannot be read, or is not a regular file.
    """
    # The file is opened through its descriptor, because only the descriptor is known to refer to a regular file.
    with (
        _failing(file, name, **failing),
        files.opened(Path(file), follow=True) as (descriptor, _),
        safe_open(f"/proc/self/fd/{descriptor}", framework="pt", device="cpu") as tensors,
    ):
        yield tensors


def tensor_of(file: str | Path, name: str, **failing: Any) -> torch.Tensor:
    """Return a tensor of a file. The arguments and errors are the same as for open_tensor_file()."""
    return rows_in(file, name, 0, None, **failing)


def rows_in(file: str | Path, name: str, begin: int, end: int | None, **failing: Any) -> torch.Tensor:
    """Return rows [begin, end) of a tensor of a file; with end=None, all rows from `begin` on. Other arguments and
    errors are the same as for open_tensor_file()."""
    with _failing(file, name, **failing), files.opened(Path(file), follow=True) as (descriptor, _):
        place = _headers.of(descriptor).get(name)
        if place is None or place.dtype not in _DTYPES:  # safetensors says what is missing, and knows every dtype
            with safe_open(f"/proc/self/fd/{descriptor}", framework="pt", device="cpu") as tensors:
                found: torch.Tensor = tensors.get_tensor(name)
                return found[begin:end] if begin or end is not None else found
        try:
            rows = range(place.shape[0])[begin:end] if place.shape else range(1)
            shape = (len(rows), *place.shape[1:]) if place.shape else ()
            tensor = torch.empty(shape, dtype=_DTYPES[place.dtype], device="cpu")
        except (OverflowError, RuntimeError) as error:  # no elements, and a dimension that no tensor can have
            raise OSError(f"its shape is {list(place.shape)}") from error
        row_bytes = tensor.nbytes // len(rows) if rows else 0
        into = tensor.reshape(-1).view(torch.uint8).numpy().data
        at = place.offset + rows.start * row_bytes
        if len(into) >= _LARGE_BYTES:
            with suppress(OSError):  # a file system without advice
                os.posix_fadvise(descriptor, at + len(into), _AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
        if files.read_into(descriptor, into, at) < len(into):
            raise OSError("the file was truncated")
        return tensor


def names_in(file: str) -> list[str]:
    """Return the names of a file's tensors. Raises ModelError."""
    with open_tensor_file(file) as tensors:
        return list(tensors.keys())


def stored_as(file: str, name: str) -> tuple[str, tuple[int, ...]]:
    """Return the dtype (as safetensors names it) and the shape of a tensor in a file. Raises ModelError."""
    with open_tensor_file(file, name) as tensors:
        found = tensors.get_slice(name)
        return str(found.get_dtype()), tuple(found.get_shape())


def stored_tensors(file: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the dtype (as safetensors names it) and the shape of each tensor of a file. Raises ModelError."""
    with _failing(file), files.opened(Path(file), follow=True) as (descriptor, _):
        return {name: (place.dtype, place.shape) for name, place in _headers.of(descriptor).items()}


def is_readable(file: Path) -> bool:
    try:
        with open_tensor_file(file):
            return True
    except ModelError:
        return False
