"""Handing one group's update to the native pipeline: where each state is, and the weights' slot if they are in one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infinity import _native
from infinity.io.arena import Lease
from infinity.io.engine import Transfer
from infinity.schedule.gradients import Place
from infinity.schedule.ledger import Ledger
from infinity.state.dtypes import native_name


@dataclass(frozen=True)
class UpdateTransfer(Transfer):
    """The update of a unit's group under way."""

    future: _native.UpdateFuture

    @property
    def finite(self) -> bool:
        """After `result`: whether all new weights and moments were."""
        return self.future.finite


def submit_update(
    ledger: Ledger,
    index: int,
    group_index: int,
    segments: Sequence[_native.Segment],
    grad_scale: float,
    *,
    arithmetic: bool = True,
) -> UpdateTransfer:
    """Start the update of a unit's group; units go through the pipeline in the order of these calls.

    Args:
        segments: sorted by element; what is in none is not touched.
        grad_scale: the gradients are multiplied by this first.
        arithmetic: False moves the states to and fro and leaves them as they are.
    """
    record = ledger.records[index]
    group = record.unit.groups[group_index]
    backing = ledger.backing
    states = backing.states[index][group_index]
    gradients = ledger.gradients.of(Place(record.unit, group_index, group.specs[0]))
    future = backing.pipeline.submit(
        numel=group.numel,
        weight_dtype=native_name(group.dtype),
        master=states.master,
        moments=group.moments,
        grad_dtype=native_name(gradients.dtype),
        segments=segments,
        grad_scale=grad_scale,
        arithmetic=arithmetic,
        weight=_weight_stream(ledger, index, group_index),
        residual=backing.stream(states.residual),
        exp_avg=backing.stream(states.exp_avg),
        exp_avg_sq=backing.stream(states.exp_avg_sq),
        grad=gradients.view(),
    )
    return UpdateTransfer(future, record.unit.name, "optimizer states", ledger.steps + 1)


def _weight_stream(ledger: Ledger, index: int, group_index: int) -> _native.StateStream:
    """In RAM: their home. On NVMe: the file, and the slot as well when the unit is in one, so that it stays current."""
    group = ledger.records[index].unit.groups[group_index]
    home = ledger.backing.weights[index]
    start, nbytes = group.weight_offset, group.weight_bytes
    if isinstance(home, Lease):
        return _native.StateStream(memory=home.view(start, nbytes))
    if ledger.backing.store is None:
        raise AssertionError("an extent without a store")
    slot = ledger.resident_memory(index)
    memory = None if slot is None else _writable(slot[start : start + nbytes])
    return _native.StateStream(memory=memory, file=ledger.backing.store.file, offset=home.offset + start)


def _writable(tensor: torch.Tensor) -> _native.Buffer:
    return tensor.numpy()
