"""The planner's plan for a machine that is not here."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from infinity.config import SwapConfig
from infinity.plan import planner, speculation
from infinity.plan.plan import Plan
from infinity.plan.planner import make_plan
from infinity.plan.problem import Problem
from simulation.gpu import RING
from simulation.machine import Machine
from simulation.shapes import Task

DEVICE_SHARE = 0.9
HOST_SHARE = 0.8
"""What infinity takes of free memory where the config does not say (plan/planner.py)."""
_SYSTEM_BYTES = 6 << 30
"""Of RAM: the system, and a process with torch and a GPU's context."""


def plan_for(machine: Machine, task: Task, **config: Any) -> Plan:
    """Args: config: keys of the swap config beside memory, paths and threads.

    Raises:
        PlanError: the machine is too small.
    """
    host = config.pop("host", None) or int((machine.host_bytes - _SYSTEM_BYTES) * HOST_SHARE)
    device = config.pop("device", None) or int(machine.device_bytes * DEVICE_SHARE)
    given = SwapConfig(
        memory={"host": host, "device": device},  # type: ignore[arg-type]
        nvme={"paths": [f"/simulated/{number}" for number in range(machine.disks)]},  # type: ignore[arg-type]
        update={"threads": int(machine.cores), "tile": config.pop("tile", None)},  # type: ignore[arg-type]
        commit_every=0,
        **config,
    )
    kind = torch.device("cuda", 0) if machine.is_gpu else torch.device("cpu")
    with ExitStack() as patches:
        for module in (planner, speculation):
            patches.enter_context(mock.patch.object(module, "room_bytes", return_value=machine.disk_bytes))
        if machine.is_gpu:
            patches.enter_context(mock.patch.object(planner, "reserve", _as_on_a_cpu(speculation.reserve)))
            patches.enter_context(mock.patch.object(planner, "shadow_wanted", _as_on_a_cpu(speculation.shadow_wanted)))
        plan = make_plan(task.units, given, kind, can_recompute=True, accumulation_steps=1, sites=task.sites)
    return _with_slab(plan, task) if machine.is_gpu else plan


def _as_on_a_cpu(rule: Any) -> Any:
    """What updates that begin during backward need, which is the same on a GPU. The planner reserves it on CPUs."""

    def ask(problem: Problem, *args: Any) -> Any:
        return rule(replace(problem, limits=replace(problem.limits, shares_memory=True)), *args)

    return ask


def _with_slab(plan: Plan, task: Task) -> Plan:
    """The slots have what activations and the ring of gradients leave. Raises ValueError where that is too little."""
    largest = max(unit.weight_bytes for unit in task.units)
    room = plan.budgets.limits.device - task.activation_bytes - RING * largest
    needed = 2 * largest + sum(unit.weight_bytes for unit in task.units if unit.stays)
    if room < needed:
        raise ValueError(
            f"device memory: {room / 2**30:.1f} GiB are left beside {task.activation_bytes / 2**30:.1f} GiB of "
            f"activations and the ring; two of the largest units need {needed / 2**30:.1f} GiB"
        )
    return replace(plan, budgets=replace(plan.budgets, slot_bytes=min(room, plan.layout.weight_bytes)))
