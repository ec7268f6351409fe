"""`--optimizer`: the optimizers by their names on the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from infinity.cli.options import SGD_MOMENTUM
from infinity.optim.adagrad import Adagrad
from infinity.optim.adamw import Adam, AdamW
from infinity.optim.lion import Lion
from infinity.optim.offloaded import OffloadedOptimizer
from infinity.optim.sgd import SGD
from infinity.state.moments import OptimizerName

_MAKE: dict[str, Callable[..., OffloadedOptimizer]] = {
    "adamw": AdamW,
    "adam": Adam,
    "lion": Lion,
    "adagrad": Adagrad,
    "sgd": lambda params, **options: SGD(params, momentum=SGD_MOMENTUM, **options),
}


def make_optimizer(name: OptimizerName, params: Iterable[Any], **options: Any) -> OffloadedOptimizer:
    """An optimizer with its own defaults and `options`: lr, weight_decay, max_grad_norm, seed,
    accumulation_steps."""
    return _MAKE[name](params, **options)
