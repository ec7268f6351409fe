"""Pins of one offloaded model: which of its generations checkpoint folders keep. Each act takes the lock and is
whole."""

from __future__ import annotations

from pathlib import Path

from infinity.base.interrupt import whole
from infinity.coordinator.coordinator import Coordinator
from infinity.errors import ConfigError, InfinityError
from infinity.io.generations import Generations


@whole
def pin(coordinator: Coordinator, folder: Path, into: Path | None) -> int:
    """Make a generation of the states as they are and have `folder` pin it. Returns its step.

    Raises:
        PlanError, InfinityError: as Generations.pin; the first before anything is written.
        others: as Coordinator.commit.
    """
    with coordinator.locked():
        coordinator.require_usable()
        kept = generations_of(coordinator)
        kept.require_free_pin(folder)
        coordinator.commit()
        kept.pin(coordinator.steps, folder, into)
        return coordinator.steps


@whole
def unpin(coordinator: Coordinator, folder: Path) -> bool:
    """Let what `folder` pins go. Returns whether it pinned a generation. Raises as Generations.unpin."""
    with coordinator.locked():
        return generations_of(coordinator).unpin(folder)


@whole
def mark_portable(coordinator: Coordinator, folder: Path, name: str) -> None:
    """`folder` has a portable copy now, and needs its generation no more. Raises as Generations.unpin."""
    with coordinator.locked():
        generations_of(coordinator).mark_portable(folder, name)


def pinned(coordinator: Coordinator) -> dict[Path, int]:
    """The steps of the pinned generations by their folders, the oldest pin first."""
    with coordinator.locked():
        kept = coordinator.resources.generations
        return {} if kept is None else kept.pins


def require_none_pinned(coordinator: Coordinator) -> None:
    """Raises InfinityError where checkpoint folders that are there need generations of this store."""
    with coordinator.locked():
        folders = [str(folder) for folder in pinned(coordinator) if folder.exists()]
    if folders and not coordinator.closed:
        raise InfinityError(
            f"close(discard=True) would remove the generations that checkpoint folders pin: {', '.join(folders)}. "
            "Close without discard; or unpin or remove these folders first."
        )


def generations_of(coordinator: Coordinator) -> Generations:
    """Raises ConfigError where no generations are kept, InfinityError once the model is closed."""
    coordinator.health.require_open()
    kept = coordinator.resources.generations
    if kept is None:
        raise ConfigError("commit_every: 0 keeps no generations; set commit_every: 1, or how many steps apart")
    return kept
