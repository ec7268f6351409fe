"""The planner: budgets and units in, a plan out, or a PlanError that names the smallest change that would fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from infinity import _native
from infinity.config import SwapConfig
from infinity.errors import ConfigError, PlanError
from infinity.io.profile import profile_of
from infinity.plan.early import EarlyUpdates, ahead_bytes, plan_early, shadow_wanted
from infinity.plan.machine import available_device_bytes, available_host_bytes, usable_cores
from infinity.plan.placement import WEIGHT_SHARE_OF_DEVICE, Budgets, Placement, place
from infinity.plan.spilling import GradientPlacement, gradient_placements
from infinity.plan.together import needed_at_once
from infinity.plan.totals import Totals, total
from infinity.sizes import PAGE_BYTES, exact_bytes, format_bytes, round_up
from infinity.state.discover import HookSite
from infinity.state.dtypes import master_format, native_name
from infinity.state.moments import STORED, OptimizerName
from infinity.state.plan import Plan, SwapBytes
from infinity.state.unit import Group, Unit

HOST_SHARE = 0.8
"""Of the RAM that is available when the plan is made, what memory.host is where the config does not say."""

_STAGING_BYTES = 64 << 20
_STAGING_BYTES_PER_THREAD = 8 << 20
_STAGING_SHARE_OF_HOST = 1 / 8
_TILE_SLOTS_MIN, _TILE_SLOTS_MAX = 3, 32
_TILE_NUMEL_MIN = 1 << 18  # a moment's part of a tile is a transfer: 1 MiB in fp32
_TASKS_PER_THREAD = 4
_NAMED_MAX = 6  # units in a message


def make_plan(
    units: Sequence[Unit],
    config: SwapConfig,
    device: torch.device,
    *,
    can_recompute: bool,
    optimizer: OptimizerName = "adamw",
    accumulation_steps: int | None = None,
    sites: Sequence[HookSite] = (),
) -> Plan:
    """Place every state.

    Args:
        can_recompute: the model can switch activation recomputation on.
        optimizer: whose moments room is made for.
        accumulation_steps: backward passes before each step; None: not known, and one is counted.
        sites: which units each module needs; none: every unit has a module of its own.

    Raises:
        PlanError: a budget is too small; names the unit, the budget and what would fit.
        ConfigError: `optimizer` or `weights` on NVMe without nvme.paths; `recompute` where the model has none.
    """
    totals, budgets = total(units, config, len(STORED[optimizer]), accumulation_steps or 1), _budgets(config, device)
    staging, placed, gradients = _place(config, totals, budgets)
    swap, host_bytes, early = _reserve_early(config, totals, budgets, staging, placed, gradients)
    read, written = _step_bytes(config, totals, placed, gradients, widens=not budgets.on_cpu)
    return Plan(
        device=str(device),
        weights=placed.weights,
        optimizer=placed.optimizer,
        weights_in_ram=placed.weights_in_ram,
        states_in_ram=placed.states_in_ram,
        gradients="nvme" if gradients.spills else "host",
        gradients_in_ram=gradients.in_ram,
        activations=_activations(config, can_recompute),
        master=config.master,
        moments=config.moments,
        stored=STORED[optimizer],
        commit_every=config.commit_every,
        keep=config.keep,
        overlap=early.overlap,
        spare_units=early.spare_units,
        shadow_bytes=early.shadow_bytes,
        overlap_reason=early.reason,
        gradient_fp32=gradients.fp32,
        numel=sum(unit.numel for unit in units),
        trainable_numel=sum(spec.numel for unit in units for group in unit.trainable_groups for spec in group.specs),
        unit_count=len(units),
        trained_count=len(totals.trained),
        weight_bytes=totals.weight,
        state_bytes=totals.state,
        weight_ram_bytes=totals.weight_of(placed.weights_in_ram),
        state_ram_bytes=totals.state_of(placed.states_in_ram),
        gradient_bytes=gradients.ram_bytes,
        landing_bytes=gradients.landing_bytes,
        slot_bytes=_slot_bytes(totals, sites, placed, budgets),
        staging_bytes=staging.nbytes,
        ahead_bytes=early.ahead_bytes,
        upload_bytes=placed.upload_bytes,
        tile_numel=staging.tile_numel,
        tile_bytes=staging.tile_bytes,
        threads=staging.threads,
        host_bytes=host_bytes,
        device_budget=budgets.device,
        host_budget=budgets.host,
        swap=swap,
        step_read_bytes=read,
        step_written_bytes=written,
        swap_rate=_swap_rate(config) if swap.nbytes else None,
        accumulation_steps=totals.passes,
    )


def _budgets(config: SwapConfig, device: torch.device) -> Budgets:
    on_cpu = device.type == "cpu"
    return Budgets(
        device=config.memory.device or int(available_device_bytes(device) * (0.4 if on_cpu else 0.9)),
        host=config.memory.host or int(available_host_bytes() * HOST_SHARE),
        on_cpu=on_cpu,
    )


def _place(config: SwapConfig, totals: Totals, budgets: Budgets) -> tuple[_Staging, Placement, GradientPlacement]:
    """Where everything rests, and the update's memory: the first placement of the gradients that fits beside what must
    be there, and then what fits of weights and states. Fewer tiles for the update come before a worse placement."""
    least = place(config, totals, budgets, 0)
    stagings = {
        spills: [
            _staging(totals.units, config, host, gradients=spills)
            for host in (budgets.host, 0)  # what suits the budget, and the least
        ]
        for spills in (False, True)
    }
    for gradients in gradient_placements(config, totals, budgets.host - stagings[True][1].nbytes - least.host_bytes):
        for staging in stagings[gradients.spills]:
            fixed = staging.nbytes + gradients.host_bytes(totals)
            room = budgets.host - fixed
            placed = place(config, totals, budgets, room)
            if placed.host_bytes <= room and (shadow := shadow_wanted(config, totals, placed, budgets)):
                placed = place(config, totals, budgets, room - shadow)
            if fixed + placed.host_bytes <= budgets.host:
                return staging, placed, gradients
    tried = [
        (stagings[gradients.spills][1].nbytes + gradients.host_bytes(totals) + least.host_bytes, gradients)
        for gradients in gradient_placements(config, totals, 0)
    ]
    needed, gradients = min(tried, key=lambda each: each[0])
    raise _host_error(config, totals, least, gradients, needed, budgets.host)


def _reserve_early(
    config: SwapConfig,
    totals: Totals,
    budgets: Budgets,
    staging: _Staging,
    placed: Placement,
    gradients: GradientPlacement,
) -> tuple[SwapBytes, int, EarlyUpdates]:
    """Of the swap file and of host memory, with what early updates get of the rest of both."""
    _require_paths(config, placed, gradients)
    swap = totals.swap_bytes(placed.weights_in_ram, placed.states_in_ram) + gradients.swap_bytes
    states = totals.one_slot_bytes(placed.weights_in_ram, placed.states_in_ram)
    host = staging.nbytes + placed.host_bytes + gradients.host_bytes(totals)
    early = plan_early(config, totals, placed, gradients, budgets, swap, budgets.host - host)
    host += early.shadow_bytes + totals.checksum_bytes(early.spare_bytes)
    ahead = ahead_bytes(config, totals, placed, staging.tile_bytes, budgets.host - host, early.shadow_bytes)
    early = replace(early, ahead_bytes=ahead)
    slots = swap - states - gradients.swap_bytes + early.spare_bytes
    return SwapBytes(states, slots, gradients.swap_bytes), host + early.ahead_bytes, early


def _swap_rate(config: SwapConfig) -> float | None:
    """The measured rates of all the disks together; None where one was not measured."""
    profiles = {path: profile_of(path) for path in config.nvme.paths}
    known = [profile.mixed_rate for profile in profiles.values() if profile is not None]
    return sum(known) if len(known) == len(profiles) else None


@dataclass(frozen=True)
class _Staging:
    """Elements per tile, bytes per tile, bytes for the tiles in flight, and the threads that compute them."""

    tile_numel: int
    tile_bytes: int
    nbytes: int
    threads: int


def _require_isa() -> None:
    """Raises ConfigError where INFINITY_ISA names what this processor has not."""
    try:
        _native.select_isa()
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _staging(units: Sequence[Unit], config: SwapConfig, host_budget: int, *, gradients: bool) -> _Staging:
    """The memory the update's tiles are read into; `gradients`: those, too. No less for any smaller budget than for 0.

    A thread works on pieces that fit its L2 cache; a tile has a few for every thread, so that none waits long for the
    last one.
    """
    _require_isa()
    threads = config.update.threads or min(usable_cores(), torch.get_num_threads())
    groups = [group for unit in units for group in unit.trainable_groups]
    largest = round_up(max((group.numel for group in groups), default=1), _native.CUT_NUMEL)
    if config.update.tile is not None:
        numel = max(config.update.tile // 4, 1)
    else:
        numel = max(_TILE_NUMEL_MIN, threads * _native.task_numel() * _TASKS_PER_THREAD)
    int8 = any(group.moments == "int8" for group in groups)
    numel = min(round_up(numel, _native.CHUNK_NUMEL if int8 else _native.CUT_NUMEL), largest)
    staging = min(max(_STAGING_BYTES, threads * _STAGING_BYTES_PER_THREAD), int(host_budget * _STAGING_SHARE_OF_HOST))

    def tile_bytes() -> int:
        return max((_tile_bytes(group, config, numel, gradients=gradients) for group in groups), default=PAGE_BYTES)

    while config.update.tile is None and numel >= 2 * _TILE_NUMEL_MIN and _TILE_SLOTS_MIN * tile_bytes() > staging:
        numel = round_up(numel // 2, _TILE_NUMEL_MIN)
    nbytes = tile_bytes()
    slots = min(max(staging // nbytes, _TILE_SLOTS_MIN), _TILE_SLOTS_MAX)
    return _Staging(numel, nbytes, slots * nbytes, threads)


def _tile_bytes(group: Group, config: SwapConfig, numel: int, *, gradients: bool) -> int:
    return _native.UpdatePipeline.staging_tile_bytes(
        min(numel, group.numel),
        weight_dtype=native_name(group.dtype),
        master=master_format(group.dtype, config.master),
        moments=group.moments,
        gradients=gradients,
    )


def _slot_bytes(totals: Totals, sites: Sequence[HookSite], placed: Placement, budgets: Budgets) -> int:
    """Device memory for fetched weights. On the CPU those in host memory are used where they are."""
    if placed.weights == "device" or (budgets.on_cpu and placed.weights == "host"):
        if placed.weights == "device" and totals.weight > budgets.device:
            raise PlanError(
                f"weights: device needs {format_bytes(totals.weight)}; memory.device is "
                f"{format_bytes(budgets.device)}. Raise it to {exact_bytes(totals.weight)} plus what activations need, "
                "or set weights: host or nvme."
            )
        return totals.weight
    fetched = totals.every - placed.weights_in_ram if budgets.on_cpu else totals.every
    needed = needed_at_once(totals.units, sites, fetched)
    slots = min(max(int(budgets.device * WEIGHT_SHARE_OF_DEVICE), needed.nbytes), totals.weight_of(fetched))
    if slots > budgets.device:
        largest = max(needed.units, key=lambda unit: unit.weight_bytes)
        names = ", ".join(unit.name for unit in needed.units[:_NAMED_MAX])
        more = f" and {len(needed.units) - _NAMED_MAX} more" if len(needed.units) > _NAMED_MAX else ""
        raise PlanError(
            f"unit '{largest.name}' needs {format_bytes(needed.nbytes)} of device memory: its weights, "
            f"{format_bytes(largest.weight_bytes)}, and those of the other units that are there at the same time "
            f"(together {names}{more}); memory.device is {format_bytes(budgets.device)}. Raise memory.device to "
            f"{exact_bytes(needed.nbytes)} plus what activations need."
        )
    return round_up(slots, PAGE_BYTES)


def _host_error(
    config: SwapConfig, totals: Totals, placed: Placement, gradients: GradientPlacement, needed: int, host_budget: int
) -> PlanError:
    advice = [f"raise memory.host to {exact_bytes(needed)}"]
    if placed.optimizer == "host":
        advice.append("set optimizer: nvme")
    if placed.weights == "host":
        advice.append("set weights: nvme")
    if config.gradients == "host":
        advice.append("set gradients: auto")
    gradient = gradients.host_bytes(totals)
    measured = "" if config.memory.host else f" ({HOST_SHARE:.0%} of the RAM that is available now)"
    return PlanError(
        f"memory.host is {format_bytes(host_budget)}{measured}, but the plan needs {format_bytes(needed)}: "
        f"{format_bytes(gradient)} for gradients{' on their way to NVMe' if gradients.spills else ''} and "
        f"{format_bytes(needed - gradient)} for states and staging kept there. The largest unit is "
        f"'{totals.largest.name}' with {format_bytes(totals.largest.weight_bytes)} of weights. To fit, "
        f"{' or '.join(advice)}."
    )


def _require_paths(config: SwapConfig, placed: Placement, gradients: GradientPlacement) -> None:
    if config.commit_every and not config.nvme.paths:
        raise ConfigError(
            f"commit_every: {config.commit_every} needs a directory for the generations: add nvme: {{paths: "
            "[/a/directory/on/an/ssd]} to the swap config, or set commit_every: 0"
        )
    on_nvme = gradients.spills or "nvme" in (placed.weights, placed.optimizer)
    if on_nvme and not config.nvme.paths:
        raise ConfigError(
            "states on nvme need a directory: add nvme: {paths: [/a/directory/on/an/ssd]} to the swap config"
        )


def _activations(config: SwapConfig, can_recompute: bool) -> str:
    if config.activations == "recompute" and not can_recompute:
        raise ConfigError(
            "activations: recompute, but the model has no gradient_checkpointing_enable(). Use "
            "torch.utils.checkpoint in "
            "the model and set activations: keep."
        )
    if config.activations == "auto":
        return "recompute" if can_recompute else "keep"
    return config.activations


def _step_bytes(
    config: SwapConfig, totals: Totals, placed: Placement, gradients: GradientPlacement, *, widens: bool
) -> tuple[int, int]:
    """Read and written in one step, no slot outliving a pass (design §4, with the weights read once more where the
    update is a phase of its own), and what commits write of the states in RAM.

    Args:
        widens: the first of several gradients comes as autograd gives it; else in fp32, as the others.
    """
    read = written = committed = 0
    for unit in totals.of_units:
        if unit.index in placed.weights_in_ram:
            committed += unit.trained_weight
        else:
            read += 2 * totals.passes * unit.weight + unit.trained_weight
            written += unit.trained_weight
        if unit.index in placed.states_in_ram:
            committed += unit.state
        else:
            read += unit.state
            written += unit.state
        if unit.index not in gradients.in_ram:
            first = unit.gradient_native if widens or totals.passes == 1 else unit.gradient_fp32
            moved = first + (totals.passes - 1) * unit.gradient_fp32
            read += moved
            written += moved
    return read, written + (committed // config.commit_every if config.commit_every else 0)
