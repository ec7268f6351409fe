"""Pins of one offloaded model: each pin keeps a generation in the store for a checkpoint folder.

Operations that change pins take the lock. Ctrl-C is deferred until `pin`, `unpin` or `mark_portable` ends. For several
ranks see [Note: a checkpoint folder of several ranks] in io/generation_pins.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from infinity.base.interrupt import uninterruptible
from infinity.coordinator.coordinator import Coordinator
from infinity.errors import ConfigError, InfinityError, PeerError, ResumeError
from infinity.io.generation_pins import PinMarker, begin_folder, pins_text, read_pins, require_marker
from infinity.io.generations import Generations
from infinity.io.headers import header_in
from infinity.ranks.paths import rank_path
from infinity.ranks.ranks import rank_and_world
from infinity.sharded.rank_stores import ranks_text


@uninterruptible
def pin(coordinator: Coordinator, folder: Path, into: Path | None) -> int:
    """Make a generation of the current states, and pin the generation for `folder`. All ranks call this.

    Returns:
        The step of the generation.

    Raises:
        PlanError: raised by Generations.require_free_pin; nothing was written.
        InfinityError, SwapIOError: the folder cannot be made, or the generation cannot be pinned. The folder has no
            marker and pins nothing; try again.
        others: the errors of Coordinator.commit.
    """
    with coordinator.locked():
        coordinator.require_usable()
        kept = generations_of(coordinator)
        agree(coordinator)
        coordinator.world.each(f"looking for a free pin for {folder}", lambda: kept.require_free_pin(folder))
        coordinator.commit()
        _pin(coordinator, kept, folder, into)
        return coordinator.steps


def _pin(coordinator: Coordinator, kept: Generations, folder: Path, into: Path | None) -> None:
    """Pin the generation on each rank, before rank 0 writes the marker."""
    world = coordinator.world
    world.once(f"beginning {folder}", lambda: begin_folder(folder, into))
    try:
        digests = world.each(f"pinning {folder}", lambda: kept.pin(coordinator.steps, folder))
    except PeerError:
        raise
    except Exception:  # some ranks may have the new pin, others the old one: neither is valid
        with suppress(InfinityError):  # a pin that remains is removed when the ranks compare their pins
            world.each(f"unpinning {folder}", lambda: kept.unpin(folder))
        raise
    world.once(f"finishing {folder}", lambda: kept.mark(folder, into, digests))
    if into is None:
        world.each(f"remembering {folder}", lambda: kept.finish(folder))


def agree(coordinator: Coordinator) -> None:
    """Remove a pin on all ranks if any rank has removed the pin. All ranks call this.

    Raises:
        SwapIOError: a pin cannot be removed.
        PeerError: another rank failed.
    """
    with coordinator.locked():
        kept = generations_of(coordinator)
        told = coordinator.world.tell("comparing the pins", [pin.folder for pin in kept.pin_list])
        coordinator.world.each("removing pins", lambda: kept.keep_pins(set.intersection(*map(set, told))))


@uninterruptible
def unpin(coordinator: Coordinator, folder: Path) -> bool:
    """Remove the pin of `folder`. One rank may call this alone. Raises the errors of Generations.unpin.

    Returns:
        Whether the folder pinned a generation.
    """
    with coordinator.locked():
        return generations_of(coordinator).unpin(folder)


@uninterruptible
def mark_portable(coordinator: Coordinator, folder: Path, name: str) -> None:
    """Mark `folder` as having a portable copy, and remove the folder's pin. All ranks call this.

    Raises the errors of Generations.unpin.
    """
    with coordinator.locked():
        kept = generations_of(coordinator)
        coordinator.world.once(f"marking {folder}", lambda: kept.mark_portable(folder, name))
        coordinator.world.each(f"unpinning {folder}", lambda: coordinator.world.leads or kept.unpin(folder))


def pinned(coordinator: Coordinator) -> dict[Path, int]:
    """Return the steps of the pinned generations by folder, oldest pin first.

    The function takes no lock, because every thread that removes a folder calls the function. Such a thread may run a
    finalizer while another thread holds the lock and waits for other ranks.
    """
    kept = coordinator.generations
    return {} if kept is None else kept.pins


def require_none_pinned(coordinator: Coordinator) -> None:
    """Check that no existing checkpoint folder pins a generation of this store.

    Raises:
        InfinityError: a folder pins a generation.
    """
    with coordinator.locked():
        folders = [str(folder) for folder in pinned(coordinator) if folder.exists()]
    if folders and not coordinator.closed:
        raise InfinityError(
            f"close(discard=True) would remove the generations that checkpoint folders pin: {', '.join(folders)}. "
            "Close without discard; or unpin or remove these folders first."
        )


def generations_of(coordinator: Coordinator) -> Generations:
    """Return the generations of the run.

    Raises:
        ConfigError: the config keeps no generations.
        InfinityError: the model is closed.
    """
    coordinator.require_open()
    kept = coordinator.generations
    if kept is None:
        raise ConfigError(
            "commit_every: 0 keeps no generations; set commit_every: 1, or another number of steps between generations"
        )
    return kept


def generation_of(place: Path, paths: Sequence[Path]) -> PinMarker:
    """Return the marker of a checkpoint folder, after checking that this rank's store has the folder's generation.

    Args:
        place: path of the folder, in the form that folder_path returns.
        paths: nvme.paths of the current run; [] for the paths that the marker names.

    Raises:
        ResumeError: the errors of infinity.runtime.pins.generation_of.
    """
    marker = require_marker(place)
    if marker.portable is not None:
        return marker
    rank, ranks = rank_and_world()
    if marker.ranks != ranks:
        raise ResumeError(
            f"{place} was written by a run of {ranks_text(marker.ranks)}, and this run has {ranks_text(ranks)}. Resume "
            f"from it with {ranks_text(marker.ranks)}; or start a new run that loads the folder as a model."
        )
    directory = rank_path((paths[0] if paths else Path(marker.directories[0])).expanduser().absolute(), rank, ranks)
    header = header_in(directory).header
    if header.run != marker.run:
        raise ResumeError(
            f"{place} names run {marker.run[:8]}, whose states were in {', '.join(marker.directories)}; {directory} "
            f"holds run {header.run[:8]}. Set nvme.paths to the swap directory of run {marker.run[:8]}."
        )
    pins = read_pins(directory, marker.run)
    digest = marker.digest_of(rank, ranks)
    if not any(pin.digest == digest and (directory / pin.manifest_name).exists() for pin in pins):
        raise ResumeError(
            f"generation {marker.step}, which {place} names, is not in {directory} any more: it was unpinned. "
            f"Generations pinned there: {pins_text(pins) or 'none'}. The folder's weights are complete: load them as a "
            "model, or resume from another folder."
        )
    return marker


def local_digest(marker: PinMarker) -> str | None:
    """Return the digest of the generation that a checkpoint folder pins in this rank's store; None without a pin."""
    return marker.digest_of(*rank_and_world())
