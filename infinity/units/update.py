"""One unit's update under way, and how the update of a group is handed to the native pipeline.

[Note: a step is a dataflow]

    gradients complete ──speculate──▶ SPECULATIVE ──step() agrees──▶ DECIDED ──computed──▶ APPLIED ──written──▶ FINISHED
                                           │                            ▲
    step() ────────────────────────────────┼────────────────────────────┘
                                           └─step() disagrees──▶ UNDONE
    backward begins ──▶ first states READ AHEAD (read_ahead.py), which an update that begins takes over

A speculative update expects that the step will neither clip nor skip, with the hyperparameters of now. It reads what is
current and writes beside it: to a copy of the extent that no generation names, and for what rests in RAM to other
memory. So it may be undone at any time, and whoever looks meanwhile sees the values of before.

A decided update may overwrite. Whoever wants the unit waits for this unit alone. If its new weights go to memory, that
wait ends when they are computed: the update is applied, while what goes to the store may still be on its way there.
Once the update is finished, what was written counts, too.

Both end in the same bits as a step that waits for all of it, since it is the same jobs over the same bytes.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, overload

from infinity import _native
from infinity.base.timeline import JobTag
from infinity.io.arena import Lease
from infinity.io.engine import Transfer
from infinity.state.dtypes import native_name
from infinity.state.request import GroupUpdate
from infinity.state.unit import Unit
from infinity.tiers.downloads import WeightsCopy
from infinity.tiers.home import Home, UnitHomes, WeightsHome
from infinity.tiers.resources import Resources
from infinity.tiers.slots import NewWeights, Written
from infinity.units.gradients import GroupGradients
from infinity.units.shadows import Shadow


@dataclass(frozen=True)
class WeightsPlace:
    """Where a unit's weights are beside their home, and where new values are to go.

    Attributes:
        slot: the memory they were fetched to, where the update may use it; else None.
        speculative: what is current must stay as it is.
        shadow: for the new values of what rests in RAM, weights and states, where what is current must stay.
        copy: of what is current, in host memory of the update's own, for weights that live in the store.
    """

    slot: Lease | None = None
    speculative: bool = False
    shadow: Shadow | None = None
    copy: WeightsCopy | None = None

    @property
    def memory(self) -> Lease | None:
        """Host memory with the current weights, beside their home."""
        return self.slot if self.copy is None else self.copy.lease

    @property
    def moves_home(self) -> bool:
        """Whether the weights will rest in other memory when the update is applied."""
        return self.shadow is not None and self.shadow.weights is not None

    @property
    def on_their_way(self) -> list[_native.IOFuture]:
        """What an update that reads them has to wait for."""
        return [] if self.copy is None else [self.copy.landed]


Milestone = Literal["computed", "weights", "written"]
"""Of an update: its new values are computed, so that those in memory are there and the gradients are free; new weights
are where they go; everything is."""


@dataclass(frozen=True)
class UpdateTransfer(Transfer):
    """The update of a unit's group under way.

    Attributes:
        moves: where each state goes: its home, and the copy in the store it is written to, None where it stays in RAM.
    """

    future: _native.UpdateFuture
    moves: tuple[tuple[Home, int | None], ...] = field(default=())

    @property
    def finite(self) -> bool:
        """After `result`: whether all new weights and moments were."""
        return self.future.finite

    @functools.cached_property
    def _futures(self) -> dict[Milestone, _native.IOFuture]:
        """Kept: each time it is asked for one, the native future makes another object."""
        return {"computed": self.future.computed, "weights": self.future.weights, "written": self.future}

    def until(self, milestone: Milestone) -> Transfer:
        """The part of it that ends there."""
        return Transfer(self._futures[milestone], self.unit, self.state, self.step, self.state_of)

    def done_until(self, milestone: Milestone) -> bool:
        """Whether that part has ended, well or not."""
        return self._futures[milestone].done()

    def finish(self) -> None:
        """After `result`, once: from now on the new values are the ones that count."""
        for home, copy in self.moves:
            if copy is None:
                home.changed()
            else:
                home.written(copy)

    def copy_of(self, home: Home) -> int | None:
        """The copy in the store that the new values of a state are written to; None when it is not updated."""
        return next((copy for moved, copy in self.moves if moved is home), None)


class UpdateState(enum.Enum):
    SPECULATIVE = "speculative"
    DECIDED = "decided"
    APPLIED = "applied"
    FINISHED = "finished"
    UNDONE = "undone"


_NEXT = {
    UpdateState.SPECULATIVE: {UpdateState.DECIDED, UpdateState.UNDONE},
    UpdateState.DECIDED: {UpdateState.APPLIED},
    UpdateState.APPLIED: {UpdateState.FINISHED},
    UpdateState.FINISHED: set(),
    UpdateState.UNDONE: set(),
}

UnitRequest = Mapping[int, GroupUpdate]
"""What is wanted of a unit's groups, by their index."""


class UnitUpdate:
    """One unit's update under way ([Note: a step is a dataflow]).

    Attributes:
        wanted: of which groups what.
        place: where the weights are and go.
        committed: the update writes what a generation needs.
        transfers: by group.
        viewed: somebody holds views of the weights' memory, so that the new weights must go there.
        copy: of the current weights, while the update may read it or write from it.
        state: changed by `to` alone.
    """

    def __init__(self, name: str, wanted: UnitRequest, place: WeightsPlace, *, committed: bool) -> None:
        self._name = name
        self.wanted = wanted
        self.place = place
        self.committed = committed
        self.transfers: dict[int, UpdateTransfer] = {}
        self.viewed = False
        self.copy = place.copy
        self.state = UpdateState.SPECULATIVE if place.speculative else UpdateState.DECIDED

    def to(self, state: UpdateState) -> None:
        if state not in _NEXT[self.state]:
            raise AssertionError(f"the update of '{self._name}' cannot go from {self.state.value} to {state.value}")
        self.state = state

    @property
    def is_speculative(self) -> bool:
        return self.state is UpdateState.SPECULATIVE

    def until(self, milestone: Milestone) -> list[Transfer]:
        return [transfer.until(milestone) for transfer in self.transfers.values()]

    def reached(self, milestone: Milestone) -> bool:
        """Whether the milestone was reached, well or not."""
        return all(transfer.done_until(milestone) for transfer in self.transfers.values())

    def wait(self, milestone: Milestone) -> None:
        """Until the milestone is reached, well or not."""
        for transfer in self.until(milestone):
            transfer.wait()

    def reads_slot(self) -> bool:
        """Whether the update reads the weights from the slot they were fetched to, so that the slot must stay."""
        return self.place.speculative and self.place.slot is not None and not self.reached("computed")

    def writes_from_slot(self) -> bool:
        """Whether the update may write weights to the store from the slot they are used in."""
        return not self.is_speculative and self.place.slot is not None and not self.reached("weights")

    def release_copy(self, *, now: bool = False) -> bool:
        """Give back the copy of the weights, once the update is done with it, or now. Whether there is none."""
        if self.copy is not None and (now or self.reached("computed" if self.is_speculative else "weights")):
            copy, self.copy = self.copy, None
            copy.release()
        return self.copy is None

    def keep_memory(self) -> None:
        """Somebody holds views of the weights' memory: the new weights must go there when they are applied."""
        self.viewed = True

    def written(self, weights: WeightsHome) -> Written:
        """The new weights that are on their way."""
        memory = None if self.place.shadow is None else self.place.shadow.weights
        return {
            index: NewWeights(transfer.copy_of(weights.groups[index]), transfer.until("weights"), memory)
            for index, transfer in self.transfers.items()
        }

    def require_well(self) -> None:
        """Raises SwapIOError when the update is known to have failed."""
        for transfer in self.transfers.values():
            if transfer.done() and transfer.future.failure() is not None:
                transfer.result()


def submit_update(
    resources: Resources,
    unit: Unit,
    homes: UnitHomes,
    group_index: int,
    wanted: GroupUpdate,
    gradients: Mapping[int, GroupGradients],
    weights: WeightsPlace,
    *,
    step: int,
    committed: bool,
    ahead: _native.UpdateFuture | None,
) -> UpdateTransfer:
    """Start the update of a unit's group; groups go through the pipeline in the order of these calls, but for
    speculative ones: the newest is the next, once the unit that was begun is done. So what is left of them when the
    step is decided lies all over the model, and the next forward meets it now and then instead of all at once. Groups
    that move nothing to or from the store have an order of their own: they are computed while the others wait for the
    disk.

    Args:
        gradients: of all groups that are updated. Each waits for those of all: of a unit that had begun with a small
            group while the gradients of another were on their way, the rest would come after all later units.
        step: the optimizer step, counted from 1.
        committed: the step becomes a generation, so what is in RAM is written, too.
        ahead: what `read_update_ahead` gave for this group; it is taken over.
    """
    group = unit.groups[group_index]
    states = homes.states[group_index]
    streams = _Streams(resources, weights, committed=committed)
    weight = streams.weight(homes.weights.groups[group_index])
    residual, exp_avg, exp_avg_sq = map(streams.of, states.updated(wanted.moments))
    landings = [landing for each in gradients.values() for landing in each.on_their_way()]
    future = resources.pipeline.submit(
        numel=group.numel,
        weight_dtype=native_name(group.dtype),
        master=states.master,
        moments=group.moments,
        grad_dtype=native_name(gradients[group_index].dtype),
        segments=wanted.native_segments(),
        whole=streams.elsewhere,
        arithmetic=wanted.arithmetic,
        weight=weight,
        residual=residual,
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        grad=gradients[group_index].stream(),
        tag=JobTag(step, unit.index, group_index).pack(),
        unit=unit.index,
        speculative=weights.speculative,
        ahead=ahead,
        after=[*landings, *weights.on_their_way],
    )
    moves = tuple(streams.moves)
    return UpdateTransfer(
        future, unit.name, "optimizer states", step, _naming(resources, landings, weights.on_their_way), moves
    )


def _naming(
    resources: Resources, landings: Sequence[_native.IOFuture], copies: Sequence[_native.IOFuture]
) -> Callable[[_native.Failure], str]:
    """The state whose transfer failed in an update. Of what it moves, spilled gradients alone are scratch.

    Args:
        landings, copies: of gradients and of weights, which the update waits for. A device is part of nothing else.
    """

    def failed(futures: Sequence[_native.IOFuture]) -> bool:
        return any(each.done() and each.failure() is not None for each in futures)

    def name(failure: _native.Failure) -> str:
        if failure.kind == "device" and failed(landings):
            return "grad"
        if failure.kind == "device" and failed(copies):
            return "weight"
        scratch = resources.store is not None and resources.store.is_scratch(failure.path, failure.offset)
        return "grad" if scratch else "optimizer states"

    return name


def read_update_ahead(
    resources: Resources, unit: Unit, homes: UnitHomes, group_index: int, *, step: int
) -> _native.UpdateFuture:
    """Begin to read what a group's update will read, whatever is decided. Its states are in the store. Weights are not
    read ahead: the update finds them where they were fetched to, if they still are there.
    """
    group, states = unit.groups[group_index], homes.states[group_index]

    def stream(home: Home | None) -> _native.StateStream | None:
        if home is None:
            return None
        return _native.StateStream(file=resources.require_store().file, offset=home.stored().offset)

    return resources.pipeline.read_ahead(
        numel=group.numel,
        weight_dtype=native_name(group.dtype),
        master=states.master,
        moments=group.moments,
        residual=stream(states.residual),
        exp_avg=stream(states.exp_avg),
        exp_avg_sq=stream(states.exp_avg_sq),
        tag=JobTag(step, unit.index, group_index).pack(),
    )


class _Streams:
    """The streams of one job, and what becomes of the homes when it is done.

    A state in the store is written where no generation has it; one in RAM is written, beside being updated, when this
    step is committed.
    """

    def __init__(self, resources: Resources, place: WeightsPlace, *, committed: bool) -> None:
        self._resources = resources
        self._place = place
        self._committed = committed
        self.moves: list[tuple[Home, int | None]] = []
        self.elsewhere = False  # something is written to another place than it was read from

    @overload
    def of(self, home: Home, memory: _native.Buffer | None = None) -> _native.StateStream: ...
    @overload
    def of(self, home: Home | None, memory: _native.Buffer | None = None) -> _native.StateStream | None: ...
    def of(self, home: Home | None, memory: _native.Buffer | None = None) -> _native.StateStream | None:
        """A state as the pipeline takes it; None where there is none.

        Args:
            memory: a copy of a state that lives in the store, which is to stay current.
        """
        if home is None:
            return None
        if not home.in_memory:
            return self._stream(home, memory, None)
        if not self._place.speculative:
            return self._stream(home, home.view(), None)
        shadow = self._place.shadow
        return self._beside(home, None if shadow is None else shadow.states.get(home))

    def weight(self, home: Home) -> _native.StateStream:
        place = self._place
        slot = None if place.memory is None else place.memory.view(home.start, home.nbytes)
        if not place.speculative:
            return self.of(home, slot)
        if not home.in_memory:
            return self._stream(home, None, slot)
        return self._beside(home, None if place.shadow is None else place.shadow.weights)

    def _beside(self, home: Home, shadow: Lease | None) -> _native.StateStream:
        if shadow is None:
            raise AssertionError("a speculative update of what rests in RAM would overwrite it")
        return self._stream(home, shadow.view(home.start, home.nbytes), home.view())

    def _stream(self, home: Home, memory: _native.Buffer | None, source: _native.Buffer | None) -> _native.StateStream:
        self.elsewhere |= source is not None
        if home.in_memory and not self._committed:
            self.moves.append((home, None))
            return _native.StateStream(memory=memory, source=source)
        extent = home.stored()
        copy = self._resources.spare_copy(extent) if self._place.speculative else self._resources.destination(extent)
        if copy is None:
            raise AssertionError(f"no spare copy for {extent.state} of unit '{extent.unit}'")
        self.moves.append((home, copy))
        self.elsewhere |= home.in_memory or copy != extent.copy
        file, write_offset = self._resources.require_store().file, extent.offsets[copy]
        return _native.StateStream(
            memory=memory, file=file, offset=extent.offset, write_offset=write_offset, source=source
        )
