"""Random swap configs, made from a seed, with budgets between the smallest budgets that the planner accepts and large
budgets.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity
from infinity.config import load_config
from infinity.plan.plan import Plan
from infinity.plan.planner import make_plan
from infinity.sizes import PAGE_BYTES
from infinity.state.discover import discover
from infinity.state.offload_arguments import OffloadArguments

_PLENTY = 64 << 20


def fixed(rng: random.Random) -> dict[str, Any]:
    """Return the options that a resumed run cannot change. For example, `moments` would change the bits."""
    return {
        "moments": rng.choice(["fp32", "fp32", "int8"]),
        "master": rng.choice(["split16", "split16", "fp32"]),
        "commit_every": rng.choice([0, 0, 1, 1, 2, 3]),
        "keep": rng.choice([1, 2]),
        "nvme": {"checksums": rng.random() < 0.9},
    }


def make(
    rng: random.Random,
    given: dict[str, Any],
    model: nn.Module,
    paths: list[Path],
    *,
    accumulates: bool,
) -> Any:
    """Return a config for a model, with the `given` options.

    Args:
        rng: source of random choices.
        given: options that are fixed.
        model: the model to be offloaded.
        paths: swap directories.
        accumulates: memory must be sufficient for gradients of several passes.
    """
    config = given | {
        "weights": rng.choice(["nvme", "nvme", "host", "auto"]),
        "optimizer": rng.choice(["nvme", "nvme", "host", "auto"]),
        "gradients": rng.choice(["host", "auto", "auto", "nvme"]),
        "overlap": rng.choice(["auto", "during_backward", "during_backward", "before_forward", "off"]),
        "update": {"tile": rng.choice(["4KiB", "16KiB", "1MiB"]), "threads": rng.choice([1, 2])},
        "nvme": given["nvme"]
        | {
            "paths": [str(path) for path in paths],
            "engine": rng.choice(["io_uring", "threads"]),
            "block": rng.choice(["4KiB", "64KiB"]),
            "queue_depth": rng.choice([2, 128]),
            "deadline_s": 30.0,
        },
    }
    slack = [rng.choice([0.0, 0.0, 0.1, 1.0]) for _ in range(2)]
    return budgeted(config, model, slack, accumulates=accumulates)


def budgeted(config: dict[str, Any], model: nn.Module, slack: list[float], *, accumulates: bool) -> dict[str, Any]:
    """Return the config with memory.device and memory.host. Each of these budgets is larger than its minimum by a
    fraction from `slack`.
    """
    found = discover(model, config["moments"])

    def fits(**memory: int) -> bool:
        plan = planned(found, config | {"memory": {"device": _PLENTY, "host": _PLENTY} | memory})
        return plan is not None and (plan.placement.accumulates or not accumulates)

    device = least(lambda nbytes: fits(device=nbytes))
    device += int(device * slack[0])
    host = least(lambda nbytes: fits(device=device, host=nbytes))
    return config | {"memory": {"device": device, "host": host + int(host * slack[1])}}


def planned(found: Any, config: dict[str, Any]) -> Plan | None:
    """Return the plan of a model; None if the model does not fit."""
    try:
        cpu = torch.device("cpu")
        return make_plan(
            found.units, OffloadArguments(load_config(config), cpu), can_recompute=False, sites=found.sites
        )
    except infinity.PlanError:
        return None


def least(fits: Callable[[int], bool]) -> int:
    """Return the smallest memory size in bytes for which `fits` returns true, rounded to whole pages."""
    low, high = 0, _PLENTY // PAGE_BYTES
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle * PAGE_BYTES) else (middle, high)
    return high * PAGE_BYTES
