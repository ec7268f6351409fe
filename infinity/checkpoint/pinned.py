"""Freeing a pin when all pins are in use.

The oldest pinned generation is written as a portable copy into its checkpoint folder. Then its place in the store is
freed.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from torch import nn

from infinity.access import generation_pinning
from infinity.checkpoint.export import copy_bytes, write_copy
from infinity.checkpoint.generation import StoredGeneration, newest_stored_generation, open_stores
from infinity.checkpoint.portable import STATE_NAME
from infinity.coordinator import registry
from infinity.coordinator.coordinator import Coordinator
from infinity.errors import PlanError
from infinity.io.generation_pins import GenerationPin, folder_path, remove_marker
from infinity.io.rank_paths import place_of
from infinity.io.store import SwapStore
from infinity.sizes import format_bytes

logger = logging.getLogger(__name__)

COPY_NAME = "portable"
"""The subfolder of a checkpoint folder that contains the portable copy."""


def make_room_for_pin(model: nn.Module, folder: str | Path, *, max_shard_size: str = "5GB") -> list[Path]:
    """Ensure that `folder` can pin a generation.

    If all of the config's `pins` are in use, the generation that was pinned first is written as a portable copy into
    its folder (`checkpoint-4/portable`) and unpinned. Call this function before any file of the new checkpoint is
    written. If `folder` exists already, its marker is removed, so that it does not look resumable while its files are
    replaced. The generation that `folder` pinned before is kept until `folder` pins another generation, or until the
    next resume.

    infinity.offload_from_checkpoint and load_pretrained(resume=folder) continue a run from such a portable copy.

    If several ranks train the model, all ranks call this function. Rank 0 writes the copy, and must be able to read the
    stores of all ranks.

    Args:
        model: the offloaded model.
        folder: the checkpoint folder that is about to be written.
        max_shard_size: maximum size of a safetensors file, such as "5GB".

    Returns:
        The folders that now contain a portable copy instead of a pin.

    Raises:
        PlanError: the copy does not fit on its disk, the oldest folder is gone, or pins is 0; the message says what to
            do. Nothing was written.
        ResumeError: the oldest generation is damaged; it stays pinned.
        InfinityError: the disk became full while the copy was written, or the disk cannot be written; the generation
            stays pinned.
    """
    coordinator, place, freed = registry.coordinator_of(model), folder_path(folder), list[Path]()
    kept = generation_pinning.generations_of(coordinator)
    generation_pinning.agree(coordinator)
    while not all(coordinator.world.each(f"looking for a free pin for {place}", lambda: kept.has_free_pin(place))):
        others = [pin.folder for pin in kept.pin_list if pin.folder != str(place)]
        if not others:
            coordinator.world.each(f"looking for a pin of {place}", lambda: kept.require_free_pin(place))
            raise AssertionError("no pin is free, and none is taken")
        oldest = kept.pin_of(Path(coordinator.world.tell("looking for the oldest pin", others)[0][0]))
        if any(coordinator.world.each(f"looking at {oldest.folder}", partial(kept.is_over, oldest))):
            # the folder's files belong to another generation now and must not be changed
            coordinator.world.each(f"unpinning {oldest.folder}", partial(kept.unpin, Path(oldest.folder)))
            continue
        _make_portable(coordinator, oldest, max_shard_size)
        freed.append(Path(oldest.folder))
    coordinator.world.once(f"beginning {place}", lambda: remove_marker(place))
    return freed


def _make_portable(coordinator: Coordinator, pin: GenerationPin, max_shard_size: str) -> None:
    what = f"the portable copy of {pin}"
    digests = coordinator.world.each(what, lambda: pin.digest)
    folder, was = Path(pin.folder), list[os.stat_result]()

    def copy() -> None:
        _require_there(pin, coordinator.directories[0])
        was.append(folder.stat())
        with _stores_of(coordinator) as stores:
            _write(newest_stored_generation(stores, digests=digests), pin, folder, max_shard_size)

    coordinator.world.once_slow(what, copy)
    generation_pinning.mark_portable(coordinator, folder, COPY_NAME)
    # keep the folder's modification time: trainers remove the folder with the oldest modification time first
    coordinator.world.once(f"ending {what}", lambda: os.utime(folder, ns=(was[0].st_atime_ns, was[0].st_mtime_ns)))


def _require_there(pin: GenerationPin, directory: Path) -> None:
    """Raise PlanError if the folder of a pin is gone."""
    if not Path(pin.folder).is_dir():
        unpin = f"infinity checkpoint unpin {place_of(directory)}"
        raise PlanError(
            "all pins are in use, and the folder of the oldest pin is gone, so that its generation cannot be copied to "
            f"it: {pin}. Put the folder back, or unpin it: with `{unpin} --all-gone` while no process uses the store, "
            "or with infinity.runtime.pins.unpin in this process. Nothing was written."
        )


@contextmanager
def _stores_of(coordinator: Coordinator) -> Iterator[Sequence[SwapStore]]:
    """Yield the stores of all ranks, open for reading."""
    mine, cut = coordinator.resources.require_store(), coordinator.plan.peers.cut
    if cut.whole:
        yield [mine]
        return
    paths = [directory.path.parent for directory in mine.directories]
    with open_stores(paths, count=cut.count, shared=True) as every:
        yield every


def _write(generation: StoredGeneration, pin: GenerationPin, folder: Path, max_shard_size: str) -> None:
    needed, info = copy_bytes(generation), os.statvfs(folder)
    free = info.f_bavail * info.f_frsize
    if needed > free:
        raise PlanError(
            f"all pins are in use, and the generation of the oldest pin, {pin}, cannot be copied to its folder: the "
            f"copy takes {format_bytes(needed)}, and the disk has {format_bytes(free)} free. Free space there, remove "
            "or unpin a checkpoint folder, or begin a run with a larger `pins`. Nothing was written."
        )
    logger.info(
        "all pins are in use: the generation of %s is copied to its folder and unpinned (%s)", pin, format_bytes(needed)
    )
    _remove_unfinished(folder)
    write_copy(generation, folder / COPY_NAME, max_shard_size)


def _remove_unfinished(folder: Path) -> None:
    """Remove incomplete copies, which the folder's marker does not name.

    An incomplete copy remains if a process is killed while it writes the copy.
    """
    for left in (folder / COPY_NAME, *folder.glob(f".{COPY_NAME}-*")):
        if (left / STATE_NAME).exists() or left.name != COPY_NAME:
            shutil.rmtree(left, ignore_errors=True)
