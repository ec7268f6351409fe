"""Bytes that a step moves between memory and NVMe, for a placement. The forecast and the choice of a placement use the
same count."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from infinity.plan.plan_input import PlanInput, UnitBytes


@dataclass(frozen=True)
class NvmeTraffic:
    """NVMe bytes of a step in which no slot is kept after a pass.

    Each pass reads the weights once for the forward and once for the backward. The update reads them once more.

    Attributes:
        read_bytes, written_bytes: bytes of one step, without commits.
        commit_bytes: bytes of the states in RAM and on the device, all of which a commit writes; 0 if there are no
            commits.
        commit_share_bytes: commit_bytes divided by the steps between commits.
    """

    read_bytes: int
    written_bytes: int
    commit_bytes: int
    commit_share_bytes: int

    @property
    def step_bytes(self) -> int:
        """Bytes that a step reads and writes, including the step's share of a commit."""
        return self.read_bytes + self.written_bytes + self.commit_share_bytes


def traffic(
    inputs: PlanInput,
    weights_in_ram: Collection[int],
    states_in_ram: Collection[int],
    gradients_in_ram: Collection[int],
) -> NvmeTraffic:
    """Count the NVMe bytes of a step. Each collection has the indices of the units that have the named state in RAM."""
    passes, read, written, committed = inputs.passes, 0, 0, 0
    for unit in inputs.units:
        if unit.index in weights_in_ram:
            committed += unit.trained_weight
        else:
            read += 2 * passes * unit.weight + unit.trained_weight
            written += unit.trained_weight
        if unit.index in states_in_ram or unit.index in inputs.states_on_device:
            committed += unit.state
        else:
            read += unit.state
            written += unit.state
        if unit.index not in gradients_in_ram:
            moved = gradient_traffic(inputs, unit)
            read += moved
            written += moved
    committed += sum(unit.trained_weight + unit.state for unit in inputs.resident)
    committed = committed if inputs.commit_every else 0
    return NvmeTraffic(read, written, committed, committed // max(inputs.commit_every, 1))


def gradient_traffic(inputs: PlanInput, unit: UnitBytes) -> int:
    """Return the bytes that a step writes for a unit's gradients if they spill. The step reads as many bytes."""
    # A device sends the first of several gradients in autograd's dtype. On the CPU, all of them are in fp32.
    widens = not (inputs.passes > 1 or inputs.config.vertical) or not inputs.limits.in_place
    first = unit.gradient_native if widens else unit.gradient_fp32
    return first + (inputs.passes - 1) * unit.gradient_fp32
