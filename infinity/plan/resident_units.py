"""Choice of the units that are updated on the device. With one process these are the resident units: units all of whose
states are kept on the device.

The weights, optimizer states and gradients of a resident unit never leave the device except for commits. So a resident
unit needs no slot, no ring for its gradients, no RAM and no time of the processor. Each byte of device memory that the
states of one unit take is worth the same as a byte of another unit. Therefore the planner takes as many units as fit,
spread evenly over the model: while the device updates a resident unit, the processor updates another unit.

If the planner does not know the batch, `auto` leaves half of memory.device to activations, as without resident units,
but not more than 40 GiB. If the planner knows the batch, activations get what they need, and with the rates of the
machine the planner chooses a share of the units that fit (fastest_plan.py). `device` takes all units that are trained.

If several ranks share their weights in RAM, only a rank's slices of the optimizer states are kept on its device. The
weights stay in RAM, where all ranks fetch them, and the gradients of all ranks are added there. An update copies the
weights and the gradients of a slice to the device, and the new weights back. Such units still need slots. So `auto`
leaves half of the memory to slots, or the bytes of all weights if these are less. Ranks do not compare shares
(fastest_plan.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from infinity.config import SwapConfig
from infinity.errors import PlanError
from infinity.plan.budgets import needed_at_once
from infinity.plan.plan_input import MemoryLimits, UnitBytes, device_state_bytes, operand_bytes, scratch_bytes
from infinity.plan.speculation_memory import spread_out
from infinity.sizes import enough_bytes, format_bytes
from infinity.state.discover import HookedModule
from infinity.state.dtypes import master_format

logger = logging.getLogger(__name__)


def resident_units(
    config: SwapConfig,
    limits: MemoryLimits,
    units: Sequence[UnitBytes],
    sites: Sequence[HookedModule],
    *,
    adds_up: bool,
    refusal: Callable[[], str],
    share: float = 1.0,
) -> frozenset[int]:
    """Return the indices of the units that are updated on the device.

    Args:
        config: the swap config.
        limits: the two budgets.
        units: bytes of all units, in the order of their indices.
        sites: the units that each module needs; empty: every unit has a module of its own.
        adds_up: whether gradients need room for fp32.
        refusal: function that returns why the device cannot update units, or "" if it can; called only if that matters.
        share: share of the units that fit, by bytes; only for `optimizer: auto`.

    Raises:
        PlanError: the config asks for `optimizer: device`, which is not possible; the message says why.
    """
    if config.optimizer not in ("auto", "device"):
        return frozenset()
    trained = [unit for unit in units if unit.state]
    reason = _refusal(config, limits, trained)
    if not reason and trained and (reason := refusal()):
        logger.warning("%s: states stay in RAM or on NVMe", reason)
        return frozenset()
    if reason:
        if config.optimizer == "device":
            raise PlanError(f"optimizer: device is not possible: {reason}. Set optimizer: auto, host or nvme.")
        return frozenset()
    states_only = limits.slice_count > 0  # weights and gradients rest in RAM
    costs = {
        unit.index: device_state_bytes(unit) if states_only else unit.resident_bytes(fp32=adds_up) for unit in trained
    }

    def beside(resident: Collection[int]) -> int:
        """Return the bytes that are needed on the device at least, beside what these units cost."""
        others = [unit for unit in units if states_only or unit.index not in resident]
        slots = [unit.full for unit in others]
        if config.weights != "device":
            slots = needed_at_once([unit.full for unit in units], sites, {unit.index for unit in others})
        ring = sum(sorted(unit.full.gradient_bytes for unit in others)[-2:])
        decoding = sum(sorted(unit.encoded for unit in others)[-2:])
        nbytes = sum(unit.weight_bytes for unit in slots)
        if states_only and config.optimizer == "auto":
            nbytes = max(nbytes, min(sum(unit.full.weight_bytes for unit in units), limits.beside_activations // 2))
        operands = operand_bytes(trained) if states_only else 0
        return nbytes + ring + decoding + scratch_bytes(trained) + operands

    whole = sum(costs.values()) + beside(costs)
    if config.optimizer == "device" and whole > limits.device:
        raise PlanError(
            f"optimizer: device needs {format_bytes(whole)} of memory.device: {format_bytes(sum(costs.values()))} for "
            f"{'optimizer states' if states_only else 'weights, optimizer states and gradients'}, and the rest for "
            f"{'weights and updates' if states_only else 'other weights'}; memory.device is "
            f"{format_bytes(limits.device)}. Raise memory.device to {enough_bytes(whole)} plus what activations need, "
            "or set optimizer: auto."
        )
    room = limits.beside_activations
    if config.optimizer == "device" or (whole <= room and share == 1):
        return frozenset(costs)
    if config.weights == "device":  # `beside` has these weights already
        costs = {unit.index: costs[unit.index] - unit.full.weight_bytes for unit in trained}
    return spread_out(list(costs.items()), int(share * min(room - beside(()), sum(costs.values()))))


def _refusal(config: SwapConfig, limits: MemoryLimits, trained: Sequence[UnitBytes]) -> str:
    """Return why units cannot be kept on the device; "" if they can."""
    if limits.in_place:
        return "the CPU has no memory of its own besides RAM"
    if limits.gathers or (limits.slice_count and config.weights == "nvme"):
        return "several ranks update on their devices only if they share all weights in RAM, and here they do not"
    if limits.slice_count and config.gradients == "nvme":
        return "with several ranks the device updates from gradients in RAM, and the config has gradients: nvme"
    if config.moments != "fp32":
        return f"moments: {config.moments} is updated on the CPU only"
    if config.weights not in ("auto", "device", *(("host",) if limits.slice_count else ())):
        return f"the weights of such units are kept on the device, too, and the config has weights: {config.weights}"
    if config.master == "none" and any(
        master_format(group.group.dtype, config.master) == "none" for unit in trained for group in unit.groups
    ):
        return "master: none is updated on the CPU only"
    if any(unit.encoded for unit in trained):
        return "some trained parameters are in one unit with frozen parameters that are kept in 4 or 8 bits"
    return ""
