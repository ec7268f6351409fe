"""Choice of the Triton kernels for updates on a device, where Triton supports the device."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch

from infinity import _native

if TYPE_CHECKING:
    from infinity.device_update.states import DeviceStates

logger = logging.getLogger(__name__)


class Kernels(Protocol):
    """The functions of triton_kernels.py."""

    def update(self, states: DeviceStates, segments: list[tuple[int, int, _native.Constants]]) -> torch.Tensor: ...

    def sums_of_squares(
        self, gradient: torch.Tensor, first: int, out: torch.Tensor, partial_numel: int, width: int
    ) -> None: ...


@cache
def kernels_of(device: torch.device) -> Kernels | None:
    """Return the kernels; None for the CPU, and where Triton is not installed or does not load.

    The kernels can fail on the device, or give other bits: arithmetic_check.py checks them before their first use.
    """
    if device.type == "cpu" or importlib.util.find_spec("triton") is None:
        return None
    try:
        kernels: Kernels = importlib.import_module("infinity.device_update.triton_kernels")
    except Exception as error:  # this release of Triton is incompatible
        logger.info("Triton cannot be used for updates on %s (%s: %s)", device, type(error).__name__, error)
        return None
    return kernels
