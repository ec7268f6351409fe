"""infinity: full fine-tuning of models larger than memory.

model = infinity.load_pretrained("path/or/hub-id", "swap.yaml")
optim = infinity.AdamW(model.parameters(), lr=1e-5, max_grad_norm=1.0)
...                                        # the training loop is unchanged
infinity.save_pretrained(model, "out/")

[Note: what is imported when]
The import of torch and transformers takes seconds, and `infinity --help` needs neither of them. A public name is
therefore imported when it is first used. This file lists each public name three times: for type checkers, in _HOMES,
and in __all__. A test compares the three lists.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from infinity.errors import (
    ConfigError,
    DamagedFileError,
    DeviceCopyError,
    DeviceError,
    DirtyStoreError,
    ForkError,
    InfinityError,
    ManifestError,
    ModelError,
    NewerVersionError,
    NonFiniteGradientError,
    NotAvailableError,
    PeerError,
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

if TYPE_CHECKING:
    from infinity.checkpoint.export import export_checkpoint
    from infinity.checkpoint.from_portable import offload_from_checkpoint
    from infinity.checkpoint.load_pretrained import load_pretrained
    from infinity.checkpoint.reshard import resume
    from infinity.checkpoint.save_pretrained import save_pretrained
    from infinity.config import SwapConfig, load_config
    from infinity.integrations.chunked_loss import use_chunked_loss
    from infinity.integrations.infinity_config import InfinityConfig
    from infinity.optim.adagrad import Adagrad
    from infinity.optim.adamw import Adam, AdamW
    from infinity.optim.lion import Lion
    from infinity.optim.sgd import SGD
    from infinity.runtime.accumulation_methods import no_sync
    from infinity.runtime.commit_api import commit, track
    from infinity.runtime.cross_entropy import chunked_cross_entropy
    from infinity.runtime.gathered import gathered, state_dict
    from infinity.runtime.micro_batches import backward
    from infinity.runtime.offload import close, offload, synchronize
    from infinity.runtime.statistics import Statistics, statistics
    from infinity.runtime.tiles import tile
    from infinity.runtime.token_tiles import tile_tokens
    from infinity.runtime.trace import trace

_HOMES = {
    "checkpoint.from_portable": ("offload_from_checkpoint",),
    "checkpoint.export": ("export_checkpoint",),
    "checkpoint.load_pretrained": ("load_pretrained",),
    "checkpoint.save_pretrained": ("save_pretrained",),
    "config": ("SwapConfig", "load_config"),
    "integrations.chunked_loss": ("use_chunked_loss",),
    "integrations.infinity_config": ("InfinityConfig",),
    "optim.adagrad": ("Adagrad",),
    "optim.adamw": ("Adam", "AdamW"),
    "optim.lion": ("Lion",),
    "optim.sgd": ("SGD",),
    "runtime.cross_entropy": ("chunked_cross_entropy",),
    "runtime.gathered": ("gathered", "state_dict"),
    "runtime.accumulation_methods": ("no_sync",),
    "runtime.micro_batches": ("backward",),
    "checkpoint.reshard": ("resume",),
    "runtime.offload": ("close", "offload", "synchronize"),
    "runtime.statistics": ("Statistics", "statistics"),
    "runtime.tiles": ("tile",),
    "runtime.token_tiles": ("tile_tokens",),
    "runtime.trace": ("trace",),
    "runtime.commit_api": ("commit", "track"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = ("_native", "config", "hf", "sizes")
_PACKAGES = ("checkpoint", "io", "optim", "plan", "runtime", "state")
"""Packages that are available after `import infinity` alone, as in `infinity.optim.adamw.AdamW`."""

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "ConfigError",
    "DamagedFileError",
    "DeviceCopyError",
    "DeviceError",
    "DirtyStoreError",
    "ForkError",
    "InfinityConfig",
    "InfinityError",
    "Lion",
    "ManifestError",
    "ModelError",
    "NewerVersionError",
    "NonFiniteGradientError",
    "NotAvailableError",
    "PeerError",
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
    "backward",
    "chunked_cross_entropy",
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
    "tile",
    "tile_tokens",
    "trace",
    "track",
    "use_chunked_loss",
]
__version__ = "0.1.0"


if not TYPE_CHECKING:  # type checkers must not see __getattr__, so that they report names that do not exist

    def __getattr__(name: str) -> Any:
        """Import a public name that is used for the first time (PEP 562)."""
        if name in _HOME_OF:
            value = getattr(import_module(f"infinity.{_HOME_OF[name]}"), name)
        elif name in _MODULES:
            value = import_module(f"infinity.{name}")
        elif name in _PACKAGES:
            for home in _HOMES:  # each import makes the module an attribute of its package
                if not home.startswith("integrations"):
                    import_module(f"infinity.{home}")
            value = import_module(f"infinity.{name}")
        else:
            raise AttributeError(f"module 'infinity' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF, *_MODULES, *_PACKAGES})
