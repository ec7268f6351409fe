"""Units without a model: small units with homes in a small arena, and fakes of the pipeline and the device."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from infinity.base.timeline import Timeline
from infinity.io.arena import ArenaRegion
from infinity.io.store import Extent
from infinity.ranks.world import SingleProcessWorld
from infinity.sizes import PAGE_BYTES
from infinity.state.shard import RankPartition, Shard
from infinity.state.unit import FlatParameterGroup, ParameterSpec, Unit
from infinity.state.update_request import GroupUpdate, SegmentRequest
from infinity.tiers.home import GroupStateHomes, StateHome, UnitHomes, WeightsHome
from infinity.units.arrivals import GradientArrivals
from infinity.units.health import ModelHealth
from infinity.units.parameters import ParameterViews
from infinity.units.released_parameters import released_class
from infinity.units.speculative_update_buffers import SpeculativeUpdateBuffers
from infinity.units.unit import OffloadedUnit
from infinity.units.update import UpdateTransfer
from tests.tiers.fakes import CANCELED, Store, UpdateFuture, extent

NUMEL = PAGE_BYTES // 4
"""Number of elements of a group that has one page of fp32 weights."""


def unit_of(index: int, groups: Sequence[int] = (1,), *, stays: bool = False) -> Unit:
    """Return a unit of fp32 groups. `groups` has the number of pages of each group; each group has two parameters."""
    made, offset = [], 0
    for number, count in enumerate(groups):
        half = NUMEL * count // 2
        specs = tuple(
            ParameterSpec(f"{index}.{number}.{part}", torch.Size([half]), half, half * part, 0) for part in (0, 1)
        )
        made.append(FlatParameterGroup(torch.float32, True, "fp32", specs, 2 * half, offset, PAGE_BYTES * count))
        offset += PAGE_BYTES * count
    return Unit(index, str(index), tuple(made), offset, stays)


def homes_of(
    unit: Unit, weights: ArenaRegion | None = None, states: ArenaRegion | None = None, *, kept: bool = False
) -> UnitHomes:
    """Return the homes of a unit. `weights` and `states` are spaces in RAM for the homes; None: the homes are in the
    store. `kept`: homes in RAM have an extent, too.
    """

    def home(state: str, group: int, space: ArenaRegion | None) -> StateHome:
        lease = None if space is None else space.lease(PAGE_BYTES * size(group), state)
        return StateHome(lease, 0, PAGE_BYTES * size(group), place(state, group, space))

    def place(state: str, group: int, space: ArenaRegion | None) -> Extent | None:
        return extent(unit.name, state, group=group, count=size(group)) if space is None or kept else None

    def size(group: int) -> int:
        return unit.groups[group].weight_bytes // PAGE_BYTES

    lease = None if weights is None else weights.lease(unit.weight_bytes, "weights")
    of_weights = tuple(
        StateHome(lease, group.weight_offset, group.weight_bytes, place("weight", index, weights))
        for index, group in enumerate(unit.groups)
    )
    return UnitHomes(
        WeightsHome(of_weights, unit.weight_bytes),
        {
            index: GroupStateHomes(
                "weight", "fp32", None, home("exp_avg", index, states), home("exp_avg_sq", index, states), None, None
            )
            for index in range(len(unit.groups))
        },
    )


class Nobody:
    """ParameterLender that lends no parameters."""

    def lend(self, parameters: Sequence[nn.Parameter], use: str) -> Any:
        raise AssertionError(f"{use} of a parameter that is released")

    def name_of(self, parameter: nn.Parameter) -> str:
        return "a parameter"


NOBODY = Nobody()
RELEASED = released_class(NOBODY)


def parameters_of(unit: Unit) -> dict[str, nn.Parameter]:
    return {
        spec.name: nn.Parameter(torch.zeros(spec.shape, dtype=group.dtype))
        for group in unit.groups
        for spec in group.specs
    }


class Gradients:
    """Counterpart of UnitGradients, with gradients in RAM."""

    def __init__(self, unit: Unit) -> None:
        self.in_ram = True
        self.finite = True
        self.arrivals = GradientArrivals([spec.name for group in unit.groups for spec in group.specs])
        self.groups = {
            index: SimpleNamespace(
                dtype=torch.float32,
                stream=lambda index=index: f"gradients of {unit.name}.{index}",
                landing_futures=lambda: [],
            )
            for index in range(len(unit.groups))
        }
        self.in_host_memory = self.groups.__getitem__


class Pipeline:
    """Counterpart of _native.UpdatePipeline. A job of this pipeline ends when the test ends the job, or when a caller
    waits for the job.
    """

    ahead_tiles_max = 2

    def __init__(self) -> None:
        self.jobs: list[UpdateFuture] = []
        self.ahead: list[UpdateFuture] = []
        self.canceled: list[UpdateFuture] = []
        self.lent: list[Any] = []
        self.lost = False  # whether a device was given up, so that lent memory is not returned

    def submit(self, **job: Any) -> UpdateFuture:
        if job["ahead"] is not None:
            self.ahead.remove(job["ahead"])
        self.jobs.append(UpdateFuture(**job))
        return self.jobs[-1]

    def read_ahead(self, **job: Any) -> UpdateFuture:
        self.ahead.append(UpdateFuture(**job))
        return self.ahead[-1]

    def cancel(self, job: UpdateFuture) -> None:
        if job in self.ahead:
            self.ahead.remove(job)
        self.canceled.append(job)
        job.fate = job.fate or CANCELED

    def withdraw(self, lists: Sequence[Sequence[UpdateFuture]]) -> list[bool]:
        withdrawn = [not any(job.begun or job.done() for job in jobs) for jobs in lists]
        for job in (job for jobs, taken_back in zip(lists, withdrawn, strict=True) for job in jobs if taken_back):
            job.end(CANCELED)
        return withdrawn

    def lend(self, memory: memoryview) -> None:
        self.lent.append(memory)

    def reclaim(self, memory: memoryview) -> bool:
        self.lent.pop()
        return not self.lost

    @property
    def under_way(self) -> list[UpdateFuture]:
        return [job for job in self.jobs if not job.done()]


class Idle:
    """Counterpart of IdleClock."""

    def begins(self) -> None:
        return

    def ends(self) -> None:
        return


def resources(*, slot_pages: int = 8, in_place: bool = True, in_ram: bool = True) -> Any:
    """Return resources without generations, in which every extent has a spare copy."""
    return SimpleNamespace(
        plan=SimpleNamespace(
            budgets=SimpleNamespace(
                slot_bytes=slot_pages * PAGE_BYTES,
                staging=SimpleNamespace(tile_numel=NUMEL),
                device_for="{} B of slots".format,
            ),
            placement=SimpleNamespace(updates=SimpleNamespace(in_ram=range(100) if in_ram else ())),
        ),
        pipeline=Pipeline(),
        device=None if in_place else object(),
        torch_device=torch.device("cpu"),
        idle=Idle(),
        store=Store(),
        require_store=Store,
        generations=None,
        copy_to_write=lambda extent: extent.newest_copy,
        spare_copy=lambda extent: next((s for s in range(len(extent.offsets)) if s != extent.newest_copy), None),
    )


def no_shadows(pipeline: Pipeline) -> SpeculativeUpdateBuffers:
    native: Any = pipeline
    space: Any = None
    return SpeculativeUpdateBuffers(space, native, 0, [])


def offloaded(
    unit: Unit, homes: UnitHomes, shadows: SpeculativeUpdateBuffers, health: ModelHealth | None = None
) -> OffloadedUnit:
    gradients: Any = Gradients(unit)
    views = ParameterViews(unit, parameters_of(unit), RELEASED)
    shard = Shard(unit, RankPartition(1, 0))
    made = OffloadedUnit(
        shard, views, homes, gradients, Timeline(), health or ModelHealth(SingleProcessWorld()), shadows
    )
    made.views.adopt(torch.device("cpu"))
    return made


def wanted(unit: Unit, lr: float = 1.0) -> dict[int, GroupUpdate]:
    """Return a step's updates of all groups of a unit."""
    return {
        index: GroupUpdate((SegmentRequest(0, group.numel, 1, 0, True, 1.0, (("lr", lr),)),), None)
        for index, group in enumerate(unit.groups)
    }


def under_way(future: UpdateFuture) -> UpdateTransfer:
    native: Any = future
    return UpdateTransfer(native, "a unit", "optimizer states", 1)


def slot_of(content: float, nbytes: int, *, at_home: bool = True) -> Slot:
    return Slot(torch.full((nbytes // 4,), content).view(torch.uint8), at_home=at_home)


class Slot:
    """A slot in device memory; or a counterpart of HostSlot with separate memory.

    Attributes:
        viewed: whether there are views of the slot.
        rests: whether the slot is not in use.
    """

    lease = None

    def __init__(self, tensor: torch.Tensor, *, at_home: bool = True) -> None:
        self.tensor = tensor
        self.at_home = at_home
        self.rests = False
        self.viewed = False
        self.expected: int | None = None
        self.freed = False

    def wait(self) -> None:
        self.rests = False

    def copy_down(self) -> None:
        return None

    def rest(self) -> bool:
        self.rests = True
        return not self.at_home

    def outstanding(self) -> bool:
        return self.viewed

    def expect(self, views: int) -> None:
        self.expected = views

    def free(self) -> None:
        assert not self.freed
        self.freed = True


class Fetch:
    """Weights that are being fetched. `fate` is the exception that `finish` raises; None: the fetch succeeds."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.fate: BaseException | None = None
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1

    def finish(self) -> Slot:
        if self.fate is not None:
            raise self.fate
        return self.slot
