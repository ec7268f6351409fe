"""Predicted longest sequences by where activations rest, as a table: one sequence per micro-batch, without tiles of
tokens. Nothing is measured."""

from __future__ import annotations

from dataclasses import replace

import torch

from infinity.cli.planning.machines import MACHINES
from infinity.cli.planning.main import on_machine
from infinity.cli.planning.model import build
from infinity.cli.planning.scenario import PlanScenario
from infinity.config import load_config
from infinity.errors import PlanError
from infinity.plan.disk import DiskLimits
from infinity.state.training_step import BatchShape

WHERE = {
    "keep": {"activations": "keep"},
    "recomputed": {"activations": "keep", "recompute": "blocks"},
    "recomputed, in RAM": {"activations": "host", "recompute": "blocks"},
    "recomputed, on NVMe": {"activations": "nvme", "recompute": "blocks"},
    "keep, on NVMe": {"activations": "nvme", "recompute": "none"},
}


def longest(name: str, machine: str, given: dict[str, str]) -> str:
    """Return the number of tokens of the longest sequence whose activations fit."""
    there = MACHINES[machine]
    scenario = PlanScenario(
        model=build(name, torch.bfloat16),
        config=on_machine(there, load_config({"commit_every": 0, "optimizer": "nvme", **given})),
        machine=there,
        disks=DiskLimits(there.disk_bytes),
        device=torch.device("cuda", 0),
        batch=BatchShape(1, 4096),
    )
    try:
        outcome = scenario.outcome()
        for _ in range(2):  # once more with the plan of a long sequence
            most = scenario.most_tokens(outcome)
            scenario = replace(scenario, batch=BatchShape(1, max(most, 1)))
            outcome = scenario.outcome()
        return f"{scenario.most_tokens(outcome):,}"
    except PlanError:
        return "does not fit"


def main() -> None:
    print("| model, machine | " + " | ".join(WHERE) + " |")
    print("|---" * (len(WHERE) + 1) + "|")
    for name in ("llama-3-8b", "qwen3-32b"):
        for machine in ("consumer", "h200", "gh200"):
            cells = [longest(name, machine, given) for given in WHERE.values()]
            print(f"| {name}, {machine} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
