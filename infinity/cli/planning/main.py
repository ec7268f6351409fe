"""`infinity plan`: the command, which reads the options and prints the report."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from infinity.base.accelerator import resolve
from infinity.cli.default_dtype import default_dtype, dtype_line
from infinity.cli.endurance import endurance_bytes
from infinity.cli.optimizers import DTYPES
from infinity.cli.options import options_of
from infinity.cli.planning.machines import MACHINES, SYSTEM_BYTES
from infinity.cli.planning.model import adapt, build
from infinity.cli.planning.options import PlanOptions
from infinity.cli.planning.plan_report import as_json, duration, report
from infinity.cli.planning.scenario import PlanScenario, as_yaml, with_changes
from infinity.config import SwapConfig, load_config
from infinity.errors import ConfigError, PlanError
from infinity.io.directory import require_place
from infinity.plan.disk import DiskLimits, disks_of
from infinity.plan.local_rates import rates_for
from infinity.plan.planner import DEVICE_SHARE, HOST_SHARE
from infinity.quoting import quoted
from infinity.sizes import format_bytes
from infinity.state.machine_rates import MachineRates
from infinity.state.training_step import BatchShape

DOES_NOT_FIT = 1


def plan(found: argparse.Namespace) -> int:
    """Print the plan. Return the exit code: 1 if the model does not fit.

    Args:
        found: the parsed arguments of the command line.

    Raises:
        ConfigError, ModelError: the options, the swap config or the model cannot be used.
    """
    options = options_of(PlanOptions, found)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    device = _device(options)
    dtype = DTYPES[_dtype(options, device)]
    model = build(options.model, dtype, trust_remote_code=options.trust_remote_code, revision=options.revision)
    if options.lora:
        adapt(model, options.lora, experts=options.lora_experts)
    scenario = _scenario(options, model, device)
    if options.dtype is None and device.type == "cpu":
        print(dtype_line(_dtype(options, device), "default", device.type), file=sys.stderr)
    try:
        outcome = scenario.outcome()
    except PlanError as error:
        for line in scenario.warnings:
            print(line, file=sys.stderr)
        return _does_not_fit(scenario, error, options)
    alternatives = scenario.alternatives(outcome)
    if options.json:
        print(json.dumps(as_json(scenario, outcome, alternatives), indent=2))
    else:
        print(report(scenario, outcome, alternatives))
    return 0 if outcome.activations_fit else DOES_NOT_FIT


def _does_not_fit(scenario: PlanScenario, error: PlanError, options: PlanOptions) -> int:
    found = scenario.fits_if()
    if options.json:
        fits_with = None if found is None else dict(found[0])
        print(json.dumps({"fits": False, "why": str(error), "fits_with": fits_with}, indent=2))
        return DOES_NOT_FIT
    print(f"does not fit: {error}")
    if found is not None:
        changes, outcome = found
        print(f"it fits with {as_yaml(changes)} in the swap config: {duration(outcome.prediction.seconds)} per step")
    return DOES_NOT_FIT


def _device(options: PlanOptions) -> torch.device:
    """Return the device that computes on the machine for which the plan is made."""
    if options.machine is not None:
        return torch.device("cuda", 0) if MACHINES[options.machine].is_gpu else torch.device("cpu")
    return torch.device("cpu") if options.cpu else resolve(None)


def _dtype(options: PlanOptions, device: torch.device) -> str:
    """Return the name of the dtype that `infinity finetune` would use with these options."""
    return options.dtype or default_dtype(device.type).name


def _scenario(options: PlanOptions, model: Any, device: torch.device) -> PlanScenario:
    config = _config(options)
    count = options.micro_batches * options.gradient_accumulation
    passes = 1 if config.vertical else options.gradient_accumulation
    batch = BatchShape(options.batch_size, options.sequence_length, count // passes, passes)
    warnings: list[str] = []
    if options.machine is not None:
        machine = MACHINES[options.machine]
        config = on_machine(machine, config)
        ranks = options.ranks or machine.gpus
        disks = DiskLimits(machine.disk_bytes // ranks)
    else:
        ranks = options.ranks or 1
        disks = disks_of(config, ranks)
        machine = rates_for(model, config, device, batch.tokens)
        machine = replace(machine, endurance_bytes=endurance_bytes(config.nvme.paths))
        warnings += _missing_here(machine, config)
    if ranks > 1 and machine.is_gpu:
        warnings.append("several ranks were never run on real GPUs: this is a prediction of what they would do")
    _require_possible(ranks, machine)
    from infinity.runtime.experts import cut_banks, why_together

    cut_banks(model, config.experts, lambda: why_together(config, several=ranks > 1))
    return PlanScenario(
        model=model,
        config=config,
        machine=machine,
        disks=disks,
        device=device,
        batch=batch,
        optimizer=options.optimizer,
        ranks=ranks,
        clips=options.clips,
        warnings=warnings,
    )


def _missing_here(machine: MachineRates, config: SwapConfig) -> Iterator[str]:
    """Yield a line for each budget and each directory of the config that this machine does not have."""
    for name, there in ("host", machine.host_bytes), ("device", machine.device_bytes):
        if (given := getattr(config.memory, name) or 0) > there:
            here = f"this machine has {format_bytes(there)} free"
            yield f"memory.{name} is {format_bytes(given)}, and {here}: the plan is for a machine with more memory"
    for path in config.nvme.paths:
        try:
            require_place(path)
        except ConfigError as error:
            yield f"{error} A run would end with this error."


def _require_possible(ranks: int, machine: MachineRates) -> None:
    """Raise ConfigError for a setup that infinity does not support."""
    if machine.is_gpu and ranks > machine.gpus:
        raise ConfigError(f"--ranks {ranks}: {machine.name} has {machine.gpus}, and each rank needs one")


def _config(options: PlanOptions) -> SwapConfig:
    """Return the swap config, changed by the options of the command line."""
    changes = dict(map(_pair, options.set))
    if options.swap_dir:
        changes["nvme.paths"] = [str(path) for path in options.swap_dir]
    if options.frozen:
        changes["frozen"] = options.frozen
    if options.micro_batches > 1:
        changes["vertical"] = True
    return with_changes(load_config(options.config), changes)


def _pair(text: str) -> tuple[str, Any]:
    """Parse a pair such as 'moments=int8'. Raise ConfigError if the text is not such a pair."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise ConfigError(f"--set {quoted(text)}: write KEY=VALUE, such as moments=int8 or memory.host=48GiB")
    words = {"true": True, "false": False}
    return key.strip(), words.get(value.strip().lower(), value.strip())


def on_machine(machine: MachineRates, config: SwapConfig) -> SwapConfig:
    """Return the swap config for another machine.

    Memory, cores and disks that the swap config does not set are the machine's.
    """
    changes: dict[str, Any] = {}
    if config.memory.host is None:
        changes["memory.host"] = int((machine.host_bytes - SYSTEM_BYTES) * HOST_SHARE)
    if config.memory.device is None:
        changes["memory.device"] = int(machine.device_bytes * DEVICE_SHARE)
    if not config.nvme.paths:
        changes["nvme.paths"] = [f"/mnt/nvme{number}" for number in range(machine.disks)]
    if config.update.threads is None:
        changes["update.threads"] = max(int(machine.cores // machine.gpus), 1)
    return with_changes(config, changes)
