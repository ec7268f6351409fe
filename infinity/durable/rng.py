"""The random number generators that a training loop uses: Python's, numpy's, and torch's on every device."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch

from infinity.base.accelerator import random_states, set_random_states
from infinity.errors import ResumeError

logger = logging.getLogger(__name__)


def snapshot() -> dict[str, Any]:
    """Return the states of all generators, without drawing a number."""
    version, words, gauss = random.getstate()
    return {
        "python": (version, np.array(words, dtype=np.uint32), gauss),
        "numpy": dict(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
        "cuda": random_states(),  # an old name: accelerators of any kind
    }


def restore(states: dict[str, Any]) -> None:
    """Restore the states that snapshot() returned.

    States of GPUs that this machine does not have are ignored, with a warning.

    Raises:
        ResumeError: `states` is not a valid snapshot.
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
    here = set_random_states(states["cuda"])
    if len(states["cuda"]) > here:
        logger.warning(
            "the run drew random numbers on %d GPUs, and this machine has %d: the random states of the other GPUs are "
            "not used",
            len(states["cuda"]),
            here,
        )
