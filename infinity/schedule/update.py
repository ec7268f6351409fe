"""Handing one group's update to the native pipeline: where each state is, and the weights' slot if they are in one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import overload

from infinity import _native
from infinity.io.engine import Transfer
from infinity.schedule.backing import Home
from infinity.schedule.gradients import Place
from infinity.schedule.ledger import Ledger
from infinity.state.dtypes import native_name
from infinity.state.moments import Moment
from infinity.state.unit import Group


@dataclass(frozen=True)
class UpdateTransfer(Transfer):
    """The update of a unit's group under way.

    Attributes:
        moves: where each state goes: its home, and the slot of the store it is written to, None where it stays in RAM.
    """

    future: _native.UpdateFuture
    moves: tuple[tuple[Home, int | None], ...] = ()

    @property
    def finite(self) -> bool:
        """After `result`: whether all new weights and moments were."""
        return self.future.finite

    def land(self) -> None:
        """After `result`, once: from now on the new values are the ones that count."""
        for home, slot in self.moves:
            if slot is None:
                home.dirty = True
            else:
                home.stored().slot, home.dirty = slot, False


def submit_update(
    ledger: Ledger,
    index: int,
    group_index: int,
    segments: Sequence[_native.Segment],
    grad_scale: float,
    *,
    moments: Collection[Moment] | None = None,
    arithmetic: bool = True,
) -> UpdateTransfer:
    """Start the update of a unit's group; units go through the pipeline in the order of these calls.

    Args:
        segments: sorted by element; what is in none is not touched.
        grad_scale: the gradients are multiplied by this first.
        moments: those the segments' rules use, which are moved; None: all there are.
        arithmetic: False moves the states to and fro and leaves them as they are.
    """
    record = ledger.records[index]
    group = record.unit.groups[group_index]
    backing = ledger.backing
    states = backing.states[index][group_index]
    gradients = ledger.gradients.of(Place(record.unit, group_index, group.specs[0]))
    streams = _Streams(ledger)
    weight = streams.of(backing.weights[index].groups[group_index], _slot_view(ledger, index, group))
    used = [
        home if moments is None or name in moments else None
        for name, home in (("exp_avg", states.exp_avg), ("exp_avg_sq", states.exp_avg_sq))
    ]
    residual, exp_avg, exp_avg_sq = (streams.of(home) for home in (states.residual, *used))
    future = backing.pipeline.submit(
        numel=group.numel,
        weight_dtype=native_name(group.dtype),
        master=states.master,
        moments=group.moments,
        grad_dtype=native_name(gradients.dtype),
        segments=segments,
        grad_scale=grad_scale,
        whole=streams.elsewhere,
        arithmetic=arithmetic,
        weight=weight,
        residual=residual,
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        grad=gradients.stream(),
    )
    return UpdateTransfer(future, record.unit.name, "optimizer states", ledger.steps + 1, tuple(streams.moves))


class _Streams:
    """The streams of one job, and what becomes of the homes when it is done.

    A state in the store is written where no generation has it; one in RAM is written, beside being updated, when this
    step is committed.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._backing = ledger.backing
        self._commits = ledger.commits.due(ledger.steps + 1)
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
        if home.in_memory:
            memory = home.view()
            if not self._commits:
                self.moves.append((home, None))
                return _native.StateStream(memory=memory)
        extent, slot = home.stored(), home.stored().slot
        if self._backing.generations is not None:
            slot = self._backing.generations.destination(extent)
        self.moves.append((home, slot))
        self.elsewhere |= home.in_memory or slot != extent.slot
        file, write_offset = self._backing.require_store().file, extent.offsets[slot]
        return _native.StateStream(memory=memory, file=file, offset=extent.offset, write_offset=write_offset)


def _slot_view(ledger: Ledger, index: int, group: Group) -> _native.Buffer | None:
    """The weights of a group in the device memory they were fetched to, when the update may work there."""
    slot = ledger.resident_memory(index)
    if slot is None:
        return None
    start = group.weight_offset
    return slot[start : start + group.weight_bytes].numpy()
