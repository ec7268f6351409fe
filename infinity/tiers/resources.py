"""What exists once per offloaded model below the coordinator: engine, store, arena, compute threads, and the home of
every state."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from infinity import _native
from infinity.config import SwapConfig
from infinity.errors import ConfigError
from infinity.io.arena import PinnedArena, Space
from infinity.io.engine import open_engine
from infinity.io.generations import Generations
from infinity.io.manifest import sum_bytes
from infinity.io.store import Extent, ExtentMap, Mode, SwapStore
from infinity.state.dtypes import master_format, residual_itemsize
from infinity.state.plan import Plan
from infinity.state.unit import Group, Unit
from infinity.tiers.accelerator import Device, open_device, pin
from infinity.tiers.home import GroupStates, Home, UnitHomes, WeightsHome
from infinity.tiers.window import Landing

logger = logging.getLogger(__name__)

_EXTENT_RECORD_BYTES = 256
_BODY_BYTES = 1 << 20


class Resources:
    """Built from a plan, in order: extents → engine and store → arena → homes. Closed in reverse.

    Raises:
        SwapIOError, StoreLockedError, StoreNotEmptyError, ConfigError: the swap file cannot be made; nothing is left
        behind.
        ResumeError: with `resume`, there is no store to resume, or it is another one.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        plan: Plan,
        config: SwapConfig,
        device: torch.device,
        faults: Sequence[_native.Fault] = (),
        *,
        resume: bool = False,
    ) -> None:
        self.plan = plan
        self.device: Device = open_device(device)
        layout = ExtentMap()
        planned = [_plan_homes(unit, plan, layout) for unit in units]
        scratch = ExtentMap(layout.nbytes)
        spilled = {unit.index: _plan_gradients(unit, plan, scratch) for unit in units}
        self.engine = open_engine(config.nvme, faults)
        self.store: SwapStore | None = None
        self.generations: Generations | None = None
        try:
            if scratch.nbytes:
                mode: Mode = "resume" if resume else "generations" if plan.commit_every else "in place"
                self.store = SwapStore(
                    config.nvme.paths,
                    layout.nbytes,
                    self.engine,
                    scratch_bytes=scratch.nbytes - layout.nbytes,
                    checksums=config.nvme.checksums,
                    mode=mode,
                    spare_bytes=_manifests_bytes(layout, plan),
                )
            if self.store is not None and plan.commit_every:
                self.generations = Generations(self.store, layout.extents, plan.keep)
            node = -1 if self.store is None else self.store.numa_node
            self.arena = PinnedArena(plan.arena_bytes, numa_node=node)
            refused = pin(self.arena, self.device)
            if refused:
                logger.warning("%s; copies to and from the GPU are slower, results are the same", refused)
            self.weights_ram = self._open_weights_ram()
            self.units: list[UnitHomes] = []
            for unit, (weights, groups) in zip(units, planned, strict=True):
                extents = spilled[unit.index]
                states = {
                    index: self._open_states(unit, index, each, extents.get(index)) for index, each in groups.items()
                }
                self.units.append(UnitHomes(self._open_weights(unit, weights), states))
            self.landing = self._open_landing()
            self.staging = self.arena.lease(plan.staging_bytes + plan.ahead_bytes, "the update's tiles")
            self._register()
            self.pool = _open_pool(plan.threads, node)
            self.pipeline = _native.UpdatePipeline(
                self.engine,
                self.pool,
                self.staging.view(),
                plan.tile_numel,
                plan.tile_bytes,
                held_tiles_max=plan.ahead_bytes // plan.tile_bytes,
            )
        except BaseException:
            self.engine.close()
            if self.store is not None:
                self.store.close()
            raise

    def homes(self) -> Iterator[Home]:
        """Every state of every unit."""
        for unit in self.units:
            yield from unit

    def extents(self) -> Iterator[Extent]:
        """Every place in the swap file, those of gradients that spill among them."""
        for home in self.homes():
            if home.extent is not None:
                yield home.extent
        for unit in self.units:
            for states in unit.states.values():
                if states.spilled is not None:
                    yield states.spilled

    def destination(self, extent: Extent) -> int:
        """The slot that new values of a state go to."""
        return extent.slot if self.generations is None else self.generations.destination(extent)

    def spare_slot(self, extent: Extent) -> int | None:
        """A slot whose bytes nobody will ever want; None where there is none."""
        if self.generations is not None:
            return self.generations.spare(extent)
        return next((slot for slot in range(len(extent.offsets)) if slot != extent.slot), None)

    def require_store(self) -> SwapStore:
        if self.store is None:
            raise AssertionError("an extent without a store")
        return self.store

    def _register(self) -> None:
        """Have the kernel keep the memory at hand that transfers use: the tiles, and what is left for weights.

        What never moves (states and gradients in RAM) is not registered: that would make all of it resident at once.
        """
        if self.store is None:
            return
        landing = [] if self.landing is None else self.landing.space.free_views()
        for view in [*self.arena.free_views(), *landing, self.staging.view(), *self.weights_ram.free_views()]:
            refused = self.engine.register_memory(view)
            if refused:
                logger.warning("%s; transfers take more processor time, results are the same", refused)
                return

    def _open_weights_ram(self) -> Space:
        """For weights that live in RAM, and new ones beside them. Homes move about in it when these are taken in, so it
        is apart from the memory for fetched weights: that must not be broken up."""
        return self.arena.lease(self.plan.weight_ram_bytes + self.plan.shadow_bytes, "weights in RAM").space()

    def _open_weights(self, unit: Unit, extents: list[Extent | None]) -> WeightsHome:
        lease = None
        if unit.index in self.plan.weights_in_ram:
            lease = self.weights_ram.lease(unit.weight_bytes, f"the weights of '{unit.name}'")
        groups = tuple(
            Home(lease, group.weight_offset, group.weight_bytes, extent, dirty=lease is not None)
            for group, extent in zip(unit.groups, extents, strict=True)
        )
        return WeightsHome(lease, groups, unit.weight_bytes)

    def _open_landing(self) -> Landing | None:
        if not self.plan.landing_bytes:
            return None
        lease = self.arena.lease(self.plan.landing_bytes, "gradients on their way to the store")
        return Landing(lease.space(), self.require_store())

    def _open_states(self, unit: Unit, index: int, homes: _PlannedHomes, spilled: Extent | None) -> GroupStates:
        group = unit.groups[index]
        gradient = None
        if unit.index in self.plan.gradients_in_ram:
            nbytes = group.state_bytes(4 if self.plan.gradient_fp32 else group.dtype.itemsize)
            gradient = self.arena.lease(nbytes, f"gradients of '{unit.name}'")

        def home(state: str, extent: Extent | None) -> Home | None:
            nbytes = _state_bytes(group, homes.master, self.plan, state)
            if nbytes == 0:
                return None
            held = unit.index in self.plan.states_in_ram
            lease = self.arena.lease(nbytes, f"{state} of '{unit.name}'") if held else None
            return Home(lease, 0, nbytes, extent)

        return GroupStates(
            master=homes.master,
            moments=group.moments,
            residual=home("residual", homes.residual),
            exp_avg=home("exp_avg", homes.exp_avg),
            exp_avg_sq=home("exp_avg_sq", homes.exp_avg_sq),
            gradient=gradient,
            spilled=spilled,
        )

    def close(self, *, discard: bool = False) -> None:
        """Stop the threads and remove the swap file, unless it has generations that are not to be discarded.
        Idempotent."""
        self.pipeline.close()
        self.pool.close()
        self.engine.close()
        try:
            self.device.close()
        finally:
            if self.store is not None:
                self.store.close(discard=discard)


def _open_pool(threads: int, node: int) -> _native.ThreadPool:
    try:
        return _native.ThreadPool(threads, numa_node=node)
    except RuntimeError as error:
        raise ConfigError(
            f"update.threads: {threads} threads cannot be started ({error}): this process may have no more. Lower "
            "update.threads, or raise the limit (ulimit -u, or pids.max of the control group)."
        ) from error


@dataclass(frozen=True)
class _PlannedHomes:
    master: _native.MasterName
    residual: Extent | None
    exp_avg: Extent | None
    exp_avg_sq: Extent | None


def _manifests_bytes(layout: ExtentMap, plan: Plan) -> int:
    """Room for the manifests, one more than stay, as far as it can be told before: what is tracked is not in it."""
    if not plan.commit_every:
        return 0
    sums = sum(sum_bytes(extent.nbytes) for extent in layout.extents)
    return (plan.keep + 1) * (sums + _EXTENT_RECORD_BYTES * len(layout.extents) + _BODY_BYTES)


def _plan_homes(unit: Unit, plan: Plan, layout: ExtentMap) -> tuple[list[Extent | None], dict[int, _PlannedHomes]]:
    """Extents for what lives on NVMe, and for everything where generations are kept. A unit's lie side by side."""
    kept = plan.commit_every > 0
    slots = plan.keep + 1 if kept else 1 + (unit.index in plan.spare_units)
    weights: list[Extent | None] = []
    for index, group in enumerate(unit.groups):
        extent = None
        if kept or unit.index not in plan.weights_in_ram:
            of_group = slots if group.trainable else 1
            extent = layout.add(unit.name, "weight", group.weight_bytes, group=index, slots=of_group)
        weights.append(extent)
    groups = {}
    for index, group in enumerate(unit.groups):
        if not group.trainable:
            continue
        master = master_format(group.dtype, plan.master)
        extents: dict[str, Extent | None] = {}
        for state in ("residual", "exp_avg", "exp_avg_sq"):
            nbytes = _state_bytes(group, master, plan, state)
            stored = nbytes > 0 and (kept or unit.index not in plan.states_in_ram)
            extents[state] = layout.add(unit.name, state, nbytes, group=index, slots=slots) if stored else None
        groups[index] = _PlannedHomes(master, extents["residual"], extents["exp_avg"], extents["exp_avg_sq"])
    return weights, groups


def _plan_gradients(unit: Unit, plan: Plan, scratch: ExtentMap) -> dict[int, Extent]:
    """Extents, by group, for the gradients that have no room to be fp32 in RAM. No generation has them."""
    if not plan.landing_bytes:
        return {}
    waiting = unit.index in plan.gradients_in_ram
    return {
        index: scratch.add(unit.name, "grad", group.state_bytes(4), group=index)
        for index, group in enumerate(unit.groups)
        if group.trainable and not (waiting and (plan.gradient_fp32 or group.dtype == torch.float32))
    }


def _state_bytes(group: Group, master: _native.MasterName, plan: Plan, state: str) -> int:
    """0 where the group has no such state."""
    if state == "residual":
        return group.state_bytes(residual_itemsize(master))
    return group.moment_bytes if state in plan.stored else 0
