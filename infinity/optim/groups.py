"""Param groups of an optimizer: offloaded parameters in any form that torch accepts, and hyperparameters by group."""

from __future__ import annotations

import reprlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, SupportsIndex

import torch
from torch import nn

from infinity.coordinator import registry
from infinity.coordinator.coordinator import Coordinator
from infinity.errors import ConfigError, ModelError, ReleasedParameterError
from infinity.optim.hyperparameter_checks import (
    TorchOptions,
    max_grad_norm_of,
    require_flags,
    require_possible,
    require_seed,
    say_ignored,
)
from infinity.state.moments import KEPT, Moment, OptimizerName
from infinity.state.unit import ParameterPlace
from infinity.state.update_request import require_accumulation_steps

NO_STATES = (
    "was frozen when the model was offloaded or its optimizer was made, so the store has no room for its optimizer "
    "states, and cannot get room later. To unfreeze a parameter during the run, leave requires_grad=True until the "
    "optimizer of the other parameters is made, then set it to False; add_param_group takes the parameter once it is "
    "unfrozen."
)
_FIXED = (bool, int, float, str, type(None))  # immutable types of hyperparameters


class GroupedOptimizer(torch.optim.Optimizer, ABC):
    """The param groups of an optimizer: offloaded parameters of one model, each parameter once.

    The arguments and errors are the same as for OffloadedOptimizer.
    """

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        max_grad_norm: float | None,
        maximize: bool,
        seed: int,
        accumulation_steps: int | None,
        torchs: TorchOptions,
    ) -> None:
        self.max_grad_norm = max_grad_norm
        self.accumulation_steps = accumulation_steps
        self._coordinator: Coordinator | None = None
        self._places: dict[nn.Parameter, ParameterPlace] = {}
        self._in_range: list[dict[str, Any]] | None = None  # hyperparameters at the last check
        self._members: dict[int, dict[nn.Parameter, int]] = {}  # by unit: parameters and their param group
        groups, defaults = groups_of(params), defaults | dict(torchs) | {"maximize": maximize, "seed": seed}
        given = [each for group in groups for each in parameters_of(group)]
        for index, group in enumerate(groups):
            self._check(index, defaults | group)
        registry.reoffload_if_changed(given)
        super().__init__(groups, defaults)
        self._require_in_range()
        if self._coordinator is None:
            raise ConfigError("all param groups are empty: give the parameters of an offloaded model")
        say_ignored(torchs)

    rule: ClassVar[OptimizerName]

    def moments(self, group: dict[str, Any]) -> dict[str, Moment]:
        """Return the states kept per parameter of a group: torch's name of each state, and its name in the store."""
        return KEPT[self.rule]

    @abstractmethod
    def check(self, group: Mapping[str, Any]) -> None:
        """Raise ConfigError if a hyperparameter of a group is out of range."""

    @abstractmethod
    def hyperparameters(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return the update rule and its hyperparameters as arguments of _native.Segment."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does. The group's parameters must be offloaded parameters of the same model.

        Raises:
            ModelError, ConfigError: see the constructor; after an error the optimizer is unchanged.
        """
        coordinator, places = self._find(parameters_of(param_group))
        try:
            super().add_param_group(param_group)
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error)) from error
        try:
            self._enter(coordinator, places)
        except BaseException:
            self.param_groups.pop()  # undo the change: the group was refused
            raise

    def _take_in(self) -> None:
        """Accept param groups with other parameters that other code has assigned to `param_groups`.

        Lightning's BaseFinetuning assigns such param groups when a run continues. Raises the errors of add_param_group;
        after an error nothing has changed.
        """
        given = self.param_groups
        if all(parameter in self._places for group in given for parameter in group["params"]):
            return
        before = self._places, self._members
        try:
            self.param_groups, self._places, self._members = [], {}, {}
            for group in given:
                self.add_param_group(group)
        except BaseException:
            self.param_groups, (self._places, self._members) = given, before
            raise

    def _find(
        self, parameters: Sequence[torch.Tensor]
    ) -> tuple[Coordinator | None, dict[nn.Parameter, ParameterPlace]]:
        """Return the coordinator and the places of a new group's parameters. An empty group has no places."""
        coordinator, places, new = self._coordinator, dict[nn.Parameter, ParameterPlace](), len(self.param_groups)
        taken = {id(parameter): index for index, group in enumerate(self.param_groups) for parameter in group["params"]}
        for parameter in parameters:
            if not isinstance(parameter, nn.Parameter) or (found := registry.find(parameter)) is None:
                raise ModelError(
                    f"a parameter of shape {tuple(parameter.shape)} is not offloaded: call infinity.offload(model, "
                    f"config) before infinity.{type(self).__name__}(model.parameters()). Add modules around a model, "
                    "such as a head or a prompt encoder, before the model is offloaded: give defer=True to "
                    "infinity.load_pretrained, add the modules, then call infinity.offload(whole, config)."
                )
            of_model, place = found
            if coordinator is not None and of_model is not coordinator:
                raise ModelError(f"one infinity.{type(self).__name__} updates the parameters of one model only")
            if parameter.requires_grad and not place.group.trainable:
                raise ModelError(f"parameter '{place.spec.name}' {NO_STATES}")
            if parameter in places:
                raise ConfigError(f"parameter '{place.spec.name}' is twice in param group {new}: give it once")
            if id(parameter) in taken:
                raise ConfigError(
                    f"parameter '{place.spec.name}' is in param groups {taken[id(parameter)]} and {new}: give it once"
                )
            coordinator = of_model
            places[parameter] = place
        return coordinator, places

    def _enter(self, coordinator: Coordinator | None, places: dict[nn.Parameter, ParameterPlace]) -> None:
        """Register the last param group; `places` has the places of its parameters."""
        index = len(self.param_groups) - 1
        self._check(index, self.param_groups[index])
        if coordinator is None:
            return
        coordinator.require_usable()
        self._require_room(coordinator, self.param_groups[index])
        if self._coordinator is not None:
            coordinator.require_disjoint(self, {place.spec.name for place in places.values()})
        self._coordinator = coordinator
        self._places |= places
        for parameter, place in places.items():
            self._members.setdefault(place.unit.index, {})[parameter] = index

    def _check(self, index: int, group: Mapping[str, Any]) -> None:
        """Raise a ConfigError that names the param group if one of its hyperparameters is out of range."""
        try:
            self.check(group)
            require_seed(group)
            require_flags(group, "maximize")
            require_possible(group)
        except ConfigError as error:
            raise ConfigError(f"param group {index}: {error}") from None

    def _require_room(self, coordinator: Coordinator, group: dict[str, Any]) -> None:
        missing = set(self.moments(group).values()) - set(coordinator.plan.placement.form.stored)
        if missing:
            name = type(self).__name__
            raise ModelError(
                f"this model was offloaded without room for {' and '.join(sorted(missing))}, which infinity.{name} "
                f"needs. Give optimizer='{name.lower()}' to infinity.offload or infinity.load_pretrained."
            )

    @property
    def coordinator(self) -> Coordinator:
        if self._coordinator is None:
            raise AssertionError("an optimizer whose constructor has not ended")
        return self._coordinator

    def _require_sound(self) -> None:
        """Check the groups again as the constructor does, because other code may have changed them since."""
        self._require_in_range()
        seen: set[nn.Parameter] = set()
        for index, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if parameter not in self._places:
                    raise ModelError(
                        f"param group {index} has a parameter of shape {tuple(parameter.shape)} that was not there "
                        "when the group was made: use add_param_group"
                    )
                if parameter in seen:
                    name = self._places[parameter].spec.name
                    raise ConfigError(f"param group {index}: parameter '{name}' is in the param groups twice")
                seen.add(parameter)

    def _require_in_range(self) -> None:
        """Raise ConfigError if a scheduler or the user has set a value that is out of range."""
        max_grad_norm_of(self.max_grad_norm)
        require_accumulation_steps(self.accumulation_steps)
        named = ("params", "param_names")
        now = [{key: _typed(value) for key, value in group.items() if key not in named} for group in self.param_groups]
        fixed = all(value is not None for group in now for value in group.values())
        if fixed and now == self._in_range:
            return
        for index, group in enumerate(self.param_groups):
            self._check(index, group)
        self._in_range = now if fixed else None

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise ReleasedParameterError(
            f"a copy or a pickle of infinity.{type(self).__name__} would hold placeholders: the parameters and their "
            "states are in the store. infinity.commit(model) and commit_every keep both, `infinity checkpoint export` "
            f"copies them; a second model needs an infinity.{type(self).__name__} of its own."
        )


def _typed(value: Any) -> tuple[Any, ...] | None:
    """Return a value with its types, so that True and 1 differ; None for a value that could change in place."""
    values = value if isinstance(value, tuple) else (value,)
    if not all(isinstance(each, _FIXED) for each in values):
        return None
    return (value, type(value), *map(type, values))


def groups_of(params: Any) -> list[dict[str, Any]]:
    """Return param groups from the first argument of an optimizer.

    Raises:
        ConfigError: the argument is not a collection of parameters, or is empty.
    """
    if isinstance(params, Mapping):
        raise ConfigError("params is one param group: give a list of them, [{'params': ...}]")
    given = _listed(params)
    if not given:
        raise ConfigError(
            "there are no parameters: the list is empty, or a generator was used up. model.parameters() makes a new "
            "generator each time it is called."
        )
    return given if isinstance(given[0], dict) else [{"params": given}]


def parameters_of(group: Any) -> list[torch.Tensor]:
    """Return the parameters of a param group, and make its "params" a list.

    Raises:
        ConfigError: the parameters are not given in the form of a param group.
    """
    if not isinstance(group, dict) or "params" not in group:
        raise ConfigError(f"a param group is a dict with 'params', not {reprlib.repr(group)}")
    params = group["params"]
    given = group["params"] = [params] if isinstance(params, torch.Tensor) else _listed(params)
    parameters = [_parameter_of(each) for each in given]
    if len({isinstance(each, tuple) for each in given}) > 1:
        raise ConfigError("some parameters of a param group have names and others have none: give all or none of them")
    return parameters


def _listed(params: Any) -> list[Any]:
    if isinstance(params, nn.Module):
        raise ConfigError(f"params is a {type(params).__name__}: give its parameters, model.parameters()")
    if isinstance(params, torch.Tensor):
        raise ConfigError("params is a tensor: give a list, [parameter]")
    if isinstance(params, set | frozenset):
        raise ConfigError("params is a set, which has no order: give a list")
    if isinstance(params, str | bytes | Mapping) or not isinstance(params, Iterable):
        raise ConfigError(f"params is {reprlib.repr(params)}: give model.parameters(), or a list of param groups")
    return list(params)


def _parameter_of(given: Any) -> torch.Tensor:
    """Return the parameter in `given`, which is a parameter or a pair from model.named_parameters()."""
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], str):
        given = given[1]
    if not isinstance(given, torch.Tensor):
        raise ConfigError(
            f"params holds {reprlib.repr(given)} ({type(given).__name__}), which is not a parameter: give "
            "model.parameters() or model.named_parameters()"
        )
    return given
