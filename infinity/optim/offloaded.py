"""Base of all optimizers on offloaded parameters.

The base class clips gradients by their exact global norm, and updates the parameters unit by unit.
"""

from __future__ import annotations

import logging
import math
import operator
import reprlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from infinity.access.exact import exact_moment
from infinity.base.interrupt import uninterruptible
from infinity.coordinator.gradient_handle import GradientHandle
from infinity.durable.generation_body import OptimizerRecord, record_optimizer
from infinity.errors import ConfigError, ModelError, NonFiniteGradientError, ReleasedParameterError, ResumeError
from infinity.optim.groups import NO_STATES, GroupedOptimizer
from infinity.optim.handles import StateHandle, parts_of
from infinity.optim.hyperparameter_checks import max_grad_norm_of
from infinity.optim.loss_scale import LossScale, forget_scale, inverse_of, loss_scale
from infinity.state.moments import STORED_AS, Moment
from infinity.state.unit import ParameterPlace
from infinity.state.update_request import GroupUpdate, SegmentRequest

logger = logging.getLogger(__name__)

_SKIPS_IN_A_ROW_MAX = 5
_NAMES = ("params", "param_names")  # keys of a param group that name its parameters; all other keys are hyperparameters


class _ActiveParameter(NamedTuple):
    """A parameter that has a gradient. `group` is the parameter's param group."""

    parameter: nn.Parameter
    place: ParameterPlace
    group: dict[str, Any]
    handle: GradientHandle


class _ParameterState(dict[str, Any]):
    """`optimizer.state[parameter]`: the parameter's step. The moments of the parameter are in the store."""

    def __missing__(self, key: str) -> NoReturn:
        if key not in STORED_AS:
            raise KeyError(key)
        raise ReleasedParameterError(
            f"optimizer.state[parameter]['{key}'] is in the store: optimizer.read_state(parameter, '{key}') reads a "
            "copy; a change of the copy does not change the state. optimizer.state_dict() names the state."
        )

    def __setitem__(self, key: str, value: Any) -> None:
        if key in STORED_AS:
            raise ReleasedParameterError(
                f"optimizer.state[parameter]['{key}'] is in the store and cannot be set. To reset a parameter's "
                "moments and step, call optimizer.state[parameter].clear(); to reset those of all parameters, "
                "optimizer.state.clear()."
            )
        super().__setitem__(key, value)


class OffloadedOptimizer(GroupedOptimizer):
    """An optimizer whose states are kept where the swap config places them.

    The arithmetic is in fp32 on fp32 masters, for weights of any dtype. bf16 weights are their masters, rounded half
    up. With `master: none` there is no master, and weights are rounded stochastically. A parameter whose grad is None
    is not touched. A step with a gradient that is not finite changes nothing and is counted in `skipped_steps`.

    torch.amp.GradScaler works as with torch's optimizers: gradients are unscaled as part of the update.

    Args:
        params: parameters of one offloaded model, or param groups with their own hyperparameters.
        defaults: hyperparameters, as in torch.optim.Optimizer; LR schedulers work as usual.
        max_grad_norm: clip the gradients of all groups together to this norm, exactly; None: do not clip.
        maximize: maximize the objective instead of minimizing it.
        seed: seed of stochastic rounding (`moments: bf16`, `master: none`). The random bits depend only on the seed,
            the step and the element, so a run can be repeated to the bit.
        accumulation_steps: backward passes before each step, so that updates begin during the last pass; None: as many
            as before the previous step. A wrong number only costs time; the result is the same to the bit.
        torchs: options of torch's optimizers that choose an implementation (TorchOptions).

    Attributes:
        last_grad_norm: global norm of the last step's gradients, unscaled, before any clipping. torch's clip_grad_norm_
            works as with torch's optimizers: if both are used, max_grad_norm clips the gradients that clip_grad_norm_
            has already clipped.
        skipped_steps: number of steps that were skipped because a gradient was NaN or infinite, or because
            skip_next_step was called.

    Raises:
        ModelError: a parameter is not offloaded, the parameters belong to several models, or the model was offloaded
            for an optimizer that keeps fewer states.
        ConfigError: a hyperparameter is out of range, a parameter is given twice, or no parameter is given.
    """

    _step_supports_amp_scaling = True  # torch's GradScaler calls step() with scaled gradients, and sets their scale

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], **options: Any) -> None:
        self.last_grad_norm = 0.0
        self.skipped_steps = 0
        self._skips_in_a_row = 0
        self._skip_reason = ""  # why the next step will be skipped; set by skip_next_step
        self._inverse_scale = 1.0  # of the last step that was not skipped; 1 before the first step
        self._unclaimed: dict[str, dict[str, Any]] = {}
        super().__init__(params, defaults, **options)
        self.state: defaultdict[torch.Tensor, Any] = defaultdict(_ParameterState)
        self._inverse_scale = inverse_of(float(self.coordinator.world.size))
        self.coordinator.enter(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._claim(self._places)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip, then update every parameter that has a gradient.

        On return it is certain which updates are applied, but the updates may still be running. The next use of a unit
        waits for the update of this unit only. With `overlap: off` all updates are done on return.

        Raises:
            NonFiniteGradientError: gradients were not finite several steps in a row; the message names the parameter.
            SwapIOError: a transfer of this step or of the step before failed; the message names the step. After this
                error the states are partly updated, and every later call raises.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            with self.coordinator.stepping():
                self._step()
        except BaseException:
            forget_scale(self)
            raise
        return loss

    def _step(self) -> None:
        coordinator = self.coordinator
        coordinator.require_entered(self)
        self._require_sound()
        if self._unclaimed:
            raise ResumeError(
                f"the run trained '{min(self._unclaimed)}', which is not among the parameters of this "
                f"{type(self).__name__}"
            )
        reason, self._skip_reason = coordinator.begin_step(self._facts(), self._skip_reason), ""
        active = self._active()
        scale = loss_scale(self, ((each.place.spec.name, each.handle) for each in active))
        inverse = scale.inverse * inverse_of(float(coordinator.world.size))
        total, clipped, bad = self._sum_squares(active)
        self.last_grad_norm = math.sqrt(total) * inverse if not (bad or reason) else float("nan")
        if bad or reason or scale.overflowed:
            self._skip(bad, reason, scale)
        else:
            self._skips_in_a_row = 0
            self._update(active, inverse * self._clip_factor(math.sqrt(clipped) * inverse))
            self._inverse_scale = inverse
        coordinator.end_step()

    def _facts(self) -> dict[str, object]:
        """Return values that must be the same on all ranks, by the name that messages use for the value."""
        facts: dict[str, object] = {
            "the optimizer": type(self).__name__,
            "max_grad_norm": self.max_grad_norm,
            "the loss scale": inverse_of(getattr(self, "grad_scale", None)),
        }
        for index, group in enumerate(self.param_groups):
            facts[f"the rule of param group {index}"] = {key: str(value) for key, value in self._options(group)}
        return facts

    def _active(self) -> list[_ActiveParameter]:
        """Return the parameters with a gradient, in the order of the groups."""
        with torch._C.DisableTorchFunctionSubclass():  # otherwise released parameters run Python code for each .grad
            every = [(parameter, group, parameter.grad) for group in self.param_groups for parameter in group["params"]]
        active = []
        for parameter, group, gradient in every:
            place = self._places[parameter]
            if gradient is None:
                if place.group.trainable:
                    self.coordinator.drop_gradient(place)
                continue
            if not place.group.trainable:
                raise ModelError(f"parameter '{place.spec.name}' has a gradient, and {NO_STATES}")
            if not isinstance(gradient, GradientHandle):  # set by hand
                self.coordinator.set_gradient(place, gradient, accumulate=False)
                gradient = parameter.grad = self.coordinator.handle(parameter, place)
            active.append(_ActiveParameter(parameter, place, group, gradient))
        return active

    def _sum_squares(self, active: list[_ActiveParameter]) -> tuple[float, float, str]:
        """Return two sums of squares of the gradients, and the name of a parameter whose gradient is not finite ('' if
        all are finite).

        The first sum is that of the gradients as they landed. The second sum is that of the gradients after torch's
        clipping.
        """
        by_factor: dict[float, list[ParameterPlace]] = {}
        for each in active:
            by_factor.setdefault(each.handle.factors.clip, []).append(each.place)
        landed = clipped = 0.0
        for factor, places in by_factor.items():
            part, bad = self.coordinator.gradient_sum_squares(places)
            if bad or not math.isfinite(factor):
                return landed, clipped, bad or places[0].spec.name
            landed += part
            clipped += part * factor * factor
        return landed, clipped, ""

    def _clip_factor(self, norm: float) -> float:
        """Return the factor by which the optimizer itself clips gradients of this norm."""
        maximum = max_grad_norm_of(self.max_grad_norm)
        return 1.0 if maximum is None else min(1.0, maximum / (norm + 1e-6))

    @property
    def expected_scale(self) -> float:
        """Factor by which the next step is expected to multiply the gradients.

        The actual factor differs only if gradients are clipped or the loss scale changes. A skipped step leaves the
        factor unchanged, because a scaler that tried a larger scale then returns to the old scale.
        """
        return self._inverse_scale

    def expected_update(self, unit: int) -> dict[int, GroupUpdate]:
        """Return the next step's update of a unit's groups.

        The update assumes that no gradient is clipped and that no hyperparameter changes.

        If the step would refuse the current hyperparameters, return an empty dict.
        """
        try:
            self._require_in_range()
        except ConfigError:
            return {}
        with torch._C.DisableTorchFunctionSubclass():  # as in _active
            active = [
                _ActiveParameter(parameter, self._places[parameter], self.param_groups[index], gradient)
                for parameter, index in self._members.get(unit, {}).items()
                if isinstance(gradient := parameter.grad, GradientHandle) and index < len(self.param_groups)
            ]
        requests, _ = self._requests(active, self.expected_scale)
        return {group_index: request for (_, group_index), request in requests.items()}

    def skip_next_step(self, reason: str) -> None:
        """Make the next step() change nothing and count as skipped, as if a gradient were not finite.

        Args:
            reason: text for messages, such as "the loss is nan"; needed because all gradients may be finite.
        """
        self._skip_reason = reason

    def _skip(self, bad: str, reason: str, scale: LossScale) -> None:
        self.coordinator.skip()
        self.skipped_steps += 1
        if scale.at_fault:
            logger.info("step skipped: the gradient of '%s' overflowed, loss scale %g", bad, 1.0 / scale.inverse)
            return
        self._skips_in_a_row += 1
        why = f"the gradient of '{bad}' is not finite" if bad else reason
        logger.warning("step skipped: %s (%d in a row)", why, self._skips_in_a_row)
        if self._skips_in_a_row >= _SKIPS_IN_A_ROW_MAX:
            found = f"gradients were NaN or infinite {self._skips_in_a_row} steps in a row, first in '{bad}'"
            raise NonFiniteGradientError(
                f"{found if bad else f'{reason}; {self._skips_in_a_row} steps in a row were skipped'}. The states "
                "are those of the last good step. Lower the learning rate, check the data and the loss for NaN."
            )

    def _update(self, active: list[_ActiveParameter], grad_scale: float) -> None:
        requests, after = self._requests(active, grad_scale)
        self.coordinator.update(requests)
        for parameter, state in after.items():
            self.state[parameter].update(state)

    def _requests(
        self, active: list[_ActiveParameter], grad_scale: float
    ) -> tuple[dict[tuple[int, int], GroupUpdate], dict[nn.Parameter, dict[str, Any]]]:
        """Return the update of each (unit, group), and the state of each parameter after that update."""
        segments: dict[tuple[int, int], list[SegmentRequest]] = {}
        used: dict[tuple[int, int], set[Moment]] = {}
        after: dict[nn.Parameter, dict[str, Any]] = {}
        shared: dict[int, tuple[tuple[tuple[str, Any], ...], dict[str, Moment]]] = {}  # by param group
        for parameter, place, group, handle in active:
            if id(group) not in shared:
                shared[id(group)] = self._options(group), self.moments(group)
            options, moments = shared[id(group)]
            state = self.state.get(parameter, {})  # .get() adds no entry, because a speculative update may be dropped
            step, begun = state.get("step", 0) + 1, state.get("begun", {})
            if not begun and self.coordinator.gradient_is_zero(place) and self.keeps_idle(group):
                after[parameter] = {"step": step, "begun": begun}
                continue
            fresh = not moments.keys() <= begun.keys()
            after[parameter] = {"step": step, "begun": begun | dict.fromkeys(moments, True) if fresh else begun}
            spec = place.spec
            if spec.numel:
                where = place.unit.index, place.group_index
                end = spec.offset + spec.numel
                segments.setdefault(where, []).append(
                    SegmentRequest(spec.offset, end, step, spec.index, fresh, grad_scale * handle.factors.clip, options)
                )
                used.setdefault(where, set()).update(moments.values())
        requests = {
            where: GroupUpdate(tuple(sorted(found, key=_begin)), frozenset(used[where]))
            for where, found in segments.items()
        }
        return requests, after

    def keeps_idle(self, group: Mapping[str, Any]) -> bool:
        """Return whether a gradient of zeros changes neither weights nor moments of a param group that are zero."""
        return False

    def _options(self, group: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
        """Return the options that are the same for every parameter of a param group."""
        flags = {"maximize": bool(group["maximize"]), "seed": int(group["seed"])}
        return tuple((self.hyperparameters(group) | flags).items())

    def checkpoint(self) -> OptimizerRecord:
        """Return the data of this optimizer that a generation stores in addition to the states.

        Raises:
            ConfigError: a hyperparameter could not be read back, such as NaN.
        """
        names: dict[Any, str] = {parameter: place.spec.name for parameter, place in self._places.items()}
        groups = [
            {key: value for key, value in group.items() if key not in _NAMES}
            | {"params": [names[parameter] for parameter in group["params"]]}
            for group in self.param_groups
        ]
        return record_optimizer(
            class_name=type(self).__name__,
            param_groups=groups,
            state={names[parameter]: state for parameter, state in self.state.items()},
            last_grad_norm=self.last_grad_norm,
            skipped_steps=self.skipped_steps,
            skips_in_a_row=self._skips_in_a_row,
        )

    def names(self) -> set[str]:
        """Return the names of the parameters."""
        return {place.spec.name for place in self._places.values()}

    def restore_progress(self, saved: OptimizerRecord) -> None:
        """Set each parameter's step number from the record of a resumed run, so that the number matches the states in
        the store.

        Raises:
            ResumeError: the run had another optimizer.
        """
        name = type(self).__name__
        if saved.class_name != name:
            raise ResumeError(f"the run was trained with infinity.{saved.class_name}; it cannot be resumed with {name}")
        self._unclaimed = {key: progress.model_dump() for key, progress in saved.state.items()}
        self._claim(self._places)
        self.last_grad_norm, self.skipped_steps = saved.last_grad_norm, saved.skipped_steps
        self._skips_in_a_row = saved.skips_in_a_row

    def _claim(self, places: Mapping[nn.Parameter, ParameterPlace]) -> None:
        for parameter, place in places.items():
            state = self._unclaimed.pop(place.spec.name, None)
            if state is not None:
                self.state[parameter] = _ParameterState(state)

    def restore_hyperparameters(self, saved: OptimizerRecord) -> None:
        """Restore learning rates and other hyperparameters in a resumed run, as torch's load_state_dict does.

        Raises:
            ResumeError: the param groups differ from those of the run.
        """
        mine = [[self._places[parameter].spec.name for parameter in group["params"]] for group in self.param_groups]
        if mine != [group.get("params") for group in saved.param_groups]:
            raise ResumeError(
                f"the param groups of infinity.{type(self).__name__} are not those of the run that is resumed: give "
                "the same parameters in the same groups and order"
            )
        known = ({key: value for key, value in group.items() if key not in _NAMES} for group in saved.param_groups)
        groups = [group | values for group, values in zip(self.param_groups, known, strict=True)]
        try:
            for index, group in enumerate(groups):
                self._check(index, group)
        except ConfigError as error:
            raise ResumeError(f"the run cannot be resumed: {error}") from error
        for group, values in zip(self.param_groups, groups, strict=True):
            group.update(values)

    @uninterruptible
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients.

        Gradients are set to None even with `set_to_none=False`, because there is no tensor to fill with zeros.
        """
        self.coordinator.zero_grad(self._places.items())

    def read_state(self, parameter: nn.Parameter, name: str) -> torch.Tensor:
        """Return a copy of a parameter's state after the last step: an fp32 tensor in RAM with the parameter's shape.

        A state that is kept in bf16 or int8 is decoded.

        Args:
            parameter: a parameter of this optimizer.
            name: torch's name of the state, such as "exp_avg".

        Raises:
            ConfigError: the parameter has no state of this name. Before its first step, a parameter has no states.
            NotAvailableError: there are several ranks.
            SwapIOError: the store could not be read.
        """
        place, begun = self._places.get(parameter), self.state.get(parameter, {}).get("begun", {})
        if place is None:
            raise ConfigError(
                f"read_state: this optimizer does not train the parameter of shape {tuple(parameter.shape)}"
            )
        if name not in begun:
            known = ", ".join(begun) or "none before its first step"
            raise ConfigError(f"read_state: '{place.spec.name}' has no state {reprlib.repr(name)}. Its states: {known}")
        return exact_moment(self.coordinator, place, STORED_AS[name])

    def state_dict(self) -> dict[str, Any]:
        """Return hyperparameters and steps, and a StateHandle for each moment. No tensor is read from the store."""
        packed = super().state_dict()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, state in packed["state"].items():
            name = self._places[parameters[index]].spec.name
            handles = {key: self._handle(name, key, state["step"]) for key in state["begun"]}
            packed["state"][index] = {"step": state["step"], **handles}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore hyperparameters; missing hyperparameters get this optimizer's defaults.

        The state_dict must name the states that are in the store now.

        Raises:
            ModelError: the state_dict belongs to another run or step, or contains tensors, which cannot be loaded.
            ConfigError: the argument is no state_dict, it has different groups, or a hyperparameter is out of range.
        """
        self._take_in()
        sizes = [len(group["params"]) for group in self.param_groups]
        groups, states = parts_of(state_dict, sizes)
        groups = [{**self.defaults, **group} for group in groups]
        for index, group in enumerate(groups):
            self._check(index, group)
        named = [key for group in groups for key in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        own = dict(zip(named, parameters, strict=True))
        for key in states:
            if key not in own:
                raise ModelError(
                    f"the state_dict has a state of parameter {reprlib.repr(key)}, which none of its groups has"
                )
        state = {key: self._own_state(own[key], state) for key, state in states.items()}
        super().load_state_dict({**state_dict, "param_groups": groups, "state": state})
        self.state = defaultdict(
            _ParameterState, {parameter: _ParameterState(each) for parameter, each in self.state.items()}
        )

    def _own_state(self, parameter: nn.Parameter, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state that a state_dict names, after a check that the store has this state."""
        name, now = self._places[parameter].spec.name, self.state.get(parameter, {})
        saved = {key: StateHandle.read(value) for key, value in saved.items()}
        for key in dict.fromkeys([*now.get("begun", {}), *saved]):
            mine, theirs = self._handle(name, key, now.get("step", 0)), saved.get(key)
            if isinstance(theirs, StateHandle) and self.coordinator.is_at(theirs.run, self.coordinator.steps):
                theirs = replace(theirs, run=mine.run)  # saved by the run from which this run was copied
            if key != "step" and theirs != mine:
                raise ModelError(
                    f"cannot load {key} of '{name}': {_difference(theirs, mine)}. A state_dict only names states, "
                    "which are in the store of the run that saved it. Restore the states from a checkpoint folder "
                    "(Trainer's resume_from_checkpoint, for a model of InfinityConfig(..., resume=FOLDER) or under "
                    "infinity run --resume FOLDER), with infinity.resume, or from a copy with "
                    "infinity.offload_from_checkpoint."
                )
        if saved.get("step") != now.get("step"):
            raise ModelError(f"cannot load step {saved.get('step')} of '{name}': the store is at {now.get('step', 0)}")
        return dict(now)

    def _handle(self, name: str, state: str, step: int) -> StateHandle:
        return StateHandle(name, state, step, self.coordinator.run)


def _difference(saved: Any, mine: StateHandle) -> str:
    """Return how a saved state differs from the state that is in the store now."""
    if not isinstance(saved, StateHandle):
        return "it is a tensor of another optimizer" if isinstance(saved, torch.Tensor) else "it was not saved"
    if saved.run != mine.run:
        return f"it belongs to run {saved.run[:8] or 'in RAM'}, and this is run {mine.run[:8] or 'in RAM'}"
    if saved.step != mine.step:
        return f"it was saved after step {saved.step}, and the store is at step {mine.step}"
    return f"it is {saved.state} of '{saved.parameter}'"


_begin = operator.attrgetter("begin")
