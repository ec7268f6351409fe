"""Checkpoint folders of a script: each holds exported weights and pins the generation with its optimizer states."""

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

from infinity.access.opening import pins_in_store
from infinity.access.pinning import agree
from infinity.checkpoint.aside import sync_tree
from infinity.checkpoint.carry_on import offload_from_checkpoint
from infinity.checkpoint.other_ranks import resume, tile_as_run
from infinity.checkpoint.pinned import make_room_for_pin
from infinity.config import SwapConfig
from infinity.coordinator import registry
from infinity.errors import PlanError, ResumeError, StoreNotEmptyError
from infinity.integrations.patches import patched
from infinity.io.directory import remove_store_of
from infinity.io.pins import Marker, read_pins
from infinity.io.rank_paths import place_of
from infinity.runtime.pins import generation_of, pin, pinned, unpin
from infinity.state.terms import Terms

logger = logging.getLogger(__name__)

_PINS_OF_ALL = 2
"""Checkpoint folders with a generation of their own where a script keeps all folders: older ones hold a copy."""


def pins_for(kept: int | None) -> int:
    """How many checkpoint folders pin a generation at a time.

    Args:
        kept: how many folders the script keeps, and then there is one more before an old one goes; None: all of them.
    """
    return _PINS_OF_ALL if kept is None else kept + 1


def keeps_generations(model: nn.Module) -> bool:
    """Whether a checkpoint folder of this model can hold its optimizer states."""
    return registry.is_offloaded(model) and registry.coordinator_of(model).resources.generations is not None


def folders_of(model: nn.Module) -> dict[Path, int]:
    """The folders that pin a generation of the model, with their steps."""
    return pinned(model) if keeps_generations(model) else {}


def _held_by(model: nn.Module) -> dict[Path, int]:
    """`folders_of`, while they can be let go: until the model is closed."""
    return {} if keeps_generations(model) and registry.coordinator_of(model).closed else folders_of(model)


def go_on(model: nn.Module, folder: Path, config: SwapConfig, **how: Any) -> None:
    """Offload a model as the run was when it wrote a checkpoint folder. The store keeps its room for pins, whatever
    number of folders the script wishes now: of more folders the older ones get a portable copy (`Saving`).

    Raises:
        ResumeError: the folder is none of infinity, or its generation is gone; says what to do.
        others: as infinity.resume and infinity.offload_from_checkpoint.
    """
    marker = generation_of(folder, config)
    if marker.portable is None:
        resume(model, _with_pins_of_store(model, config, **how), folder=folder, **how)
        return
    try:
        offload_from_checkpoint(model, folder / marker.portable, config, **how)
    except StoreNotEmptyError as error:
        raise ResumeError(
            f"{folder} holds a copy of its optimizer states, because newer checkpoint folders took its place in the "
            f"store. The swap directory still has theirs ({error}) To go on from {folder} and keep the newer ones, "
            "name another directory in nvme.paths."
        ) from error


def _with_pins_of_store(model: nn.Module, config: SwapConfig, **how: Any) -> SwapConfig:
    tile_as_run(model, config)
    pins = pins_in_store(model, Terms.of(config, **how))
    if pins != config.pins:
        fewer = "; where more checkpoint folders stay, the older ones get a portable copy of their states"
        logger.warning(
            "infinity: the store in %s was made with room for %d pinned generations and keeps it, not %d as now%s",
            config.nvme.paths[0],
            pins,
            config.pins,
            fewer if pins < config.pins else "",
        )
    return config.model_copy(update={"pins": pins})


class Saving:
    """One checkpoint folder that is being written, in the context of this object. Its generation is pinned once, by
    `finish`.

    Raises (from the constructor):
        PlanError: there is no room for one more pin; nothing was written.
    """

    open_now: ClassVar[list[Saving]] = []

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
                    logger.warning("infinity: %s holds a portable copy of its optimizer states now", freed)
        else:
            logger.warning(
                "infinity: %s will hold weights and no optimizer states: commit_every is 0, so there are no "
                "generations. Nothing can be resumed from it",
                folder,
            )

    def __enter__(self) -> Saving:
        self.open_now.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.open_now.remove(self)

    def finish(self) -> None:
        """Everything else of the folder is written."""
        if self._pins:
            coordinator = registry.coordinator_of(self._model)
            coordinator.world.tell(f"writing {self._folder}", None)  # all ranks have
            coordinator.world.once_slow(f"syncing {self._folder}", self._sync)
            pin(self._model, self._folder)
            self._pins = False

    def _sync(self) -> None:
        if self._folder.exists():
            sync_tree(self._folder)


def require_pins(model: nn.Module) -> None:
    """Raises PlanError where no checkpoint folder can pin a generation, though generations are kept."""
    if keeps_generations(model) and not registry.coordinator_of(model).plan.placement.pins:
        raise PlanError(
            "this model was offloaded when nothing said that checkpoint folders are saved, so its store has no room "
            "for their states. Set `pins: 2` in the swap config (as many as there are folders at a time, and one more) "
            "or let the first Trainer of the model be one that saves."
        )


def name_vanished(model: nn.Module) -> None:
    """Say which folders pin a generation and are not there. They stay pinned: their disk may not be mounted."""
    vanished = [str(folder) for folder in folders_of(model) if not os.path.lexists(folder)]
    if vanished:
        store = place_of(registry.coordinator_of(model).directories[0])
        logger.warning(
            "infinity: %s pin generations and are not there. If they were removed, `infinity checkpoint unpin %s "
            "--all-gone` lets the generations go once this process has ended",
            ", ".join(vanished),
            shlex.quote(str(store)),
        )


@contextmanager
def letting_go(model: nn.Module) -> Iterator[None]:
    """Checkpoint folders that shutil.rmtree removes in this context let their generations go first, so that no crash
    leaves a pin of a folder that is gone. Those that vanished before stay pinned: they may be on a disk that is not
    mounted."""
    there = [folder for folder in folders_of(model) if folder.exists()]
    with patched(shutil, "rmtree", removing(lambda: [model])):
        yield
    for folder in there:
        if not folder.exists():
            unpin(model, folder)


def removing(models: Callable[[], Iterable[nn.Module]]) -> Callable[..., None]:
    """A shutil.rmtree, to be patched in, that first lets the generations go of the checkpoint folders it removes.

    Args:
        models: those that are offloaded now.
    """
    process = os.getpid()

    def remove(rmtree: Callable[..., None], path: Any, *args: Any, **kwargs: Any) -> None:
        ours = os.getpid() == process  # and not a worker of a loader, which removes folders of its own
        if ours and kwargs.get("dir_fd") is None and not os.path.islink(path):  # of a link rmtree removes nothing
            place = Path(os.path.realpath(os.fsdecode(path)))
            for model in models():
                for folder in _held_by(model):
                    if folder.is_relative_to(place) and folder.exists():
                        unpin(model, folder)
        rmtree(path, *args, **kwargs)

    return remove


def is_at(model: nn.Module, marker: Marker) -> bool:
    """Whether an offloaded model has the states that a checkpoint folder names."""
    return registry.coordinator_of(model).is_at(marker.run, marker.step)


def remove_left(paths: Sequence[Path], run: str) -> None:
    """Remove the store of a model that was collected, unless checkpoint folders pin generations of it.

    Raises:
        StoreLockedError: another process uses the store.
        SwapIOError, ManifestError: a file cannot be removed; the pins cannot be read.
    """
    if not read_pins(paths[0]):
        remove_store_of(run, paths)


def remove_empty(paths: Iterable[Path]) -> None:
    """Remove those of a script's swap directories in which nothing is left. Args: paths: that it found absent."""
    for path in paths:
        with suppress(OSError):  # it is not empty, or not there
            path.rmdir()
