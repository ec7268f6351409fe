"""Adagrad on offloaded parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from typing_extensions import Unpack

from infinity.coordinator.coordinator import Coordinator
from infinity.errors import ConfigError
from infinity.optim.hyperparameter_checks import TorchOptions, require_range
from infinity.optim.offloaded import OffloadedOptimizer
from infinity.state.moments import OptimizerName


class Adagrad(OffloadedOptimizer):
    """Adagrad (Duchi, Hazan & Singer 2011), as in torch.optim.Adagrad.

    Args:
        params: parameters of one offloaded model, or param groups with their own hyperparameters.
        lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize: as in torch.optim.Adagrad.
        max_grad_norm, seed: see OffloadedOptimizer.

    Raises:
        ModelError: a parameter is not offloaded, or the parameters belong to several models.
        ConfigError: a hyperparameter is out of range.
    """

    rule: ClassVar[OptimizerName] = "adagrad"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        seed: int = 0,
        accumulation_steps: int | None = None,
        **torchs: Unpack[TorchOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
        }
        super().__init__(
            params,
            defaults,
            max_grad_norm=max_grad_norm,
            maximize=maximize,
            seed=seed,
            accumulation_steps=accumulation_steps,
            torchs=torchs,
        )

    def _require_room(self, coordinator: Coordinator, group: dict[str, Any]) -> None:
        super()._require_room(coordinator, group)
        if coordinator.plan.placement.form.moments == "int8":
            raise ConfigError(
                "moments: int8 does not work with Adagrad: Adagrad's sum grows in steps that 8 bits cannot represent, "
                "so the sum would stop growing. Set moments: bf16 or fp32."
            )

    def check(self, group: Mapping[str, Any]) -> None:
        positive = (0, float("inf"))
        require_range(
            group,
            lr=positive,
            lr_decay=positive,
            weight_decay=positive,
            initial_accumulator_value=positive,
            eps=positive,
        )

    def hyperparameters(self, group: dict[str, Any]) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "lr": float(group["lr"]),
            "lr_decay": float(group["lr_decay"]),
            "weight_decay": float(group["weight_decay"]),
            "initial_accumulator": float(group["initial_accumulator_value"]),
            "eps": float(group["eps"]),
        }
