"""Table of the moments that each optimizer keeps. In the store, the moments of every optimizer have the names of Adam's
moments."""

from __future__ import annotations

from typing import Literal, get_args

Moment = Literal["exp_avg", "exp_avg_sq"]
OptimizerName = Literal["adamw", "adam", "lion", "adagrad", "sgd"]

KEPT: dict[str, dict[str, Moment]] = {
    "adamw": {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    "adam": {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    "lion": {"exp_avg": "exp_avg"},
    "adagrad": {"sum": "exp_avg_sq"},
    "sgd": {"momentum_buffer": "exp_avg"},
}
"""Moments of each optimizer: torch's name of each moment, with its name in the store."""

STORED: dict[str, tuple[Moment, ...]] = {name: tuple(kept.values()) for name, kept in KEPT.items()}
STORED_AS: dict[str, Moment] = {torchs: stored for kept in KEPT.values() for torchs, stored in kept.items()}
"""Name in the store of each moment of any optimizer, by torch's name."""

assert tuple(KEPT) == get_args(OptimizerName)
