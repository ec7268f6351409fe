"""From a model to its coordinator: discover → plan → open → bring the values home."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Sequence

import torch
from torch import nn

from infinity import _native
from infinity.config import PINS_MAX, NvmeConfig, SwapConfig
from infinity.coordinator import registry
from infinity.coordinator.coordinator import Coordinator
from infinity.coordinator.ingest import Source, ingest
from infinity.coordinator.parts import Optimizer
from infinity.durable import buffers, rng
from infinity.durable.commits import Commits, facts_of
from infinity.durable.optimizers import Optimizers
from infinity.errors import ModelError, NotAvailableError, ResumeError
from infinity.io.headers import header_in
from infinity.io.manifest import Manifest
from infinity.io.store import wait_all
from infinity.plan.plan import Plan
from infinity.plan.planner import make_plan
from infinity.plan.problem import ALONE, Peers
from infinity.ranks.ranks import Ranks
from infinity.state.description import describe
from infinity.state.discover import Discovery, discover
from infinity.state.moments import OptimizerName
from infinity.state.records import Body, parse_body
from infinity.state.shard import Cut
from infinity.tiers.resources import Resources

logger = logging.getLogger(__name__)

_LARGE_BYTES = 256 << 20
_SEVERAL_RANKS = "INFINITY_SEVERAL_RANKS"
"""Set by the tests of several ranks, which nobody else can train with yet: generations and GPUs are missing."""
_MARGIN_S = 30.0  # a rank whose disk does not answer is told of before the others give that rank up


def open_coordinator(
    model: nn.Module,
    config: SwapConfig,
    device: torch.device,
    optimizer: OptimizerName,
    accumulation_steps: int | None,
    faults: Sequence[_native.Fault],
    *,
    resume: bool,
    fill: Callable[[Coordinator], None],
) -> tuple[Coordinator, Discovery]:
    """Find the units of a model, plan where their states rest, open that, and bring the values home.

    Args:
        resume: the store is there.
        fill: brings the values (`from_source`, `from_generation`).

    Raises:
        ModelError: the model is offloaded already, or cannot be.
        PlanError: a budget is too small; nothing was moved.
        ResumeError, StoreLockedError, StoreNotEmptyError, SwapIOError: as Resources, and as `fill`.
    """
    found = discover(model, config.moments)
    _require_free(found)
    ranks = _ranks(config, device, resume=resume)
    plan = plan_for(model, found, config, device, optimizer, accumulation_steps, resume=resume, ranks=ranks)
    logger.info("plan:\n%s", plan.describe())
    if plan.layout.arena.nbytes > _LARGE_BYTES:
        gc.collect()  # a model that was closed may hang in cycles, and its memory with it
    if not plan.placement.accumulates and any(
        group.dtype != torch.float32 for unit in found.units for group in unit.trainable_groups
    ):
        logger.info("memory.host has no room to add up several micro-batches in fp32; step after every backward pass")
    record, read_buffers = describe(model, found, config.master), buffers.reader(model)
    resources = Resources(plan, _nvme_of(config.nvme, ranks), device, faults, resume=resume, ranks=ranks)
    try:
        optimizers = Optimizers[Optimizer]()
        commits = Commits(resources, optimizers, record, read_buffers)
        coordinator = Coordinator(found.units, found.parameters, resources, optimizers, commits)
    except BaseException:
        resources.close()
        raise
    try:
        fill(coordinator)
    except BaseException:
        coordinator.close()
        registry.give_back_signals()
        raise
    return coordinator, found


def _ranks(config: SwapConfig, device: torch.device, *, resume: bool) -> Ranks | None:
    """This process among others that train the model together. Raises NotAvailableError, PeerError."""
    ranks = Ranks.of_world(deadline_s=config.nvme.deadline_s + _MARGIN_S)
    if ranks is None:
        return None
    refused = {
        "training": (_SEVERAL_RANKS not in os.environ, "one process, started without torchrun"),
        "a model on a GPU": (device.type != "cpu", "device='cpu', or one process"),
        "infinity.resume": (resume, "one process"),
        f"commit_every: {config.commit_every}": (config.commit_every not in (0, "auto"), "commit_every: 0"),
    }
    for what, (asked, instead) in refused.items():
        if asked:
            ranks.close()
            raise NotAvailableError(f"{what} with several ranks is not available yet; use {instead}")
    return ranks


def plan_for(
    model: nn.Module,
    found: Discovery,
    config: SwapConfig,
    device: torch.device,
    optimizer: OptimizerName,
    accumulation_steps: int | None,
    *,
    resume: bool,
    ranks: Ranks | None = None,
) -> Plan:
    """Where everything of a model will rest. Raises PlanError."""
    return make_plan(
        found.units,
        config,
        device,
        can_recompute=bool(getattr(model, "supports_gradient_checkpointing", False)),
        optimizer=optimizer,
        accumulation_steps=accumulation_steps,
        sites=found.sites,
        resumes=resume,
        peers=ALONE if ranks is None else Peers(Cut(ranks.world, ranks.rank), ranks.local_world),
    )


def _nvme_of(nvme: NvmeConfig, ranks: Ranks | None) -> NvmeConfig:
    """Each rank has a store of its own, in a directory of its own in each of nvme.paths."""
    if ranks is None:
        return nvme
    name = f"rank-{ranks.rank:05}-of-{ranks.world:05}"
    for path in nvme.paths:
        path.expanduser().mkdir(exist_ok=True)
    return nvme.model_copy(update={"paths": [path / name for path in nvme.paths]})


def pins_in_store(
    model: nn.Module,
    config: SwapConfig,
    device: torch.device,
    optimizer: OptimizerName,
    accumulation_steps: int | None = None,
) -> int:
    """How many generations can be pinned in the store of a run that is to be resumed, by the store's size. The config's
    own number where that size is not one of this model with any number of pins: opening the store says so.

    Raises:
        PlanError, ConfigError, ModelError: as open_coordinator.
        ResumeError: there is no store, or its header is damaged.
    """
    if not config.commit_every or not config.nvme.paths:
        return config.pins
    found, without = discover(model, config.moments), config.model_copy(update={"pins": 0})
    swap = plan_for(model, found, without, device, optimizer, accumulation_steps, resume=True).layout.swap
    copy_bytes = swap.further_copies // config.keep
    more = header_in(config.nvme.paths[0].expanduser().absolute()).header.nbytes - swap.kept
    pins, rest = divmod(more, copy_bytes) if copy_bytes else (0, more)
    return pins if not rest and 0 <= pins <= PINS_MAX else config.pins


def from_source(source: Source | None) -> Callable[[Coordinator], None]:
    """Values come from `source`, or from the parameters themselves."""
    return lambda coordinator: ingest(coordinator, source)


def from_generation(model: nn.Module, step: int | None, digest: str | None = None) -> Callable[[Coordinator], None]:
    """Values, and those of the persistent buffers, come from generation `step`, the pinned one of `digest`, or the
    newest that is whole."""

    def fill(coordinator: Coordinator) -> None:
        buffers.restore(model, _restore(coordinator, step, digest).buffers)

    return fill


def _restore(coordinator: Coordinator, step: int | None, digest: str | None) -> Body:
    """Find the newest generation that is whole (or `step`, or `digest`), take it over, and leave placeholders. Returns
    its body.

    Raises:
        ResumeError: there is none, or its states have another form than the config asks for.
        SwapIOError: the device failed.
    """
    resources = coordinator.resources
    if resources.generations is None:
        raise AssertionError("resuming without generations")
    manifest = resources.generations.recover(resources.staging.view(), step, _check, digest)
    expected = facts_of(resources)
    if manifest.facts != expected:
        differ = ", ".join(
            f"{key} is {manifest.facts.get(key)!r} there and {value!r} here"
            for key, value in expected.items()
            if manifest.facts.get(key) != value
        )
        raise ResumeError(
            f"the store's states have another form: {differ}. Resume with the same config and optimizer, or convert "
            "them with `infinity checkpoint export` and --from-checkpoint."
        )
    store = resources.require_store()
    held = [home for home in resources.homes() if home.in_memory]
    wait_all([store.read(home.stored(), home.view(), io_class="states") for home in held])
    for home in held:
        home.read()
    coordinator.room.adopt()
    return go_on_from(coordinator, manifest)


def go_on_from(coordinator: Coordinator, manifest: Manifest) -> Body:
    """The states are those of a generation: go on from its step, with its random numbers. Returns its body."""
    coordinator.at_step(manifest.step, manifest.run)
    body = parse_body(manifest.body, f"generation {manifest.step}")
    coordinator.commits.resume(manifest.step, body)
    rng.restore(body.rng)
    return body


def _check(manifest: Manifest) -> None:
    parse_body(manifest.body, f"generation {manifest.step}")


def _require_free(found: Discovery) -> None:
    for named in found.parameters:
        for name, parameter in named.items():
            if registry.find(parameter) is not None:
                raise ModelError(f"parameter '{name}' belongs to another offloaded model")
