"""Replacement of torch's optimizers by infinity's optimizers, for models that are or will be offloaded."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import torch
from torch import nn

from infinity.coordinator import registry
from infinity.errors import ConfigError, ModelError
from infinity.integrations.checkpoint_folders import CheckpointFolderSave
from infinity.integrations.module_of_optimizer import holder_of
from infinity.integrations.patches import Patches
from infinity.integrations.saving import give_saving
from infinity.integrations.script_messages import log_kept_optimizer
from infinity.integrations.script_run import ScriptRun, parameters_in
from infinity.optim.adagrad import Adagrad
from infinity.optim.adamw import Adam, AdamW
from infinity.optim.groups import GroupedOptimizer
from infinity.optim.handles import StateHandle
from infinity.optim.sgd import SGD
from infinity.runtime.tiles import in_tiles

logger = logging.getLogger(__name__)

_OURS: dict[type[torch.optim.Optimizer], type[GroupedOptimizer]] = {
    torch.optim.AdamW: AdamW,
    torch.optim.Adam: Adam,
    torch.optim.SGD: SGD,
    torch.optim.Adagrad: Adagrad,
}


def ours_for(theirs: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return infinity's optimizer class for an optimizer class of torch. Return any other class unchanged."""
    return _OURS.get(theirs, theirs)


def replace_optimizers(run: ScriptRun, patches: Patches) -> None:
    """Make `torch.optim.AdamW(model.parameters(), ...)` and similar calls offload a model that a library loaded.

    The object that such a call creates is one of infinity's optimizers.
    """
    for theirs, ours in _OURS.items():
        patches.wrap(theirs, "__init__", _becoming(run, theirs, ours))
    patches.wrap(torch.optim.Optimizer, "__init__", _refusing(run))
    patches.wrap(GroupedOptimizer, "__init__", _bringing(run))
    patches.wrap(StateHandle, "__reduce__", _warning_of_names())


def _warning_of_names() -> Callable[..., Any]:
    """Return a replacement of StateHandle.__reduce__.

    It warns once if the script itself saves an optimizer's state_dict. The file has only the names of the states, and
    the store is removed at the end of the script.
    """
    runs: set[str] = set()

    def reduce(original: Callable[..., Any], handle: StateHandle) -> Any:
        if not CheckpointFolderSave.open_now and handle.run not in runs:
            runs.add(handle.run)
            logger.warning(
                "infinity: the script saves the state_dict of an optimizer itself. It has only the names of the "
                "states, and the states stay in the store, which is removed when the script succeeds. To resume from "
                "step %d in a later process, save with accelerator.save_state, with a Trainer's checkpoints, or, with "
                "`pins: 1` in the swap config, with infinity.runtime.pins.pin(model, folder): such a folder keeps its "
                "states, and `infinity run --resume folder` resumes from it",
                handle.step,
            )
        return original(handle)

    return reduce


def _becoming(run: ScriptRun, theirs: type[Any], ours: type[Any]) -> Callable[..., None]:
    def init(original: Callable[..., None], self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        params = _listed(params)
        if type(self) is not theirs or not offload_for(run, parameters_in(params), ours):
            original(self, params, *args, **kwargs)
            return
        self.__class__ = ours
        ours.__init__(self, _in_tiles(params), *args, **kwargs)
        self.accumulation_steps = run.facts.accumulation_steps or _accumulation_steps()

    return init


def _bringing(run: ScriptRun) -> Callable[..., None]:
    """Return a constructor for infinity's own optimizers.

    If the model is not offloaded, the constructor offloads it first.
    """

    def init(original: Callable[..., None], self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        params = _listed(params)
        offload_for(run, parameters_in(params), type(self))
        original(self, _in_tiles(params), *args, **kwargs)
        run.optimizer_made()

    return init


def optimizer_for(run: ScriptRun | None, kind: type[GroupedOptimizer], params: Any, **options: Any) -> GroupedOptimizer:
    """Make one of infinity's optimizers for a model. If the model is not offloaded yet, offload the model first. `run`
    is the run that loaded the model; None if the model is offloaded already.
    """
    params = _listed(params)
    if run is None:
        return kind(params, **options)
    offload_for(run, parameters_in(params), kind)
    made = kind(_in_tiles(params), **({"accumulation_steps": run.facts.accumulation_steps} | options))
    run.optimizer_made()
    return made


def _refusing(run: ScriptRun) -> Callable[..., None]:
    def init(original: Callable[..., None], self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        params = _listed(params)
        ours = isinstance(self, GroupedOptimizer)
        if not ours and offload_for(run, parameters_in(params), None):
            known = ", ".join(f"torch.optim.{theirs.__name__}" for theirs in _OURS)
            raise ConfigError(
                f"{type(self).__module__}.{type(self).__name__} works on weights in memory, and the weights of this "
                f"model are offloaded. Use one of {known} (optim='adamw_torch' of a TrainingArguments), or "
                "infinity.Lion."
            )
        original(self, params, *args, **kwargs)
        if not ours and type(self) not in _OURS:  # an optimizer in _OURS was already handled
            stays = holder_of(parameters_in(params))
            if stays is not None:
                log_kept_optimizer(self, stays)

    return init


def _listed(params: Any) -> Any:
    """Return the first argument of an optimizer, with each iterator or view replaced by a list. torch does the same."""
    params = _as_list(params)
    for each in params if isinstance(params, list | tuple) else ():
        if isinstance(each, dict) and "params" in each:
            each["params"] = _as_list(each["params"])
    return params


def _as_list(params: Any) -> Any:
    """Return a list of the elements of an iterator or a view. Return a value that torch refuses unchanged."""
    stays = not isinstance(params, Iterable) or isinstance(params, list | tuple | torch.Tensor | Mapping | Set)
    return params if stays else list(params)


def _in_tiles(params: Any) -> Any:
    """Return the first argument of an optimizer, with parameters of tiles in place of those of tiled layers.

    Making the optimizer offloads the model, and offloading divides layers that are too large into tiles.
    """
    if not isinstance(params, list | tuple):
        return params
    found: list[Any] = []
    for each in params:
        if isinstance(each, dict) and "params" in each:
            inner = each["params"]
            each["params"] = _in_tiles([inner] if isinstance(inner, torch.Tensor) else inner)
        named = isinstance(each, tuple) and len(each) == 2
        parameter = each[1] if named else each
        parts = in_tiles(parameter) if isinstance(parameter, nn.Parameter) else [parameter]
        whole = len(parts) == 1 and parts[0] is parameter
        found += [each] if whole else [(f"{each[0]}.{n}", part) if named else part for n, part in enumerate(parts)]
    return found


def offload_for(run: ScriptRun, parameters: list[Any], optimizer: type[GroupedOptimizer] | None) -> bool:
    """Offload the model to which these parameters belong, and return whether they belong to an offloaded model.

    The model is one that a library loaded, or a module of the script that is large enough.
    """
    model, home = run.owner_of(parameters), _home_of(parameters)
    if model is None and home is None and optimizer is not None:
        model = holder_of(parameters)
    at_home = home is not None and not run.is_evaluated(home) and not _outside(home, parameters)
    if model is not None and optimizer is not None and not at_home:
        _require_all_in(model, parameters)
        run.ensure_offloaded(model, optimizer=optimizer.rule)
    elif home is not None:
        give_saving(home)  # the script itself may have offloaded the model
    found = [registry.find(each) for each in parameters if isinstance(each, nn.Parameter)]
    places = [each[1] for each in found if each is not None]
    if optimizer is not None and model in run.references and not any(place.group.trainable for place in places):
        raise ModelError(
            "an optimizer gets parameters of a model that was offloaded for evaluation only: the model was prepared "
            "with evaluation_mode=True, and used. Make the optimizer before the first forward pass."
        )
    return model is not None or bool(places)


def _home_of(parameters: list[Any]) -> nn.Module | None:
    """Return the offloaded model that has some of these parameters. This is a loaded model, or a module around it."""
    for each in parameters:
        found = registry.find(each) if isinstance(each, nn.Parameter) else None
        if found is not None:
            return registry.model_of(found[0])
    return None


def _outside(model: nn.Module, parameters: list[Any]) -> list[Any]:
    """Return the elements of `parameters` that the model does not have."""
    inside = set(map(id, model.parameters()))
    return [each for each in parameters if id(each) not in inside]


def _require_all_in(model: nn.Module, parameters: list[Any]) -> None:
    """Raise ModelError if an optimizer for an offloaded model also has parameters that are not offloaded."""
    others = _outside(model, parameters)
    if others:
        raise ModelError(
            f"an optimizer gets the parameters of a {type(model).__name__}, which infinity offloads, and {len(others)} "
            f"others, the first of shape {tuple(others[0].shape)}. Put both into one module, class Whole(nn.Module) "
            "with both as attributes, and give the optimizer its parameters(); or make an optimizer for each."
        )


def _accumulation_steps() -> int | None:
    """Return the number of backward passes before a step that accelerate knows.

    Return None if the number is 1, or if the script does not use accelerate.
    """
    state = sys.modules.get("accelerate.state")
    if state is None or not state.GradientState._shared_state:
        return None
    steps: int = state.GradientState().num_steps
    return steps if steps > 1 else None
