"""Checkpoint folders that pin generations. A folder has exported weights; its optimizer states stay in the store until
the folder is removed or unpinned ([Note: a checkpoint folder and its generation], io/pins.py)."""

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
    """Make a generation of the current states (infinity.commit) and let a checkpoint folder pin it.

    The generation stays until the folder is unpinned. The folder gets a marker, infinity.json, by which a later process
    finds the generation. A generation that the folder pinned before is unpinned. If several ranks train the model, all
    of them call this, with a folder that all of them see.

    Call this after the rest of the folder is written: a folder without a marker does not look resumable.

    Args:
        model: an offloaded model.
        folder: created if missing.
        into: directory that has the folder's files now, if it is renamed to `folder` later.

    Returns:
        The step of the generation.

    Raises:
        PlanError: all `pins` of the config are in use; nothing was written.
        ConfigError: the model was offloaded with commit_every: 0.
        InfinityError: the generation could not be made, or the marker not written; the folder does not look resumable.
    """
    where = None if into is None else folder_path(into)
    return pinning.pin(registry.coordinator_of(model), folder_path(folder), where)


def unpin(model: nn.Module, folder: str | Path) -> None:
    """Unpin the generation of a checkpoint folder, durably.

    The marker is removed first, if the folder exists. Nothing is done for a folder that pins no generation. If several
    ranks train the model, one of them may call this alone: the others unpin theirs when they next pin a folder, or
    resume.

    Raises:
        SwapIOError: the generation stays pinned.
    """
    pinning.unpin(registry.coordinator_of(model), folder_path(folder))


def pinned(model: nn.Module) -> dict[Path, int]:
    """Return the steps of the pinned generations by the folders that pin them, the oldest pin first.

    Folders that have vanished are included.
    """
    return pinning.pinned(registry.coordinator_of(model))


def generation_of(folder: str | Path, config: str | Path | Mapping[str, Any] | SwapConfig | None = None) -> Marker:
    """Return the marker of a checkpoint folder, if the swap directory has the generation that it names.

    If there are several ranks, all call this, and each gets the marker of its own generation.

    Args:
        folder: the checkpoint folder.
        config: its nvme.paths are the swap directories of the run now; None: the directories that the marker names.

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
