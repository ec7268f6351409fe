"""Reading of safetensors files, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from infinity import files
from infinity.errors import InfinityError, ModelError


@contextmanager
def open_tensor_file(
    file: str | Path, name: str = "", failure: type[InfinityError] = ModelError, then: str = "Is the file complete?"
) -> Iterator[Any]:
    """Open a file with safetensors.

    Open the file again for each tensor: the tensor's pages leave RAM when the mapping of the file is closed.

    Args:
        file: a safetensors file.
        name: name of the tensor to read, for the error message.
        failure: the class of the error.
        then: the end of the error message.

    Raises:
        ModelError, or `failure`: the file cannot be read, or is not a regular file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        # The file is opened through its descriptor, because only the descriptor is known to refer to a regular file.
        with (
            files.opened(Path(file), follow=True) as (descriptor, _),
            safe_open(f"/proc/self/fd/{descriptor}", framework="pt", device="cpu") as tensors,
        ):
            yield tensors
    except (OSError, SafetensorError) as error:
        what = f"'{name}' " if name else ""
        problem = error.strerror or error if isinstance(error, OSError) else error
        raise failure(f"{file}: {what}cannot be read: {problem}. {then}") from error


def tensor_of(file: str | Path, name: str, **failing: Any) -> torch.Tensor:
    """Return a tensor of a file. The arguments and errors are the same as for open_tensor_file()."""
    with open_tensor_file(file, name, **failing) as tensors:
        tensor: torch.Tensor = tensors.get_tensor(name)
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


def is_readable(file: Path) -> bool:
    try:
        with open_tensor_file(file):
            return True
    except ModelError:
        return False
