"""Checkpoint folders that pin generations: a folder holds exported weights, and its optimizer states stay in the store
until the folder is removed or unpinned ([Note: a checkpoint folder and its generation], io/pins.py)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from infinity.config import SwapConfig, load_config
from infinity.coordinator import pinning, registry
from infinity.errors import ResumeError
from infinity.io.headers import header_in
from infinity.io.pins import Marker, folder_path, read_pins, require_marker, said


def pin(model: nn.Module, folder: str | Path, *, into: str | Path | None = None) -> int:
    """Make a generation of the states as they are now (infinity.commit) and have a checkpoint folder pin it: it stays
    until the folder is unpinned. The folder gets a marker, infinity.json, by which a later process finds the
    generation. What the folder pinned before goes.

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
    nothing for a folder that pins none.

    Raises:
        SwapIOError: the generation stays pinned.
    """
    pinning.unpin(registry.coordinator_of(model), folder_path(folder))


def pinned(model: nn.Module) -> dict[Path, int]:
    """The steps of the pinned generations by the folders that pin them, the oldest pin first. A folder that vanished is
    among them."""
    return pinning.pinned(registry.coordinator_of(model))


def generation_of(folder: str | Path, config: str | Path | Mapping[str, Any] | SwapConfig | None = None) -> Marker:
    """What the marker of a checkpoint folder says, when the swap directory has what it names.

    Args:
        config: its nvme.paths are the swap directories of the run now; None: those that the marker names.

    Raises:
        ResumeError: the folder has no marker; the swap directory holds another run or none; or the generation is gone.
            Says what to do.
    """
    place = folder_path(folder)
    marker = require_marker(place)
    if marker.portable is not None:
        return marker
    paths = load_config(config).nvme.paths if config is not None else []
    directory = (paths[0] if paths else Path(marker.directories[0])).expanduser().absolute()
    header = header_in(directory).header
    if header.run != marker.run:
        raise ResumeError(
            f"{place} names run {marker.run[:8]}, whose states were in {', '.join(marker.directories)}; {directory} "
            f"holds run {header.run[:8]}. Set nvme.paths to the swap directory of run {marker.run[:8]}."
        )
    pins = read_pins(directory, marker.run)
    if not any(pin.digest == marker.digest and (directory / pin.manifest_name).exists() for pin in pins):
        raise ResumeError(
            f"generation {marker.step}, which {place} names, is not in {directory} any more: it was unpinned. Pinned "
            f"there are: {said(pins) or 'none'}. The folder's weights are whole: load them as a model, or take another "
            "folder."
        )
    return marker
