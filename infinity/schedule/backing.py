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
    exp_avg: Home | None
    exp_avg_sq: Home | None
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
            self.pipeline = _native.UpdatePipeline(
                self.engine, self.pool, self.staging.view(), plan.tile_numel, plan.tile_bytes
            )
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

        def home(state: str, extent: Extent | None) -> Home | None:
            nbytes = _state_bytes(group, homes.master, self.plan, state)
            if nbytes == 0:
                return None
            return extent or self.arena.lease(nbytes, f"{state} of '{unit.name}'")

        return GroupStates(
            master=homes.master,
            residual=home("residual", homes.residual),
            exp_avg=home("exp_avg", homes.exp_avg),
            exp_avg_sq=home("exp_avg_sq", homes.exp_avg_sq),
            gradient=self.arena.lease(group.state_bytes(gradient_itemsize), f"gradients of '{unit.name}'"),
        )

    def stream(self, home: Home | None) -> _native.StateStream | None:
        """A state as the update pipeline takes it; None where there is none."""
        if home is None:
            return None
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
            _extent(extents, plan, unit, group, master, "residual"),
            _extent(extents, plan, unit, group, master, "exp_avg"),
            _extent(extents, plan, unit, group, master, "exp_avg_sq"),
        )
    return weight, groups


def _extent(
    extents: ExtentMap, plan: Plan, unit: Unit, group: Group, master: _native.MasterName, state: str
) -> Extent | None:
    nbytes = _state_bytes(group, master, plan, state)
    return extents.add(unit.name, state, nbytes) if plan.optimizer == "nvme" and nbytes else None


def _state_bytes(group: Group, master: _native.MasterName, plan: Plan, state: str) -> int:
    """0 where the group has no such state."""
    if state == "residual":
        return group.state_bytes(residual_itemsize(master))
    return group.moment_bytes if state in plan.stored else 0
