"""A model's persistent buffers (such as running means of batch norms), kept in each generation.

Training changes these buffers, so a resumed run must restore them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from infinity.errors import ResumeError


def named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the persistent buffers with their full names.

    If several names refer to one buffer, the buffer is yielded under each name.
    """
    return iter(reader(model)().items())


def reader(model: nn.Module) -> Callable[[], dict[str, torch.Tensor]]:
    """Return a function that reads the current values of the persistent buffers.

    The function does not keep the model alive, and still works when the model no longer exists.
    """
    places = [
        (f"{prefix}.{name}" if prefix else name, module._buffers, name)
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]

    def read() -> dict[str, torch.Tensor]:
        return {full: buffer for full, owner, name in places if (buffer := owner.get(name)) is not None}

    return read


def restore(model: nn.Module, saved: dict[str, Any]) -> None:
    """Copy the buffer values of a generation into the model's buffers.

    Raises:
        ResumeError: the model's buffers differ from the buffers of the run in name, shape or dtype.
    """
    mine = dict(named(model))
    if mine.keys() != saved.keys():
        name = sorted(mine.keys() ^ saved.keys())[0]
        raise ResumeError(f"buffer '{name}' is only in {'the model' if name in mine else 'the run that is resumed'}")
    for name, buffer in mine.items():
        there = saved[name]
        if not isinstance(there, torch.Tensor) or (buffer.shape, buffer.dtype) != (there.shape, there.dtype):
            facts = (tuple(there.shape), there.dtype) if isinstance(there, torch.Tensor) else type(there).__name__
            raise ResumeError(f"buffer '{name}' is {tuple(buffer.shape)}, {buffer.dtype} here and {facts} in the run")
        with torch.no_grad():
            buffer.copy_(saved[name])
