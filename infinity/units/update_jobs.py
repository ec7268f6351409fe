"""Jobs of the native pipeline: the update of a unit's group, and the reads ahead for an update that has not begun."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from infinity import _native
from infinity.base.timeline import JobTag
from infinity.state.dtypes import native_name
from infinity.tiers.resources import ModelResources
from infinity.units.unit import OffloadedUnit
from infinity.units.update import UnitUpdate, UpdateTransfer


def submit_update(
    resources: ModelResources,
    unit: OffloadedUnit,
    update: UnitUpdate,
    group_index: int,
    *,
    step: int,
    ahead: _native.UpdateFuture | None,
) -> UpdateTransfer:
    """Start the update of a unit's group.

    Groups pass through the pipeline in the order of these calls, except speculative groups. When the running update has
    ended, the newest speculative update runs next. The speculative updates that have not run when the step is decided
    are therefore spread over the model, and the next forward reaches them one at a time. Groups without transfers to or
    from the store have a separate order. They are computed while the other groups wait for the disk.

    Each group waits for the gradients of all updated groups of the unit. Otherwise a unit could begin with a small
    group while the gradients of its large group are in flight, and the large group would run after all later units.

    Args:
        resources: resources of the model.
        unit: unit of the group.
        update: update of the unit.
        group_index: index of the group.
        step: the optimizer step, counted from 1.
        ahead: job that `read_update_ahead` returned for this group, which the update takes over; None if there is no
            such job.
    """
    group, wanted = unit.local.groups[group_index], update.wanted[group_index]
    destinations = update.destinations[group_index]
    gradients = {index: unit.gradients.in_host_memory(index) for index in update.wanted}
    streams = {state: destination.stream(resources.store) for state, destination in destinations.items()}
    landings = [landing for index in update.wanted for landing in gradients[index].landing_futures()]
    copies = [] if update.weights_copy is None else [update.weights_copy.landed]
    future = resources.pipeline.submit(
        numel=group.numel,
        weight_dtype=native_name(group.dtype),
        master=unit.homes.states[group_index].master,
        moments=group.moments,
        grad_dtype=native_name(gradients[group_index].dtype),
        segments=wanted.native_segments(),
        whole=any(destination.elsewhere for destination in destinations.values()),
        arithmetic=wanted.arithmetic,
        weight=streams["weight"],
        residual=streams.get("residual"),
        exp_avg=streams.get("exp_avg"),
        exp_avg_sq=streams.get("exp_avg_sq"),
        grad=gradients[group_index].stream(),
        tag=JobTag(step, unit.index, group_index).pack(),
        unit=unit.index,
        speculative=update.speculated,
        ahead=ahead,
        after=[*landings, *copies],
    )
    return UpdateTransfer(future, unit.name, "optimizer states", step, _naming(resources, landings, copies))


def _naming(
    resources: ModelResources, landings: Sequence[_native.IOFuture], copies: Sequence[_native.IOFuture]
) -> Callable[[_native.Failure], str]:
    """Return a function that names the state whose transfer failed in an update.

    The only data of an update that belong to no extent of a state are spilled gradients.

    Args:
        resources: resources of the model.
        landings: landings of gradients that the update waits for.
        copies: copies of weights that the update waits for. Only landings and copies can fail with a device error.
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
    resources: ModelResources, unit: OffloadedUnit, group_index: int, *, step: int
) -> _native.UpdateFuture:
    """Before the step is decided, begin to read the states that a group's update will need from the store.

    Weights are not read ahead, because the update uses the weights in the slot if the unit still has a slot.
    """
    group, states = unit.local.groups[group_index], unit.homes.states[group_index]
    file = resources.require_store().file
    streams = {
        state: _native.StateStream(file=file, offset=home.stored().offset)
        for state, home in states.updated(None).items()
    }
    return resources.pipeline.read_ahead(
        numel=group.numel,
        weight_dtype=native_name(group.dtype),
        master=states.master,
        moments=group.moments,
        residual=streams.get("residual"),
        exp_avg=streams.get("exp_avg"),
        exp_avg_sq=streams.get("exp_avg_sq"),
        tag=JobTag(step, unit.index, group_index).pack(),
    )
