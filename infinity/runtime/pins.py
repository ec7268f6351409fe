"""Checkpoint folders that pin generations. Such a folder contains exported weights; the optimizer states stay in the
store until the folder is removed or unpinned ([Note: a checkpoint folder and its generation], io/pins.py)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from infinity.access import pinning
from infinity.config import SwapConfig, load_config
from infinity.coordinator import registry
from infinity.io.pins import Marker, folder_path
from infinity.sharded.rank_agreement import meeting


def pin(model: nn.Module, folder: str | Path, *, into: str | Path | None = None) -> int:
    """Make a generation of the current states (infinity.commit) and pin the generation for a checkpoint folder.

    The generation stays until the folder is unpinned. A marker, infinity.json, is written to the folder; a later
    process finds the generation by the marker. A generation that the folder pinned before is unpinned. If several ranks
    train the model, all ranks must call this, with a folder that all ranks can access.

    Call this after all other files of the folder are written: until then the folder has no marker and does not look
    resumable.

    Args:
        model: an offloaded model.
        folder: the checkpoint folder; it is created if it does not exist.
        into: directory that has the folder's files at present, if this directory is renamed to `folder` later.

    Returns:
        The step of the generation.

    Raises:
        PlanError: the config's number of `pins` is used up; nothing was written.
        ConfigError: the model was offloaded with commit_every: 0.
        InfinityError: the generation or the marker could not be written; the folder does not look resumable.
    """
    where = None if into is None else folder_path(into)
    return pinning.pin(registry.coordinator_of(model), folder_path(folder), where)


def unpin(model: nn.Module, folder: str | Path) -> None:
    """Unpin the generation of a checkpoint folder, durably.

    The marker is removed first, if the folder exists. Nothing is done for a folder that pins no generation. If several
    ranks train the model, one rank may call this alone: the other ranks unpin their generations when they pin the next
    folder, or when they resume.

    Raises:
        SwapIOError: the generation could not be unpinned and stays pinned.
    """
    pinning.unpin(registry.coordinator_of(model), folder_path(folder))


def pinned(model: nn.Module) -> dict[Path, int]:
    """Return the step of each pinned generation, by the folder that pins it; the oldest pin is the first.

    Folders that no longer exist are included.
    """
    return pinning.pinned(registry.coordinator_of(model))


def generation_of(folder: str | Path, config: str | Path | Mapping[str, Any] | SwapConfig | None = None) -> Marker:
    """Return the marker of a checkpoint folder, if the swap directory has the generation that the marker names.

    If there are several ranks, all ranks must call this, and each rank gets the marker of its own generation.

    Args:
        folder: the checkpoint folder.
        config: swap config whose nvme.paths are the present swap directories of the run; None: the marker names the
            directories.

    Raises:
        ResumeError: the folder has no marker; the swap directory has another run or none; or the generation is gone.
            The message says what to do.
        PeerError: another rank failed.
    """
    resolved = load_config(config)
    with meeting(resolved.nvme.deadline_s) as tell:
        marker = pinning.generation_of(folder_path(folder), resolved.nvme.paths)
        tell(f"looking for the generation that {folder} names", None)
        return marker
