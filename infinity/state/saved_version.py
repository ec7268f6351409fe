"""Check that a tensor that autograd saved was not changed in place since then."""

from __future__ import annotations

import torch

from infinity.errors import StaleWeightsError


def unchanged(tensor: torch.Tensor, version: int, size: torch.Size | None = None) -> torch.Tensor:
    """Return the tensor. Raises StaleWeightsError if the tensor no longer has this version, because it was modified.

    `size` is the size of the modified tensor, if `tensor` only shares its version.
    """
    if tensor._version != version:
        shape = tuple(tensor.shape if size is None else size)
        raise StaleWeightsError(
            f"a tensor of shape {shape} needed for the backward pass was modified in place "
            f"(version {tensor._version}, expected {version}). Use an operation that is not in place."
        )
    return tensor
