"""Parametrizations that are registered during a forward or backward pass. PEFT registers such parametrizations for a
stack of experts.

torch.nn.utils.parametrize registers a parametrization with `original.set_(original)`: the parameter's version counter
increases by one, and its values do not change. After that, torch registers the parameter in a ParametrizationList and
calls the hook of this module.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.hooks import RemovableHandle

from infinity.coordinator import registry
from infinity.coordinator.coordinator import Coordinator


class _RegistrationHook:
    """Hook that torch calls for every registration of a parameter in this process."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def __call__(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None or name != "original" or not isinstance(module, ParametrizationList):
            return
        found = registry.find(parameter)
        swaps = torch.__future__.get_swap_module_params_on_conversion()  # with this setting torch does not call set_
        if found is not None and found[0] is self._coordinator and not swaps:
            self._coordinator.set_to_itself(found[1])


def watch_parametrizations(coordinator: Coordinator) -> RemovableHandle:
    """From now on, report to a model's coordinator each of the model's parameters that torch parametrizes."""
    return nn.modules.module.register_module_parameter_registration_hook(_RegistrationHook(coordinator))
