"""Scenarios that are logged: on the simulated device, on the device `cpu`, and on two ranks.

Every scenario fixes the number of threads, and has no `auto` that depends on a clock.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from infinity.device_update.arithmetic_check import check_of
from tests import sampling
from tests.operations.log import logged
from tests.ranks.workers import run
from tests.runtime import over_ranks
from tests.sim import test_schedules as schedules
from tests.sim.queues import EAGER, LAZY

Scenario = Callable[[Path], list[str]]
SIMULATED, ON_THE_CPU = 20, 4
TIMES = (8, 2, 5, 3, 8, 1, 4, 6)
"""Sizes of blocks. Several small blocks are evicted for a large block, so that the log shows the order of eviction."""
DEEP: dict[str, dict[str, Any]] = {
    "store": {"config": over_ranks.TIERS[3] | {"commit_every": 1, "overlap": "before_forward"}},
    "store, clipped": {"config": over_ranks.TIERS[3], "max_grad_norm": 1e-3},
    "store, recomputed": {"config": over_ranks.TIERS[3], "model": {"recomputed": True}},
    "store, a block twice": {"config": over_ranks.TIERS[3], "model": {"twice": True}},
    "store, some gradients, evaluated": {"config": over_ranks.TIERS[3], "some": True, "disturbed": True},
    "weights in the store": {"config": over_ranks.TIERS[2], "model": {"frozen": True}},
    "int8, a step at a time": {"config": over_ranks.TIERS[3] | {"overlap": "off", "moments": "int8"}},
    "states in the store": {"config": over_ranks.TIERS[1] | {"commit_every": 2}, "model": {"recomputed": True}},
    "weights in RAM": {"config": over_ranks.TIERS[0], "disturbed": True, "simulated": EAGER},
    "simulated": {"config": over_ranks.TIERS[3], "simulated": LAZY},
}
"""Scenarios with more blocks than fit on the device."""
RANKS: dict[str, dict[str, Any]] = {
    "host": {"config": over_ranks.TIERS[0]},
    "weights in RAM, states in the store": {"config": over_ranks.TIERS[1]},
    "store": {"config": over_ranks.TIERS[3] | {"commit_every": 1}},
    "store, recomputed": {"config": over_ranks.TIERS[3], "model": {"recomputed": True}, "max_grad_norm": 1e-3},
    "some gradients": {"config": over_ranks.TIERS[1], "some": True, "disturbed": True},
    "vertical": {"config": over_ranks.TIERS[3], "vertical": True},
}


def scenarios() -> Mapping[str, Scenario]:
    """Return the scenarios by name. There are always the same 40 scenarios."""
    named: dict[str, Scenario] = {}
    for index, case in enumerate(_cases(SIMULATED + ON_THE_CPU)):
        policy = [LAZY, EAGER][index % 2] if index < SIMULATED else None
        named[f"{index:02} {policy or 'cpu'} {'/'.join(map(str, case.tiers))}"] = _trained(case, policy)
    for name, options in DEEP.items():
        named[f"deep, {name}"] = _deep(options)
    for name, options in RANKS.items():
        named[f"two ranks, {name}"] = _ranks(options)
    return named


def _cases(number: int) -> list[schedules.Case]:
    """Return `number` cases, in which as many pairs of values as possible occur together."""
    draw = random.Random("operations")
    fixed = [case for case in schedules.CASES if case.overlap != "auto"]
    drawn = [draw.choice(fixed) for _ in range(400)]
    first = sampling.covering([case._asdict() for case in drawn])
    chosen = [drawn[index] for index in first]
    return (chosen + [case for case in drawn if case not in chosen])[:number]


def _trained(case: schedules.Case, policy: Any) -> Scenario:
    def record(folder: Path) -> list[str]:
        _seed()
        with logged() as log, nullcontext() if policy is None else schedules.simulated(policy):
            check_of.cache_clear()  # the check of the device's arithmetic is in the log of every recording
            schedules.train(case, _swap(folder))
        return [str(case), *log.lines()]

    return record


def _deep(options: dict[str, Any]) -> Scenario:
    def record(folder: Path) -> list[str]:
        _seed()
        given = dict(options)
        policy = given.pop("simulated", None)
        fixed = {"update": {"threads": 1}, "overlap": "during_backward", "memory": {"device": "1MiB", "host": "64MiB"}}
        given["config"] = fixed | given["config"]
        given["model"] = {"times": TIMES} | given.get("model", {})
        with logged() as log, nullcontext() if policy is None else schedules.simulated(policy):
            over_ranks.train(str(_swap(folder)), micro=2, ranks=1, steps=3, dtype="bfloat16", **given)
        return log.lines()

    return record


def _seed() -> None:
    """Seed all three generators, whose states are in manifests."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def _swap(folder: Path) -> Path:
    """Return a swap directory that has the same name each time."""
    place = folder / "place"
    place.mkdir(parents=True, exist_ok=True)
    return place / "swap"


def _ranks(options: dict[str, Any]) -> Scenario:
    def record(folder: Path) -> list[str]:
        logs = run(2, on_rank, str(_swap(folder)), options)
        # the first of the ranks makes the swap directory
        own = [[line for line in lines if not line.endswith(" directory place")] for lines in logs]
        return [f"rank {rank}: {line}" for rank, lines in enumerate(own) for line in lines]

    return record


def on_rank(folder: str, options: dict[str, Any]) -> list[str]:
    _seed()
    given = dict(options)
    fixed = {"update": {"threads": 1}, "overlap": "during_backward", "memory": {"device": "3MiB", "host": "256MiB"}}
    config = given.pop("config") | fixed
    given["model"] = {"times": TIMES} | given.get("model", {})
    with logged() as log:
        over_ranks.train(folder, config, 2, 2, steps=2, **given)
    return log.lines()
