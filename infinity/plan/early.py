"""What updates that begin before the step is decided need: a slot beside the current one for what lives on NVMe, other
memory for the new weights of what lives in RAM. And what reading ahead gets for those that begin later.

Where generations are kept and every step is one, each state has such a slot. Where nothing is committed they are
reserved as far as the disks reach, the last units of the model first: their gradients come first.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.config import SwapConfig
from infinity.plan.placement import Budgets, Placement
from infinity.plan.spilling import GradientPlacement
from infinity.plan.totals import Totals, as_far_as
from infinity.sizes import PAGE_BYTES, format_bytes, round_up
from infinity.state.plan import Overlap

_DISK_SHARE = 0.9  # of what is free: the rest is for what the run writes elsewhere
_SHADOW_SHARE = 0.5  # of the weights, where states would be cached in the rest
_AHEAD_SHARE = 1 / 2  # of the states: the rest streams in while these are updated, and they stream out


@dataclass(frozen=True)
class EarlyUpdates:
    """Which updates may begin early.

    Attributes:
        overlap: as the config has it; before_forward where none may.
        spare_units: that get another slot although no generations are kept; `spare_bytes` of the swap file.
        shadow_bytes: host memory for new weights.
        ahead_bytes: staging for states that are read before the step is decided.
        reason: why not all may that might; empty where nothing is to be said.
    """

    overlap: Overlap
    spare_units: frozenset[int] = frozenset()
    spare_bytes: int = 0
    shadow_bytes: int = 0
    ahead_bytes: int = 0
    reason: str = ""


def plan_early(
    config: SwapConfig,
    totals: Totals,
    placed: Placement,
    gradients: GradientPlacement,
    budgets: Budgets,
    swap_bytes: int,
    room: int,
) -> EarlyUpdates:
    """Reserve what early updates need. Units whose gradients spill have none: they would wait for their way to the
    store and back. Nor has a GPU: there updates begin with the step.

    Args:
        swap_bytes: of the swap file without it.
        room: bytes of host memory that nothing else wants.
    """
    if config.overlap in ("off", "before_forward"):
        return EarlyUpdates(config.overlap)
    if not budgets.on_cpu:
        return EarlyUpdates("before_forward", reason="on a GPU updates do not begin during backward yet")
    moved = [unit for unit in totals.of_units if unit.index in _moved(totals, placed) & gradients.in_ram]
    if not moved:
        why = "the gradients spill" if _moved(totals, placed) else "the states are in RAM"
        return EarlyUpdates("before_forward", reason=why)
    reason, spare = "", frozenset[int]()

    def slot_bytes(index: int) -> int:
        unit = totals.of_units[index]
        return unit.state + (0 if index in placed.weights_in_ram else unit.trained_weight)

    if config.commit_every == 0:
        free = int(free_bytes(config.nvme.paths) * _DISK_SHARE) - swap_bytes
        # The checksums of a slot are kept in RAM.
        per_byte = totals.checksum_bytes(1 << 30) / (1 << 30)
        reach = min(free, int(room / per_byte)) if per_byte else free
        spare = as_far_as(((unit.index, slot_bytes(unit.index)) for unit in reversed(moved)), reach)
        room -= totals.checksum_bytes(sum(map(slot_bytes, spare)))
        if len(spare) < len(moved):
            wanted = sum(slot_bytes(unit.index) for unit in moved)
            reason = f"early updates of all units would need {format_bytes(wanted)} more on disk"
    elif config.commit_every > 1:
        reason = f"commit_every: {config.commit_every} leaves a free slot in the step after each commit only"
    candidates = [unit for unit in moved if config.commit_every or unit.index in spare]
    in_ram = [unit.weight for unit in candidates if unit.index in placed.weights_in_ram]
    shadow = min(sum(in_ram), room // PAGE_BYTES * PAGE_BYTES)
    if not candidates or (len(in_ram) == len(candidates) and shadow < min(in_ram)):
        why = reason or f"early updates need {format_bytes(min(in_ram, default=0))} more of memory.host"
        return EarlyUpdates("before_forward", reason=why)
    return EarlyUpdates(config.overlap, spare, sum(map(slot_bytes, spare)), shadow, reason=reason)


def shadow_wanted(config: SwapConfig, totals: Totals, placed: Placement, budgets: Budgets) -> int:
    """Host memory that early updates want before more states are cached there; 0 where that is not to be weighed."""
    if config.overlap in ("off", "before_forward") or config.optimizer != "auto" or placed.optimizer != "nvme":
        return 0
    if not budgets.on_cpu:
        return 0
    held = placed.weights_in_ram & _moved(totals, placed)
    weights = [unit.weight for unit in totals.of_units if unit.index in held]
    return round_up(max(int(sum(weights) * _SHADOW_SHARE), max(weights, default=0)), PAGE_BYTES)


def ahead_bytes(
    config: SwapConfig, totals: Totals, placed: Placement, tile_bytes: int, room: int, shadow_bytes: int
) -> int:
    """Staging, in whole tiles, for states that are read before the step is decided.

    Args:
        room: bytes of host memory that nothing else wants.
        shadow_bytes: that are lent to the staging where no updates begin early.
    """
    if config.overlap == "off":
        return 0
    wanted = int(totals.state_of(_moved(totals, placed)) * _AHEAD_SHARE)
    wanted -= _lent_bytes(totals, placed, tile_bytes, shadow_bytes)
    return max(min(room, wanted), 0) // tile_bytes * tile_bytes


def _lent_bytes(totals: Totals, placed: Placement, tile_bytes: int, shadow_bytes: int) -> int:
    """What the shadows hold of tiles. They are lent unit by unit, so of each unit's only whole tiles count: nothing
    where its weights are smaller than one."""
    lent = 0
    for unit in totals.of_units:
        if unit.index in placed.weights_in_ram and 0 < unit.weight <= shadow_bytes:
            shadow_bytes -= unit.weight
            lent += unit.weight // tile_bytes * tile_bytes
    return lent


def _moved(totals: Totals, placed: Placement) -> frozenset[int]:
    return totals.trained - placed.states_in_ram


def free_bytes(paths: Sequence[Path]) -> int:
    """What a file striped evenly over these directories can grow to."""
    free: list[tuple[int, int]] = []
    for path in paths:
        there = path.expanduser().absolute()
        while not there.exists():
            there = there.parent
        free.append((os.stat(there).st_dev, shutil.disk_usage(there).free))
    devices = [device for device, _ in free]
    return min((nbytes // devices.count(device) for device, nbytes in free), default=0) * len(paths)
