"""The random number generators a training loop draws from: Python's, numpy's, torch's on every device."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


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
    """Put back what snapshot() returned.

    Raises:
        ValueError, KeyError, TypeError, RuntimeError: it is no such thing, or of more GPUs than there are.
    """
    version, words, gauss = states["python"]
    random.setstate((version, tuple(int(word) for word in words), gauss))
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])
