"""Checkpoint folders of a script.

Each folder contains exported weights, and pins the generation with the optimizer states.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from infinity.access.generation_pinning import agree
from infinity.access.opening import pins_in_store
from infinity.checkpoint.atomic_directory import sync_tree
from infinity.checkpoint.from_portable import offload_from_checkpoint
from infinity.checkpoint.pinned import make_room_for_pin
from infinity.checkpoint.reshard import resume, tile_as_run
from infinity.config import SwapConfig
from infinity.coordinator import registry
from infinity.errors import PlanError, ResumeError, StoreNotEmptyError
from infinity.integrations.patches import patched
from infinity.io.directory import remove_store_of
from infinity.io.generation_pins import PinMarker, read_pins
from infinity.io.rank_paths import place_of
from infinity.runtime.pins import generation_of, pin, pinned, unpin
from infinity.state.offload_arguments import OffloadArguments

logger = logging.getLogger(__name__)

_PINS_OF_ALL = 2
"""Number of checkpoint folders that pin a generation, for a script that keeps all of its folders.

Older folders contain a portable copy of the states instead.
"""


def pins_for(kept: int | None) -> int:
    """Return the number of checkpoint folders that pin a generation at the same time.

    Args:
        kept: the number of folders that the script keeps, or None if it keeps all. The script writes a new folder
            before it removes an old one, so one pin more is needed.
    """
    return _PINS_OF_ALL if kept is None else kept + 1


def keeps_generations(model: nn.Module) -> bool:
    """Return whether the model's store keeps generations, so that a checkpoint folder can pin optimizer states."""
    return registry.is_offloaded(model) and registry.coordinator_of(model).resources.generations is not None


def folders_of(model: nn.Module) -> dict[Path, int]:
    """Return the folders that pin a generation of the model, each with the generation's step."""
    return pinned(model) if keeps_generations(model) else {}


def _held_by(model: nn.Module) -> dict[Path, int]:
    """Return the folders that can still be unpinned.

    These are the folders of folders_of, or none if the model is closed.
    """
    return {} if keeps_generations(model) and registry.coordinator_of(model).closed else folders_of(model)


def resume_from_folder(model: nn.Module, folder: Path, config: SwapConfig, **how: Any) -> None:
    """Offload a model with the states that it had when the run wrote a checkpoint folder.

    The number of pins in the store does not change, even if the script now keeps another number of folders. If the
    script keeps more folders than the store has pins, the older folders get a portable copy of their states
    (`CheckpointFolderSave`).

    Args:
        model: the model to offload.
        folder: the checkpoint folder.
        config: the swap config.
        how: further arguments for infinity.resume.

    Raises:
        ResumeError: infinity did not write the folder, or the folder's generation does not exist any more. The message
            says what to do.
        others: as for infinity.resume and infinity.offload_from_checkpoint.
    """
    marker = generation_of(folder, config)
    if marker.portable is None:
        resume(model, _with_pins_of_store(model, config, **how), folder=folder, **how)
        return
    try:
        offload_from_checkpoint(model, folder / marker.portable, config, **how)
    except StoreNotEmptyError as error:
        raise ResumeError(
            f"{folder} contains a portable copy of its optimizer states, because newer checkpoint folders use the "
            f"pins of the store. {config.nvme.paths[0]} still has the newer states. To resume from {folder} and keep "
            "the newer states, name another directory in nvme.paths."
        ) from error


def _with_pins_of_store(model: nn.Module, config: SwapConfig, **how: Any) -> SwapConfig:
    tile_as_run(model, config)
    pins = pins_in_store(model, OffloadArguments.of(config, **how))
    if pins != config.pins:
        fewer = "; if more checkpoint folders are kept, the older folders get a portable copy of their states"
        logger.warning(
            "infinity: the store in %s has room for %d pinned generations, and this number does not change, although "
            "the config now says %d%s",
            config.nvme.paths[0],
            pins,
            config.pins,
            fewer if pins < config.pins else "",
        )
    return config.model_copy(update={"pins": pins})


class CheckpointFolderSave:
    """A context manager around the writing of one checkpoint folder. The first call of `finish` pins the folder's
    generation; later calls do nothing.

    Raises (from the constructor):
        PlanError: the store has no room for one more pin. Nothing was written.
    """

    open_now: ClassVar[list[CheckpointFolderSave]] = []

    def __init__(self, model: nn.Module, folder: Path) -> None:
        self._model = model
        self._folder = folder
        self._pins = keeps_generations(model)
        if self._pins:
            require_pins(model)
            agree(registry.coordinator_of(model))
            name_vanished(model)
            for freed in make_room_for_pin(model, folder):
                if registry.coordinator_of(model).world.leads:
                    logger.info("infinity: %s now contains a portable copy of its optimizer states", freed)
        else:
            logger.warning(
                "infinity: %s will contain weights and no optimizer states: commit_every is 0, so there are no "
                "generations. No run can resume from this folder",
                folder,
            )

    def __enter__(self) -> CheckpointFolderSave:
        self.open_now.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.open_now.remove(self)

    def finish(self) -> None:
        """Sync the folder and pin its generation. All other files of the folder must exist already."""
        if self._pins:
            coordinator = registry.coordinator_of(self._model)
            coordinator.world.tell(f"writing {self._folder}", None)  # waits until all ranks have written their files
            coordinator.world.once_slow(f"syncing {self._folder}", self._sync)
            pin(self._model, self._folder)
            self._pins = False

    def _sync(self) -> None:
        if self._folder.exists():
            sync_tree(self._folder)


def require_pins(model: nn.Module) -> None:
    """Raise PlanError if the store keeps generations but has no pins for checkpoint folders."""
    if keeps_generations(model) and not registry.coordinator_of(model).plan.placement.pins:
        raise PlanError(
            "this model was offloaded before infinity knew that checkpoint folders are saved, so its store has no room "
            "for their states. Set `pins: 2` in the swap config (one more than the number of folders that exist at a "
            "time), or let the first Trainer of the model be one that saves."
        )


def name_vanished(model: nn.Module) -> None:
    """Warn of folders that pin a generation but do not exist.

    Their generations are not unpinned, because the folders may be on a disk that is not mounted.
    """
    vanished = [str(folder) for folder in folders_of(model) if not os.path.lexists(folder)]
    if vanished:
        store = place_of(registry.coordinator_of(model).directories[0])
        logger.warning(
            "infinity: %s pin generations and do not exist. If they were removed, `infinity checkpoint unpin %s "
            "--all-gone` unpins the generations after this process has ended",
            ", ".join(vanished),
            shlex.quote(str(store)),
        )


@contextmanager
def unpinning_removed_folders(model: nn.Module) -> Iterator[None]:
    """In the `with` block, unpin each checkpoint folder before shutil.rmtree removes the folder.

    Because of this order, a crash cannot leave a pin of a removed folder. Folders that were missing before the block
    are not unpinned, because they may be on a disk that is not mounted.
    """
    there = [folder for folder in folders_of(model) if folder.exists()]
    with patched(shutil, "rmtree", removing(lambda: [model])):
        yield
    for folder in there:
        if not folder.exists():
            unpin(model, folder)


def removing(models: Callable[[], Iterable[nn.Module]]) -> Callable[..., None]:
    """Return a replacement of shutil.rmtree, which unpins checkpoint folders before it removes them.

    Args:
        models: function that returns the currently offloaded models.
    """
    process = os.getpid()

    def remove(rmtree: Callable[..., None], path: Any, *args: Any, **kwargs: Any) -> None:
        ours = os.getpid() == process  # a worker process of a loader removes folders of its own, which pin nothing
        # rmtree refuses to remove a symbolic link
        if ours and kwargs.get("dir_fd") is None and not os.path.islink(path):
            place = Path(os.path.realpath(os.fsdecode(path)))
            for model in models():
                for folder in _held_by(model):
                    if folder.is_relative_to(place) and folder.exists():
                        unpin(model, folder)
        rmtree(path, *args, **kwargs)

    return remove


def is_at(model: nn.Module, marker: PinMarker) -> bool:
    """Return whether an offloaded model has the states that a checkpoint folder pins."""
    return registry.coordinator_of(model).is_at(marker.run, marker.step)


def remove_left(paths: Sequence[Path], run: str) -> None:
    """Remove the store of a garbage-collected model, unless checkpoint folders pin its generations.

    Raises:
        StoreLockedError: another process uses the store.
        SwapIOError, ManifestError: a file cannot be removed, or the pins cannot be read.
    """
    if not read_pins(paths[0]):
        remove_store_of(run, paths)


def remove_empty(paths: Iterable[Path]) -> None:
    """Remove the empty directories in `paths`.

    Args:
        paths: the swap directories that did not exist when the script began.
    """
    for path in paths:
        with suppress(OSError):  # the directory is not empty, or is missing
            path.rmdir()
