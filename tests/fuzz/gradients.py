"""Gradients that a loop reads and changes between backward and step, on plain torch and on infinity."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

KINDS = ("read", "scale", "clip", "clip by .data", "zero", "noise", "replace", "forget")


@dataclass(frozen=True)
class Change:
    """Changes of gradients after a backward pass.

    Attributes:
        kinds: kinds of change, used in turn for the chosen parameters.
        share: share of the parameters that are chosen.
        seed: seed of the choice and of the noise.
        write: whether the context also allows weights to be written; no weight is written.
    """

    kinds: tuple[str, ...]
    share: float
    seed: int
    write: bool


def drawn(seed: int, index: int, passes: int) -> tuple[Change | None, ...]:
    """Return a change or None for each backward pass of an iteration.

    The random numbers are separate from the loop's random numbers, so that a seed gives the same loop with and without
    changes.
    """
    rng = random.Random(f"gradients {seed} {index}")
    likely = rng.choice([0.0, 0.0, 0.3, 0.7])

    def change() -> Change:
        kinds = tuple(rng.choice(KINDS) for _ in range(rng.choice([1, 1, 5])))
        return Change(kinds, rng.choice([0.1, 0.5, 1.0]), rng.randrange(1 << 30), rng.random() < 0.2)

    return tuple(change() if rng.random() < likely else None for _ in range(passes))


def apply(world: Any, change: Change | None) -> list[float]:
    """Apply a change and return the values that were read: a sum over each gradient."""
    if change is None:
        return []
    rng, read = random.Random(change.seed), list[float]()
    every = [parameter for parameter in world.model.parameters() if parameter.grad is not None]
    chosen = rng.sample(every, round(len(every) * change.share))
    if not chosen:
        return []
    with world.gradients(chosen, write=change.write), torch.no_grad():
        for at, parameter in enumerate(chosen):
            read.append(parameter.grad.double().abs().sum().item())
            _change(parameter, change.kinds[at % len(change.kinds)], rng)
    return read


def _change(parameter: nn.Parameter, kind: str, rng: random.Random) -> None:
    grad = parameter.grad
    assert grad is not None
    if kind == "scale":
        grad.mul_(rng.choice([0.5, 1 / 3, -1.0]))
    elif kind == "clip":
        nn.utils.clip_grad_value_([parameter], rng.choice([1e-3, 1e-5]), foreach=False)
    elif kind == "clip by .data":
        grad.data.clamp_(-1e-4, 1e-4)
    elif kind == "zero":
        grad.zero_()
    elif kind == "noise":
        noise = torch.randn(grad.shape, generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))
        grad.add_(noise.to(grad.dtype), alpha=1e-3)
    elif kind == "replace":
        parameter.grad = grad.sign() * 1e-3
    elif kind == "forget":
        parameter.grad = None


@contextmanager
def lent(kept: dict[nn.Parameter, torch.Tensor], parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Provide `kept` fp32 gradients as infinity.gathered(..., grads=True) does."""
    given = {parameter: kept[parameter].to(parameter.dtype) for parameter in parameters}
    before = {parameter: (copy.clone(), copy._version) for parameter, copy in given.items()}
    for parameter, copy in given.items():
        parameter.grad = copy
    yield
    for parameter, (was, version) in before.items():
        now = parameter.grad
        if now is None:
            del kept[parameter]
            continue
        if now is not given[parameter] or now._version != version or not _same_bits(now, was):
            kept[parameter] = now.float().clone()
        parameter.grad = torch.zeros_like(parameter)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
