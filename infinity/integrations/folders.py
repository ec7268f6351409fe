"""Checkpoint folders of a script: each holds exported weights and pins the generation with its optimizer states."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from infinity.checkpoint.carry_on import offload_from_checkpoint
from infinity.checkpoint.pinned import make_room_for_pin
from infinity.config import SwapConfig
from infinity.coordinator import registry
from infinity.io.pins import Marker
from infinity.runtime.offload import resume
from infinity.runtime.pins import generation_of, pin, pinned, unpin

logger = logging.getLogger(__name__)


def keeps_generations(model: nn.Module) -> bool:
    """Whether a checkpoint folder of this model can hold its optimizer states."""
    return registry.is_offloaded(model) and registry.coordinator_of(model).resources.generations is not None


def folders_of(model: nn.Module) -> dict[Path, int]:
    """The folders that pin a generation of the model, with their steps."""
    return pinned(model) if keeps_generations(model) else {}


def go_on(model: nn.Module, folder: Path, config: SwapConfig, **how: Any) -> None:
    """Offload a model as the run was when it wrote a checkpoint folder.

    Raises:
        ResumeError: the folder is none of infinity, or its generation is gone; says what to do.
        others: as infinity.resume and infinity.offload_from_checkpoint.
    """
    marker = generation_of(folder, config)
    if marker.portable is None:
        resume(model, config, folder=folder, **how)
    else:
        offload_from_checkpoint(model, folder / marker.portable, config, **how)


class Saving:
    """One checkpoint folder that is being written. Its generation is pinned once, by `finish`.

    Raises (from the constructor):
        PlanError: there is no room for one more pin; nothing was written.
    """

    def __init__(self, model: nn.Module, folder: Path) -> None:
        self._model = model
        self._folder = folder
        self._pins = keeps_generations(model)
        if self._pins:
            for freed in make_room_for_pin(model, folder):
                logger.warning("infinity: %s holds a portable copy of its optimizer states now", freed)
        else:
            logger.warning(
                "infinity: %s will hold weights and no optimizer states: commit_every is 0, so there are no "
                "generations. Nothing can be resumed from it",
                folder,
            )

    def finish(self) -> None:
        """Everything else of the folder is written."""
        if self._pins:
            pin(self._model, self._folder)
            self._pins = False


@contextmanager
def letting_go(model: nn.Module) -> Iterator[None]:
    """Checkpoint folders that are removed in this context let their generations go. Those that vanished before stay
    pinned: they may be on a disk that is not mounted."""
    there = [folder for folder in folders_of(model) if folder.exists()]
    yield
    for folder in there:
        if not folder.exists():
            unpin(model, folder)


def is_at(model: nn.Module, marker: Marker) -> bool:
    """Whether an offloaded model has the states that a checkpoint folder names."""
    return registry.coordinator_of(model).is_at(marker.run, marker.step)


def fits_memory(model: nn.Module) -> bool:
    """Whether memory.host has room for all weights of an offloaded model at the same time."""
    if not registry.is_offloaded(model):
        return True
    return nbytes_of(model) <= registry.coordinator_of(model).plan.budgets.limits.host


def nbytes_of(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
