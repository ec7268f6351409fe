"""Checks of a swap config that need no model: whether its directories and its engine can be used."""

from __future__ import annotations

from infinity.config import SwapConfig
from infinity.io.directory import require_place
from infinity.io.engine import open_engine
from infinity.plan.planner import require_paths


def require_ready(config: SwapConfig) -> None:
    """Check the directories and the I/O engine of a swap config. Nothing is written.

    Raises:
        ConfigError: nvme.paths is missing; a path in nvme.paths is not a directory and cannot be created, or is not
            writable; or the kernel refuses `nvme.engine`.
    """
    require_paths(config)
    for path in config.nvme.paths:
        require_place(path)
    if config.nvme.engine != "auto":
        open_engine(config.nvme).close()
