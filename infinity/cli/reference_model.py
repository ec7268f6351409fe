"""The reference model of --method dpo, for a run that trains all parameters.

The reference model is the model before the training. It is offloaded without optimizer states.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from infinity.config import SwapConfig
from infinity.coordinator import registry
from infinity.errors import ConfigError
from infinity.integrations.checkpoint_folders import remove_empty
from infinity.integrations.script_run import ScriptRun
from infinity.io.rank_paths import place_of
from infinity.runtime.offload import close

_READ_NUMEL = 1 << 20


class ReferenceModel:
    """A reference model.

    Each generation contains its digest, so that a run is only resumed with the same reference model.

    Attributes:
        model: the reference model. offload_beside offloads it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._digest = _digest_of(model)

    def state_dict(self) -> dict[str, Any]:
        return {"digest": self._digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that the state belongs to the same reference model.

        Raises:
            ConfigError: the state belongs to another reference model.
        """
        if state != self.state_dict():
            raise ConfigError(
                "--model: the run began with other weights, which its reference model must have: give --model with the "
                "original weights"
            )

    def offload_beside(
        self, trained: nn.Module, config: SwapConfig, begin: Callable[..., Any], made: dict[str, Any]
    ) -> None:
        """Offload the trained model and the reference model.

        The two models share memory.host and memory.device as under `infinity run`. The reference model has swap
        directories of its own.

        Args:
            trained: the trained model.
            config: swap config of the run.
            begin: function that offloads the trained model, which is infinity.offload or a function that resumes a run.
            made: facts about the optimizer, as arguments of ScriptRun.add_facts.
        """
        run = ScriptRun(config)
        run.add_facts(begin=begin, **made)
        for each in (trained, self.model):
            run.loaded(each)
        run.trained.add(trained)
        run.references.add(self.model)
        run.ensure_offloaded(trained)
        try:
            run.ensure_offloaded(self.model)
        except BaseException:
            close(trained)
            raise

    def close(self) -> None:
        """Close the reference model and remove its store. All ranks call this."""
        places = registry.coordinator_of(self.model).directories
        close(self.model, discard=True)
        remove_empty(map(place_of, places))


def _digest_of(model: nn.Module) -> str:
    """Return the digest of the small parameters and of the smallest matrix.

    These parameters suffice, because a training changes them. Reading all parameters of a large model would take long.
    """
    named = sorted(model.named_parameters(), key=lambda each: (each[1].ndim < 2, each[1].numel()))
    matrix = next((name for name, value in named if value.ndim > 1), "")
    digest = hashlib.blake2b(digest_size=16)
    for name, value in named:
        digest.update(f"{name} {list(value.shape)}".encode())
        if name == matrix or (value.ndim < 2 and value.numel() <= _READ_NUMEL):
            read = value.detach().cpu().contiguous().clone()
            digest.update(read.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
