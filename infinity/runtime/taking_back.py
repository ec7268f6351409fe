"""A model that was offloaded, used and not trained becomes what it was before: one that waits to be offloaded."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from infinity.base.interrupt import whole
from infinity.coordinator import registry
from infinity.errors import ModelError
from infinity.runtime.deferred import Deferred, defer_again
from infinity.runtime.methods import take_methods
from infinity.state.released import nan_placeholder, ordinary_tensors


@whole
def take_back(model: nn.Module, deferred: Mapping[nn.Parameter, Deferred]) -> None:
    """End offloading as if it had not begun, so that the model can be offloaded again, in another way. Its store goes.

    Args:
        deferred: parameters that were deferred when the model was offloaded, with where their values are read. Values
            that were written since, and those of all other parameters, come from the store into memory.

    Raises:
        ModelError: it is trained.
        SwapIOError: the store could not be read.
    """
    coordinator = registry.coordinator_of(model)
    if coordinator.plan.layout.trainable_numel:
        raise ModelError(f"this {type(model).__name__} is trained, and its states would be lost")
    coordinator.require_usable()
    coordinator.forget_dead()
    there: dict[nn.Parameter, torch.Tensor] = {}
    waiting: dict[nn.Parameter, Deferred] = {}
    for parameter, place in coordinator.places():
        index = place.unit.index
        if parameter in deferred and not coordinator.units[index].weights.version:
            waiting[parameter] = deferred[parameter]
            continue
        with coordinator.locked(), coordinator.taking([index]), ordinary_tensors(), torch.no_grad():
            there[parameter] = parameter.detach().clone()
    device = torch.device(coordinator.plan.device)
    coordinator.close(discard=True)
    registry.leave(model)
    take_methods(model)
    for unit in coordinator.units:
        unit.views.open_up()
    with ordinary_tensors():
        for parameter in (*waiting, *there):
            value = there.get(parameter)
            parameter.data = nan_placeholder(parameter.shape, parameter.dtype, device) if value is None else value
    defer_again(waiting)
