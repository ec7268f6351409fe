"""What a script under infinity has: its swap config, the models that it loaded, and those that are offloaded."""

from __future__ import annotations

import logging
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.load import scratch_directory
from infinity.config import PINS_MAX, SwapConfig
from infinity.coordinator import registry
from infinity.errors import ModelError, PlanError, printable
from infinity.integrations.folders import folders_of, go_on, name_vanished, remove_left
from infinity.io.directory import HEADER_NAME, generations_in
from infinity.plan.machine import available_device_bytes, available_host_bytes
from infinity.runtime.deferred import is_a_deferred, is_deferred, values_of
from infinity.runtime.offload import close, offload
from infinity.sizes import format_bytes
from infinity.state.moments import OptimizerName

logger = logging.getLogger(__name__)

_COMPUTED_IN = {"bf16": torch.bfloat16, "fp16": torch.float16}
_TRAINED_WEIGHT = 4
"""How much of memory.host a byte of trained weights counts beside one of frozen weights: it has states, too."""


@dataclass(frozen=True)
class Wishes:
    """What is known of the training before the model is offloaded.

    Attributes:
        accumulation_steps: backward passes before a step.
        optimizer: whose states to make room for.
        moments: how the optimizer keeps them ("int8" where a script asks for an 8-bit optimizer).
        folder: the checkpoint folder to go on from.
        pins: how many checkpoint folders there are at a time.
        dtype: that the weights are to have: the one that the script computes in.
        device: where models compute; None: the current GPU, or the CPU where there is none.
    """

    accumulation_steps: int | None = None
    optimizer: OptimizerName = "adamw"
    moments: str | None = None
    folder: Path | None = None
    pins: int = 0
    dtype: torch.dtype | None = None
    device: torch.device | None = None


@dataclass
class Run:
    """One script.

    Attributes:
        config: of all its models together.
        wishes: of the model that is trained.
        references: models that are only evaluated.
        trained: models that will be trained, whoever evaluates them before.
        resumed: the checkpoint folder that a model went on from.
    """

    config: SwapConfig
    wishes: Wishes = field(default_factory=Wishes)
    references: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    trained: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    _loaded: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    resumed: Path | None = None
    _offloaded: list[weakref.ref[nn.Module]] = field(default_factory=list)
    _names: list[str] = field(default_factory=list)
    _stores: list[tuple[weakref.ref[nn.Module], str, list[Path]]] = field(default_factory=list)
    _outer: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    _scratch: ExitStack = field(default_factory=ExitStack)

    @property
    def device(self) -> torch.device:
        """Where models compute."""
        if self.wishes.device is not None:
            return self.wishes.device
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    def scratch(self) -> str:
        """A directory on the swap disk that is gone when the run ends."""
        parent = self._scratch.enter_context(scratch_directory(self.config))
        return tempfile.mkdtemp(dir=parent)

    def wish(self, **known: Any) -> None:
        """More is known of the training. Args: known: attributes of Wishes."""
        self.wishes = replace(self.wishes, **known)

    def computes_in(self, mixed_precision: Any) -> None:
        """Args: mixed_precision: as accelerate has it: "no", "bf16" or "fp16"."""
        self.wish(dtype=_COMPUTED_IN.get(str(mixed_precision)))

    # -- models -------------------------------------------------------------------------------------------------------

    def loaded(self, model: nn.Module) -> None:
        """A model was loaded, and its parameters are deferred: it is offloaded when it is first used."""
        self._loaded.add(model)
        model.register_forward_pre_hook(_FirstUse(self), prepend=True)

    def wrapped(self, inner: nn.Module, outer: nn.Module) -> None:
        """A library put a module around a model, which is what is called from now on."""
        if inner in self._loaded or inner in self._outer:
            self._outer[inner] = weakref.ref(outer)
            outer.register_forward_pre_hook(_FirstUse(self), prepend=True)

    def outermost(self, model: nn.Module) -> nn.Module:
        found = self._outer.get(model)
        outer = None if found is None else found()
        return model if outer is None else self.outermost(outer)

    def models_in(self, module: nn.Module) -> list[nn.Module]:
        """The loaded models in a module, with what libraries put around them."""
        inside = set(module.modules())
        found = [self.outermost(each) for each in list(self._loaded) if each in inside]
        return [each for each in dict.fromkeys(found) if each in inside]

    def owner_of(self, parameters: Iterable[Any]) -> nn.Module | None:
        """The loaded model, with what libraries put around it, that has one of these parameters."""
        wanted = {id(each) for each in parameters}
        for model in list(self._loaded):
            outer = self.outermost(model)
            if any(id(parameter) in wanted for parameter in outer.parameters()):
                return outer
        return None

    # -- offloading ---------------------------------------------------------------------------------------------------

    def ensure_offloaded(self, model: nn.Module, *, optimizer: OptimizerName | None = None) -> None:
        """Offload a model that is not, as one that is trained or one that is only evaluated.

        Raises:
            InfinityError: as infinity.offload and infinity.resume.
        """
        if registry.is_offloaded(model):
            return
        inner = [each for each in model.modules() if each is not model and registry.is_offloaded(each)]
        if inner:
            raise ModelError(
                f"{type(model).__name__} was put around a model that was offloaded already, because it was used. Make "
                f"the {type(model).__name__} before the first forward pass."
            )
        trained = model not in self.references or model in self.trained
        self._convert(model)
        if not trained:
            model.requires_grad_(False)
        name = self._directory_name(trained=trained)
        config = self._config_of(model, name, trained=trained)
        how: dict[str, Any] = {"device": self.device, "optimizer": optimizer or self.wishes.optimizer}
        with _naming_the_share(config, self._others(model)), values_of(model) as source:
            if trained:
                how["accumulation_steps"] = self.wishes.accumulation_steps
            if trained and self.wishes.folder is not None:
                go_on(model, self.wishes.folder, config, **how)
                self.resumed = self.wishes.folder
                self.wish(folder=None)  # another model is not the one of that folder
            else:
                offload(model, config, source=source, **how)
        self._offloaded.append(weakref.ref(model))
        self._names.append(name)
        if config.nvme.paths:
            paths = [path.expanduser() for path in config.nvme.paths]
            self._stores.append((weakref.ref(model), registry.coordinator_of(model).run, paths))
        _say(model, trained=trained)

    def optimizer_made(self) -> None:
        """Until then a model that was changed is offloaded anew, and its store is of another run."""
        for index, (found, _, paths) in enumerate(self._stores):
            model = found()
            if model is not None and registry.is_offloaded(model):
                self._stores[index] = found, registry.coordinator_of(model).run, paths

    def _convert(self, model: nn.Module) -> None:
        """Weights in the dtype that autocast would copy them to: the fp32 values stay, in the master."""
        dtype = self.wishes.dtype
        if dtype is None or not any(parameter.dtype == torch.float32 for parameter in model.parameters()):
            return
        named = "bf16" if dtype == torch.bfloat16 else "fp16"
        logger.warning(
            "infinity: the weights are %s with an fp32 master, instead of fp32 with a %s copy by autocast", named, named
        )
        loaded = is_deferred(model)
        for parameter in model.parameters():  # adapters, which PEFT has in fp32, stay so
            if parameter.dtype == torch.float32 and (is_a_deferred(parameter) if loaded else parameter.requires_grad):
                parameter.data = parameter.to(dtype)

    def _config_of(self, model: nn.Module, name: str, *, trained: bool) -> SwapConfig:
        """The config of one model: its share of the memory, a directory of its own, and what the script wishes.

        Args:
            name: of its directory below each of nvme.paths; "" for these themselves.
        """
        others, memory = self._others(model), self.config.memory
        if others:
            host, device = memory.host or available_host_bytes(), memory.device or available_device_bytes(self.device)
            mine = _nbytes(model) * (_TRAINED_WEIGHT if trained else 1)
            host_share = mine / (mine + sum(map(self._claim, others)))
            device_share = _nbytes(model) / (_nbytes(model) + sum(map(_nbytes, others)))
            memory = memory.model_copy(update={"host": int(host * host_share), "device": int(device * device_share)})
        changes: dict[str, Any] = {"memory": memory}
        if trained and self.wishes.moments is not None and self.config.moments == "fp32":
            changes["moments"] = self.wishes.moments
        if not trained:
            changes |= {"commit_every": 0, "pins": 0}
        elif self.config.commit_every and not self.config.pins:
            changes["pins"] = min(self.wishes.pins, PINS_MAX)
        if name:
            paths = [path / name for path in self.config.nvme.paths]
            changes["nvme"] = self.config.nvme.model_copy(update={"paths": paths})
        return self.config.model_copy(update=changes)

    def _directory_name(self, *, trained: bool) -> str:
        """The first model that is trained has the directories of the config; others have one below them."""
        number = len(self._names) + 1  # a model that is gone keeps its name
        if not trained:
            return f"reference-{number}"
        return f"model-{number}" if "" in self._names else ""

    def _others(self, model: nn.Module) -> list[nn.Module]:
        """The models that share memory with this one. One that is offloaded later gets its share then."""
        waiting = [each for each in self._loaded if is_deferred(each) and self.outermost(each) is not model]
        return [*self.alive(), *(each for each in waiting if each is not model)]

    def _claim(self, model: nn.Module) -> int:
        frozen = _frozen(model) or model in self.references
        return _nbytes(model) * (1 if frozen else _TRAINED_WEIGHT)

    def alive(self) -> list[nn.Module]:
        """The offloaded models that the script has not let go."""
        return [model for model in (each() for each in self._offloaded) if model is not None]

    def close(self, *, failed: bool) -> None:
        """The script is over. Where it ended well the stores go, also of models that were collected, but for those with
        generations that checkpoint folders need."""
        with ExitStack() as ending:
            ending.callback(self._scratch.close)
            for model in self.alive():
                if failed:
                    ending.callback(_say_what_is_left, self.config)
                ending.callback(close if failed else _close_what_ended_well, model)
            if not failed:
                for _, run, paths in (each for each in self._stores if each[0]() is None):
                    ending.callback(remove_left, paths, run)


class _FirstUse:
    """Offloads a model before its first forward, where no optimizer was made before."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __call__(self, module: nn.Module, args: Any) -> None:
        if registry.is_offloaded(self._run.outermost(module)):
            for number, hook in list(module._forward_pre_hooks.items()):
                if hook is self:
                    del module._forward_pre_hooks[number]  # it has done its work
            return
        if not is_deferred(module):
            return
        before = set(module._forward_pre_hooks)
        self._run.ensure_offloaded(self._run.outermost(module))
        for number, hook in list(module._forward_pre_hooks.items()):
            if number not in before:  # torch calls the hooks that there were when the call began
                hook(module, args)

    def __deepcopy__(self, memo: dict[int, Any]) -> _FirstUse:
        return self


@contextmanager
def _naming_the_share(config: SwapConfig, others: Sequence[nn.Module]) -> Iterator[None]:
    """A plan that does not fit says what the memory was shared with."""
    try:
        yield
    except PlanError as error:
        if not others:
            raise
        memory = config.memory
        raise PlanError(
            f"{error} (The script has {len(others) + 1} models; of memory.device and memory.host this one was given "
            f"{format_bytes(memory.device or 0)} and {format_bytes(memory.host or 0)}, by its share of the weights.)"
        ) from error


def _close_what_ended_well(model: nn.Module) -> None:
    name_vanished(model)
    folders = folders_of(model)
    if folders:
        logger.warning("infinity: the store stays: %s need it", ", ".join(map(str, folders)))
    close(model, discard=not folders)


def _say_what_is_left(config: SwapConfig) -> None:
    """After a script that failed and a store that was closed."""
    first = config.nvme.paths[0].expanduser() if config.nvme.paths else None
    found = generations_in(first) if first is not None and (first / HEADER_NAME).exists() else {}
    if found:
        logger.warning(
            "infinity: the script failed. Its states after step %d stay in %s: resume_from_checkpoint goes on from a "
            "checkpoint folder, `infinity checkpoint export %s --output FOLDER` writes them, and `infinity checkpoint "
            "remove %s` lets them go, so that the script can begin anew",
            max(found),
            first,
            first,
            first,
        )


def _frozen(model: nn.Module) -> bool:
    return not any(parameter.requires_grad for parameter in model.parameters())


def _nbytes(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _say(model: nn.Module, *, trained: bool) -> None:
    plan = registry.coordinator_of(model).plan
    what = "trained" if trained else "a reference, which has no states"
    logger.warning(
        "infinity: %s, %s parameters, %s: weights %s, optimizer %s, %s of device and %s of host memory",
        printable(type(model).__name__),
        f"{plan.layout.numel:,}",
        what,
        plan.placement.weights.tier,
        plan.placement.optimizer.tier if trained else "none",
        format_bytes(plan.device_bytes),
        format_bytes(plan.host_bytes),
    )


def parameters_in(groups: Sequence[Any]) -> list[Any]:
    """Of the first argument of an optimizer, as a list of parameters, of (name, parameter), or of param groups."""
    found: list[Any] = []
    for each in groups:
        inner = each.get("params", []) if isinstance(each, dict) else [each]
        inner = [inner] if isinstance(inner, torch.Tensor) else inner
        found += [one[1] if isinstance(one, tuple) and len(one) == 2 else one for one in inner]
    return found
