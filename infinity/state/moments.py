"""Table of the moments that each optimizer keeps. Stored moments have Adam's names, whichever optimizer uses them."""

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
"""Names of the moments of each optimizer: torch's, each with the name under which the moment is stored."""

STORED: dict[str, tuple[Moment, ...]] = {name: tuple(kept.values()) for name, kept in KEPT.items()}
STORED_AS: dict[str, Moment] = {torchs: stored for kept in KEPT.values() for torchs, stored in kept.items()}
"""Names of stored moments, by torch's names, of all optimizers."""

assert tuple(KEPT) == get_args(OptimizerName)
