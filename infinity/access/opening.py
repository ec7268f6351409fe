"""Opening of a coordinator for a model: discover the units, plan, open the resources, and fill them with values."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from infinity.access.ingest import ingest
from infinity.config import PINS_MAX
from infinity.coordinator import registry
from infinity.coordinator.coordinator import CoordinatedOptimizer, Coordinator
from infinity.device_update.arithmetic_check import why_not_there
from infinity.device_update.compared_updates import StateDtypes
from infinity.durable import module_buffers
from infinity.durable.commits import Commits
from infinity.durable.model_description import describe
from infinity.durable.registered_optimizers import RegisteredOptimizers
from infinity.errors import DeviceRoomError, ModelError
from infinity.io.headers import header_in
from infinity.plan.commit_frequency import CommitFrequency
from infinity.plan.fastest_plan import needs_rates
from infinity.plan.local_rates import rates_for
from infinity.plan.plan import Plan
from infinity.plan.plan_input import NO_PEERS, PeerFacts
from infinity.plan.planner import make_plan, require_shared
from infinity.ranks.paths import rank_path
from infinity.sharded.rank_agreement import RankAgreement, local_peers, meet_ranks, meeting
from infinity.sharded.rank_agreement import ranks_share_memory as ranks_share_memory
from infinity.sharded.rank_dependent_parts import open_maker
from infinity.state.discover import DiscoveredUnits, discover
from infinity.state.dtypes import master_format
from infinity.state.machine_rates import MachineRates
from infinity.state.model_shape import shape_of
from infinity.state.offload_arguments import OffloadArguments
from infinity.state.training_step import TrainingStep
from infinity.state.values import Source
from infinity.tiers.resources import ModelResources

logger = logging.getLogger(__name__)

_LARGE_BYTES = 256 << 20


def open_coordinator(
    model: nn.Module, terms: OffloadArguments, fill: Callable[[Coordinator], None]
) -> tuple[Coordinator, DiscoveredUnits]:
    """Find the units of a model, plan where their states are kept, open the resources, and fill them with values.

    Args:
        model: the model.
        terms: terms of the run.
        fill: function that writes the values to their homes (`from_source`; resuming.py: `from_generation`).

    Returns:
        The coordinator, and the units and parameters that were found.

    Raises:
        ModelError: the model is offloaded already, or cannot be offloaded.
        PlanError: a budget is too small; nothing was moved.
        ResumeError, StoreLockedError, StoreNotEmptyError, SwapIOError: the errors of ModelResources and of `fill`.
        NotAvailableError, PeerError: the errors of meet_ranks; or another rank failed.
    """
    agreement = meet_ranks(terms.config, terms.device)
    with agreement.telling():
        found = discover(model, terms.config.moments, terms.config.frozen)
        _require_free(found)
        agreement = agreement.agreed(terms, found.units)

        def plan_of(commits: CommitFrequency | None, peers: PeerFacts) -> Plan:
            return plan_for(model, found, terms, peers, commits)

        try:
            plan = plan_of(None, agreement.peers)
        except DeviceRoomError as error:
            agreement.world.tell("planning", None)
            raise error.among(agreement.peers) from None
        commits, peers = agreement.planned(plan)
        if commits != plan.placement.commits or peers.sharing != plan.peers.sharing:
            plan = plan_of(commits, peers)
        if plan.peers.sharing != peers.sharing:
            raise AssertionError("another frequency of commits has moved weights to NVMe")
        require_shared(plan, terms.config)
        return _open(model, found, terms, plan, agreement, fill), found


def _open(
    model: nn.Module,
    found: DiscoveredUnits,
    terms: OffloadArguments,
    plan: Plan,
    agreement: RankAgreement,
    fill: Callable[[Coordinator], None],
) -> Coordinator:
    """Open the resources of a plan, and fill them with values."""
    config, resumes = terms.config, terms.resumes
    logger.info("plan:\n%s", plan.describe())
    if plan.layout.arena.nbytes > _LARGE_BYTES:
        gc.collect()  # reference cycles may keep a closed model and its memory alive
    if not plan.placement.accumulates and any(
        group.dtype != torch.float32 for unit in found.units for group in unit.trainable_groups
    ):
        logger.info("memory.host has no room to add up several micro-batches in fp32; step after every backward pass")
    record, read_buffers = describe(model, found, config.master), module_buffers.reader(model)
    if resumes:
        agreement.require_resumable(config.nvme)
    else:
        agreement.begin_run(config.nvme, replaces=terms.replaces)
    nvme = agreement.nvme(config.nvme)
    resources = ModelResources(plan, nvme, terms.device, agreement.resources(plan), terms.faults, resume=resumes)
    try:
        optimizers = RegisteredOptimizers[CoordinatedOptimizer]()
        maker = open_maker(resources.world, resources.generations)
        commits = Commits(resources, optimizers, maker, record, read_buffers)
        coordinator = Coordinator(found.units, found.parameters, resources, optimizers, commits)
    except BaseException:
        resources.close()
        raise
    try:
        with agreement.telling():
            agreement.stores_are_open(config.nvme, resume=resumes)
            fill(coordinator)
            coordinator.filled()
    except BaseException:
        coordinator.close()
        registry.give_back_signals()
        raise
    return coordinator


def plan_for(
    model: nn.Module,
    found: DiscoveredUnits,
    terms: OffloadArguments,
    peers: PeerFacts = NO_PEERS,
    commits: CommitFrequency | None = None,
) -> Plan:
    """Return the plan for a model.

    Raises:
        PlanError: a budget is too small.
    """
    facts, step = terms.facts, terms.step
    if facts is not None and terms.device.type != "cpu":  # in RAM, activations do not count for memory.device
        several = peers.slice_count > 0  # several ranks have no plans to compare
        if facts.rates is None and not several and needs_rates(terms.config):
            facts = replace(facts, rates=_rates(model, terms, facts.batch.tokens))
        step = TrainingStep(shape_of(model, facts.batch.sequences, facts.batch.length), facts)
    return make_plan(
        found.units,
        replace(terms, refusal=partial(_why_not_on_device, found, terms), step=step),
        can_recompute=bool(getattr(model, "supports_gradient_checkpointing", False)),
        sites=found.sites,
        peers=peers,
        commits=commits,
    )


def _rates(model: nn.Module, terms: OffloadArguments, tokens: int) -> MachineRates | None:
    """Return the rates of this machine; None if the device has no memory for the measurement."""
    try:
        return rates_for(model, terms.config, terms.device, tokens)
    except torch.OutOfMemoryError as error:
        logger.info("the plan does not know the rates of this machine: %s", error)
        return None


def _why_not_on_device(found: DiscoveredUnits, terms: OffloadArguments) -> str:
    """Return why the device cannot update the units; "" if it can."""
    groups = [group for unit in found.units for group in unit.trainable_groups]
    forms = {
        StateDtypes(group.dtype, master_format(group.dtype, terms.config.master), dtype)
        for group in groups
        for dtype in (group.dtype, torch.float32)
    }
    return why_not_there(terms.device, terms.optimizer, forms)


def pins_in_store(model: nn.Module, terms: OffloadArguments) -> int:
    """Return the number of generations that can be pinned in the store of a run to be resumed. All ranks call this.

    The number is computed from the size of the store. Several ranks take the largest of their numbers. If no number of
    pins matches the store's size, return the config's number. The error about the wrong size is raised later, when the
    store is opened.

    Raises:
        PlanError, ConfigError, ModelError: the errors of open_coordinator.
        ResumeError: there is no store, or its header is damaged.
        PeerError: another rank failed.
    """
    config = terms.config
    if not config.commit_every or not config.nvme.paths:
        return config.pins
    with meeting(config.ranks_deadline_s) as tell:
        found = discover(model, config.moments, config.frozen)
        # The swap file is the same wherever states rest, and this plan does not know what the ranks share.
        anywhere = {"pins": 0, "optimizer": "auto" if config.optimizer == "device" else config.optimizer}
        without = replace(terms, config=config.model_copy(update=anywhere), resumes=True)
        peers = local_peers()
        plan = plan_for(model, found, without, peers)
        swap = plan.layout.swap
        copy_bytes = swap.further_copies // config.keep
        store = rank_path(config.nvme.paths[0].expanduser().absolute(), peers.cut.index, peers.cut.count)
        more = header_in(store).header.nbytes - swap.kept
        pins, rest = divmod(more, copy_bytes) if copy_bytes else (0, more)
        mine = pins if not rest and 0 <= pins <= PINS_MAX else config.pins
        told: list[int] = tell("reading how many pins the store has room for", mine)
    return max(told)  # a rank without slices cannot compute the number


def from_source(source: Source | None, in_memory: Callable[[str], bool]) -> Callable[[Coordinator], None]:
    """Return a function that fills a model from `source`, or from the parameters themselves (see ingest)."""
    return lambda coordinator: ingest(coordinator, source, in_memory)


def _require_free(found: DiscoveredUnits) -> None:
    for named in found.parameters:
        for name, parameter in named.items():
            if registry.find(parameter) is not None:
                raise ModelError(f"parameter '{name}' belongs to another offloaded model")
