"""Checks of an optimizer's arguments: numbers and their ranges, flags, and torch's options for the implementation."""

from __future__ import annotations

import logging
import numbers
import operator
import reprlib
from collections.abc import Mapping
from typing import Any, TypedDict

import numpy as np
import torch

from infinity.errors import ConfigError

logger = logging.getLogger(__name__)


class TorchOptions(TypedDict, total=False):
    """Options of torch's optimizers that select an implementation without a change of the result.

    Attributes:
        foreach, fused: accepted without effect, because every update is one pass over each parameter anyway.
        capturable, differentiable: refused. decoupled_weight_decay is refused, too, if it would turn Adam into AdamW or
            AdamW into Adam.
    """

    foreach: bool | None
    fused: bool | None
    capturable: bool
    differentiable: bool
    decoupled_weight_decay: bool


_REFUSED = {
    "capturable": "the update runs on the CPU and cannot be captured in a CUDA graph. Leave capturable= out, and call "
    "step() outside the graph",
    "differentiable": "autograd does not record the update. Leave differentiable= out",
}


def require_possible(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an option of torch's optimizers that infinity cannot provide."""
    for name, reason in _REFUSED.items():
        if options.get(name):
            raise ConfigError(f"{name}=True: {reason}.")


def say_ignored(options: Mapping[str, Any]) -> None:
    """Log one line about options of torch's optimizers that have no effect in infinity."""
    ignored = [f"{name}={options[name]}" for name in ("foreach", "fused") if options.get(name) is not None]
    if ignored:
        logger.info("%s changes nothing: the update is one fused pass over each parameter", ", ".join(ignored))


def number(name: str, value: Any) -> float:
    """Return a hyperparameter as a float. The value may be a number of Python or numpy, or a tensor with one element.

    Raises:
        ConfigError: the value is something else.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() == 1 and not value.is_meta and not value.is_complex():
            return float(value.detach())
        raise ConfigError(
            f"{name} is a tensor ({value.dtype}, shape {tuple(value.shape)}, {value.device}): give a number, or a real "
            "tensor with one element"
        )
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise ConfigError(f"{name} must be a number, not {reprlib.repr(value)} ({type(value).__name__})")
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(f"{name} = {reprlib.repr(value)} is out of range: a float cannot be that large") from None


def require_range(group: Mapping[str, Any], **limits: tuple[float, float]) -> None:
    """Raise ConfigError unless each named hyperparameter of a param group is a number with low <= value < high.

    `betas` must be two such numbers.
    """
    for name, (low, high) in limits.items():
        value = _entry(group, name)
        if name != "betas":
            _require_between(name, value, low, high)
        elif not isinstance(value, tuple | list) or len(value) != 2:
            raise ConfigError(f"betas must be two numbers, not {reprlib.repr(value)}")
        else:
            for index, each in enumerate(value):
                _require_between(f"betas[{index}]", each, low, high)


def _entry(group: Mapping[str, Any], name: str) -> Any:
    if name not in group:
        raise ConfigError(f"{name} is missing")
    return group[name]


def _require_between(name: str, value: Any, low: float, high: float) -> None:
    if not low <= number(name, value) < high:
        raise ConfigError(f"{name} = {reprlib.repr(value)} is out of range: {low} <= {name} < {high}")


def require_flags(group: Mapping[str, Any], *names: str) -> None:
    """Raise ConfigError unless each named hyperparameter of a param group is True or False."""
    for name in names:
        value = _entry(group, name)
        if not isinstance(value, bool | np.bool_):
            raise ConfigError(f"{name} must be True or False, not {reprlib.repr(value)}")


def require_seed(group: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the group's `seed` is an unsigned 64-bit integer."""
    value = _entry(group, "seed")
    try:
        known = not isinstance(value, bool) and 0 <= operator.index(value) < 2**64
    except TypeError:
        known = False
    if not known:
        raise ConfigError(f"seed must be a whole number between 0 and 2^64 - 1, not {reprlib.repr(value)}")


def max_grad_norm_of(value: Any) -> float | None:
    """Return max_grad_norm as a float or None.

    Raises ConfigError if the value is neither a positive number nor None.
    """
    if value is None:
        return None
    norm = number("max_grad_norm", value)
    if not norm > 0:
        raise ConfigError(f"max_grad_norm must be positive or None, not {reprlib.repr(value)}")
    return norm
