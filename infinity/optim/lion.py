"""Lion on offloaded parameters. Lion keeps one moment per parameter; Adam keeps two."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from typing_extensions import Unpack

from infinity.optim.hyperparameter_checks import TorchOptions, require_range
from infinity.optim.offloaded import OffloadedOptimizer
from infinity.state.moments import OptimizerName


class Lion(OffloadedOptimizer):
    """Evolved sign momentum (Chen et al., arXiv 2302.06675, algorithm 2), with decoupled weight decay.

    c = β1·m + (1−β1)·g;  p ← p·(1 − lr·wd) − lr·sign(c);  m ← β2·m + (1−β2)·g

    Args:
        params: parameters of one offloaded model, or param groups with their own `lr`, `betas`, `weight_decay`.
        lr: learning rate; the paper recommends a third to a tenth of AdamW's learning rate, and a weight decay that is
            larger by the same factor.
        max_grad_norm, seed: see OffloadedOptimizer.

    Raises:
        ModelError: a parameter is not offloaded, or the parameters belong to several models.
        ConfigError: a hyperparameter is out of range.
    """

    rule: ClassVar[OptimizerName] = "lion"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        seed: int = 0,
        accumulation_steps: int | None = None,
        **torchs: Unpack[TorchOptions],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(
            params,
            defaults,
            max_grad_norm=max_grad_norm,
            maximize=maximize,
            seed=seed,
            accumulation_steps=accumulation_steps,
            torchs=torchs,
        )

    def check(self, group: Mapping[str, Any]) -> None:
        require_range(group, lr=(0, float("inf")), betas=(0, 1), weight_decay=(0, float("inf")))

    def hyperparameters(self, group: dict[str, Any]) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        return {
            "rule": self.rule,
            "lr": float(group["lr"]),
            "beta1": float(beta1),
            "beta2": float(beta2),
            "weight_decay": float(group["weight_decay"]),
        }
