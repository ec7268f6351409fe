"""Script of one run, made from a seed: the loop, the config, and all disturbances.

The expected result of a run is known before it begins. A disturbed attempt at an iteration is abandoned with zero_grad,
and the iteration is tried again; a disturbed forward is repeated. Therefore the undisturbed iterations alone determine
the bits.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.stress.subjects import SUBJECTS

Where = Literal["forward", "backward", "between", "before step", "after step"]


@dataclass(frozen=True)
class Disturbance:
    """An attempt that ends early, or may end early.

    Attributes:
        kind: raise: an exception of the user's code; SIGINT: Ctrl-C at the same place; line: Ctrl-C at the `nth` line
            that infinity executes; timer: Ctrl-C after a random time; abandon: everything except the step is done, and
            the gradients are discarded.
        where: place at which `raise` and `SIGINT` happen.
        nth: index of the module (modulo the number of modules); number of the line; or time in ten-thousandths of the
            approximate duration of an attempt.
        forward_only: whether only a forward is disturbed, and only this forward is repeated.
    """

    kind: Literal["raise", "SIGINT", "line", "timer", "abandon"]
    where: Where
    nth: int
    micro_batch: int
    forward_only: bool


@dataclass(frozen=True)
class Iteration:
    """One step of the loop.

    Attributes:
        told: whether the loop tells infinity, for each backward pass except the last, that this pass is not the last.
        lr_when: place where the learning rate is set.
        asides: place and name of each additional operation; these operations change nothing.
    """

    micro_batches: int
    told: bool
    lr: float
    lr_when: Where
    nan: bool
    gated: bool
    asides: tuple[tuple[Where, str], ...]
    disturbances: tuple[Disturbance, ...]


@dataclass(frozen=True)
class Script:
    """One run.

    Attributes:
        sizes: fractions of the largest memory.host and memory.device; the player finds a plan that fits.
        closed: iteration and place at which the model is closed early; None: the model is closed at the end.
        error_at: number of the block operation that fails; None: no operation fails.
    """

    seed: int
    subject: str
    bfloat16: bool
    clip: float | None
    accumulation_steps: int | None
    iterations: tuple[Iteration, ...]
    config: dict[str, Any]
    sizes: tuple[float, float]
    shuffled: bool
    closed: tuple[int, Where] | None
    error_at: int | None
    same: dict[str, Any] = field(default_factory=dict)
    """Options of the config that change the bits."""


def _iteration(rng: random.Random, index: int, changing: bool, accumulation: int, hostile: float) -> Iteration:
    places: tuple[Where, ...] = ("forward", "between", "before step", "after step")
    asides = ("evaluate", "commit", "synchronize", "save", "statistics", "state_dict", "read")
    micro_batches = rng.choice([1, 2, 3]) if rng.random() < 0.2 else accumulation
    return Iteration(
        micro_batches=micro_batches,
        told=rng.random() < 0.3,
        lr=rng.choice([1e-3, 3e-3, 5e-4]) if changing else 1e-3,
        lr_when=rng.choice(["forward", "after step"]) if rng.random() < 0.8 else "before step",
        nan=index > 0 and rng.random() < 0.08,
        gated=rng.random() < 0.5,
        asides=tuple((rng.choice(places), rng.choice(asides)) for _ in range(rng.choice([0, 0, 0, 1, 2]))),
        disturbances=tuple(_disturbance(rng, micro_batches) for _ in range(3) if rng.random() < hostile),
    )


def _disturbance(rng: random.Random, micro_batches: int) -> Disturbance:
    return Disturbance(
        kind=rng.choice(["raise", "SIGINT", "line", "line", "line", "timer", "abandon"]),
        where=rng.choice(["forward", "backward", "between", "before step"]),
        nth=int(10 ** rng.uniform(0, 4)),
        micro_batch=rng.randrange(micro_batches),
        forward_only=rng.random() < 0.25,
    )


def script_of(seed: int) -> Script:
    """Return the script of a seed. A seed gives the same script on every machine."""
    rng = random.Random(seed)
    steps = rng.randint(3, 6)
    accumulation = rng.choice([1, 1, 1, 2, 3])
    changing, hostile = rng.random() < 0.5, rng.choice([0.0, 0.2, 0.4])
    iterations = tuple(_iteration(rng, index, changing, accumulation, hostile) for index in range(steps))
    commit_every = rng.choice([0, 0, 1, 1, 2, 5])
    same = {
        "moments": rng.choice(["fp32", "fp32", "bf16", "int8"]),
        "master": rng.choice(["split16", "split16", "fp32"]),
    }
    tier = rng.choice(["nvme", "nvme", "nvme", "auto", "host"])
    config = same | {
        "weights": rng.choice(["nvme", "nvme", "host", "auto"]),
        "optimizer": tier,
        "gradients": rng.choice(["host", "auto", "auto", "nvme"]),
        "activations": "keep",
        "overlap": rng.choice(["auto", "auto", "during_backward", "during_backward", "before_forward", "off"]),
        "commit_every": commit_every,
        "keep": rng.choice([1, 1, 2, 3]) if commit_every else 1,
        "update": {"tile": rng.choice(["16KiB", "64KiB", "256KiB"]), "threads": rng.choice([1, 2])},
        "nvme": {
            "engine": rng.choice(["io_uring", "threads"]),
            "block": rng.choice(["4KiB", "16KiB", "256KiB"]),
            "queue_depth": rng.choice([2, 8, 128]),
            "checksums": rng.random() < 0.9,
        },
    }
    ends: tuple[Where, ...] = ("forward", "backward", "between", "before step", "after step")
    return Script(
        seed=seed,
        subject=rng.choice(list(SUBJECTS)),
        bfloat16=rng.random() < 0.7,
        clip=rng.choice([None, None, 1e9, 1.0, 0.01]),
        accumulation_steps=rng.choice([None, None, accumulation, accumulation, 2]),
        iterations=iterations,
        config=config,
        sizes=(rng.random() ** 3, rng.random() ** 3),
        shuffled=rng.random() < 0.8,
        closed=(rng.randrange(steps), rng.choice(ends)) if rng.random() < 0.15 else None,
        error_at=int(10 ** rng.uniform(1.5, 3.5)) if rng.random() < 0.15 else None,
        same=same,
    )
