"""The dtypes that a weight may have, with their names in the native core."""

from __future__ import annotations

import torch

from infinity import _native
from infinity.errors import ModelError

_NAMES: dict[torch.dtype, _native.DTypeName] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


native_name = _NAMES.__getitem__
"""Function that returns the native core's name of a dtype."""


def require_supported(name: str, dtype: torch.dtype) -> None:
    """Raise ModelError for a dtype that infinity does not support."""
    if dtype.is_complex:
        raise ModelError(
            f"parameter '{name}' is {dtype}, and infinity moves real weights only. Store the same numbers in a "
            "real parameter, nn.Parameter(torch.view_as_real(weight)), and use torch.view_as_complex(self.weight) "
            "in the forward. torch's optimizers do the same internally."
        )
    if dtype not in _NAMES:
        raise ModelError(f"parameter '{name}' is {dtype}; infinity moves float32, bfloat16 and float16 weights")


def master_format(dtype: torch.dtype, asked: _native.MasterName) -> _native.MasterName:
    """Return the form of the fp32 master of a weight.

    An fp32 weight is itself the master. fp16 weights always have an fp32 master, because their residual does not fit
    into 16 bits, and because their range is too small for training without a master.
    """
    if dtype == torch.float32:
        return "weight"
    if dtype == torch.float16:
        return "fp32"
    return asked


def residual_itemsize(master: _native.MasterName) -> int:
    """Return the bytes per element of the state `residual`."""
    return {"weight": 0, "split16": 2, "fp32": 4, "none": 0}[master]
