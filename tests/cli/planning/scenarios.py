"""A preset on a simulated machine."""

from __future__ import annotations

from typing import Any

import torch

from infinity.cli.planning.machines import MACHINES
from infinity.cli.planning.main import on_machine
from infinity.cli.planning.model import build
from infinity.cli.planning.scenario import PlanScenario
from infinity.config import load_config
from infinity.plan.disk import DiskLimits
from infinity.state.training_step import BatchShape


def scenario_of(model: str, machine: str, **config: Any) -> PlanScenario:
    there = MACHINES[machine]
    return PlanScenario(
        model=build(model, torch.bfloat16),
        config=on_machine(there, load_config(config)),
        machine=there,
        disks=DiskLimits(there.disk_bytes),
        device=torch.device("cuda", 0),
        batch=BatchShape(4, 2048),
    )
