"""Optimizers and dtypes by their names on the command line, and loss scaling, without which small fp16 gradients would
be rounded to zero."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from infinity.cli.options import SGD_MOMENTUM
from infinity.errors import ConfigError
from infinity.optim.adagrad import Adagrad
from infinity.optim.adamw import Adam, AdamW
from infinity.optim.lion import Lion
from infinity.optim.offloaded import OffloadedOptimizer
from infinity.optim.sgd import SGD
from infinity.state.moments import OptimizerName

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_MAKE: dict[str, Callable[..., OffloadedOptimizer]] = {
    "adamw": AdamW,
    "adam": Adam,
    "lion": Lion,
    "adagrad": Adagrad,
    "sgd": lambda params, **options: SGD(params, momentum=SGD_MOMENTUM, **options),
}


_BETAS = {"adamw": (0.9, 0.999), "adam": (0.9, 0.999), "lion": (0.9, 0.99)}
_HAVE_EPS = ("adamw", "adam", "adagrad")


def moments_of(name: str, beta1: float | None, beta2: float | None, eps: float | None) -> dict[str, Any]:
    """Return the options `betas` and `eps` for an optimizer.

    Args:
        name: the optimizer.
        beta1: value of the option, or None for the optimizer's default.
        beta2: value of the option, or None for the optimizer's default.
        eps: value of the option, or None for the optimizer's default.

    Raises:
        ConfigError: the user gave an option that the optimizer does not have.
    """
    options: dict[str, Any] = {}
    for option, value in (("--beta1", beta1), ("--beta2", beta2)):
        if value is not None and name not in _BETAS:
            raise ConfigError(f"{option} does nothing with --optimizer {name}; {', '.join(_BETAS)} have it")
    if name in _BETAS:
        default = _BETAS[name]
        options["betas"] = (default[0] if beta1 is None else beta1, default[1] if beta2 is None else beta2)
    if eps is not None:
        if name not in _HAVE_EPS:
            raise ConfigError(f"--eps does nothing with --optimizer {name}; {', '.join(_HAVE_EPS)} have it")
        options["eps"] = eps
    return options


def make_optimizer(name: OptimizerName, params: Iterable[Any], **options: Any) -> OffloadedOptimizer:
    """Make an optimizer.

    Args:
        name: the optimizer.
        params: parameters that it updates.
        options: lr, weight_decay, max_grad_norm, seed, accumulation_steps, betas and eps. Arguments that are missing
            have the optimizer's defaults.
    """
    return _MAKE[name](params, **options)


def make_scaler(model: nn.Module) -> torch.amp.GradScaler:
    """Make a gradient scaler (torch.amp.GradScaler) for the model.

    The scaler is enabled only if the model has trainable fp16 weights; otherwise the scaler does nothing.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    enabled = any(parameter.dtype == torch.float16 for parameter in trained)
    if enabled:
        print("fp16 weights: the loss is scaled", flush=True)
    device = next((parameter.device.type for parameter in trained), "cpu")
    return torch.amp.GradScaler(device, enabled=enabled)
