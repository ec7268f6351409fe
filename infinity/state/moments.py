"""Which of the two moments each optimizer keeps. The states have Adam's names for every optimizer."""

from __future__ import annotations

from typing import Literal, get_args

Moment = Literal["exp_avg", "exp_avg_sq"]
OptimizerName = Literal["adamw", "adam", "lion", "adagrad", "sgd"]

STORED: dict[str, tuple[Moment, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "adagrad": ("exp_avg_sq",),
    "sgd": ("exp_avg",),
}

assert tuple(STORED) == get_args(OptimizerName)
