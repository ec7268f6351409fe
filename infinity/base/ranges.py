"""Ranges for torch.profiler, nsys (`torch.autograd.profiler.emit_nvtx`) and the like: one per phase of the engine."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

_NOTHING = nullcontext()


def profiled(phase: str, unit: str = "") -> AbstractContextManager[object]:
    """A context manager: a profiler shows what runs in it as `infinity::phase`. Without a profiler it does nothing.

    Args:
        unit: name of the unit that the phase is of, which profilers show as the range's argument; "" without one.
    """
    if not torch._C._autograd._profiler_enabled():
        return _NOTHING
    return record_function(f"infinity::{phase}", unit)
