"""The random number generators a training loop draws from: Python's, numpy's, torch's on every device."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch

from infinity.errors import ResumeError

logger = logging.getLogger(__name__)


def snapshot() -> dict[str, Any]:
    """Their states, without drawing a number."""
    version, words, gauss = random.getstate()
    # A GPU that was not used yet has no state of its own: its generator begins with torch's seed.
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return {
        "python": (version, np.array(words, dtype=np.uint32), gauss),
        "numpy": dict(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
        "cuda": list(cuda),
    }


def restore(states: dict[str, Any]) -> None:
    """Put back what snapshot() returned. Of GPUs that are not here, nothing, with a warning.

    Raises:
        ResumeError: it is no such thing.
    """
    try:
        _restore(states)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ResumeError(f"the states of the random number generators do not fit this machine: {error}") from error


def _restore(states: dict[str, Any]) -> None:
    version, words, gauss = states["python"]
    random.setstate((version, tuple(int(word) for word in words), gauss))
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if len(states["cuda"]) > here:
        logger.warning(
            "the run drew random numbers on %d GPUs, and %d are here: what it draws on others begins anew",
            len(states["cuda"]),
            here,
        )
    for index, state in enumerate(states["cuda"][:here]):
        torch.cuda.set_rng_state(state, index)
