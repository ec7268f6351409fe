"""Checks of a swap config that need no model: whether its directories, its store and its engine can be used.

Opening the store makes the same checks again. Here they are made early: before imports and the reading of a model,
which take long.
"""

from __future__ import annotations

from contextlib import ExitStack

from infinity.config import SwapConfig
from infinity.io.directory import ReadDirectory, require_place
from infinity.io.engine import open_engine
from infinity.io.headers import headers_of
from infinity.plan.planner import require_paths
from infinity.sharded.rank_stores import furthest_in, require_free


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


def require_new_store(config: SwapConfig) -> None:
    """Check that a new run of one process can make its store. Nothing is checked if the run may need no store.

    Raises:
        StoreNotEmptyError: a run can be resumed from a store in nvme.paths.
        StoreLockedError: a run uses a store in nvme.paths.
        SwapIOError: a directory cannot be read.
    """
    if config.commit_every != 0 or "nvme" in (config.weights, config.optimizer):
        require_free(path.expanduser().absolute() for path in config.nvme.paths)


def require_whole_store(config: SwapConfig) -> None:
    """Check that one process can open the store of the run that it resumes. A run of several ranks is not checked.

    Raises:
        StoreLockedError: another run uses the store.
        ResumeError: nvme.paths are not the directories of one store, or the store was updated in place.
    """
    paths = [path.expanduser().absolute() for path in config.nvme.paths]
    if not paths or furthest_in(paths[0]) > 1:
        return
    with ExitStack() as held:
        for path in paths:
            held.callback(ReadDirectory(path).close)
        headers_of(paths)
