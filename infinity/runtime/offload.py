"""infinity.offload: moves the weights of a model to their tiers and installs the hooks. The values come from a model in
memory, or from a source of values for a model on the meta device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from infinity import _native
from infinity.access.generation_pinning import local_digest, require_none_pinned
from infinity.access.opening import from_source, open_coordinator, plan_for, ranks_share_memory
from infinity.access.resuming import from_generation
from infinity.base.fork import use
from infinity.config import SwapConfig
from infinity.coordinator import registry
from infinity.coordinator.coordinator import Coordinator
from infinity.coordinator.structure import ModelStructure
from infinity.errors import ConfigError, DeviceRoomError, ModelError, PlanError, ResumeError, printable
from infinity.runtime.accumulation_methods import MethodHandle, give_methods
from infinity.runtime.auto_tile import tile_to_fit
from infinity.runtime.backward_ends import BackwardEnds
from infinity.runtime.deferred_parameters import is_a_deferred, values_of
from infinity.runtime.experts import cut_banks, why_together
from infinity.runtime.guards import guard
from infinity.runtime.hooks import (
    ParameterHooks,
    RootForward,
    RootPostForward,
    RootPreForward,
    UnitPostForward,
    UnitPreForward,
)
from infinity.runtime.micro_batches import remember
from infinity.runtime.parametrizations import watch_parametrizations
from infinity.runtime.pins import generation_of
from infinity.runtime.reoffload import HookHandle, ResizeMethod, remember_handles, remember_readers, undo_offload
from infinity.runtime.tiles import by_rows, require_untied
from infinity.state.discover import DiscoveredUnits, discover
from infinity.state.frozen_codecs import pass_on
from infinity.state.moments import STORED, OptimizerName
from infinity.state.offload_arguments import OffloadArguments
from infinity.state.training_step import StepFacts
from infinity.state.values import Source
from infinity.units.released_parameters import nan_placeholder

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)


def offload(
    model: Model,
    config: str | Path | Mapping[str, Any] | SwapConfig | None = None,
    *,
    device: torch.device | str | None = None,
    optimizer: OptimizerName = "adamw",
    accumulation_steps: int | None = None,
    tokens: int | StepFacts | None = None,
    source: Source | None = None,
    faults: Sequence[_native.Fault] = (),
) -> Model:
    """Move a model's weights and optimizer states to the tiers that the swap config names; change the model in place.

    The only change to the training loop is the optimizer, which becomes infinity.AdamW. Each unit's weights are fetched
    just before its forward and backward. The model gets a method `no_sync()` unless it already has one. A linear layer
    that does not fit memory.device is tiled (infinity.tile).

    Args:
        model: any module with weights in float32, bfloat16 or float16. The model may be on the meta device if `source`
            is given. A model from load_pretrained(defer=True) may be changed or wrapped before this call.
        config: path of a swap config, a mapping, a SwapConfig, or None for all defaults.
        device: device on which the model computes; default: the current GPU, or the CPU if there is no GPU.
        optimizer: name of the optimizer, for whose states memory is reserved: "adamw", "adam", "lion", "adagrad" or
            "sgd". The memory that is reserved for AdamW is enough for every other optimizer, but a part of this memory
            then stays unused.
        accumulation_steps: number of backward passes before each step; the optimizer needs the same argument. The plan
            keeps as many gradients in RAM, in fp32, as memory.host has room for, and predicts the bytes of such a step.
            With 1, gradients are kept in 16 bits until the step if this leaves more RAM to states. None: the number is
            not known, and gradients of further passes get RAM before states. A wrong number costs time, but changes no
            bit of the result.
        tokens: number of tokens in a micro-batch, at most (with `vertical: true`, in all micro-batches that go through
            the model together); None: not known. The plan leaves as much of memory.device to
            activations as this number of tokens needs, and gives the rest to weights and states; without the number,
            it gives them half. On a GPU, one process measures the rates of the machine in a few seconds, and takes the
            plan with the shortest predicted step. A wrong number changes no bit of the result.
        source: function that returns the value of a parameter, given its name; None: the model has the values.
        faults: transfers that must fail, for tests.

    Returns:
        The same model.

    Raises:
        ConfigError, NotAvailableError: the config is not usable.
        PlanError: a budget is too small; nothing was moved.
        ModelError: the model is offloaded already, or cannot be offloaded.
        StoreLockedError, SwapIOError: the swap directory is in use; the disk is full or failed.
        StoreNotEmptyError: the swap directory has the generations of an earlier run.
    """
    terms = OffloadArguments.of(config, device, optimizer, accumulation_steps, faults, tokens)
    return offload_on(model, terms, source)


def offload_on(model: Model, terms: OffloadArguments, source: Source | None = None) -> Model:
    """Do the work of offload(), with arguments that are already parsed into `terms`."""
    _warn_of_changed_layout(model)
    share = partial(ranks_share_memory, terms.config)
    cut_banks(model, terms.config.experts, partial(why_together, terms.config, shares=share))

    def attempt() -> Model:
        return offload_values(model, terms, None if source is None else by_rows(model, source))

    try:
        return attempt()
    except DeviceRoomError as error:
        peers = error.peers

        def plan(model: nn.Module) -> None:
            plan_for(model, discover(model, terms.config.moments, terms.config.frozen), terms, peers)

        if not tile_to_fit(model, error, plan):
            raise PlanError(str(error)) from None
    return attempt()


def _warn_of_changed_layout(model: nn.Module) -> None:
    """Warn about weights in channels_last order, because all weights are in row-major order at home."""
    turned = [
        name
        for name, parameter in model.named_parameters()
        if not is_a_deferred(parameter) and parameter.dim() > 3 and not parameter.is_contiguous()
    ]
    if turned:
        logger.warning(
            "'%s'%s in channels_last order; offloaded weights have torch's default order: convolutions may take longer",
            printable(turned[0]),
            f" and {len(turned) - 1} other weights are" if len(turned) > 1 else " is",
        )


def offload_values(
    model: Model,
    terms: OffloadArguments,
    source: Source | None,
    encoded: Callable[[nn.Module], AbstractContextManager[object]] = nullcontext,
) -> Model:
    """Do the work of offload_on(), but never tile a layer.

    Args:
        model: the model.
        terms: the parsed arguments of infinity.offload.
        source: function that returns the values of a parameter, by name; None: the model's own values.
        encoded: function that returns a context in which the encoded forms of the values of `source` are recorded
            (frozen_codecs.remember).
    """
    with values_of(model) as values:
        readers, in_memory = ({}, _nowhere) if source is not None else (values.readers, values.in_memory)
        if source is None and values.deferred:
            source = values
        with encoded(model):
            _offload(model, terms, from_source(source, in_memory), placeless=source is not None)
    remember_readers(model, readers)
    return model


def _nowhere(name: str) -> bool:
    """Return False for every name, because no value is in memory."""
    return False


def resume(
    model: Model, terms: OffloadArguments, *, step: int | None = None, folder: str | Path | None = None
) -> Model:
    """Do the work of infinity.resume for a run with as many ranks as this run.

    The arguments and errors are the same as for infinity.resume.
    """
    digest = None if folder is None else _digest(folder, terms.config, step)
    fill = from_generation(model, step, digest)
    with values_of(model):  # the values are not read
        return _offload(model, replace(terms, resumes=True), fill, placeless=True)


def _digest(folder: str | Path, config: SwapConfig, step: int | None) -> str:
    """Return the digest of the generation that a checkpoint folder pins. Raises ResumeError."""
    marker = generation_of(folder, config)
    if step not in (None, marker.step):
        raise ResumeError(f"{folder} holds step {marker.step}, but step={step} is given: leave step= out")
    digest = local_digest(marker)
    if digest is None:
        raise ResumeError(
            f"{folder} holds a portable copy of its generation, in {marker.portable}: resume from the copy, in other "
            f"nvme.paths, with infinity.offload_from_checkpoint(model, '{Path(folder) / str(marker.portable)}', config)"
        )
    return digest


def _offload(model: Model, terms: OffloadArguments, fill: Callable[[Coordinator], None], *, placeless: bool) -> Model:
    """Offload a model.

    `fill` writes the values to their homes. With `placeless`, parameters may be on the meta device.
    """
    use()
    _require_offloadable(model, terms)
    if placeless:
        _leave_meta(model, terms.device)
    coordinator, found = open_coordinator(model, terms, fill)
    try:
        move_buffers(model, terms.device)
        coordinator.share_buffers(dict(model.named_buffers()), fresh=not terms.resumes)
        if terms.config.activations == "recompute":
            logger.info("activations: recompute is the older spelling of recompute: blocks")
        if coordinator.plan.placement.recompute:
            _recompute(model)
        structure = ModelStructure(model)
        on_parameters, on_modules = _install(model, found, coordinator, structure)
        remember_handles(model, [*on_modules, *give_methods(model, coordinator), *_resizing(model)])
    except BaseException:
        coordinator.close()
        registry.give_back_signals()
        raise

    # the limits are not measured again, because memory that becomes free later may be intended for another model
    limits = coordinator.plan.budgets.limits
    host = limits.host * limits.ranks
    memory = terms.config.memory.model_copy(
        update={"host": host} if limits.in_place else {"host": host, "device": limits.device}
    )
    same = terms.config.model_copy(update={"memory": memory})
    again = replace(terms, config=same, faults=(), resumes=False, replaces="")

    def require_plan(model: nn.Module) -> None:
        plan_for(model, discover(model, same.moments, same.frozen), again, coordinator.plan.peers)

    def reoffload(model: nn.Module, change: Callable[[], Any] | None) -> Any:
        undo_offload(model, lambda: require_plan(model) if change is None else None)
        try:
            return None if change is None else change()
        finally:
            offload_on(model, again)

    registry.enter(model, coordinator, on_parameters, reoffload, structure)
    return model


def _resizing(model: nn.Module) -> list[MethodHandle]:
    own = hasattr(type(model), "resize_token_embeddings")
    return [MethodHandle(model, "resize_token_embeddings", ResizeMethod(model))] if own else []


def _require_offloadable(model: nn.Module, terms: OffloadArguments) -> None:
    if registry.is_offloaded(model):
        raise ModelError(
            "this model is offloaded already, or was until infinity.close(model), and does not contain its values any "
            "more. Make or load the model again, and offload the new one."
        )
    if terms.optimizer not in STORED:
        raise ConfigError(f"optimizer '{terms.optimizer}' is not known; use one of {', '.join(STORED)}")
    require_untied(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ModelError(
                f"'{printable(name)}' has max_norm, so every forward writes to its weight, and the change would be "
                "lost. Leave max_norm out, and before the forward do `with infinity.gathered(model, embedding, "
                "write=True), torch.no_grad(): torch.embedding_renorm_(embedding.weight, ids, max_norm, 2.0)`."
            )
    if terms.resumes and terms.config.commit_every == 0:
        raise ConfigError(
            "commit_every: 0 updates states in place, so a run cannot resume with it; set commit_every: 1"
        )


def close(model: nn.Module, *, discard: bool = False) -> None:
    """End offloading: wait for transfers in flight, finish the last commit and stop the threads. A second call does
    nothing.

    The swap file is removed unless it has generations, from which the run can be resumed. The model cannot be used
    afterwards.

    Args:
        model: an offloaded model.
        discard: whether the generations are removed, too; the run can then not be resumed. With several ranks, each
            rank removes its own generations after all ranks have called this.

    Raises:
        ModelError: the model was never offloaded.
        InfinityError: the last commit failed. With `discard` also: existing checkpoint folders pin generations; the
            model was not closed.
        PeerError: with `discard`, another rank did not call this. The model is closed, and the generations are not
            removed.
    """
    coordinator = registry.coordinator_of(model)
    if discard:
        require_none_pinned(coordinator)
    try:
        coordinator.require_untouched()
    except ModelError as error:
        logger.warning("the model is closed, and a change to it is lost: %s", error)
    try:
        coordinator.close(discard=discard)
    finally:
        registry.give_back_signals()


def synchronize(model: nn.Module) -> None:
    """Wait until all updates of the last step are done.

    Correctness does not need this: fetches, evaluation, saving and commits wait for the updates that they depend on.
    The function is useful for measurements, and to learn of a failed update immediately.

    Raises:
        ModelError: the model was never offloaded.
        InfinityError: an update failed; the message names the step.
    """
    registry.coordinator_of(model).finish_updates()


def _leave_meta(model: nn.Module, device: torch.device) -> None:
    """Replace meta parameters by placeholders on `device`, because autograd does not allow a later change of a
    parameter's device.

    Tied parameters stay tied.
    """
    placed: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if parameter not in placed:
                empty = nan_placeholder(parameter.shape, parameter.dtype, device)
                placed[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                pass_on(parameter, placed[parameter])
            module._parameters[name] = placed[parameter]


class _CheckpointWithGrad:
    """Object for the attribute `gradient_checkpointing` of transformers layers. It is true only while autograd records
    a graph.

    Without a graph there is nothing to recompute. If the attribute were True, a layer in training mode would not use
    its cache even without a graph, and `generate` would return other tokens.
    """

    def __bool__(self) -> bool:
        return torch.is_grad_enabled()


def _recompute(model: Any) -> None:
    """Switch activation recomputation on.

    The method's name depends on the version of transformers: version 5 renamed it.
    """
    before = {module for module in model.modules() if getattr(module, "gradient_checkpointing", False)}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if module not in before and getattr(module, "gradient_checkpointing", None) is True:
            module.gradient_checkpointing = _CheckpointWithGrad()


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move all buffers to the device. Buffers are not offloaded."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)


def _install(
    model: nn.Module, found: DiscoveredUnits, coordinator: Coordinator, structure: ModelStructure
) -> tuple[list[RemovableHandle], list[HookHandle]]:
    """Install the hooks on parameters and on modules. Return the handles of the parameters' hooks and of the modules'
    hooks."""
    ends = BackwardEnds(coordinator)
    root_forward = RootForward(coordinator, structure, ends)
    on_parameters = [watch_parametrizations(coordinator)]
    on_modules: list[HookHandle] = []
    for site in found.sites:
        on_modules.append(site.module.register_forward_pre_hook(UnitPreForward(coordinator, site)))
        leave = UnitPostForward(coordinator, site, root_forward)
        on_modules.append(site.module.register_forward_hook(leave, with_kwargs=True, always_call=True))
    # The root candidates' pre-hooks run before the sites' pre-hooks, and their post-hooks run after the sites'
    # post-hooks, because a module may be both a root candidate and a site.
    for module in found.root_candidates:
        on_modules.append(module.register_forward_pre_hook(RootPreForward(root_forward), prepend=True))
        on_modules.append(module.register_forward_hook(RootPostForward(root_forward), always_call=True))
    for parameter, place in coordinator.places():
        if place.group.trainable:
            hooks = ParameterHooks(coordinator, parameter, place, ends)
            on_parameters.append(parameter.register_hook(hooks.before))
            on_parameters.append(parameter.register_post_accumulate_grad_hook(hooks.after))
    on_modules.append(remember(model, root_forward, ends, found.sites))
    return on_parameters, [*on_modules, *guard(model, coordinator)]
