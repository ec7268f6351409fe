"""`infinity checkpoint unpin`, and what the other acts say of pins."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from infinity.errors import ConfigError, ManifestError, ResumeError, printable
from infinity.io.directory import SwapDirectory
from infinity.io.headers import header_in, members_of
from infinity.io.manifest import manifest_bytes
from infinity.io.pins import Pin, Pins, digest_of, folder_path, is_gone, read_pins, said


def unpin(paths: Sequence[Path], folders: Sequence[Path], *, all_gone: bool) -> int:
    """Let the generations of checkpoint folders go.

    Args:
        paths: the directories of the store.
        folders: that are unpinned; whether they are there or not.
        all_gone: unpin all folders that are not there.

    Raises:
        ConfigError: no folder is given, or one of them pins nothing.
        StoreLockedError: a run is using the store.
    """
    if not folders and not all_gone:
        raise ConfigError("say which pins go: --folder FOLDER, or --all-gone for the folders that are not there")
    places = list(paths) if len(paths) > 1 else members_of(paths[0])
    header = header_in(places[0]).header
    directory = SwapDirectory(places[0], create=False)
    try:
        pins = Pins(places, header.run)
        pins.load()
        chosen = [_pin_of(pins, folder) for folder in folders]
        chosen += [pin for pin in pins.entries if all_gone and is_gone(pin) and pin not in chosen]
        for pin in chosen:
            pins.unmark(pin)
        if chosen:
            pins.write(pin for pin in pins.entries if pin not in chosen)
        for pin in chosen:
            print(printable(f"unpinned {pin}"))
        if not chosen:
            print("every folder that pins a generation is there: nothing was unpinned")
    finally:
        directory.close(keep=True)
    return 0


def _pin_of(pins: Pins, folder: Path) -> Pin:
    found = pins.of(folder_path(folder))
    if found is None:
        raise ConfigError(
            f"{folder} pins no generation in {pins.directory}. Pinned there are: {said(pins.entries) or 'none'}."
        )
    return found


def pinned_by(path: Path) -> dict[str, str]:
    """For each pinned generation in a directory, by its digest: who pins it, in words. Raises ManifestError."""
    folders = defaultdict[str, list[str]](list)
    for pin in read_pins(path):
        folders[pin.digest].append(f"{pin.folder}{' (its folder is gone)' if is_gone(pin) else ''}")
    return {digest: f"pinned by {' and '.join(each)}" for digest, each in folders.items()}


def pinned_apart(path: Path, kept: dict[int, Path]) -> Iterator[tuple[int, str, Path]]:
    """The pinned generations in a directory that no manifest of `kept` names: step, digest and manifest, each once.
    Raises ManifestError."""
    known = {digest for digest in map(digest_in, kept.values()) if digest}
    for pin in sorted(read_pins(path), key=lambda pin: -pin.step):
        if pin.digest not in known:
            known.add(pin.digest)
            yield pin.step, pin.digest, path / pin.manifest_name


def digest_in(manifest: Path) -> str:
    """The digest of the generation of a manifest; "" where it is damaged, and pins nothing."""
    try:
        return digest_of(manifest_bytes(manifest))
    except ManifestError:
        return ""


def let_go(path: Path, *, pinned: bool) -> None:
    """Before a store is removed: see to it that no checkpoint folder looks resumable afterwards.

    Args:
        path: a directory of the store, which is locked.
        pinned: remove the store although folders that are there need it.

    Raises:
        ResumeError: such folders are there; names them. Or it cannot be known.
    """
    try:
        pins = read_pins(path)
    except ManifestError:
        if pinned:
            return  # which folders it named is not known
        raise
    there = [pin for pin in pins if not is_gone(pin)]
    if there and not pinned:
        raise ResumeError(
            f"checkpoint folders pin generations in {path}: {said(there)}. Remove or unpin them first (`infinity "
            f"checkpoint unpin {path} --folder FOLDER`); or give `remove` the option --pinned: then no run can go on "
            "from these folders."
        )
    if there:
        header = header_in(path).header
        held = Pins([path], header.run)
        for pin in there:
            held.unmark(pin)
