"""Checkpoint folders that pin generations. Such a folder contains exported weights; the optimizer states stay in the
store until the folder is removed or unpinned ([Note: a checkpoint folder and its generation],
io/generation_pins.py)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from infinity.access import generation_pinning
from infinity.config import SwapConfig, load_config
from infinity.coordinator import registry
from infinity.io.generation_pins import PinMarker, folder_path
from infinity.sharded.rank_agreement import meeting


def pin(model: nn.Module, folder: str | Path, *, into: str | Path | None = None) -> int:
    """Make a generation of the current states (infinity.commit) and pin the generation for a checkpoint folder.

    The generation is kept until the folder is unpinned. A file infinity.json, the marker, is written to the folder; a
    later process reads the marker to find the generation. A generation that the folder pinned before is unpinned. If
    several ranks train the model, all ranks must call this, with a folder that all ranks can access.

    Call this after all other files of the folder are written. A folder without a marker does not look resumable.

    Args:
        model: an offloaded model.
        folder: the checkpoint folder; it is created if it does not exist.
        into: directory that has the folder's files now and is renamed to `folder` later; None: the files are in
            `folder`.

    Returns:
        The step of the generation.

    Raises:
        PlanError: there are already as many pinned generations as `pins` in the config allows; nothing was written.
        ConfigError: the model was offloaded with commit_every: 0.
        InfinityError: the generation or the marker could not be written; the folder does not look resumable.
    """
    where = None if into is None else folder_path(into)
    return generation_pinning.pin(registry.coordinator_of(model), folder_path(folder), where)


def unpin(model: nn.Module, folder: str | Path) -> None:
    """Unpin the generation of a checkpoint folder. The change is durable when this function returns.

    The marker is removed first, if the folder exists. Nothing is done for a folder that pins no generation. If several
    ranks train the model, one rank may call this alone: the other ranks unpin their generations when they pin the next
    folder, or when they resume.

    Raises:
        SwapIOError: the generation could not be unpinned and stays pinned.
    """
    generation_pinning.unpin(registry.coordinator_of(model), folder_path(folder))


def pinned(model: nn.Module) -> dict[Path, int]:
    """Return the step of each pinned generation, by the folder that pins it; the oldest pin is the first.

    Folders that no longer exist are included.
    """
    return generation_pinning.pinned(registry.coordinator_of(model))


def generation_of(folder: str | Path, config: str | Path | Mapping[str, Any] | SwapConfig | None = None) -> PinMarker:
    """Return the marker of a checkpoint folder, if the swap directory has the generation that the marker names.

    If there are several ranks, all ranks must call this, and each rank gets the marker of its own generation.

    Args:
        folder: the checkpoint folder.
        config: swap config whose nvme.paths are the present swap directories of the run; None: the marker names the
            directories.

    Raises:
        ResumeError: the folder has no marker; the swap directory has another run or none; or the generation no longer
            exists. The message says what to do.
        PeerError: another rank failed.
    """
    resolved = load_config(config)
    with meeting(resolved.ranks_deadline_s) as tell:
        marker = generation_pinning.generation_of(folder_path(folder), resolved.nvme.paths)
        tell(f"looking for the generation that {folder} names", None)
        return marker
