"""What can be said of a swap config before there is a model: whether its directories can be used."""

from __future__ import annotations

from infinity.config import SwapConfig
from infinity.io.directory import require_place
from infinity.io.engine import open_engine
from infinity.plan.planner import require_paths


def require_ready(config: SwapConfig) -> None:
    """Nothing is written.

    Raises:
        ConfigError: nvme.paths is missing, or names what is no directory that can be written or made; or `nvme.engine`
            is one that the kernel refuses.
    """
    require_paths(config)
    for path in config.nvme.paths:
        require_place(path)
    if config.nvme.engine != "auto":
        open_engine(config.nvme).close()
