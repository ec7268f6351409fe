"""Ranges for profilers such as torch.profiler and nsys (`torch.autograd.profiler.emit_nvtx`): one per engine phase."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

_NOTHING = nullcontext()


def profiled(phase: str, unit: str = "") -> AbstractContextManager[object]:
    """Return a context manager that a profiler shows as the range `infinity::phase`.

    Without a profiler the context manager does nothing.

    Args:
        phase: name of the phase.
        unit: name of the phase's unit, which profilers show as the range's argument; "" without a unit.
    """
    if not torch._C._autograd._profiler_enabled():
        return _NOTHING
    return record_function(f"infinity::{phase}", unit)
