"""Resources of one offloaded model below the coordinator.

The resources are the I/O engine, the store, the arena, the compute threads and the home of every state. Each model has
its own resources, which are opened according to the plan's layout.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from infinity import _native
from infinity.base.accelerator import Accelerator, open_accelerator
from infinity.config import NvmeConfig
from infinity.errors import ConfigError
from infinity.io import atomic_file
from infinity.io.arena import ArenaRegion, Lease, PinnedArena
from infinity.io.directory import require_place
from infinity.io.engine import BackgroundWork, open_engine
from infinity.io.generations import Generations
from infinity.io.scratch import ScratchFiles
from infinity.io.store import Extent, Mode, SwapStore, wait_all
from infinity.plan.layout import StateLayout, UnitLayout
from infinity.plan.plan import Plan
from infinity.plan.plan_input import FLAG_BYTES
from infinity.sizes import PAGE_BYTES
from infinity.state.unit import Unit
from infinity.tiers.activations import ActivationTier, DeviceCopies, HostCopies
from infinity.tiers.decoding import open_decoding
from infinity.tiers.device import DeviceTier, open_device, torch_device
from infinity.tiers.home import GroupStateHomes, ResidentHome, StateHome, UnitHomes, WeightsHome
from infinity.tiers.idle_clock import IdleClock
from infinity.tiers.landing_window import LandingWindow
from infinity.tiers.resident import ResidentMemory, ResidentUses, clear
from infinity.tiers.state_writer import StateWriter
from infinity.tiers.weights_memory import RankResources

logger = logging.getLogger(__name__)

_STATES = ("residual", "exp_avg", "exp_avg_sq")
_REGISTERED_ACTIVATION_BYTES = 128 << 20


class ModelResources:
    """Resources of one offloaded model.

    The resources are opened in this order and closed in reverse order: engine, store, arena, threads, device, homes.

    If an error occurs during opening, all resources that were already opened are closed.

    Attributes:
        world: the ranks. When the resources are closed, this rank leaves the world.
        facts: facts about this rank's states. A run can resume these states only if its facts are the same.
        torch_device: device on which models compute.
        device: device tier; None when models compute in host memory.
        activation_memory: host memory for tensors that a forward keeps.
        commit_ring: host memory for states on the device on their way to or from the store.
        idle: clock of the device's idle time.
        weights: memory of the weights in RAM.
        transfers: memory that weights are fetched into, or pass on their way to the device (WeightsMemory.transfers).
        decoding: decoder of encoded weights for slots in host memory; None when no weights are decoded in host memory.
        activations: tier of the tensors that a forward keeps; None if these stay on the device.
        state_writer: queue of states from the device to the store; None when no states are there, or without commits.

    Raises:
        SwapIOError: the swap file cannot be made.
        StoreLockedError: another run uses the directory.
        StoreNotEmptyError: the directory has the generations of an earlier run.
        ConfigError: the config does not fit the machine (for example, a path or update.threads).
        ResumeError: with `resume`: there is no store to resume, or the existing store does not fit the model and the
            config.
    """

    def __init__(
        self,
        plan: Plan,
        nvme: NvmeConfig,
        device: torch.device,
        ranks: RankResources,
        faults: Sequence[_native.Fault] = (),
        *,
        resume: bool = False,
    ) -> None:
        self.plan = plan
        self.world, self.weights = ranks.world, ranks.weights
        self.facts = plan.peers.facts
        self._quiet = False
        accelerator = open_accelerator(device)
        self.torch_device = torch_device(accelerator)
        self.device: DeviceTier | None = None
        self.idle = IdleClock(accelerator)
        self.engine = open_engine(nvme, faults)
        self.store: SwapStore | None = None
        self.generations: Generations | None = None
        arena, staging = plan.layout.arena, plan.budgets.staging
        try:
            if plan.needs_store:
                self.store = self._open_store(nvme, ranks.run, resume=resume)
            node = self._numa_node(accelerator)
            self.arena = PinnedArena(arena.nbytes, numa_node=node)
            # Homes have a separate memory region. They move when an update is applied, and would otherwise fragment the
            # memory for fetched weights.
            self.resting = self.arena.lease(arena.homes_and_shadows, "weights and states in RAM").space()
            self.landing_window: LandingWindow | None = None
            if arena.landing:
                lease = self.arena.lease(arena.landing, "gradients on their way to the store")
                self.landing_window = LandingWindow(lease.space(), self.require_store())
            self.between_ranks = self._region(arena.exchange, "gradients between ranks")
            self.secondary = self._region(arena.secondary, "copies of weights of other ranks")
            self.commit_ring = self._region(arena.commits, "states of the device for commits")
            self.activation_memory = self._region(arena.activations, "activations")
            self.staging = self.arena.lease(arena.staging, "the update's tiles")
            self.transfers = self.weights.transfers(self.arena)
            self.pool = _open_pool(staging.threads, node, 0 if accelerator is None else accelerator.nice)
            self.decoding = open_decoding(plan, self.arena, self.pool)
            self.device = open_device(accelerator, plan, self.arena, self.engine, self.pool)
            refused = "" if accelerator is None else self.weights.pin(accelerator)
            if refused:
                logger.warning("%s; copies of weights to the device are slower, results are the same", refused)
            self.units = [self._open_unit(unit) for unit in plan.layout.units]
            if self.store is not None and plan.placement.commit_every:
                extents = [home.stored() for home in self.homes()]
                cut = plan.peers.cut
                self.generations = Generations(
                    self.store, extents, plan.placement.keep, plan.placement.pins, cut.index, cut.count, ranks.run
                )
            self.state_writer = self._open_state_writer()
            self.activations = self._open_activations()
            self._register()
            self.pipeline = _native.UpdatePipeline(
                self.engine,
                self.pool,
                self.staging.view(),
                staging.tile_numel,
                staging.tile_bytes,
                ahead_tiles_max=staging.ahead_tiles,
            )
        except BaseException:
            self.engine.close()
            self.weights.close()
            if self.store is not None:
                self.store.close()
            raise

    def _region(self, nbytes: int, what: str) -> ArenaRegion:
        """Lease a part of the arena for the whole run; 0 bytes need no lease."""
        return self.arena.lease(nbytes, what).space() if nbytes else ArenaRegion(self.arena.memory, 0, 0)

    def _numa_node(self, accelerator: Accelerator | None) -> int:
        """Return the NUMA node for the memory and the threads of updates; -1 for any node.

        The device's node has priority over the node of the disks, because the device's bus carries all weights in each
        forward and backward. The disks read and write states only once per step.
        """
        node = -1 if accelerator is None else accelerator.numa_node
        return self.store.numa_node if node < 0 and self.store is not None else node

    def homes(self) -> Iterator[StateHome]:
        """Yield the home of every state of every unit."""
        for unit in self.units:
            yield from unit

    def read_homes(self) -> None:
        """Read all states in memory from the store.

        Raises:
            SwapIOError: a read failed.
        """
        held, reads = [home for home in self.homes() if home.in_memory], list[BackgroundWork]()
        try:
            for home in held:
                reads += home.load(self)
        finally:
            wait_all(reads)
        for home in held:
            home.mark_read()

    def extents(self) -> Iterator[Extent]:
        """Yield every extent in the swap file, including the extents for spilled gradients."""
        for home in self.homes():
            if home.extent is not None:
                yield home.extent
        for unit in self.units:
            for states in unit.states.values():
                if states.spilled is not None:
                    yield states.spilled

    def synchronize_uploads(self) -> None:
        """Wait until no copy to the device reads weights in RAM. The caller is about to change these weights."""
        if self.device is not None:
            self.device.uploads.synchronize()

    def copy_to_write(self, extent: Extent) -> int:
        """Return the copy in the store to which new values of a state are written."""
        return extent.newest_copy if self.generations is None else self.generations.copy_to_write(extent)

    def spare_copy(self, extent: Extent) -> int | None:
        """Return a copy in the store that is not the newest copy and belongs to no generation; None if there is no such
        copy."""
        if self.generations is not None:
            return self.generations.spare_copy(extent)
        return next((copy for copy in range(len(extent.offsets)) if copy != extent.newest_copy), None)

    def require_store(self) -> SwapStore:
        if self.store is None:
            raise AssertionError("an extent without a store")
        return self.store

    def require_state_writer(self) -> StateWriter:
        if self.state_writer is None:
            raise AssertionError("states on the device are written without a ring")
        return self.state_writer

    def _register(self) -> None:
        """Register the memory of transfers with the kernel: tiles, the rings of commits and activations, and free
        memory for weights.

        States in RAM are not registered, because registration would allocate all their pages immediately.
        """
        if self.store is None:
            return
        landing = [] if self.landing_window is None else self.landing_window.space.free_views()
        ring = self.commit_ring.free_views()
        last = self._activations_to_register()
        slots = [] if self.transfers is self.arena else self.transfers.free_views()
        tiles, resting = self.staging.view(), self.resting.free_views()
        for view in [*self.arena.free_views(), *slots, *landing, *ring, tiles, *resting, *last]:
            refused = self.engine.register_memory(view)
            if refused:
                logger.warning("%s; transfers take more processor time, results are the same", refused)
                return

    def _activations_to_register(self) -> list[memoryview]:
        """Return the memory of activations on their way to NVMe, up to the bytes that a pass moves.

        If these bytes are not known, a small model would otherwise allocate the memory of a large model. Leases are
        first-fit, so the first bytes of the region are used most.
        """
        if self.plan.placement.activations != "nvme":
            return []
        moved = self.plan.budgets.limits.away or _REGISTERED_ACTIVATION_BYTES
        return [view[:moved] for view in self.activation_memory.free_views()]

    def _open_store(self, nvme: NvmeConfig, run: str, *, resume: bool) -> SwapStore:
        layout = self.plan.layout
        kept = layout.swap.kept if layout.swap.nbytes else PAGE_BYTES  # a rank without states has manifests, too
        mode: Mode = "resume" if resume else "generations" if self.plan.placement.commit_every else "in place"
        return SwapStore(
            nvme.paths,
            kept,
            self.engine,
            scratch_bytes=layout.swap.scratch,
            checksums=nvme.checksums,
            mode=mode,
            spare_bytes=layout.manifest_bytes,
            run=run,
        )

    def _open_state_writer(self) -> StateWriter | None:
        if self.device is None or not self.commit_ring.nbytes:
            return None
        device = self.device
        return StateWriter(device.accelerator, device.gate, self.commit_ring, self.pool, self.require_store())

    def _open_activations(self) -> ActivationTier | None:
        space = self.activation_memory
        if not space.nbytes:
            if self.plan.placement.activations == "host":
                logger.warning(
                    "activations: host: memory.host has no room left, and activations stay on the device. Raise "
                    "memory.host, or set activations: nvme."
                )
            return None
        on_nvme = self.plan.placement.activations == "nvme"
        scratch = ScratchFiles(self.require_store(), "activations", "activations") if on_nvme else None
        limits = self.plan.budgets.limits
        room = max(limits.device - self.plan.device_bytes, 0)
        share = room // 2 if limits.block is None else max(room - limits.block, 0)
        if self.device is None:
            return ActivationTier(space, scratch, HostCopies(), share)
        copies = DeviceCopies(self.device.accelerator, self.device.gate, self.pool)
        return ActivationTier(space, scratch, copies, share)

    def _open_unit(self, layout: UnitLayout) -> UnitHomes:
        if layout.is_resident and self.device is not None:
            return self._open_resident(layout, self.device)
        weights = self._open_weights(layout)
        # In this order the weights, the residuals and the first moments are one piece of memory. When these homes move,
        # their old memory is again free in one piece, even if the optimizer does not change the second moment.
        leases = {
            (name, index): self.resting.lease(group.states[name].lease_bytes, f"{name} of '{layout.local.name}'")
            for name in _STATES
            for index, group in enumerate(layout.groups)
            if name in group.states and group.states[name].lease_bytes
        }
        there, flags = self._open_device_states(layout)
        trained = [index for index, group in enumerate(layout.groups) if group.states]
        states = {index: self._open_states(layout, index, leases, there) for index in trained}
        return UnitHomes(weights, states, flags)

    def _open_device_states(
        self, layout: UnitLayout
    ) -> tuple[dict[tuple[str, int], ResidentMemory], ResidentMemory | None]:
        """Return the device memory of the states that are kept there, by state and group, and of the flags of their
        updates; ({}, None) if there are none."""
        if not layout.resident_bytes or self.device is None:
            return {}, None
        memory, uses, of_flags = _cleared(self.device, layout.resident_bytes)
        there, begin = {}, 0
        for index, group in enumerate(layout.groups):
            for state, place in group.states.items():
                there[state, index] = ResidentMemory(memory[begin : begin + place.resident_bytes], uses)
                begin += place.resident_bytes
        return there, ResidentMemory(memory[begin : begin + FLAG_BYTES], of_flags)

    def _open_resident(self, layout: UnitLayout, device: DeviceTier) -> UnitHomes:
        """Open the homes of a resident unit. Its memory has the weights of all groups first, as a slot has them."""
        memory, states, flags = _cleared(device, layout.resident_bytes)
        gradients = ResidentUses(device.accelerator)
        with gradients.writing():  # later uses, on any stream, wait for this one
            pass
        unit, begin = layout.local, 0

        def home(index: int, state: str, place: StateLayout) -> ResidentHome:
            nonlocal begin
            start, begin = begin, begin + place.resident_bytes
            is_weight, part = state == "weight", ResidentMemory(memory[start:begin], states)
            extent = _extent(unit, index, state, place)
            return ResidentHome(None, start * is_weight, place.nbytes, extent, dirty=is_weight, memory=part)

        weights = tuple(home(index, "weight", group.weight) for index, group in enumerate(layout.groups))
        whole = ResidentMemory(memory[:begin], states)
        trained = {}
        for index, group in enumerate(layout.groups):
            if group.states:
                homes = {state: home(index, state, place) for state, place in group.states.items()}
                trained[index] = GroupStateHomes(
                    master=group.master,
                    moments=group.group.moments,
                    residual=homes.get("residual"),
                    exp_avg=homes.get("exp_avg"),
                    exp_avg_sq=homes.get("exp_avg_sq"),
                    gradient=None,
                    spilled=None,
                    resident=ResidentMemory(
                        device.memory_for_resident_gradients(layout.gradients[index].resident_bytes), gradients
                    ),
                )
        reports = ResidentMemory(memory[begin : begin + FLAG_BYTES], flags)
        return UnitHomes(WeightsHome(weights, unit.home_bytes, unit, whole), trained, reports)

    def _open_weights(self, layout: UnitLayout) -> WeightsHome:
        extents = [_extent(layout.local, index, "weight", group.weight) for index, group in enumerate(layout.groups)]
        return self.weights.open(layout, extents, self.resting)

    def _open_states(
        self,
        layout: UnitLayout,
        index: int,
        leases: Mapping[tuple[str, int], Lease],
        there: Mapping[tuple[str, int], ResidentMemory],
    ) -> GroupStateHomes:
        unit, group, gradient = layout.local, layout.groups[index], layout.gradients[index]

        def home(state: str) -> StateHome | None:
            place = group.states.get(state)
            if place is None:
                return None
            extent = _extent(unit, index, state, place)
            if (state, index) in there:
                return ResidentHome(None, 0, place.nbytes, extent, memory=there[state, index])
            return StateHome(leases.get((state, index)), 0, place.nbytes, extent)

        nbytes = gradient.lease_bytes
        return GroupStateHomes(
            master=group.master,
            moments=group.group.moments,
            gradient=self.arena.lease(nbytes, f"gradients of '{unit.name}'") if nbytes else None,
            residual=home("residual"),
            exp_avg=home("exp_avg"),
            exp_avg_sq=home("exp_avg_sq"),
            spilled=_extent(unit, index, "grad", gradient),
        )

    def close(self, *, discard: bool = False) -> None:
        """Stop the threads and close the store. A second call does nothing.

        The swap file is removed unless it has generations.

        Args:
            discard: whether the swap file is removed even if it has generations.
        """
        try:
            self._quiet = self.world.close()
        finally:
            self._close(discard=discard)

    def _close(self, *, discard: bool) -> None:
        self.pipeline.close()
        try:
            with ExitStack() as closing:  # close all, even if one raises
                for part in (self.device, self.state_writer, self.activations):
                    if part is not None:
                        closing.callback(part.close)
        finally:
            self.weights.close()
            if self.decoding is not None:
                self.decoding.close()
            self.pool.close()
            self.engine.close()
            if self.store is not None:
                self.store.close(discard=discard)

    def give_back(self) -> None:
        """Free RAM and device memory, even while references to the model exist. Call this after close().

        There must be no views of a slot. If another rank or a tensor that a forward kept may still use the memory, the
        memory is not freed.
        """
        if not self._quiet or (self.activations is not None and self.activations.borrowed):
            return
        self.arena.give_all_back()
        self.weights.give_back()
        if self.device is not None:
            for unit in self.units:
                unit.give_back()
            self.device.give_back()


def _cleared(device: DeviceTier, nbytes: int) -> tuple[torch.Tensor, ResidentUses, ResidentUses]:
    """Return memory of a unit on the device, filled with zeros, and the uses of its states and of its flags."""
    memory = device.memory_for_resident_states(nbytes)
    states, flags = ResidentUses(device.accelerator), ResidentUses(device.accelerator)
    with states.writing(), flags.writing():
        clear(memory)
    return memory, states, flags


def make_directory(path: Path) -> None:
    """Make a directory that nvme.paths names. Each rank makes its own directory inside this directory.

    Raises:
        ConfigError: the path cannot be used.
    """
    require_place(path)
    place = path.expanduser().absolute()
    if not place.exists():
        place.mkdir(mode=0o700, exist_ok=True)
        atomic_file.sync_directory(place.parent)


def _open_pool(threads: int, node: int, nice: int) -> _native.ThreadPool:
    try:
        return _native.ThreadPool(threads, numa_node=node, nice=nice)
    except OSError as error:
        raise ConfigError(
            f"update.threads: {threads} threads cannot be started ({os.strerror(error.errno or 0)}): this process may "
            "not start more. Lower update.threads, or raise the limit (ulimit -u, or pids.max of the control group)."
        ) from error


def _extent(unit: Unit, group: int, state: str, layout: StateLayout) -> Extent | None:
    """Return the extent of a state; None if the state has no copy in the swap file."""
    return Extent(unit.name, group, state, layout.offsets, layout.nbytes) if layout.offsets else None
