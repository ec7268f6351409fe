"""What exists once per offloaded model below the ledger: engine, store, arena, compute threads, and the home of
every state."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infinity import _native
from infinity.config import SwapConfig
from infinity.io.arena import Lease, PinnedArena
from infinity.io.engine import open_engine
from infinity.io.store import Extent, ExtentMap, SwapStore
from infinity.schedule.device import Device, open_device, pin
from infinity.state.dtypes import master_format, residual_itemsize
from infinity.state.plan import Plan
from infinity.state.unit import Group, Unit

logger = logging.getLogger(__name__)

Home = Lease | Extent
"""Where a state lives for good: RAM or the swap file."""


@dataclass(frozen=True)
class GroupStates:
    """The homes of a trainable group's optimizer states, and the host memory its gradients land in."""

    master: _native.MasterName
    residual: Home | None
    exp_avg: Home
    exp_avg_sq: Home
    gradient: Lease


class Backing:
    """Built from a plan, in order: extents → engine and store → arena → homes. Closed in reverse.

    Raises:
        SwapIOError, StoreLockedError, ConfigError: the swap file cannot be made; nothing is left behind.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        plan: Plan,
        config: SwapConfig,
        device: torch.device,
        faults: Sequence[_native.Fault] = (),
    ) -> None:
        self.plan = plan
        self.device: Device = open_device(device)
        extents = ExtentMap()
        planned = [_plan_homes(unit, plan, extents) for unit in units]
        self.engine = open_engine(config.nvme, faults)
        self.store: SwapStore | None = None
        try:
            if extents.nbytes:
                self.store = SwapStore(config.nvme.paths, extents.nbytes, self.engine, checksums=config.nvme.checksums)
            node = -1 if self.store is None else self.store.numa_node
            self.arena = PinnedArena(plan.arena_bytes, numa_node=node)
            refused = pin(self.arena, self.device)
            if refused:
                logger.warning("%s; copies to and from the GPU are slower, results are the same", refused)
            self.weights: list[Home] = []
            self.states: list[dict[int, GroupStates]] = []
            for unit, (weight, groups) in zip(units, planned, strict=True):
                self.weights.append(weight or self.arena.lease(unit.weight_bytes, f"the weights of '{unit.name}'"))
                self.states.append({index: self._settle(unit, index, homes) for index, homes in groups.items()})
            self.staging = self.arena.lease(plan.staging_bytes, "the update's tiles")
            self._register()
            self.pool = _native.ThreadPool(plan.threads, numa_node=node)
            self.pipeline = _native.UpdatePipeline(self.engine, self.pool, self.staging.view(), plan.tile_numel)
        except BaseException:
            self.engine.close()
            if self.store is not None:
                self.store.close()
            raise

    def _register(self) -> None:
        """Have the kernel keep the memory at hand that transfers use: the tiles, and what is left for weights.

        What never moves (states and gradients in RAM) is not registered: that would make all of it resident at once.
        """
        if self.store is None:
            return
        for view in [self.staging.view(), *self.arena.free_views()]:
            refused = self.engine.register_memory(view)
            if refused:
                logger.warning("%s; transfers take more processor time, results are the same", refused)
                return

    def _settle(self, unit: Unit, index: int, homes: _PlannedHomes) -> GroupStates:
        group = unit.groups[index]
        gradient_itemsize = 4 if self.plan.gradient_fp32 else group.dtype.itemsize

        def home(extent: Extent | None, itemsize: int, state: str) -> Home:
            return extent or self.arena.lease(group.state_bytes(itemsize), f"{state} of '{unit.name}'")

        itemsize = residual_itemsize(homes.master)
        return GroupStates(
            master=homes.master,
            residual=home(homes.residual, itemsize, "residual") if itemsize else None,
            exp_avg=home(homes.exp_avg, 4, "exp_avg"),
            exp_avg_sq=home(homes.exp_avg_sq, 4, "exp_avg_sq"),
            gradient=self.arena.lease(group.state_bytes(gradient_itemsize), f"gradients of '{unit.name}'"),
        )

    def stream(self, home: Home) -> _native.StateStream:
        """A state as the update pipeline takes it."""
        if isinstance(home, Lease):
            return _native.StateStream(memory=home.view())
        if self.store is None:
            raise AssertionError("an extent without a store")
        return _native.StateStream(file=self.store.file, offset=home.offset)

    def close(self) -> None:
        """Stop the threads and remove the swap file. Idempotent."""
        self.pipeline.close()
        self.engine.close()
        if self.store is not None:
            self.store.close()


@dataclass(frozen=True)
class _PlannedHomes:
    master: _native.MasterName
    residual: Extent | None
    exp_avg: Extent | None
    exp_avg_sq: Extent | None


def _plan_homes(unit: Unit, plan: Plan, extents: ExtentMap) -> tuple[Extent | None, dict[int, _PlannedHomes]]:
    """Extents for what lives on NVMe; None for what lives in RAM. A unit's extents lie side by side."""
    weight = extents.add(unit.name, "weight", unit.weight_bytes) if plan.weights == "nvme" else None
    groups = {}
    for index, group in enumerate(unit.groups):
        if not group.trainable:
            continue
        master = master_format(group.dtype, plan.master)
        groups[index] = _PlannedHomes(
            master,
            _extent(extents, plan, unit, group, "residual", residual_itemsize(master)),
            _extent(extents, plan, unit, group, "exp_avg", 4),
            _extent(extents, plan, unit, group, "exp_avg_sq", 4),
        )
    return weight, groups


def _extent(extents: ExtentMap, plan: Plan, unit: Unit, group: Group, state: str, itemsize: int) -> Extent | None:
    if plan.optimizer != "nvme" or itemsize == 0:
        return None
    return extents.add(unit.name, state, group.state_bytes(itemsize))
