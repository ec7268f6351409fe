"""The planner's plan for a simulated machine."""

from __future__ import annotations

from typing import Any

import torch

from infinity.cli.planning.machines import SYSTEM_BYTES
from infinity.config import SwapConfig
from infinity.plan.disk import DiskLimits
from infinity.plan.plan import Plan
from infinity.plan.planner import DEVICE_SHARE, HOST_SHARE, make_plan
from infinity.state.offload_arguments import OffloadArguments
from simulation.machine import SimulatedMachine
from simulation.shapes import Task


def plan_for(machine: SimulatedMachine, task: Task, *, clips: bool = False, **config: Any) -> Plan:
    """Return the plan.

    Args:
        machine: the simulated machine.
        task: the model and its batch.
        clips: whether every step clips its gradients.
        config: keys of the swap config other than memory, paths and threads.

    Raises:
        PlanError: the machine is too small for the task.
        ValueError: the plan leaves too little device memory for activations.
    """
    host = config.pop("host", None) or int((machine.host_bytes - SYSTEM_BYTES) * HOST_SHARE)
    device = config.pop("device", None) or int(machine.device_bytes * DEVICE_SHARE)
    given = SwapConfig(
        memory={"host": host, "device": device},  # type: ignore[arg-type]
        nvme={"paths": [f"/simulated/{number}" for number in range(machine.disks)]},  # type: ignore[arg-type]
        update={"threads": int(machine.cores), "tile": config.pop("tile", None)},  # type: ignore[arg-type]
        commit_every=0,
        recompute="blocks" if task.work.recompute else "none",
        **config,
    )
    kind = torch.device("cuda", 0) if machine.is_gpu else torch.device("cpu")
    plan = make_plan(
        task.units,
        OffloadArguments(given, kind, accumulation_steps=1, step=task.step(machine, clips=clips)),
        can_recompute=True,
        sites=task.sites,
        disks=DiskLimits(machine.disk_bytes),
    )
    if machine.is_gpu:
        _require_activations(machine, task, plan)
    return plan


def _require_activations(machine: SimulatedMachine, task: Task, plan: Plan) -> None:
    planned = plan.budgets.slot_bytes + plan.budgets.ring_bytes + plan.budgets.resident_bytes
    room = machine.device_bytes * DEVICE_SHARE - planned
    if room < task.activation_bytes:
        raise ValueError(
            f"device memory: {room / 2**30:.1f} GiB are left beside {planned / 2**30:.1f} GiB for weights and "
            f"gradients; activations need {task.activation_bytes / 2**30:.1f} GiB"
        )
