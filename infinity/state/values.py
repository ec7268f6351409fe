"""Values of parameters, by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

Source = Callable[[str], torch.Tensor]
"""Function that takes the name of a parameter and returns its value on the CPU, in its shape and in any floating-point
dtype."""


@runtime_checkable
class RowsSource(Protocol):
    """A Source that reads some rows of a value alone."""

    def rows(self, name: str, begin: int, end: int | None) -> torch.Tensor:
        """Return rows [begin, end) of a value; with end=None, all rows from `begin` on."""


def sum_of_bits(tensor: torch.Tensor) -> int:
    """Return a checksum of the bits of all values. If a value changes, the checksum almost certainly changes, too."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}[tensor.element_size()]
    return 0 if tensor.is_meta else int(tensor.detach().contiguous().reshape(-1).view(bits).sum())
