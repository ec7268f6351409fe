"""The planner: budgets and units in, a plan out, or a PlanError that names the smallest change that would fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infinity import _native
from infinity.config import SwapConfig
from infinity.errors import ConfigError, PlanError
from infinity.io.profile import profile_of
from infinity.plan.machine import available_device_bytes, available_host_bytes, usable_cores
from infinity.sizes import PAGE_BYTES, format_bytes, round_up
from infinity.state.dtypes import master_format, native_name, residual_itemsize
from infinity.state.moments import STORED, OptimizerName
from infinity.state.plan import Plan
from infinity.state.unit import Group, Unit

CHECKSUM_BYTES = 4
"""Of RAM for each page of the swap file."""

_WEIGHT_SHARE_OF_DEVICE = 0.5  # the rest is for activations and the gradients of the running unit
_STAGING_BYTES = 32 << 20
_STAGING_BYTES_PER_THREAD = 8 << 20
_STAGING_SHARE_OF_HOST = 1 / 8
_TILE_SLOTS_MIN, _TILE_SLOTS_MAX = 3, 16
_TILE_NUMEL_MIN = 1 << 18  # a moment's part of a tile is a transfer: 1 MiB in fp32
_TASKS_PER_THREAD = 4


@dataclass(frozen=True)
class _Totals:
    weight: int
    trained_weight: int
    state: int
    gradient_native: int
    gradient_fp32: int
    numel: int
    trainable_numel: int
    largest: Unit
    second_bytes: int
    resident_bytes: int


def make_plan(
    units: Sequence[Unit],
    config: SwapConfig,
    device: torch.device,
    *,
    can_recompute: bool,
    optimizer: OptimizerName = "adamw",
) -> Plan:
    """Place every state.

    Args:
        optimizer: whose moments room is made for.
        can_recompute: the model can switch activation recomputation on.

    Raises:
        PlanError: a budget is too small; names the unit, the budget and what would fit.
        ConfigError: `optimizer` or `weights` on NVMe without nvme.paths; `recompute` where the model has none.
    """
    stored = STORED[optimizer]
    totals = _total(units, config, len(stored))
    on_cpu = device.type == "cpu"
    host_budget = config.memory.host or int(available_host_bytes() * 0.8)
    device_budget = config.memory.device or int(available_device_bytes(device) * (0.4 if on_cpu else 0.9))
    threads = config.update.threads or min(usable_cores(), torch.get_num_threads())
    tile_numel, tile_bytes, staging_bytes = _staging(units, config, threads, host_budget)
    weights = _place_weights(config, totals, device_budget, host_budget, on_cpu)
    slots = _slot_bytes(totals, weights, device_budget, on_cpu)
    upload = 0 if on_cpu or weights != "nvme" else 2 * totals.largest.weight_bytes
    fixed = staging_bytes + upload + (totals.weight if weights == "host" or (weights == "device" and not on_cpu) else 0)
    states = _place_optimizer(config, totals, host_budget - fixed)
    fixed += totals.state if states == "host" else 0
    swap = _swap_bytes(config, totals, weights, states)
    fixed += swap // PAGE_BYTES * CHECKSUM_BYTES if config.nvme.checksums else 0
    gradient_fp32 = fixed + totals.gradient_fp32 <= host_budget
    gradient = totals.gradient_fp32 if gradient_fp32 else totals.gradient_native
    if fixed + gradient > host_budget:
        raise _host_error(totals, weights, states, fixed, gradient, host_budget)
    _require_paths(config, weights, states)
    return Plan(
        device=str(device),
        weights=weights,
        optimizer=states,
        activations=_activations(config, can_recompute),
        master=config.master,
        moments=config.moments,
        stored=stored,
        commit_every=config.commit_every,
        keep=config.keep,
        gradient_fp32=gradient_fp32,
        numel=totals.numel,
        trainable_numel=totals.trainable_numel,
        weight_bytes=totals.weight,
        state_bytes=totals.state,
        gradient_bytes=gradient,
        slot_bytes=slots,
        staging_bytes=staging_bytes,
        upload_bytes=upload,
        tile_numel=tile_numel,
        tile_bytes=tile_bytes,
        threads=threads,
        device_bytes=slots if weights == "nvme" or not on_cpu else (totals.weight if weights == "device" else 0),
        host_bytes=fixed + gradient,
        device_budget=device_budget,
        host_budget=host_budget,
        swap_bytes=swap,
        step_bytes=_step_bytes(config, totals, weights, states),
        swap_rate=_swap_rate(config) if swap else None,
    )


def _swap_bytes(config: SwapConfig, totals: _Totals, weights: str, optimizer: str) -> int:
    """With generations everything has a place in the store, RAM-held or not, and what changes a slot more than stay."""
    if config.commit_every:
        return totals.weight - totals.trained_weight + (totals.trained_weight + totals.state) * (config.keep + 1)
    return (totals.weight if weights == "nvme" else 0) + (totals.state if optimizer == "nvme" else 0)


def _swap_rate(config: SwapConfig) -> float | None:
    """The measured rates of all the disks together; None where one was not measured."""
    profiles = {path: profile_of(path) for path in config.nvme.paths}
    known = [profile.mixed_rate for profile in profiles.values() if profile is not None]
    return sum(known) if len(known) == len(profiles) else None


def _total(units: Sequence[Unit], config: SwapConfig, moments: int) -> _Totals:
    groups = [group for unit in units for group in unit.trainable_groups]
    by_size = sorted(units, key=lambda unit: unit.weight_bytes, reverse=True)
    return _Totals(
        weight=sum(unit.weight_bytes for unit in units),
        trained_weight=sum(group.weight_bytes for group in groups),
        state=sum(
            moments * group.moment_bytes
            + group.state_bytes(residual_itemsize(master_format(group.dtype, config.master)))
            for group in groups
        ),
        gradient_native=sum(group.state_bytes(group.dtype.itemsize) for group in groups),
        gradient_fp32=sum(group.state_bytes(4) for group in groups),
        numel=sum(unit.numel for unit in units),
        trainable_numel=sum(spec.numel for group in groups for spec in group.specs),
        largest=by_size[0],
        second_bytes=by_size[1].weight_bytes if len(by_size) > 1 else 0,
        resident_bytes=sum(unit.weight_bytes for unit in units if unit.resident),
    )


def _staging(units: Sequence[Unit], config: SwapConfig, threads: int, host_budget: int) -> tuple[int, int, int]:
    """Elements per tile, bytes per tile, and bytes of staging for the tiles in flight.

    A thread works on pieces that fit its L2 cache; a tile has a few for every thread, so that none waits long for the
    last one.
    """
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
        return max((_tile_bytes(group, config, numel) for group in groups), default=PAGE_BYTES)

    while config.update.tile is None and numel >= 2 * _TILE_NUMEL_MIN and _TILE_SLOTS_MIN * tile_bytes() > staging:
        numel = round_up(numel // 2, _TILE_NUMEL_MIN)
    nbytes = tile_bytes()
    slots = min(max(staging // nbytes, _TILE_SLOTS_MIN), _TILE_SLOTS_MAX)
    return numel, nbytes, slots * nbytes


def _tile_bytes(group: Group, config: SwapConfig, numel: int) -> int:
    return _native.UpdatePipeline.staging_tile_bytes(
        min(numel, group.numel),
        weight_dtype=native_name(group.dtype),
        master=master_format(group.dtype, config.master),
        moments=group.moments,
    )


def _slots_needed(totals: _Totals) -> int:
    """Two units at once, one whose views autograd still holds and one being fetched, beside those that stay."""
    return totals.largest.weight_bytes + totals.second_bytes + totals.resident_bytes


def _place_weights(config: SwapConfig, totals: _Totals, device_budget: int, host_budget: int, on_cpu: bool) -> str:
    if config.weights != "auto":
        return config.weights
    if totals.weight <= device_budget * _WEIGHT_SHARE_OF_DEVICE and not on_cpu:
        return "device"
    # Half of the host budget is left for gradients, staging and states.
    return "host" if totals.weight <= host_budget // 2 or not config.nvme.paths else "nvme"


def _slot_bytes(totals: _Totals, weights: str, device_budget: int, on_cpu: bool) -> int:
    if weights == "device" or (on_cpu and weights == "host"):
        if weights == "device" and totals.weight > device_budget:
            raise PlanError(
                f"weights: device needs {format_bytes(totals.weight)}; memory.device is {format_bytes(device_budget)}. "
                f"Raise it, or set weights: host or nvme."
            )
        return totals.weight
    needed = min(_slots_needed(totals), totals.weight)
    slots = min(max(int(device_budget * _WEIGHT_SHARE_OF_DEVICE), needed), totals.weight)
    if slots > device_budget:
        raise PlanError(
            f"unit '{totals.largest.name}' needs {format_bytes(needed)} of device memory (its weights, "
            f"{format_bytes(totals.largest.weight_bytes)}, beside the next unit's and those that stay); "
            f"memory.device is "
            f"{format_bytes(device_budget)}. Raise memory.device to {_megabytes(needed)} plus what activations need."
        )
    return round_up(slots, PAGE_BYTES)


def _place_optimizer(config: SwapConfig, totals: _Totals, room: int) -> str:
    if config.optimizer != "auto":
        return config.optimizer
    return "host" if totals.state + totals.gradient_fp32 <= room or not config.nvme.paths else "nvme"


def _host_error(
    totals: _Totals, weights: str, optimizer: str, fixed: int, gradient: int, host_budget: int
) -> PlanError:
    advice = [f"raise memory.host to {_megabytes(fixed + gradient)}"]
    if optimizer == "host":
        advice.append("set optimizer: nvme")
    if weights == "host":
        advice.append("set weights: nvme")
    return PlanError(
        f"memory.host is {format_bytes(host_budget)}, but the plan needs {format_bytes(fixed + gradient)}: "
        f"{format_bytes(gradient)} for gradients and {format_bytes(fixed)} for states and staging kept there. The "
        f"largest "
        f"unit is '{totals.largest.name}' with {format_bytes(totals.largest.weight_bytes)} of weights. To fit, "
        f"{' or '.join(advice)}."
    )


def _require_paths(config: SwapConfig, weights: str, optimizer: str) -> None:
    if config.commit_every and not config.nvme.paths:
        raise ConfigError(
            f"commit_every: {config.commit_every} needs a directory for the generations: add nvme: {{paths: "
            "[/a/directory/on/an/ssd]} to the swap config, or set commit_every: 0"
        )
    if "nvme" in (weights, optimizer) and not config.nvme.paths:
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


def _step_bytes(config: SwapConfig, totals: _Totals, weights: str, optimizer: str) -> int:
    """One micro-batch, nothing cached (design §4, with the weights read once more where the update is a phase of its
    own), and what commits write of the states in RAM."""
    moved = committed = 0
    if weights == "nvme":
        moved += 2 * totals.weight + 2 * totals.trained_weight
    else:
        committed += totals.trained_weight
    if optimizer == "nvme":
        moved += 2 * totals.state
    else:
        committed += totals.state
    return moved + (committed // config.commit_every if config.commit_every else 0)


def _megabytes(nbytes: int) -> str:
    return f"{-(-nbytes // (1 << 20))}MiB"
