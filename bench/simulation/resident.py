"""Simulated work on the memory of resident units: gradients, their sums of squares, and updates on the device.

The memory of a simulated GPU is never touched. So the operations take the time of the bytes that they would move.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch

from infinity.device_update.states import DeviceStates
from infinity.state.machine_rates import RESIDENT_ADAM_BYTES, RESIDENT_NORM_BYTES
from infinity.state.unit import ParameterSpec
from infinity.tiers import resources
from infinity.units import resident_update
from infinity.units.resident_gradients import ResidentGradients, ResidentSums
from infinity.units.resident_update import ResidentUpdates
from simulation.clock import Future
from simulation.fluid import Activity
from simulation.gpu import Gpu


def imitate(patches: ExitStack) -> None:
    """Replace the operations on the memory of resident units, until `patches` is closed."""
    patches.enter_context(mock.patch.object(resources, "clear"))
    patches.enter_context(mock.patch.object(ResidentGradients, "land", _land))
    patches.enter_context(mock.patch.object(ResidentSums, "compute", _compute))
    patches.enter_context(mock.patch.object(ResidentUpdates, "_scratch_of", _gpu_of))
    patches.enter_context(mock.patch.object(resident_update, "update_on_device", _update))


def _land(
    gradients: ResidentGradients, spec: ParameterSpec, gradient: object, *, accumulate: bool, more: bool = False
) -> None:
    """Do nothing but note the gradient: a GPU's memory is many times faster than a link."""
    gradients.present.add(spec.name)


def _gpu_of(updates: ResidentUpdates, *given: object) -> Any:
    """Return the simulated GPU, which `_update` gets in place of temporary memory."""
    return updates.accelerator


def _compute(sums: ResidentSums) -> None:
    """Compute the sums. The host waits for the device, because the step depends on the sums."""
    moved = None
    for group in sums._groups:
        wanted = group.without_sums()
        if wanted:
            gpu: Any = group.memory.uses._accelerator
            moved = _move(gpu, RESIDENT_NORM_BYTES * sum(spec.numel for spec in wanted))
        for spec in wanted:
            group.know(spec, [0.0])
    if moved is not None:
        moved.wait()


def _update(states: DeviceStates, segments: Sequence[object], scratch: Gpu) -> torch.Tensor:
    _move(scratch, RESIDENT_ADAM_BYTES * len(states.weight))
    return torch.ones((), dtype=torch.bool)


def _move(gpu: Gpu, nbytes: int) -> Future:
    rate = gpu.machine.hbm
    return gpu.compute.run(Activity(nbytes, rate, {"device": 1 / rate}))
