"""The state of a script under infinity: the swap config, the models that libraries loaded, and the offloaded models."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.access.generation_pinning import agree
from infinity.base.accelerator import current_device
from infinity.checkpoint.load_pretrained import scratch_directory
from infinity.checkpoint.save_adapters import is_peft_model
from infinity.config import PINS_MAX, MemoryConfig, SwapConfig
from infinity.coordinator import registry
from infinity.durable import rng
from infinity.errors import ModelError, PeerError, StoreNotEmptyError
from infinity.integrations.checkpoint_folders import (
    folders_of,
    keeps_generations,
    name_vanished,
    remove_empty,
    remove_left,
    resume_from_folder,
)
from infinity.integrations.memory_shares import MemoryClaim, MemoryShares, naming_the_shares
from infinity.integrations.quantization import QuantizedForms
from infinity.integrations.resume_hint import Resuming, by_trainer, held_by_an_earlier_run, log_leftovers
from infinity.integrations.saving import give_saving, take_saving
from infinity.integrations.script_messages import log_nothing_offloaded, say
from infinity.io.directory import parts_text
from infinity.io.rank_paths import place_of
from infinity.ranks.ranks import require_ranks_met
from infinity.runtime.deferred_parameters import defer_in_memory, is_a_deferred, is_deferred, values_of
from infinity.runtime.guards import UncopyableHook
from infinity.runtime.offload import close, offload
from infinity.runtime.reoffload import as_it_was, undo_offload
from infinity.sizes import format_bytes
from infinity.state.moments import OptimizerName
from infinity.state.training_step import StepFacts

logger = logging.getLogger(__name__)

_COMPUTED_IN = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class TrainingFacts:
    """Facts about the training that are known before the trained model is offloaded.

    Attributes:
        accumulation_steps: backward passes before a step.
        step: the batch of a step, with the longest sequences that it may have; None: not known.
        optimizer: name of the optimizer. The plan has room for its states.
        moments: form of the optimizer's moments ("int8" if the script asks for an 8-bit optimizer).
        folder: the checkpoint folder to resume from.
        begin: function that offloads the model when `folder` is None: infinity.offload or infinity.resume.
        pins: the maximum number of checkpoint folders that exist at the same time.
        dtype: dtype that the weights will have, which is the dtype in which the script computes.
        device: device on which models compute; None: the current GPU, or the CPU if there is none.
    """

    accumulation_steps: int | None = None
    step: StepFacts | None = None
    optimizer: OptimizerName = "adamw"
    moments: str | None = None
    folder: Path | None = None
    begin: Callable[..., Any] = offload
    pins: int = 0
    dtype: torch.dtype | None = None
    device: torch.device | None = None


@dataclass
class ScriptRun:
    """The run of one script.

    Attributes:
        config: the swap config for all models of the script together.
        resuming: function that returns how the script resumes from a checkpoint folder.
        reads_random_states: whether a library restores the RNG states of the folder from which the script resumes;
            accelerate and a Trainer do this. Random numbers that the script draws before the RNG states are restored,
            such as the seeds of its loaders, must be the same numbers as in the original run.
        facts: facts about the training of the trained model.
        references: models that are only evaluated.
        trained: models that will be trained, even if they are evaluated first.
        forms: forms of frozen weights of models for which the script asks for quantized weights.
    """

    config: SwapConfig
    resuming: Resuming = by_trainer
    reads_random_states: bool = False
    facts: TrainingFacts = field(default_factory=TrainingFacts)
    references: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    trained: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    forms: QuantizedForms = field(default_factory=QuantizedForms)
    _loaded: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    _evaluated: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    _folders: weakref.WeakKeyDictionary[nn.Module, Path] = field(default_factory=weakref.WeakKeyDictionary)
    _offloaded: list[weakref.ref[nn.Module]] = field(default_factory=list)
    _names: list[str] = field(default_factory=list)
    _stores: list[tuple[weakref.ref[nn.Module], str, list[Path]]] = field(default_factory=list)
    _outer: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    _parents: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[nn.Module]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    _holders: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    _narrowed: list[weakref.ref[nn.Parameter]] = field(default_factory=list)
    _scratch: ExitStack = field(default_factory=ExitStack)
    _entered_before: int = field(default_factory=registry.entered)
    _shares: MemoryShares = field(init=False)
    _absent: list[Path] = field(init=False)

    def __post_init__(self) -> None:
        self._shares = MemoryShares(self.config)
        self._absent = [path for each in self.config.nvme.paths if not (path := each.expanduser()).exists()]

    @property
    def device(self) -> torch.device:
        """Device on which models compute."""
        return current_device() if self.facts.device is None else self.facts.device

    def made_accelerator(self) -> None:
        """Record that the script has an Accelerator."""
        self.reads_random_states = True

    def resumes_by(self, resuming: Resuming) -> None:
        """Record how the script resumes from a checkpoint folder: as `resuming` of that folder says."""
        self.resuming = resuming

    def scratch(self) -> str:
        """Return a new directory on the swap disk that is removed when the run ends."""
        return self._scratch.enter_context(scratch_directory(self.config))

    def add_facts(self, **known: Any) -> None:
        """Record facts about the training. The keys of `known` are attributes of TrainingFacts."""
        self.facts = replace(self.facts, **known)

    def computes_in(self, mixed_precision: Any) -> None:
        """Record the dtype of the weights, for a value of accelerate's mixed_precision: "no", "bf16" or "fp16"."""
        self.add_facts(dtype=_COMPUTED_IN.get(str(mixed_precision)))

    # -- models -------------------------------------------------------------------------------------------------------

    def loaded(self, model: nn.Module) -> None:
        """Register a loaded model whose parameters are deferred. The model is offloaded at its first use."""
        self._loaded.add(model)
        self._await_use(model)

    def _await_use(self, model: nn.Module) -> None:
        model.register_forward_pre_hook(_OffloadOnFirstUse(self, model), prepend=True)

    def copied(self, model: nn.Module, memo: dict[int, Any]) -> nn.Module | None:
        """Return a copy of a loaded model, or of a library's wrapper around a loaded model, and register the copy.

        Facts that are known about the original also apply to the copy.

        Args:
            model: the original.
            memo: memo of copy.deepcopy, which has the objects that were already copied.
        """
        copied: nn.Module | None = memo.get(id(model))
        if copied is not None and model in self._loaded:
            self._loaded.add(copied)
            self.forms.copied(model, copied)
        outer = None if (found := self._outer.get(model)) is None else found()
        if copied is not None and id(outer) in memo:
            self._outer[copied] = weakref.ref(memo[id(outer)])
        return copied

    def placed(self, parent: nn.Module, child: nn.Module | None) -> None:
        """Record that a module became a part of another module."""
        if child is not None and (child in self._loaded or child in self._holders):
            self._holders.add(parent)
            self._parents.setdefault(child, weakref.WeakSet()).add(parent)

    def wrapped(self, inner: nn.Module, outer: nn.Module) -> None:
        """Record that a library has wrapped a model in a module.

        The script will call the wrapper instead of the model.
        """
        if inner in self._loaded or inner in self._outer:
            self._outer[inner] = weakref.ref(outer)
            self._await_use(outer)

    def outermost(self, model: nn.Module) -> nn.Module:
        found = self._outer.get(model)
        outer = None if found is None else found()
        return model if outer is None else self.outermost(outer)

    def models_in(self, module: nn.Module) -> list[nn.Module]:
        """Return the loaded models in a module. For a wrapped model, return the outermost wrapper."""
        inside = set(module.modules())
        found = [self.outermost(each) for each in list(self._loaded) if each in inside]
        return [each for each in dict.fromkeys(found) if each in inside]

    def owner_of(self, parameters: Iterable[Any]) -> nn.Module | None:
        """Return the module that owns these parameters.

        The owner is a loaded model with its wrappers, if it has all of the parameters. Otherwise the owner is the
        smallest module around a loaded model that has all of the parameters, such as the script's own model. If there
        is no such module, the owner is the loaded model that has some of the parameters.
        """
        wanted = {id(each) for each in parameters}
        for model in list(self._loaded):
            outer = self.outermost(model)
            if not wanted.isdisjoint(map(id, outer.parameters())):
                return self._around(outer, wanted) or outer
        return None

    def _around(self, module: nn.Module, wanted: set[int]) -> nn.Module | None:
        if wanted.issubset(map(id, module.parameters())):
            return module
        found = [self._around(parent, wanted) for parent in self._parents.get(module, ())]
        return next((each for each in found if each is not None), None)

    # -- offloading ---------------------------------------------------------------------------------------------------

    def ensure_offloaded(self, model: nn.Module, *, optimizer: OptimizerName | None = None) -> None:
        """Offload a model with optimizer states, if it does not have them yet.

        A model that was offloaded for an evaluation is offloaded again.

        Args:
            model: the model to offload.
            optimizer: name of the optimizer that is being made for the model, which replaces an earlier optimizer in
                `facts`. None if no optimizer is being made.

        Raises:
            InfinityError: as for infinity.offload and infinity.resume.
        """
        self.undo_evaluation(model)
        if registry.is_offloaded(model):
            return
        inner = [each for each in model.modules() if registry.is_offloaded(each)]
        if inner:
            raise ModelError(
                f"{type(model).__name__} was put around a model that was offloaded already, "
                "because the model was used or has "
                f"an optimizer. Make the {type(model).__name__} before the first forward pass, and one optimizer for "
                "all of its parameters: one optimizer for each parameter, stepped by a hook in the "
                "backward, would save no memory here."
            )
        trained = optimizer is not None or model in self.trained or model not in self.references
        converted = self._convert(model)
        if not trained:
            model.requires_grad_(False)
        self._offload(model, optimizer, trained=trained)
        if trained:
            self.trained.add(model)
            coordinator = registry.coordinator_of(model)
            self._narrowed += map(weakref.ref, converted)
            narrowed = {id(each()) for each in self._narrowed}
            found = [(each, place) for each, place in coordinator.places() if id(each) in narrowed]
            coordinator.save_wide(
                (place.spec.name for _, place in found if place.group.trainable),
                {
                    place.spec.name: partial(as_it_was, model, place.spec.name, each)
                    for each, place in found
                    if not place.group.trainable and place.group.codec is None
                },
            )

    def ensure_evaluated(self, model: nn.Module) -> None:
        """Offload a model without optimizer states.

        The model is used without an autograd graph, and it is not yet known whether it will be trained.
        """
        self._convert(model)
        wanted = {parameter: parameter.requires_grad for parameter in model.parameters()}
        try:
            model.requires_grad_(False)
            self._offload(model, None, trained=False)
        finally:
            for parameter, requires_grad in wanted.items():
                parameter.requires_grad_(requires_grad)
        self._evaluated.add(model)
        if hasattr(type(model), "resize_token_embeddings"):
            object.__setattr__(model, "resize_token_embeddings", _ResizeEvaluated(self, model))
        self._await_use(model)  # this hook runs before the hooks of the offloaded model

    def undo_evaluation(self, model: nn.Module) -> None:
        """Undo the offloading of all models inside `model` that were offloaded only for an evaluation.

        Afterwards these models can be offloaded again.
        """
        for each in model.modules():
            if each in self._evaluated:
                undo_offload(each)
                self._evaluated.discard(each)
                each.__dict__.pop("resize_token_embeddings", None)
                take_saving(each)
                self._offloaded = [one for one in self._offloaded if one() is not each]
                self._stores = [one for one in self._stores if one[0]() is not each]

    def remember_folder(self, model: nn.Module, folder: Path) -> None:
        """Record that this loaded model, and no other model, will be offloaded from a checkpoint folder."""
        self._folders[model] = folder

    def began_from(self, model: nn.Module) -> Path | None:
        """Return the checkpoint folder from which this model was resumed, or from which it will be resumed when it is
        offloaded.
        """
        found = next((self._folders[each] for each in model.modules() if each in self._folders), None)
        return self.facts.folder if found is None and not registry.is_offloaded(model) else found

    def is_decided(self, model: nn.Module) -> bool:
        """Return whether it is known if this model is trained or only evaluated."""
        return model in self.trained or model in self.references or self.began_from(model) is not None

    def is_evaluated(self, model: nn.Module) -> bool:
        """Return whether a model is offloaded without states because it is not known yet whether it is trained."""
        return model in self._evaluated

    def _offload(self, model: nn.Module, optimizer: OptimizerName | None, *, trained: bool) -> None:
        require_ranks_met()
        if self._open():
            gc.collect()  # reference cycles may keep the memory of models that the script no longer uses
        mine, waiting, open_models = MemoryClaim(model, trained), self._claims(model), self._open()
        memory = self._shares.of(mine, waiting, open_models, self.device)
        name = self._directory_name(trained=trained)
        config = self._config_of(model, memory, name, trained=trained)
        folder = self.began_from(model) if trained else None
        how: dict[str, Any] = {"device": self.device, "optimizer": optimizer or self.facts.optimizer}
        with naming_the_shares(memory, waiting, open_models):
            if trained:
                how |= {"accumulation_steps": self.facts.accumulation_steps, "tokens": self.facts.step}
            if folder is not None:
                drawn = rng.snapshot()
                with values_of(model):  # this does not read the values
                    resume_from_folder(model, folder, config, **how)
                if self.reads_random_states:
                    rng.restore(drawn)
                logger.warning(
                    "infinity: the model resumes from %s, after step %d",
                    folder,
                    registry.coordinator_of(model).steps,
                )
                self.remember_folder(model, folder)
                self.add_facts(folder=None)  # only one model can resume from this folder
            else:
                try:
                    (self.facts.begin if trained else offload)(model, config, **how)
                except StoreNotEmptyError as error:
                    place = config.nvme.paths[0].expanduser().absolute()
                    raise StoreNotEmptyError(held_by_an_earlier_run(place, self.resuming) or str(error)) from error
        give_saving(model)
        self._offloaded.append(weakref.ref(model))
        self._names.append(name)
        coordinator = registry.coordinator_of(model)
        if paths := coordinator.directories:
            self._stores.append((weakref.ref(model), coordinator.run, paths))
        say(model, trained=trained)

    def optimizer_made(self) -> None:
        """Record the current run id of each store.

        If the script has changed a model, the model is offloaded again before its optimizer is made, and its store then
        belongs to a new run.
        """
        for index, (found, _, paths) in enumerate(self._stores):
            model = found()
            if model is not None and registry.is_offloaded(model):
                self._stores[index] = found, registry.coordinator_of(model).run, paths

    def _convert(self, model: nn.Module) -> list[nn.Parameter]:
        """Convert fp32 weights to the dtype to which autocast would convert them in each forward.

        Return the converted parameters.

        The masters keep the fp32 values.
        """
        dtype = self.facts.dtype
        if dtype is None or not any(parameter.dtype == torch.float32 for parameter in model.parameters()):
            return []
        named = "bf16" if dtype == torch.bfloat16 else "fp16"
        logger.warning(
            "infinity: the weights are %s with an fp32 master, instead of fp32 with a %s copy made by autocast; "
            "save_pretrained writes the masters in fp32, and state_dict() returns the %s weights",
            named,
            named,
            named,
        )
        # PEFT's adapters are in fp32 and are not converted. A new head and resized embeddings are converted.
        adapted = is_deferred(model) and any(map(is_peft_model, model.modules()))
        chosen = [
            parameter
            for parameter in model.parameters()
            if parameter.dtype == torch.float32
            and (is_a_deferred(parameter) or (parameter.requires_grad and not adapted))
        ]
        if not adapted:
            defer_in_memory(model)  # this keeps the fp32 values
        for parameter in chosen:
            parameter.data = parameter.to(dtype)
        return chosen

    def _config_of(self, model: nn.Module, memory: MemoryConfig, name: str, *, trained: bool) -> SwapConfig:
        """Return the swap config of one model.

        It has the model's share of the memory, directories of its own, and settings that the script asks for.

        Args:
            model: the model that is offloaded.
            memory: the model's share of the memory.
            name: name of the model's directory below each of nvme.paths. If it is "", the model uses nvme.paths
                themselves.
            trained: whether the model has optimizer states."""
        changes: dict[str, Any] = {"memory": memory} | self.forms.changes(model, self.config)
        if trained and self.facts.moments is not None and self.config.moments == "fp32":
            changes["moments"] = self.facts.moments
        if not trained:
            changes |= {"commit_every": 0, "pins": 0}
        elif self.config.commit_every and not self.config.pins:
            changes["pins"] = min(self.facts.pins, PINS_MAX)
        if name:
            paths = [path.expanduser() / name for path in self.config.nvme.paths]
            for path in paths:
                path.parent.mkdir(mode=0o700, exist_ok=True)
            changes["nvme"] = self.config.nvme.model_copy(update={"paths": paths})
        return self.config.model_copy(update=changes)

    def _directory_name(self, *, trained: bool) -> str:
        """Return the name of a model's directory: "" for the first trained model, which uses nvme.paths themselves."""
        number = len(self._names) + 1  # each name is used only once
        if not trained:
            return f"reference-{number}"
        return f"model-{number}" if "" in self._names else ""

    def _claims(self, model: nn.Module) -> list[MemoryClaim]:
        """Return the claims of the loaded models that are not offloaded yet, except `model` and the models inside
        `model`.
        """
        waiting = [self.outermost(each) for each in self._loaded if is_deferred(each)]
        mine = set(model.modules())
        return [self._claim(each) for each in dict.fromkeys(waiting) if each not in mine]

    def _claim(self, model: nn.Module) -> MemoryClaim:
        return MemoryClaim(model, trained=not _frozen(model) and model not in self.references)

    def _places(self) -> dict[Path, int]:
        """Return the first directory of each store of this script, with the steps of its model; 0 if it is gone."""
        named = (path.expanduser().absolute() / name for name in self._names for path in self.config.nvme.paths[:1])
        coordinators = map(registry.coordinator_of, self.alive())
        steps = {place_of(each.directories[0]).absolute(): each.steps for each in coordinators if each.directories}
        return {place: steps.get(place, 0) for place in named}

    def alive(self) -> list[nn.Module]:
        """Return the offloaded models that still exist."""
        found = (each() for each in self._offloaded)
        return [model for model in found if model is not None and registry.is_offloaded(model)]

    def _open(self) -> list[nn.Module]:
        """Return the offloaded models that are not closed."""
        return [model for model in self.alive() if not registry.coordinator_of(model).closed]

    def close(self, *, failed: bool, stopped: bool = False) -> None:
        """End the run, because the script is over.

        If the script succeeded, all stores are removed, including the stores of models that were garbage-collected.
        Stores with generations that checkpoint folders need are kept.

        Args:
            failed: whether the script failed.
            stopped: whether Ctrl-C stopped the script.
        """
        with ExitStack() as ending:
            ending.callback(remove_empty, self._absent)
            ending.callback(self._scratch.close)
            models = self.alive()
            if not failed and registry.entered() == self._entered_before:
                log_nothing_offloaded()
            if stopped or (failed and models):
                ending.callback(log_leftovers, self._places(), self.resuming, stopped=stopped)
            for model in models:
                ending.callback(close if failed else _close_finished, model)
            if not failed:
                for _, run, paths in (each for each in self._stores if each[0]() is None):
                    ending.callback(remove_left, paths, run)


class _ResizeEvaluated(UncopyableHook):
    """Replacement of `resize_token_embeddings` for a model that was only evaluated.

    It first undoes the offloading of the model.
    """

    def __init__(self, run: ScriptRun, model: nn.Module) -> None:
        self._run = run
        self._of = weakref.ref(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self._of()
        self._run.undo_evaluation(model)
        return type(model).resize_token_embeddings(model, *args, **kwargs)


class _OffloadOnFirstUse:
    """A hook that offloads a model before its first forward, if no optimizer was made for the model earlier."""

    def __init__(self, run: ScriptRun, model: nn.Module) -> None:
        self._run = run
        self._of = weakref.ref(model)

    def __call__(self, module: nn.Module, args: Any) -> None:
        model, run = self._run.outermost(module), self._run
        if run.is_evaluated(model):
            if not torch.is_grad_enabled() or _frozen(model):
                return
        elif registry.is_offloaded(model):
            for number, hook in list(module._forward_pre_hooks.items()):
                if hook is self:
                    del module._forward_pre_hooks[number]  # the hook is no longer needed
            return
        elif not is_deferred(module):
            return
        before = set(module._forward_pre_hooks)
        if run.is_decided(model) or torch.is_grad_enabled() or model.training:
            run.ensure_offloaded(model)
        else:
            run.ensure_evaluated(model)
        for number, hook in list(module._forward_pre_hooks.items()):
            if number not in before:  # in this call, torch runs only the hooks that existed when the call began
                hook(module, args)

    def __deepcopy__(self, memo: dict[int, Any]) -> _OffloadOnFirstUse:
        model = self._of()
        copied = None if model is None else self._run.copied(model, memo)
        return self if copied is None else _OffloadOnFirstUse(self._run, copied)


def _close_finished(model: nn.Module) -> None:
    coordinator = registry.coordinator_of(model)
    if keeps_generations(model) and not coordinator.closed:
        try:
            agree(coordinator)
        except PeerError as error:  # another rank has already closed its model, so the pins of this rank remain
            logger.info("infinity: the ranks cannot compare their pins at the end: %s", error)
    name_vanished(model)
    folders = folders_of(model)
    if folders and coordinator.world.leads:
        store = coordinator.resources.require_store()
        place = place_of(store.directories[0].path)
        logger.warning(
            "infinity: the store in %s, %s, is kept for the checkpoint folders that need it: %s. `infinity "
            "checkpoint remove --pinned %s` removes the store when no run will resume from these folders",
            place,
            format_bytes(coordinator.world.size * store.nbytes),
            ", ".join(map(str, folders)),
            parts_text(place),
        )
    close(model, discard=not folders)


def _frozen(model: nn.Module) -> bool:
    return not any(parameter.requires_grad for parameter in model.parameters())


def parameters_in(params: Any) -> list[Any]:
    """Return the parameters in the first argument of an optimizer.

    The argument is a list of parameters, of (name, parameter) pairs, or of param groups. For any other argument the
    result is empty.
    """
    found: list[Any] = []
    for each in params if isinstance(params, list | tuple) else ():
        inner = each.get("params", []) if isinstance(each, dict) else [each]
        inner = [inner] if isinstance(inner, torch.Tensor) else inner
        found += [one[1] if isinstance(one, tuple) and len(one) == 2 else one for one in inner]
    return found
