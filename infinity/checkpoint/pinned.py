"""When all pins are taken: the oldest pinned generation becomes a portable copy inside its checkpoint folder, and its
place in the store is free again."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from torch import nn

from infinity.checkpoint.export import copy_bytes, write_copy
from infinity.checkpoint.generation import newest_whole
from infinity.checkpoint.portable import STATE_NAME
from infinity.coordinator import pinning, registry
from infinity.coordinator.coordinator import Coordinator
from infinity.errors import PlanError
from infinity.io.pins import Pin, folder_path, remove_marker
from infinity.sizes import format_bytes

logger = logging.getLogger(__name__)

COPY_NAME = "portable"
"""The folder in a checkpoint folder that holds the portable copy."""


def make_room_for_pin(model: nn.Module, folder: str | Path, *, max_shard_size: str = "5GB") -> list[Path]:
    """See to it that `folder` can pin a generation. Where the config's `pins` are all taken, the generation that was
    pinned first becomes a portable copy in its folder (`checkpoint-4/portable`), and is unpinned. To be called before
    anything of the new checkpoint is written: where `folder` is there already its marker goes, so that it does not look
    resumable while its files are replaced. What it pinned stays until it pins another generation, or the next resume.

    A run goes on from the copy as from any: infinity.offload_from_checkpoint, load_pretrained(resume=folder).

    Returns:
        The folders that hold a portable copy now instead of a pin.

    Raises:
        PlanError: the copy does not fit its disk, the oldest folder is gone, or pins is 0; says what to do. Nothing was
            written.
        ResumeError: the oldest generation is damaged; it stays pinned.
        InfinityError: the disk is full all the same, or cannot be written; the generation stays pinned.
    """
    coordinator, place, freed = registry.coordinator_of(model), folder_path(folder), list[Path]()
    kept = pinning.generations_of(coordinator)
    while not kept.has_free_pin(place):
        oldest = next((pin for pin in kept.pin_list if pin.folder != str(place)), None)
        if oldest is None:
            kept.require_free_pin(place)
            raise AssertionError("no pin is free, and none is taken")
        _copy(coordinator, oldest, max_shard_size)
        freed.append(Path(oldest.folder))
    remove_marker(place)
    return freed


def _copy(coordinator: Coordinator, pin: Pin, max_shard_size: str) -> None:
    folder = Path(pin.folder)
    unpin = f"infinity checkpoint unpin {coordinator.resources.require_store().directories[0].path}"
    if not folder.is_dir():
        raise PlanError(
            f"all pins are taken, and the oldest is of {pin}, which is gone: it cannot become a portable copy there. "
            f"Put the folder back; or, when no process holds the store, `{unpin} --all-gone`; or "
            "infinity.runtime.pins.unpin in this one. Nothing was written."
        )
    generation = newest_whole([coordinator.resources.require_store()], digest=pin.digest)
    needed, info = copy_bytes(generation), os.statvfs(folder)
    free = info.f_bavail * info.f_frsize
    if needed > free:
        raise PlanError(
            f"all pins are taken, and the oldest, of {pin}, cannot become a portable copy there: the copy takes "
            f"{format_bytes(needed)}, and {format_bytes(free)} are free on its disk. Free space there, remove or unpin "
            "a checkpoint folder, or begin a run with a larger `pins`. Nothing was written."
        )
    logger.info("all pins are taken: %s becomes a portable copy of %s", pin, format_bytes(needed))
    _remove_unfinished(folder)
    times = folder.stat()
    write_copy(generation, folder / COPY_NAME, max_shard_size)
    pinning.mark_portable(coordinator, folder, COPY_NAME)
    os.utime(folder, ns=(times.st_atime_ns, times.st_mtime_ns))  # trainers remove the folder with the oldest time first


def _remove_unfinished(folder: Path) -> None:
    """Remove copies that the folder's marker does not name, because a process was killed while it made them."""
    for left in (folder / COPY_NAME, *folder.glob(f".{COPY_NAME}-*")):
        if (left / STATE_NAME).exists() or left.name != COPY_NAME:
            shutil.rmtree(left, ignore_errors=True)
