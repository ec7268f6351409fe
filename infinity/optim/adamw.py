"""Adam and AdamW on offloaded parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from typing_extensions import Unpack

from infinity.errors import ConfigError
from infinity.optim.hyperparameter_checks import TorchOptions, require_flags, require_range
from infinity.optim.offloaded import OffloadedOptimizer
from infinity.state.moments import OptimizerName

_INFINITE = float("inf")


class Adam(OffloadedOptimizer):
    """Adam with weight decay added to the gradient (Kingma & Ba, arXiv 1412.6980), as in torch.optim.Adam.

    The arguments and errors are the same as for AdamW.
    """

    rule: ClassVar[OptimizerName] = "adam"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        seed: int = 0,
        accumulation_steps: int | None = None,
        **torchs: Unpack[TorchOptions],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
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
        require_range(group, lr=(0, _INFINITE), betas=(0, 1), eps=(0, _INFINITE), weight_decay=(0, _INFINITE))
        require_flags(group, "amsgrad")
        if group["amsgrad"]:
            raise ConfigError(
                "amsgrad is not available: it keeps a third moment, which costs 8 bytes of NVMe traffic per parameter "
                "and step. Use amsgrad=False."
            )
        decoupled = self.rule == "adamw"
        if bool(group.get("decoupled_weight_decay", decoupled)) != decoupled:
            other = "Adam" if decoupled else "AdamW"
            raise ConfigError(f"decoupled_weight_decay={not decoupled} is the rule of infinity.{other}: use that class")

    def keeps_idle(self, group: Mapping[str, Any]) -> bool:
        return bool(group["weight_decay"] == 0 and group["eps"] > 0)

    def hyperparameters(self, group: dict[str, Any]) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        return {
            "rule": self.rule,
            "lr": float(group["lr"]),
            "beta1": float(beta1),
            "beta2": float(beta2),
            "eps": float(group["eps"]),
            "weight_decay": float(group["weight_decay"]),
        }


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov & Hutter, arXiv 1711.05101), as in torch.optim.AdamW.

    Args:
        params: parameters of one offloaded model, or param groups with their own `lr`, `betas`, `eps`, `weight_decay`.
        lr: learning rate; a float or a one-element tensor; LR schedulers work as usual.
        betas, eps, weight_decay, maximize: as in torch.optim.AdamW.
        amsgrad: refused when True.
        max_grad_norm: clip the gradients of all groups together to this norm, exactly; None: do not clip.
        seed: seed of stochastic rounding, see OffloadedOptimizer.
        accumulation_steps: backward passes before each step; None: as many as before the previous step.
        torchs: torch's foreach, fused, capturable, differentiable (TorchOptions).

    Raises:
        ModelError: a parameter is not offloaded, or the parameters belong to several models.
        ConfigError: a hyperparameter is out of range.
    """

    rule: ClassVar[OptimizerName] = "adamw"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        seed: int = 0,
        accumulation_steps: int | None = None,
        **torchs: Unpack[TorchOptions],
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            max_grad_norm=max_grad_norm,
            seed=seed,
            accumulation_steps=accumulation_steps,
            **torchs,
        )
