"""infinity: full fine-tuning of models larger than memory.

model = infinity.load_pretrained("path/or/hub-id", "swap.yaml")
optim = infinity.AdamW(model.parameters(), lr=1e-5, max_grad_norm=1.0)
...                                        # the training loop stays as it was
infinity.save_pretrained(model, "out/")
"""

from infinity.checkpoint.carry_on import offload_from_checkpoint
from infinity.checkpoint.export import export_checkpoint
from infinity.checkpoint.load import load_pretrained
from infinity.checkpoint.save import save_pretrained
from infinity.config import SwapConfig, load_config
from infinity.errors import (
    ConfigError,
    DamagedFileError,
    DirtyStoreError,
    ForkError,
    InfinityError,
    ManifestError,
    ModelError,
    NewerVersionError,
    NonFiniteGradientError,
    NotAvailableError,
    PlanError,
    ReleasedParameterError,
    ResumeError,
    StaleWeightsError,
    StoreLockedError,
    StoreNotEmptyError,
    SwapCorruptionError,
    SwapIOError,
    SwapTimeoutError,
)
from infinity.optim.adagrad import Adagrad
from infinity.optim.adamw import Adam, AdamW
from infinity.optim.lion import Lion
from infinity.optim.sgd import SGD
from infinity.runtime.gathered import gathered, state_dict
from infinity.runtime.no_sync import no_sync
from infinity.runtime.offload import close, offload, resume, synchronize
from infinity.runtime.statistics import Statistics, statistics
from infinity.runtime.trace import trace
from infinity.runtime.track import commit, track

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "ConfigError",
    "DamagedFileError",
    "DirtyStoreError",
    "ForkError",
    "InfinityError",
    "Lion",
    "ManifestError",
    "ModelError",
    "NewerVersionError",
    "NonFiniteGradientError",
    "NotAvailableError",
    "PlanError",
    "ReleasedParameterError",
    "ResumeError",
    "StaleWeightsError",
    "Statistics",
    "StoreLockedError",
    "StoreNotEmptyError",
    "SwapConfig",
    "SwapCorruptionError",
    "SwapIOError",
    "SwapTimeoutError",
    "close",
    "commit",
    "export_checkpoint",
    "gathered",
    "load_config",
    "load_pretrained",
    "no_sync",
    "offload",
    "offload_from_checkpoint",
    "resume",
    "save_pretrained",
    "state_dict",
    "statistics",
    "synchronize",
    "trace",
    "track",
]
__version__ = "0.1.0"
