"""`infinity checkpoint unpin`, and what `list` and `remove` do about pins."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from infinity.errors import ConfigError, ManifestError, ResumeError, printable
from infinity.io.directory import SwapDirectory, generations_in
from infinity.io.generation_pins import (
    GenerationPin,
    GenerationPins,
    digest_of,
    folder_path,
    is_gone,
    pins_text,
    read_pins,
)
from infinity.io.headers import header_in
from infinity.io.manifest import manifest_bytes
from infinity.io.rank_paths import place_of, rank_of
from infinity.sharded.rank_stores import parts_of, stores_of


def unpin(paths: Sequence[Path], folders: Sequence[Path], *, all_gone: bool) -> int:
    """Unpin the generations that checkpoint folders pin. Return the exit code.

    Args:
        paths: the directories of the store.
        folders: checkpoint folders to unpin. They need not exist.
        all_gone: whether to unpin all checkpoint folders that no longer exist.

    Raises:
        ConfigError: no folder is given, a folder pins no generation, or the directory belongs to one of several ranks.
        StoreLockedError: a run is using the store.
    """
    if not folders and not all_gone:
        raise ConfigError("say which pins to remove: --folder FOLDER, or --all-gone for the folders that do not exist")
    if rank_of(paths[0])[1] > 1:
        raise ConfigError(
            f"{paths[0]} belongs to one of several ranks, and ranks pin together: name the directory {paths[0].parent}"
        )
    with ExitStack() as held:
        every = []
        for entry in stores_of(paths[0]) or paths[:1]:
            places = parts_of(paths, entry)
            directory = SwapDirectory(places[0], create=False)
            held.callback(directory.close, keep=True)
            every.append(_pins_in(places))
            every[-1].load()
        wanted = set(map(str, map(folder_path, folders)))
        chosen = {pin.folder: pin for pins in every for pin in pins.entries if _goes(pin, wanted, all_gone=all_gone)}
        for folder in sorted(wanted - chosen.keys()):
            there = {pin.folder: pin for pins in every for pin in pins.entries}
            raise ConfigError(
                f"{folder} pins no generation in {paths[0]}. Pins there: {pins_text(there.values()) or 'none'}."
            )
        for pins in every:
            for pin in (pin for pin in pins.entries if pin.folder in chosen):
                pins.unmark(pin)
        for pins in every:
            if any(pin.folder in chosen for pin in pins.entries):
                pins.write(pin for pin in pins.entries if pin.folder not in chosen)
        for pin in chosen.values():
            print(printable(f"unpinned {pin}"))
        if not chosen:
            print("every folder that pins a generation exists: nothing was unpinned")
    return 0


def _pins_in(places: Sequence[Path]) -> GenerationPins:
    """Return the pins of a store.

    Raises:
        ResumeError: there is no store.
    """
    return GenerationPins(places, header_in(places[0]).header.run, *rank_of(places[0]))


def _goes(pin: GenerationPin, folders: Collection[str], *, all_gone: bool) -> bool:
    return pin.folder in folders or (all_gone and is_gone(pin))


def generations_with(pins: Sequence[GenerationPin], path: Path) -> Iterator[tuple[int, Path, str]]:
    """Yield the generations in a directory.

    The generations that the run keeps come first, and the others, which are only pinned, come last.

    Args:
        pins: the pins of the store.
        path: directory of the store.

    Yields:
        The step, the path of the manifest, and text that names the checkpoint folders that pin the generation. In each
        of the two parts, the newest generation comes first.
    """
    known = set[str]()
    for number, manifest in generations_in(path).items():
        digest = _digest_in(manifest) if pins else ""
        known.add(digest)
        yield number, manifest, _said_of(pins, digest)
    for pin in sorted(pins, key=lambda pin: -pin.step):
        if pin.digest not in known:
            known.add(pin.digest)
            yield pin.step, path / pin.manifest_name, _said_of(pins, pin.digest)


def _said_of(pins: Sequence[GenerationPin], digest: str) -> str:
    folders = [f"{pin.folder}{' (its folder is gone)' if is_gone(pin) else ''}" for pin in pins if pin.digest == digest]
    return f", pinned by {' and '.join(folders)}" if folders else ""


def _digest_in(manifest: Path) -> str:
    """Return the digest of a manifest's generation.

    For a damaged manifest return "", which is not the digest of any pin.
    """
    try:
        return digest_of(manifest_bytes(manifest))
    except ManifestError:
        return ""


def let_go(path: Path, *, pinned: bool) -> None:
    """Prepare the removal of a store: remove the marks in its checkpoint folders, so that none looks resumable.

    Args:
        path: a directory of the store, which is locked.
        pinned: whether to remove the store even if existing checkpoint folders need it.

    Raises:
        ResumeError: existing checkpoint folders need the store (the error names them), or the pins cannot be read.
    """
    try:
        pins = read_pins(path)
    except ManifestError:
        if pinned:
            return  # the file with the pins is damaged, so the folders that it named are unknown
        raise
    there = [pin for pin in pins if not is_gone(pin)]
    if there and not pinned:
        place = place_of(path)
        raise ResumeError(
            f"checkpoint folders pin generations in {place}: {pins_text(there)}. Remove or unpin them first (`infinity "
            f"checkpoint unpin {place} --folder FOLDER`); or give `remove` the option --pinned; no run can then resume "
            "from these folders."
        )
    if there:
        held = _pins_in([path])
        for pin in there:
            held.unmark(pin)
