"""infinity: full fine-tuning of models larger than memory.

model = infinity.load_pretrained("path/or/hub-id", "swap.yaml")
optim = infinity.AdamW(model.parameters(), lr=1e-5, max_grad_norm=1.0)
...                                        # the training loop stays as it was
infinity.save_pretrained(model, "out/")
"""

from infinity.checkpoint.load import load_pretrained
from infinity.checkpoint.save import save_pretrained
from infinity.config import SwapConfig, load_config
from infinity.errors import (
    ConfigError,
    ForkError,
    InfinityError,
    ModelError,
    NonFiniteGradientError,
    NotAvailableError,
    PlanError,
    ReleasedParameterError,
    StaleWeightsError,
    StoreLockedError,
    SwapCorruptionError,
    SwapIOError,
    SwapTimeoutError,
)
from infinity.optim.adagrad import Adagrad
from infinity.optim.adamw import Adam, AdamW
from infinity.optim.lion import Lion
from infinity.optim.sgd import SGD
from infinity.runtime.offload import close, offload
from infinity.runtime.statistics import Statistics, statistics

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "ConfigError",
    "ForkError",
    "InfinityError",
    "Lion",
    "ModelError",
    "NonFiniteGradientError",
    "NotAvailableError",
    "PlanError",
    "ReleasedParameterError",
    "StaleWeightsError",
    "Statistics",
    "StoreLockedError",
    "SwapConfig",
    "SwapCorruptionError",
    "SwapIOError",
    "SwapTimeoutError",
    "close",
    "load_config",
    "load_pretrained",
    "offload",
    "save_pretrained",
    "statistics",
]
__version__ = "0.1.0"
