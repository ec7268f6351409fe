"""SGD on offloaded parameters, with or without momentum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from typing_extensions import Unpack

from infinity.errors import ConfigError
from infinity.optim.hyperparameter_checks import TorchOptions, require_flags, require_range
from infinity.optim.offloaded import OffloadedOptimizer
from infinity.state.moments import Moment, OptimizerName


class SGD(OffloadedOptimizer):
    """Stochastic gradient descent, as in torch.optim.SGD. Without momentum the optimizer keeps no state.

    Args:
        params: parameters of one offloaded model, or param groups with their own hyperparameters.
        lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch.optim.SGD.
        max_grad_norm, seed: see OffloadedOptimizer.

    Raises:
        ModelError: a parameter is not offloaded, or the parameters belong to several models.
        ConfigError: a hyperparameter is out of range.
    """

    rule: ClassVar[OptimizerName] = "sgd"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        seed: int = 0,
        accumulation_steps: int | None = None,
        **torchs: Unpack[TorchOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
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

    def moments(self, group: dict[str, Any]) -> dict[str, Moment]:
        return super().moments(group) if group["momentum"] else {}

    def check(self, group: Mapping[str, Any]) -> None:
        positive = (0, float("inf"))
        require_range(group, lr=positive, momentum=positive, weight_decay=positive)
        require_range(group, dampening=(-float("inf"), float("inf")))
        require_flags(group, "nesterov")
        if group["nesterov"] and not (group["momentum"] > 0 and group["dampening"] == 0):
            raise ConfigError("nesterov needs a momentum above 0 and a dampening of 0")

    def hyperparameters(self, group: dict[str, Any]) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "lr": float(group["lr"]),
            "beta1": float(group["momentum"]),
            "dampening": float(group["dampening"]),
            "weight_decay": float(group["weight_decay"]),
            "nesterov": bool(group["nesterov"]),
        }
