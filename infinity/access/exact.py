"""Exact values of parameters and of their moments.

The exact value of a parameter is its fp32 master if the master has more bits than the weight, and the weight otherwise.
"""

from __future__ import annotations

import torch

from infinity import _native
from infinity.coordinator.coordinator import Coordinator
from infinity.errors import NotAvailableError
from infinity.state.dtypes import residual_itemsize
from infinity.state.moments import Moment
from infinity.state.unit import ParameterPlace


def exact_bytes(coordinator: Coordinator, place: ParameterPlace) -> int:
    """Return the size in bytes of the result of `exact_value`."""
    states = coordinator.units[place.unit.index].states_of(place.group_index)
    finer = states is not None and states.residual is not None
    return place.spec.numel * (4 if finer else place.group.dtype.itemsize)


def exact_value(coordinator: Coordinator, place: ParameterPlace) -> torch.Tensor:
    """Return a copy of a parameter's exact value: a tensor in RAM with the parameter's shape.

    The dtype is fp32 if the master has more bits than the weight, and the weight's dtype otherwise.

    Raises:
        SwapIOError: the store could not be read.
    """
    unit, spec = coordinator.units[place.unit.index], place.spec
    states = unit.states_of(place.group_index)
    # One lock and one wait for both reads: an update replaces the residual at another moment than the weight.
    with coordinator.locked(), torch.no_grad():
        coordinator.finish_updates()
        with coordinator.taking([place.unit.index]):
            weight = unit.parameters[spec.name].detach().to("cpu", copy=True).contiguous()
        if states is None or states.residual is None or not spec.numel:
            return weight
        itemsize = residual_itemsize(states.master)
        rest = coordinator.read_part(states.residual, spec.offset * itemsize, spec.numel * itemsize)
    if states.master == "fp32":
        return rest.view(torch.float32).view(spec.shape)
    values = torch.empty(spec.numel, dtype=torch.float32)
    _native.decode_split16(weight.reshape(-1).view(torch.uint8).numpy(), rest.numpy(), values.numpy())
    return values.view(spec.shape)


def exact_moment(coordinator: Coordinator, place: ParameterPlace, moment: Moment) -> torch.Tensor:
    """Return a copy of a parameter's moment after the last step: a tensor in RAM with the parameter's shape.

    The dtype is fp32, even for moments that are kept in bf16 or int8. The moments of a group are encoded together, so
    the function reads the moments of the parameter's whole group.

    Raises:
        NotAvailableError: there are several ranks, and this rank has only a slice of the moment.
        SwapIOError: the store could not be read.
    """
    unit, spec = coordinator.units[place.unit.index], place.spec
    if not unit.shard.whole:
        raise NotAvailableError(
            f"{moment} of '{spec.name}' is split over several ranks. `infinity checkpoint export` writes the whole "
            "state from a generation of the run."
        )
    states = unit.states_of(place.group_index)
    home = None if states is None else states.moment(moment)
    if home is None:
        raise AssertionError(f"the run keeps no {moment}")
    values = torch.empty(place.group.numel, dtype=torch.float32)
    with coordinator.locked():
        coordinator.finish_updates()
        encoded = coordinator.read_part(home, 0, home.nbytes)
    is_signed = moment == "exp_avg"
    _native.decode_moments(encoded.numpy(), place.group.moments, is_signed=is_signed, values=values.numpy())
    return values[spec.offset : spec.offset + spec.numel].clone().view(spec.shape)
