"""A preset on a simulated machine."""

from __future__ import annotations

from typing import Any

import torch

from infinity.cli.planning.machines import MACHINES
from infinity.cli.planning.main import on_machine
from infinity.cli.planning.model import Batch, build
from infinity.cli.planning.scenario import Scenario
from infinity.config import load_config
from infinity.plan.disk import Disks


def scenario_of(model: str, machine: str, **config: Any) -> Scenario:
    there = MACHINES[machine]
    return Scenario(
        model=build(model, torch.bfloat16),
        config=on_machine(there, load_config(config)),
        machine=there,
        disks=Disks(there.disk_bytes),
        device=torch.device("cuda", 0),
        batch=Batch(4, 2048),
    )
