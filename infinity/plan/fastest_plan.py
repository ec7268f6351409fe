"""Choice of the fastest plan: the share of resident units, whether blocks are recomputed, and where activations rest.

A byte of device memory can keep the states of a unit, a slot, or what a forward keeps for its backward, and a resident
unit takes time of the device in place of time of the processor and the disks. So the best share depends on the batch
and on the rates of the machine. If both are known, some shares are planned, and the plan with the shortest predicted
step is taken (step_time.py). If they are not known, as many units as fit are resident, and blocks are recomputed if the
model supports it.

Activations stay on the device if they fit. (If they move to RAM without need, the step of a model of 8 or 32 B is
predicted to be at most 3 % shorter, and this prediction does not count waits for activations.) If they do not fit, RAM
keeps them, before it keeps states. Drives keep them if no other plan fits, not even with blocks in tiles of tokens,
because each step writes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Literal, NamedTuple

from infinity.config import SwapConfig
from infinity.errors import PlanError
from infinity.plan.plan import Plan
from infinity.plan.plan_input import MemoryLimits
from infinity.plan.step_time import predict
from infinity.state.training_step import TrainingStep

_TENTHS = 10
"""Shares are multiples of a tenth of the units that fit."""

_LITTLE = 16
"""Units of less than this fraction of memory.device take little memory."""

_SLOWER = 1.25
"""A processor that is slower by this factor counts, too: the step must not depend on an update that is just in time."""

_TILED = 0.4
"""Share of a block's bytes that a Llama needs if its norms and MLPs run in tiles of tokens; attention has no tiles."""

ActivationTierName = Literal["keep", "host", "nvme"]

_ORDER: tuple[tuple[ActivationTierName, bool], ...] = (
    ("keep", False),
    ("host", False),
    ("keep", True),
    ("host", True),
    ("nvme", False),
    ("nvme", True),
)
"""Tiers of activations, each with and without tiles of tokens, the best first: drives are written if all else fails."""


class KeptActivations(NamedTuple):
    """A way to keep what the backward needs: whether blocks are recomputed, and the tier of what is kept."""

    recompute: bool
    tier: ActivationTierName


MakePlan = Callable[[KeptActivations, float], Plan]
"""Function that returns the plan for a way to keep activations, with a share of the resident units that fit."""

_Key = tuple[float, int]
"""Value by which plans are compared; the smallest is best."""


def ways_to_keep(
    config: SwapConfig, limits: MemoryLimits, step: TrainingStep | None, *, recompute: bool
) -> list[KeptActivations]:
    """Return the ways to keep activations that are compared. The first one is the default.

    Several ranks measure different rates and have different slices, so they do not compare plans.

    Args:
        config: the swap config.
        limits: the two budgets.
        step: the step; None: not known.
        recompute: whether blocks are recomputed by default.
    """
    auto = config.activations == "auto"
    tier: ActivationTierName = "keep"
    if config.activations == "host" or config.activations == "nvme":
        tier = config.activations
    if not auto or step is None or limits.in_place or limits.slice_count:
        return [KeptActivations(recompute, tier)]
    kept = step.work(recompute=False, vertical=config.vertical).peak_bytes
    weighs = recompute and config.recompute == "auto" and step.facts.rates is not None and kept < limits.device
    both = [recompute, False] if weighs else [recompute]
    tiers: tuple[ActivationTierName, ...] = ("keep", "host", "nvme") if config.nvme.paths else ("keep", "host")
    return [KeptActivations(each, tier) for tier in tiers for each in both]


def needs_rates(config: SwapConfig) -> bool:
    """Return whether the choice depends on predicted steps, and so on the rates of the machine."""
    return config.optimizer == "auto" or config.activations == config.recompute == "auto"


def fastest(made: MakePlan, config: SwapConfig, step: TrainingStep | None, ways: Sequence[KeptActivations]) -> Plan:
    """Return the plan whose predicted step is the shortest. Activations leave the device only if no other plan fits.

    Args:
        made: function that makes a plan.
        config: the swap config.
        step: the step; None: not known.
        ways: the ways to keep activations; the first one is the default.

    Raises:
        PlanError: the default does not fit.
    """
    most = {ways[0]: made(ways[0], 1.0)}
    first = most[ways[0]]
    if step is None or first.budgets.limits.in_place:
        return first
    plans = [first]
    for tier, in_tiles in _ORDER:
        tried = [way for way in ways if way.tier == tier]
        most |= {way: plan for way in tried if way not in most and (plan := _made(made, way))}
        if fitting := [most[way] for way in tried if way in most and _fits(most[way], in_tiles=in_tiles)]:
            plans = fitting
            break
    if step.facts.rates is None or first.budgets.limits.slice_count:  # see ways_to_keep
        return plans[0]
    return min((_of_shares(made, config, step, plan) for plan in plans), key=itemgetter(0))[1]


def _made(made: MakePlan, way: KeptActivations) -> Plan | None:
    """Return the plan with the most resident units; None if the states have no room."""
    try:
        return made(way, 1.0)
    except PlanError:
        return None


def _fits(plan: Plan, *, in_tiles: bool) -> bool:
    """Return whether activations have room, with `in_tiles` if blocks run in tiles of tokens."""
    limits = plan.budgets.limits
    saved = (1 - _TILED) * (limits.block or 0) if in_tiles else 0
    return plan.device_bytes + (limits.activations or 0) - saved <= limits.device


def _of_shares(made: MakePlan, config: SwapConfig, step: TrainingStep, most: Plan) -> tuple[_Key, Plan]:
    """Return the fastest plan of the plan with the most resident units and plans with fewer, with its key.

    Every second tenth of the units is tried, and then the neighbours of the best one. Fewer units are not tried if all
    of them together take little memory, such as adapters: their memory would make no step faster.
    """
    way = KeptActivations(most.placement.recompute, most.placement.activations)
    found, tried, keys = {_TENTHS: most}, {_TENTHS}, dict[frozenset[int], _Key]()

    def key(tenths: int) -> _Key:
        """Return the key of a plan; plans with the same resident units have the same key."""
        resident = found[tenths].placement.optimizer.resident
        if resident not in keys:
            keys[resident] = _key(found[tenths], config, step)
        return keys[resident]

    if config.optimizer == "auto" and most.budgets.resident_bytes * _LITTLE > most.budgets.limits.device:
        wanted = set(range(0, _TENTHS, 2))
        while wanted:
            for tenths in sorted(wanted):
                try:
                    found[tenths] = made(way, tenths / _TENTHS)
                except PlanError:  # memory.host has no room for the states of more units
                    continue
            tried |= wanted
            best = min(found, key=key)
            wanted = {each for each in (best - 1, best + 1) if 0 <= each <= _TENTHS and best % 2 == 0} - tried
    fastest = min(found, key=key)
    return key(fastest), found[fastest]


def _key(plan: Plan, config: SwapConfig, step: TrainingStep) -> _Key:
    """Return the predicted seconds of a step, as the mean for the given and for a slower processor.

    Of plans with equal seconds, the plan with more resident units is best.
    """
    facts, work = step.facts, step.work(recompute=plan.placement.recompute, vertical=config.vertical)
    given = facts.rates
    assert given is not None
    adam = {form: rate / _SLOWER for form, rate in given.adam.items()}
    slower = dataclasses.replace(given, adam=adam, land=given.land / _SLOWER)
    seconds = [
        predict(plan, work, rates, clips=facts.clips, checksums=config.nvme.checksums).seconds
        for rates in (given, slower)
    ]
    return round(sum(seconds) / len(seconds), 6), -len(plan.placement.optimizer.resident)
