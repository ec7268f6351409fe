"""Errors of ranks that were started together, of which a user needs each only once."""

from __future__ import annotations

import os

from infinity import errors
from infinity.errors import (
    ConfigError,
    ModelError,
    PeerError,
    PlanError,
    ResumeError,
    StoreLockedError,
    StoreNotEmptyError,
)

INPUT_ERRORS = (ConfigError, ModelError, PlanError, ResumeError, StoreLockedError, StoreNotEmptyError)
"""Errors of options, files and directories, which all ranks have in common."""


def is_told_by_rank_0(error: BaseException) -> bool:
    """Return whether this rank ends because rank 0 has an error of its input. Rank 0 prints the error for all ranks."""
    if not isinstance(error, PeerError) or error.ranks != (0,) or os.environ.get("RANK", "0") == "0":
        return False
    kind = getattr(errors, error.kind, None)
    return isinstance(kind, type) and issubclass(kind, INPUT_ERRORS)
