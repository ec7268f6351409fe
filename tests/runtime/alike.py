"""Comparison of an offloaded model with plain torch in training and evaluation, with little memory for its units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import infinity
from infinity.coordinator import registry
from infinity.plan.plan_input import WEIGHT_SHARE_OF_DEVICE
from infinity.sizes import PAGE_BYTES, round_up
from infinity.state.discover import discover
from infinity.units.weights import Residency
from tests import sampling
from tests.conftest import states_of, weights_of
from tests.models import Batch, loss_of

STEPS = sampling.number(2, 3)
_OPTIONS: dict[str, Any] = {"lr": 1e-3, "eps": 1e-3}  # eps: gradients that are zero except for rounding change nothing


def tight(model: nn.Module, together: int = 2) -> dict[str, str]:
    """Return memory for the units that stay on the device and the `together` largest other units, but at least the
    minimum of a plan.
    """
    units = discover(model).units
    staying = sum(unit.weight_bytes for unit in units if unit.stays)
    moving = sorted((unit.weight_bytes for unit in units if not unit.stays), reverse=True)
    least = sum(sorted((unit.weight_bytes for unit in units), reverse=True)[:2])
    largest = max(sum(moving[:together]), least)
    needed = round_up(staying + largest, PAGE_BYTES)
    return {"device": str(int(needed / WEIGHT_SHARE_OF_DEVICE)), "host": "512MiB"}


def assert_trains_and_evaluates_alike(
    build: Callable[[], nn.Module],
    batch: Batch,
    offload: Any,
    *,
    together: int = 2,
    steps: int = STEPS,
    tolerance: float = 2e-5,
) -> None:
    """Require equal losses of training, no_grad and inference_mode, equal weights, and equal moments.

    Args:
        build: function that makes the same model each time.
        batch: input of the model.
        offload: fixture that offloads a model.
        steps: number of training steps.
        together: number of units that the model needs at once (`tight`).
        tolerance: largest difference of weights and moments.
    """
    plain = build()
    expected, moments = _run(plain, torch.optim.AdamW(plain.parameters(), **_OPTIONS), batch, steps)
    model = build()
    model = offload(model, memory=tight(model, together))
    optim = infinity.AdamW(model.parameters(), **_OPTIONS)
    seen, _ = _run(model, optim, batch, steps)
    torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-5)
    _assert_close(weights_of(model), dict(plain.named_parameters()), tolerance)
    _assert_close(states_of(model), moments(plain), tolerance)
    records = registry.coordinator_of(model).units
    assert any(record.weights.residency is Residency.RELEASED for record in records), (
        "memory for all of it: nothing was tried"
    )


def _run(
    model: nn.Module, optim: torch.optim.Optimizer, batch: Batch, steps: int
) -> tuple[dict[str, list[float]], Callable[[nn.Module], dict[str, torch.Tensor]]]:
    losses: dict[str, list[float]] = {"train": [], "no_grad": [], "inference_mode": []}
    for step in range(steps):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                torch.manual_seed(step)
                losses[mode.__name__].append(loss_of(model.eval(), batch).item())
        torch.manual_seed(step)
        loss = loss_of(model.train(), batch)
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses["train"].append(loss.item())

    def moments(plain: nn.Module) -> dict[str, torch.Tensor]:
        return {
            f"{name}.{key}": state[key].flatten()
            for name, parameter in plain.named_parameters()
            if (state := optim.state.get(parameter))
            for key in ("exp_avg", "exp_avg_sq")
        }

    return losses, moments


def _assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value.detach(), rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
