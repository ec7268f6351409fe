#!/usr/bin/env python3
"""Simulated step of several GPUs of one machine with two wires. Nothing is measured, and no model has weights.

    python bench/wires.py

host   each rank uploads the one copy of the weights in RAM over its own link; gradients go through RAM to their owners
       (ranks.wire: host, which infinity has)
nccl   each rank uploads 1/N of the weights, and gathers the rest from the other GPUs; gradients are exchanged between
       the GPUs, and 1/N of them goes down (infinity does not have this wire)

The plan, its bytes and the model of time are those of `infinity plan`. The rates are those of data sheets (infinity's
table of machines). The cards without NVLink exchange through the host at 4.9 GB/s (NVIDIA/nccl#445). A cell has the
seconds of a step of 8,192 tokens for each GPU, and what bounds them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from infinity.cli.planning.machines import MACHINES
from infinity.cli.planning.main import on_machine
from infinity.cli.planning.model import adapt, build
from infinity.cli.planning.plan_report import duration
from infinity.cli.planning.public_models import PRESETS
from infinity.cli.planning.scenario import PlanOutcome, PlanScenario
from infinity.config import load_config
from infinity.errors import InfinityError
from infinity.plan.disk import DiskLimits
from infinity.plan.link_traffic import LinkBytes
from infinity.plan.step_time import StepTimePrediction, predict
from infinity.state.machine_rates import MachineRates
from infinity.state.training_step import BatchShape

GIB, GB = 1 << 30, 1e9
CARDS = replace(
    MACHINES["consumer"],
    name="4 × 24 GB without NVLink",
    gpus=4,
    cores=32.0,
    dram=150 * GB,
    host_bytes=512 * GIB,
    disks=4,
    disk_read=4 * MACHINES["consumer"].disk_read,
    disk_write=4 * MACHINES["consumer"].disk_write,
    disk_bytes=4 * MACHINES["consumer"].disk_bytes,
    between=4.9 * GB,
)
ON = (MACHINES["8xh200"], CARDS)
MODELS = ("llama-3-8b", "qwen3-32b", "llama-3-70b", "llama-3-405b")
FORMS = {"all parameters": {}, "LoRA of rank 16 on NF4": {"frozen": "nf4"}}
BATCH = BatchShape(4, 2048)


def outcome(preset: str, machine: MachineRates, form: dict[str, str]) -> PlanOutcome:
    config = load_config({"weights": "auto", "optimizer": "auto", **form})
    model = build(preset, torch.bfloat16)
    if "frozen" in form:
        adapt(model, 16, experts=False)
    scenario = PlanScenario(
        model=model,
        config=on_machine(machine, config),
        machine=machine,
        disks=DiskLimits(machine.disk_bytes // machine.gpus),
        device=torch.device("cuda", 0),
        batch=BATCH,
        ranks=machine.gpus,
    )
    return scenario.outcome()


def over_nccl(found: PlanOutcome, machine: MachineRates) -> StepTimePrediction:
    """Return the prediction for the same plan if weights and gradients go from GPU to GPU."""
    count = machine.gpus

    def moved(link: LinkBytes) -> LinkBytes:
        gathered = round(link.up * (count - 1) / count)
        loads = tuple(replace(load, fetched=load.fetched // count, down=load.down // count) for load in link.loads)
        return replace(link, up=link.up // count, down=link.down // count, gathered=gathered, loads=loads)

    forecast = found.plan.forecast
    forecast = replace(forecast, moved=moved(forecast.moved), moved_clipping=moved(forecast.moved_clipping))
    plan = replace(found.plan, forecast=forecast, peers=replace(found.plan.peers, sharing="nothing"))
    # The GPUs add the gradients, and each sends only its slices of the sum to RAM, where they land once.
    limits = replace(plan.budgets.limits, slice_count=1)
    plan = replace(plan, budgets=replace(plan.budgets, limits=limits))
    return predict(plan, found.work, machine, clips=False, checksums=True)


def rows() -> Iterator[str]:
    for machine in ON:
        print(f"\n{machine.name}, {machine.gpus} ranks (simulated)\n")
        print("| model | job | weights, for all ranks | host | nccl | nccl / host |\n|---|---|---|---|---|---|")
        for preset in MODELS:
            for title, form in FORMS.items():
                yield row(preset, title, machine, form)


def row(preset: str, title: str, machine: MachineRates, form: dict[str, str]) -> str:
    try:
        found = outcome(preset, machine, form)
    except InfinityError as error:
        return f"| {preset} | {title} | does not fit: {str(error)[:160]} | | | |"
    nbytes = sum(unit.full.home_bytes for unit in found.plan.layout.units)
    host, nccl = found.prediction, over_nccl(found, machine)
    return (
        f"| {preset} | {title} | {nbytes / GB:.0f} GB | {duration(host.seconds)}, {host.bound} | "
        f"{duration(nccl.seconds)}, {nccl.bound} | {nccl.seconds / host.seconds:.2f} |"
    )


if __name__ == "__main__":
    assert set(MODELS) <= set(PRESETS), sorted(PRESETS)
    for line in rows():
        print(line, flush=True)
