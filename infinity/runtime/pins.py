"""Checkpoint folders that pin generations: a folder holds exported weights, and its optimizer states stay in the store
until the folder is removed or unpinned ([Note: a checkpoint folder and its generation], io/pins.py)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from infinity.access import pinning
from infinity.config import SwapConfig, load_config
from infinity.coordinator import registry
from infinity.io.pins import Marker, folder_path
from infinity.sharded.together import meeting


def pin(model: nn.Module, folder: str | Path, *, into: str | Path | None = None) -> int:
    """Make a generation of the states as they are now (infinity.commit) and have a checkpoint folder pin it: it stays
    until the folder is unpinned. The folder gets a marker, infinity.json, by which a later process finds the
    generation. What the folder pinned before goes. Where several ranks train the model, all of them call this, with a
    folder that all of them see.

    Call it when the rest of the folder is written: a folder without a marker does not look resumable.

    Args:
        folder: made if missing.
        into: where the folder's files are written now, if it gets the name `folder` later.

    Returns:
        The step of the generation.

    Raises:
        PlanError: the config's `pins` are all taken; nothing was written.
        ConfigError: the model was offloaded with commit_every: 0.
        InfinityError: the generation could not be made, or the marker not written; the folder does not look resumable.
    """
    where = None if into is None else folder_path(into)
    return pinning.pin(registry.coordinator_of(model), folder_path(folder), where)


def unpin(model: nn.Module, folder: str | Path) -> None:
    """Let the generation of a checkpoint folder go, durably; its marker goes first, if the folder is there. Does
    nothing for a folder that pins none. Where several ranks train the model, one of them may call this alone: the
    others let theirs go when they next pin a folder, or resume.

    Raises:
        SwapIOError: the generation stays pinned.
    """
    pinning.unpin(registry.coordinator_of(model), folder_path(folder))


def pinned(model: nn.Module) -> dict[Path, int]:
    """The steps of the pinned generations by the folders that pin them, the oldest pin first. A folder that vanished is
    among them."""
    return pinning.pinned(registry.coordinator_of(model))


def generation_of(folder: str | Path, config: str | Path | Mapping[str, Any] | SwapConfig | None = None) -> Marker:
    """What the marker of a checkpoint folder says, when the swap directory has what it names; that of this rank, where
    there are several, which all call.

    Args:
        config: its nvme.paths are the swap directories of the run now; None: those that the marker names.

    Raises:
        ResumeError: the folder has no marker; the swap directory holds another run or none; or the generation is gone.
            Says what to do.
        PeerError: another rank failed.
    """
    resolved = load_config(config)
    with meeting(resolved.nvme.deadline_s) as tell:
        marker = pinning.generation_of(folder_path(folder), resolved.nvme.paths)
        tell(f"looking for what {folder} names", None)
        return marker
