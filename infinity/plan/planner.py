"""The planner: make a plan from budgets and units, or raise a PlanError that names the smallest change that would
fit.

[Note: who gets memory first]
memory.host is divided in this order. Each part gets memory that the earlier parts leave:

1. gradients that ranks exchange, copies of weights that ranks keep for each other, states on the device on their
   way to the store, and activations that `activations: auto` keeps in RAM (`PlanInput.reserved_bytes`);
2. gradients, or the window in which they land, together with the staging of updates. Placements of gradients are tried,
   the best first. Each is tried with the staging that suits the budget, then with the smallest staging (`_fitting`).
   The planner takes the first pair that leaves enough memory for everything that must be in RAM, or a later pair with
   which a step moves fewer bytes (`_place`);
3. the bounce buffer of gradients and the memory for uploads, then weights, then the optimizer's states (placement.py:
   place). If some states go to NVMe, weights and states leave some memory to shadows for new weights (`shadow_wanted`);
4. shadows for new weights, and the checksums of second copies (`reserve`);
5. host copies of weights that are copied from the device for updates (`copies_bytes`);
6. states that are read ahead (`ahead_bytes`);
7. shadows of updates whose states rest in RAM (`reserve_in_ram`).

memory.device is for activations, resident units (resident_units.py), slots, the ring, and weights that wait to be
decoded. If the batch is known, activations get what they need, and the other parts get the rest; if not, the other
parts get a share (MemoryLimits.for_weights). The ring is as long as possible while it leaves enough memory for the
slots (budgets.py: device_bytes). If the rates of the machine are known, too, the planner compares shares of resident
units, and plans with and without recomputation (fastest_plan.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch

from infinity.config import SwapConfig
from infinity.errors import ConfigError, DeviceRoomError, PlanError, printable
from infinity.plan.budgets import Budgets, UpdateStaging, copies_bytes, device_bytes, fits_slots, plan_staging
from infinity.plan.commit_frequency import NO_PATHS, NOTHING_TRAINED, CommitFrequency, frequency_of
from infinity.plan.disk import DiskLimits, disks_of
from infinity.plan.fastest_plan import KeptActivations, fastest, ways_to_keep
from infinity.plan.layout import lay_out
from infinity.plan.machine_resources import available_device_bytes, available_host_bytes
from infinity.plan.nvme_traffic import NvmeTraffic, traffic
from infinity.plan.placement import (
    ChosenTiers,
    GradientPlacement,
    NumberFormats,
    StatePlacement,
    TierSplit,
    gradient_placements,
    place,
)
from infinity.plan.plan import Plan, forecast
from infinity.plan.plan_input import (
    DECODING_SCRATCH_BYTES,
    NO_PEERS,
    MemoryLimits,
    PeerFacts,
    PlanInput,
    UnitBytes,
    adds_up_there,
    count,
    secondary_bytes,
)
from infinity.plan.resident_units import resident_units
from infinity.plan.speculation_memory import ahead_bytes, reserve, reserve_in_ram, shadow_wanted, wanted_in_ram
from infinity.sizes import PAGE_BYTES, enough_bytes, format_bytes, round_up
from infinity.state.discover import HookedModule
from infinity.state.moments import STORED
from infinity.state.offload_arguments import OffloadArguments
from infinity.state.unit import Unit

HOST_SHARE = 0.8
"""Default of memory.host, as a share of the RAM that is available when the plan is made."""
DEVICE_SHARE = 0.9
"""Default of memory.device, as a share of the device's free memory."""
_KEPT_BYTES_MAX = 32 << 30  # of activations in RAM


def make_plan(
    units: Sequence[Unit],
    terms: OffloadArguments,
    *,
    can_recompute: bool,
    sites: Sequence[HookedModule] = (),
    peers: PeerFacts = NO_PEERS,
    commits: CommitFrequency | None = None,
    disks: DiskLimits | None = None,
) -> Plan:
    """Place every state, and decide how often to commit if the config leaves this open.

    Args:
        units: all units, in the order of their indices.
        terms: terms of the run. If accumulation_steps is not known, one pass is counted. If accumulation_steps is 1,
            gradients leave more RAM to states, provided that a step moves fewer bytes this way. If `step` is known, the
            plan leaves room for its activations.
        can_recompute: whether the model can switch activation recomputation on.
        sites: the units that each module needs; empty: every unit has a module of its own.
        peers: facts about the other ranks; if there are several ranks, the plan covers the slices of this rank.
        commits: how often the ranks commit; None: the ranks have not agreed on a frequency yet.
        disks: the disks to plan for; None: the disks of nvme.paths with their present free space.

    Raises:
        PlanError: a budget is too small; the message names the unit, the budget and a size that would fit.
        ConfigError: `optimizer` or `weights` on NVMe without nvme.paths; `recompute` for a model that cannot recompute.
    """

    def plan_of(among: PeerFacts) -> Plan:
        return _fastest_plan(units, terms, can_recompute, sites, among, commits, disks)

    passing = replace(peers, sharing="transfers")
    open_tiers = terms.config.weights == "auto" and terms.config.optimizer != "device" and terms.config.nvme.paths
    may_pass = peers.sharing == "weights" and open_tiers and not commits
    try:
        plan = plan_of(peers)
    except DeviceRoomError:
        raise
    except PlanError:
        if not may_pass:
            raise
        return plan_of(passing)
    if peers.sharing == "weights" and plan.placement.weights.in_ram != frozenset(unit.index for unit in units):
        return plan_of(passing)
    if may_pass and not plan.budgets.limits.in_place:  # RAM for all weights may be worth more to states
        with suppress(PlanError):
            other = plan_of(passing)
            return min(plan, other, key=lambda each: each.forecast.moved.nvme_bytes)
    return plan


def require_shared(plan: Plan, config: SwapConfig) -> None:
    """Check that ranks share what they must share: memory if they have devices, and all weights if experts are apart.

    Raises:
        PlanError: they do not share it.
    """
    limits = plan.budgets.limits
    if limits.gathers and any(unit.full.routed for unit in plan.layout.units):
        raise PlanError(
            "the experts are apart, and several ranks fetch different experts. So they must share all weights in RAM, "
            "and here they do not. Set weights: host and ranks.wire: auto, or experts: together in a new run."
        )
    if limits.gathers and limits.sharing == "nothing" and not limits.in_place:
        raise PlanError(
            f"several ranks on GPUs pass weights through memory that they share, and the swap config has ranks.wire: "
            f"{config.ranks.wire}. Set ranks.wire: auto, or use one process."
        )


def _fastest_plan(
    units: Sequence[Unit],
    terms: OffloadArguments,
    can_recompute: bool,
    sites: Sequence[HookedModule],
    peers: PeerFacts,
    commits: CommitFrequency | None,
    disks: DiskLimits | None,
) -> Plan:
    """Return the plan, for given facts about the other ranks. The arguments are those of make_plan."""
    config, stored = terms.config, STORED[terms.optimizer]
    limits = limits_of(config, terms.device, peers)
    there = disks or disks_of(config, limits.ranks)
    kept = [peers.cut.of(unit).local for unit in units]
    counted = tuple(
        UnitBytes(mine, whole, tuple(count(group, config, stored) for group in mine.groups))
        for mine, whole in zip(kept, units, strict=True)
    )

    adds_up = adds_up_there(terms.accumulation_steps, config)
    recompute = _recompute(config, can_recompute)
    plans: dict[tuple[KeptActivations, frozenset[int]], Plan] = {}

    def made(kept: KeptActivations, share: float) -> Plan:
        """Return the plan with a share of the resident units that fit, for one way to keep activations."""
        config = terms.config.model_copy(update={"activations": kept.tier})
        room = _beside_activations(limits, terms, kept, decodes=any(unit.encoded for unit in counted))
        chosen = resident_units(config, room, counted, sites, adds_up=adds_up, refusal=terms.refusal, share=share)
        try:
            return updating(chosen, config, room, kept)
        except PlanError:  # the gradients of updates on the device wait in RAM, if ranks add them there
            if not limits.slice_count or not chosen or config.optimizer == "device":
                raise
            return updating(frozenset(), config, room, kept)

    def updating(chosen: frozenset[int], config: SwapConfig, room: MemoryLimits, kept: KeptActivations) -> Plan:
        """Return the plan with these units updated on the device."""
        if (kept, chosen) in plans:  # another share of the same units
            return plans[kept, chosen]
        # weights that are in their slots until their update are gathered only once
        once = peers.sharing == "weights" or not limits.in_place or fits_slots(units, room)
        among = replace(peers, near=None) if once else peers
        secondary = 0 if among.near is None else secondary_bytes(units, among.near)
        # Weights that ranks share stay in RAM, and their gradients meet there. So only the states are on the device.
        whole, states_only = (frozenset[int](), chosen) if limits.slice_count else (chosen, frozenset[int]())
        resident = tuple(unit for unit in counted if unit.index in whole)
        others = tuple(unit for unit in counted if unit.index not in whole)

        def plan(commits: CommitFrequency) -> Plan:
            inputs = PlanInput(
                config,
                room,
                there,
                others,
                stored,
                terms.accumulation_steps,
                commits.every,
                secondary,
                resident,
                states_only,
            )
            made = _plan(inputs, commits, terms.device, recompute=kept.recompute, sites=sites, resumes=terms.resumes)
            return replace(made, peers=among)

        trains = any(unit.trainable_groups for unit in units)
        found = plan(commits) if commits else _with_commits(plan, config, there, trains=trains, resumes=terms.resumes)
        plans[kept, chosen] = found
        return found

    return fastest(made, config, terms.step, ways_to_keep(config, limits, terms.step, recompute=recompute))


def _beside_activations(
    limits: MemoryLimits, terms: OffloadArguments, kept: KeptActivations, *, decodes: bool
) -> MemoryLimits:
    """Return the limits with the bytes that activations need, if the batch is known."""
    if terms.step is None or limits.in_place:
        return limits
    chosen = terms.config.activations == "auto" and kept.tier == "host"
    away = {"host": float(_KEPT_BYTES_MAX) if chosen else math.inf, "nvme": math.inf}.get(kept.tier, 0.0)
    work = terms.step.work(recompute=kept.recompute, vertical=terms.config.vertical, away=away)
    scratch = decodes * DECODING_SCRATCH_BYTES
    return replace(
        limits,
        activations=work.peak_bytes + scratch,
        block=work.block_bytes + scratch,
        away=round_up(work.away_bytes, PAGE_BYTES) if chosen or kept.tier == "nvme" else 0,
    )


def _with_commits(
    plan: Callable[[CommitFrequency], Plan], config: SwapConfig, disks: DiskLimits, *, trains: bool, resumes: bool
) -> Plan:
    """Return the plan that commits as often as the config says, or as often as it can at little cost, if the disks have
    room.

    `plan` makes a plan for a given frequency of commits. The placement is the same for every frequency except 0.
    `trains` is whether a part of the model is trained, on this rank or on another rank.
    """
    if config.commit_every != "auto":
        return plan(CommitFrequency(config.commit_every))
    if not config.nvme.paths:
        if resumes:
            raise ConfigError("there is nothing to resume without nvme.paths: name the directories of the run")
        return plan(NO_PATHS)
    try:
        every_step = plan(CommitFrequency(1))
    except PlanError:
        if resumes:
            raise
        return plan(CommitFrequency(0, "memory.host has no room for the checksums of second copies"))
    layout, forecast = every_step.layout, every_step.forecast
    if not trains and not resumes:
        return plan(NOTHING_TRAINED)
    missing = layout.swap.nbytes + layout.manifest_bytes - disks.room_bytes
    if missing > 0 and not resumes:
        where = " and ".join(printable(path) for path in config.nvme.paths)
        count = config.keep + config.pins + 1
        copies = "a second copy needs" if count == 2 else f"{count} copies need"
        return plan(CommitFrequency(0, f"{copies} {format_bytes(missing)} more on {where}"))
    commits = frequency_of(forecast.commit_bytes, forecast.step_bytes - forecast.commit_bytes)
    return plan(commits)


def _plan(
    inputs: PlanInput,
    commits: CommitFrequency,
    device: torch.device,
    *,
    recompute: bool,
    sites: Sequence[HookedModule],
    resumes: bool,
) -> Plan:
    config = inputs.config
    chosen = _place(inputs, resumes=resumes)
    staging, placed, gradients = chosen.staging, chosen.placed, chosen.gradients
    _require_paths(inputs, placed, gradients)
    host_bytes = staging.nbytes + placed.host_bytes + gradients.host_bytes + inputs.reserved_bytes
    reserved = reserve(inputs, placed, gradients, inputs.limits.host - host_bytes)
    copies = copies_bytes(inputs, placed.weights, inputs.limits.host - host_bytes - reserved.host_bytes)
    host_bytes += reserved.host_bytes + copies
    room = inputs.limits.host - host_bytes
    ahead = ahead_bytes(inputs, placed, staging.tile_bytes, room, reserved.shadow_bytes)
    reserved, before = reserve_in_ram(inputs, placed, gradients, reserved, room - ahead), reserved
    host_bytes += reserved.host_bytes - before.host_bytes
    kept = _kept_bytes(inputs, inputs.limits.host - host_bytes - ahead)
    host_bytes += kept
    placement = StatePlacement(
        weights=_beside(placed.weights, inputs, others=bool(inputs.units)),
        optimizer=_beside(placed.optimizer, inputs, inputs.states_on_device, others=bool(inputs.updated_on_processor)),
        gradients=_beside(
            TierSplit("nvme" if gradients.spills else "host", gradients.in_ram), inputs, others=bool(inputs.trained)
        ),
        form=NumberFormats(config.master, config.moments, inputs.stored, gradients.fp32),
        updates=reserved.updates,
        activations=_activations(inputs),
        recompute=recompute,
        commits=commits,
        keep=config.keep,
        pins=config.pins,
    )
    slots, ring, longest = device_bytes(inputs, sites, placed.weights)
    budgets = Budgets(
        limits=inputs.limits,
        slot_bytes=slots,
        ring=ring,
        longest_ring_bytes=longest,
        resident_bytes=inputs.resident_bytes,
        scratch_bytes=inputs.scratch_bytes,
        operand_bytes=inputs.operand_bytes,
        decoding_bytes=0 if inputs.limits.in_place else inputs.decoding_bytes,
        decodes=bool(inputs.decoded),
        upload_bytes=placed.upload_bytes,
        bounce_bytes=placed.bounce_bytes,
        copies_bytes=copies,
        commit_bytes=inputs.commit_bytes,
        activation_bytes=inputs.activation_bytes + kept,
        exchange_bytes=inputs.exchange_bytes,
        secondary_bytes=inputs.secondary_bytes,
        landing_bytes=gradients.landing_bytes,
        shadow_bytes=reserved.shadow_bytes,
        staging=replace(staging, ahead_bytes=ahead),
    )
    layout = lay_out(inputs, placement, gradients, budgets)
    saves = 0
    if inputs.known_passes is None:
        one_pass = _place(replace(inputs, known_passes=1), resumes=resumes)
        saves = chosen.moved.step_bytes - one_pass.moved.step_bytes
    predicted = forecast(inputs, placement, budgets, layout, sites, saves_bytes=saves)
    plan = Plan(str(device), placement, budgets, layout, predicted)
    if plan.host_bytes != host_bytes + ahead:
        raise AssertionError(f"placed within {host_bytes + ahead} bytes of host memory, laid out in {plan.host_bytes}")
    return plan


def _beside(
    split: TierSplit, inputs: PlanInput, states_only: frozenset[int] = frozenset(), *, others: bool
) -> TierSplit:
    """Return the tiers of all units.

    Args:
        split: tiers of the units that are not on the device.
        inputs: the input of the planner.
        states_only: units that are not resident and whose states of this kind are on the device.
        others: whether there are units that are not on the device.
    """
    resident = frozenset(unit.index for unit in inputs.resident) | states_only
    return replace(split, tier=split.tier if others or not resident else "device", resident=resident)


def limits_of(config: SwapConfig, device: torch.device, peers: PeerFacts = NO_PEERS) -> MemoryLimits:
    """Return the two budgets: the config's numbers, or a share of the memory that is available at present.

    Memory that the ranks of a machine have in common is divided by the number of these ranks.
    """
    in_place, ranks = device.type == "cpu", peers.on_machine
    if peers.memory is not None:
        return MemoryLimits(*peers.memory, in_place, peers.slice_count, ranks, sharing=peers.sharing)
    on_device = config.memory.device or int(available_device_bytes(device) * (0.4 if in_place else DEVICE_SHARE))
    return MemoryLimits(
        device=on_device // ranks if in_place else on_device,
        host=(config.memory.host or int(available_host_bytes() * HOST_SHARE)) // ranks,
        in_place=in_place,
        slice_count=peers.slice_count,
        ranks=ranks,
        sharing=peers.sharing,
    )


@dataclass(frozen=True)
class _PlacementChoice:
    """A placement of gradients, weights and states, and the memory for updates."""

    inputs: PlanInput
    staging: UpdateStaging
    placed: ChosenTiers
    gradients: GradientPlacement

    @cached_property
    def moved(self) -> NvmeTraffic:
        placed = self.placed
        return traffic(self.inputs, placed.weights.in_ram, placed.optimizer.in_ram, self.gradients.in_ram)

    @property
    def choice_bytes(self) -> int:
        """Bytes of a step by which the planner compares placements.

        While the frequency of commits is still open, the bytes of commits are left out. The planner later chooses a
        frequency at which commits cost little, and the placement must not depend on this frequency.
        """
        commits = 0 if self.inputs.config.commit_every == "auto" else self.moved.commit_share_bytes
        return self.moved.read_bytes + self.moved.written_bytes + commits

    @property
    def shadow_bytes(self) -> int:
        """Bytes of host memory left for shadows of states in RAM; at most as many bytes as the updates of all such
        states need."""
        used = self.staging.nbytes + self.placed.host_bytes + self.gradients.host_bytes + self.inputs.reserved_bytes
        return min(self.inputs.limits.host - used, wanted_in_ram(self.inputs, self.placed, self.gradients))


def _place(inputs: PlanInput, *, resumes: bool) -> _PlacementChoice:
    """Return the first placement of the gradients that fits.

    If a step is known to have one pass, return the placement that moves the fewest bytes. If several placements move
    equally few bytes, return the placement that leaves the most memory for shadows.
    """
    fitting = _fitting(inputs)
    first = next(fitting)
    if inputs.known_passes != 1 or inputs.adds_up:
        return first
    others = [each for each in fitting if _may_replace(first, each, resumes=resumes)]
    return min([first, *others], key=lambda each: (each.choice_bytes, -each.shadow_bytes))


def _may_replace(first: _PlacementChoice, other: _PlacementChoice, *, resumes: bool) -> bool:
    """Return whether the placement `other` may be used instead of `first`.

    If gradients can add up with `first`, they must be able to add up with `other`, too: a second pass may come although
    the caller said that there is one pass. And one pass may produce several gradients of a parameter (reentrant
    checkpoints that use the same parameter). The disks must have room for the bytes that the placement adds to the swap
    file.
    """
    gradients, placed = other.gradients, other.placed
    if first.gradients.accumulates and not gradients.accumulates:
        return False
    if not gradients.spills:
        return True
    kept = 0 if resumes else other.inputs.swap_bytes(placed.weights.in_ram, placed.optimizer.in_ram)
    return kept + gradients.swap_bytes <= other.inputs.disks.room_bytes


def _fitting(inputs: PlanInput) -> Iterator[_PlacementChoice]:
    """Yield the placements of gradients that leave room for the necessary memory, the best first.

    Each choice includes the placement of the weights and states that fit. If memory is short, the update gets fewer
    tiles before a worse placement is tried.

    Raises:
        PlanError: no placement fits.
    """
    host = inputs.limits.host - inputs.reserved_bytes
    least = place(inputs, 0)
    stagings = {
        spills: [
            plan_staging(inputs, nbytes, gradients=spills)
            for nbytes in (host, 0)  # the staging that suits the budget, and the smallest staging
        ]
        for spills in (False, True)
    }
    found = False
    for gradients in gradient_placements(inputs, host - stagings[True][1].nbytes - least.host_bytes):
        for staging in stagings[gradients.spills]:
            room = host - staging.nbytes - gradients.host_bytes
            placed = place(inputs, room)
            if placed.host_bytes <= room and (shadow := shadow_wanted(inputs, placed)):
                placed = place(inputs, room - shadow)
            if placed.host_bytes <= room:
                found = True
                yield _PlacementChoice(inputs, staging, placed, gradients)
                break
    if found:
        return
    tried = [
        (
            stagings[gradients.spills][1].nbytes + gradients.host_bytes + least.host_bytes + inputs.reserved_bytes,
            gradients,
        )
        for gradients in gradient_placements(inputs, 0)
    ]
    needed, gradients = min(tried, key=lambda each: each[0])
    raise _host_error(inputs, least, gradients, needed)


def _host_error(inputs: PlanInput, placed: ChosenTiers, gradients: GradientPlacement, needed: int) -> PlanError:
    config, largest = inputs.config, inputs.largest
    advice = [f"raise memory.host to {enough_bytes(needed * inputs.limits.ranks)}"]
    in_ram = {"weights": placed.weights.tier, "optimizer": placed.optimizer.tier}
    if keys := [key for key, tier in in_ram.items() if tier == "host"]:
        advice.append(f"set {' or '.join(keys)} to nvme")
    if config.gradients == "host":
        advice.append("set gradients: auto")
    kept = ""
    if inputs.secondary_bytes:
        advice.append("set ranks: {gather: world}")
        kept = f", {format_bytes(inputs.secondary_bytes)} for copies of weights (ranks.gather)"
    measured = "" if config.memory.host else f" ({HOST_SHARE:.0%} of the RAM that is available now)"
    return PlanError(
        f"memory.host is {format_bytes(inputs.limits.host)}{inputs.limits.for_each}{measured}, but the plan needs "
        f"{format_bytes(needed)}: {format_bytes(gradients.host_bytes)} for "
        f"gradients{' on their way to NVMe' if gradients.spills else ''} and "
        f"{format_bytes(needed - gradients.host_bytes - inputs.secondary_bytes)} for states and staging kept "
        f"there{kept}. The largest unit is '{largest.name}' with {format_bytes(largest.weight_bytes)} of weights. To "
        f"fit, {' or '.join(advice)}."
    )


def _require_paths(inputs: PlanInput, placed: ChosenTiers, gradients: GradientPlacement) -> None:
    tiers = placed.weights.tier, placed.optimizer.tier, inputs.config.activations
    on_nvme = gradients.spills or "nvme" in tiers
    _require_paths_for(inputs.config, inputs.commit_every, on_nvme=on_nvme)


def require_paths(config: SwapConfig) -> None:
    """Check nvme.paths as far as possible before the model is known. Raises ConfigError."""
    commit_every = 0 if config.commit_every == "auto" else config.commit_every
    _require_paths_for(config, commit_every, on_nvme="nvme" in (config.weights, config.optimizer, config.activations))


def _require_paths_for(config: SwapConfig, commit_every: int, *, on_nvme: bool) -> None:
    if commit_every and not config.nvme.paths:
        raise ConfigError(
            f"commit_every: {commit_every} needs a directory for the generations: add nvme: {{paths: "
            "[/a/directory/on/an/ssd]} to the swap config, or set commit_every: 0"
        )
    if on_nvme and not config.nvme.paths:
        raise ConfigError(
            "states on nvme need a directory: add nvme: {paths: [/a/directory/on/an/ssd]} to the swap config"
        )


def _activations(inputs: PlanInput) -> Literal["keep", "host", "nvme"]:
    wanted = inputs.config.activations
    if wanted == "nvme":
        return "nvme"
    return "host" if wanted == "host" and not inputs.limits.in_place else "keep"


def _kept_bytes(inputs: PlanInput, room: int) -> int:
    """Return the bytes of RAM for activations, of `room` bytes without other use. States have precedence in RAM over
    activations, except if the plan would not fit without this RAM (MemoryLimits.away)."""
    if _activations(inputs) != "host" or inputs.limits.away:
        return 0
    return min(max(room, 0), _KEPT_BYTES_MAX) // PAGE_BYTES * PAGE_BYTES


def _recompute(config: SwapConfig, can_recompute: bool) -> bool:
    """Return whether blocks are recomputed. Raises ConfigError if the model cannot do what the config asks for."""
    asked = "activations: recompute" if config.activations == "recompute" else "recompute: blocks"
    if (config.activations == "recompute" or config.recompute == "blocks") and not can_recompute:
        raise ConfigError(
            f"{asked}, but the model has no gradient_checkpointing_enable(). Use torch.utils.checkpoint in the model "
            "and set recompute: none."
        )
    if config.recompute == "auto" and config.activations != "recompute":
        return can_recompute and config.activations != "keep"
    return config.recompute != "none"
