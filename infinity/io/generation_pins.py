"""Pins of checkpoint folders: which folder pins which generation.

Pins are stored in three kinds of files: the file of the pins, a manifest for each pinned generation, and a marker in
each folder.

[Note: a checkpoint folder and its generation]
A folder of exported weights contains no optimizer states. The states are in the store, in a generation that the folder
pins. Three small files record the pin. Each file is written under another name, fsynced and renamed:

pinned-STEP-DIGEST.infinity   in the first swap directory: the manifest of a pinned generation, byte for byte. It has a
                              separate name because a run that resumes from an earlier step may make a generation of
                              the same step again; DIGEST is the digest of its bytes
pins.infinity                 in the first swap directory: the folders, each with the step and the digest of the
                              generation that it pins
infinity.json                 in the folder: the marker, with run, step, digest and swap directories; if the folder
                              has a portable copy instead, with the name of the copy's subfolder

To pin a folder, an older marker in the folder is removed, then the manifest is written under its second name, then the
pin is written, and then the marker. To unpin a folder, the marker is removed, then the pin, and then the manifest. A
folder with a marker therefore always has its pin. After a crash, there may be a pin whose folder has no marker; the
next resume removes this pin (`GenerationPins.over`). A folder that does not exist may be on a disk that is not mounted.
Its pin is therefore kept, unless the folder was never finished.

[Note: a checkpoint folder of several ranks]
Each rank pins a generation in its own store, with the first two files in its own directory. The folder has one marker
with the digests of all these generations. Rank 0 writes the marker after every rank has written its pin. A folder
therefore pins a generation if and only if every rank has the pin. Any rank may unpin a folder: it removes the marker
and its own pin. The other ranks remove their pins when the ranks next exchange their pins, which is before the next pin
and on resume (access/generation_pinning.py).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from infinity import files
from infinity.errors import ConfigError, InfinityError, ManifestError, ResumeError, SwapIOError
from infinity.io import atomic_file, document
from infinity.io.rank_paths import rank_name
from infinity.io.schema import AbsolutePath, Count, DiskRecord, Name, require_unique, validated
from infinity.strict_parsers import parse_json

logger = logging.getLogger(__name__)

PINS_NAME = "pins.infinity"
MARKER_NAME = "infinity.json"
PINNED = re.compile(r"pinned-([0-9]{12})-([0-9a-f]{32})\.infinity")
_KIND = "pins"
_MARKER_BYTES_MAX = 1 << 20


def _apart(pins: list[GenerationPin]) -> list[GenerationPin]:
    require_unique((pin.folder for pin in pins), "the folder")
    return pins


Digest = Annotated[str, Field(pattern=r"\A[0-9a-f]{32}\z")]


class GenerationPin(DiskRecord):
    """Pin of a generation by a checkpoint folder.

    Attributes:
        folder: absolute path of the folder, links resolved.
        step, digest: step and digest of the generation. Two generations may have the same step.
        finished: whether the marker of the folder is known to have been written.
    """

    folder: AbsolutePath
    step: Count
    digest: Digest
    finished: bool

    @property
    def manifest_name(self) -> str:
        """Name of the generation's manifest in the first swap directory."""
        return f"pinned-{self.step:012d}-{self.digest}.infinity"

    def __str__(self) -> str:
        return f"{self.folder} (generation {self.step})"


class _PinsFile(DiskRecord):
    """Contents of the file of the pins. The first pin of `pins` is the oldest."""

    run: Name
    pins: Annotated[list[GenerationPin], Field(max_length=1 << 12), AfterValidator(_apart)]


class PinMarker(DiskRecord):
    """Contents of the marker in a checkpoint folder. The marker says where the states are.

    Attributes:
        run: id of the run that wrote the folder.
        step: number of optimizer steps done.
        digest: digest of the generation that the folder pins; None if the folder has a portable copy. If several ranks
            trained, this is the digest of rank 0.
        digests: digests of all ranks' generations if several ranks trained; [] if the folder has a portable copy.
        portable: name of the subfolder with the portable copy; None if the folder pins a generation.
        directories: the swap directories of the run, in their order.
    """

    infinity: Literal["checkpoint"] = "checkpoint"
    version: Literal[1] = 1
    run: Name
    step: Count
    digest: Digest | None = None
    digests: Annotated[list[Digest], Field(default_factory=list)]
    portable: Annotated[str, Field(pattern=r"\A[A-Za-z0-9_-]+\z")] | None = None
    directories: list[AbsolutePath]

    @property
    def ranks(self) -> int:
        """Number of ranks that trained when the folder was pinned."""
        return len(self.digests) or 1

    def digest_of(self, rank: int, ranks: int) -> str | None:
        """Return the digest of the generation that is pinned in the store of a rank; None if no generation is pinned.

        Args:
            rank: index of the rank.
            ranks: number of ranks of the present run. If the folder was written by another number of ranks, it pins
                nothing for this rank.
        """
        if ranks != self.ranks:
            return None
        return self.digests[rank] if self.digests else self.digest


def folder_path(folder: str | Path) -> Path:
    """Return the path of a folder in the form that pins have: absolute, with all links resolved.

    Raises:
        ConfigError: the path cannot be written to a file.
    """
    path = Path(os.path.realpath(Path(folder).expanduser()))
    try:
        if "\0" not in str(path) and len(str(path).encode()) <= 4096:
            return path
    except UnicodeEncodeError:
        pass
    raise ConfigError(f"{path}: the name of a checkpoint folder must be UTF-8, of 4096 bytes at most. Choose another.")


def digest_of(manifest: bytes) -> str:
    """Return the digest of a manifest. The digest identifies a generation among all generations of a run."""
    return hashlib.blake2b(manifest, digest_size=16).hexdigest()


# -- the marker --------------------------------------------------------------------------------------------------------


def read_marker(folder: Path) -> PinMarker | None:
    """Return the marker of a folder; None if the folder has no marker. Raises ManifestError."""
    path = folder / MARKER_NAME
    try:
        value = parse_json(files.read_regular(path, _MARKER_BYTES_MAX).decode())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ManifestError(path, f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ManifestError(path, f"is damaged: {error}") from error
    return validated(PinMarker, value, path)


def write_marker(folder: Path, marker: PinMarker) -> None:
    """Write the marker of a folder durably.

    Raises SwapIOError. After this error the folder has its old marker, or no marker.
    """
    text = json.dumps(marker.model_dump(exclude_none=True), indent=1)
    atomic_file.write_file(folder / MARKER_NAME, [text.encode()])


def remove_marker(folder: Path) -> None:
    """Remove the marker of a folder durably, so that the folder no longer looks resumable. Raises SwapIOError."""
    if os.path.lexists(folder / MARKER_NAME):
        atomic_file.remove(folder / MARKER_NAME)
        atomic_file.sync_directory(folder)


def begin_folder(folder: Path, into: Path | None = None) -> None:
    """Prepare a folder for pin(): remove its older marker, and make the folder durably if it does not exist.

    Args:
        folder: the checkpoint folder.
        into: directory in which the folder's files are written, if this directory is renamed to the folder later.

    Raises:
        InfinityError, SwapIOError: the folder cannot be made, or its marker cannot be removed.
    """
    made = into or folder
    if not made.is_dir():
        try:
            made.mkdir(parents=True)
        except OSError as error:
            raise InfinityError(f"cannot make the checkpoint folder {made}: {error.strerror}") from error
        atomic_file.sync_directory(made.parent)
    remove_marker(folder)


# -- the file of the pins ----------------------------------------------------------------------------------------------


def read_pins(directory: Path, run: str | None = None) -> list[GenerationPin]:
    """Return the pins in a swap directory, oldest first; [] if there is no file of pins.

    A pin that a run resumed from counts as the newest at that moment, so the last pin is on the present branch of the
    run.

    Args:
        directory: the first swap directory of a store.
        run: id of the run that the pins must belong to; None: any run.

    Raises:
        ManifestError: the file is damaged, cannot be read, or belongs to another run.
    """
    path = directory / PINS_NAME
    if not os.path.lexists(path):
        return []
    try:
        value: Any = document.read(path, _KIND)
        found = validated(_PinsFile, value, path)
    except ManifestError as error:
        raise ManifestError(
            path,
            f"{error.problem}. It lists which checkpoint folders pin which generations: put an undamaged copy back, or "
            "remove the file, which gives up all pinned generations",
        ) from error
    if run not in (None, found.run):
        raise ManifestError(path, f"belongs to run {found.run[:8]}, and the store to run {str(run)[:8]}")
    return found.pins


class GenerationPins:
    """Pins of an open store.

    Args:
        directories: all swap directories of the store.
        run: id of the store's run.
        rank, ranks: rank that owns the store, and the number of ranks.

    Attributes:
        entries: the pins in the file, oldest first.
    """

    def __init__(self, directories: Sequence[Path], run: str, rank: int = 0, ranks: int = 1) -> None:
        self._directories = list(directories)
        self._run = run
        self._rank, self._ranks = rank, ranks
        self.entries: list[GenerationPin] = []

    @property
    def directory(self) -> Path:
        return self._directories[0]

    def load(self) -> None:
        """Read the pins from the file. Raises ManifestError like read_pins."""
        self.entries = read_pins(self.directory, self._run)

    def of(self, folder: Path) -> GenerationPin | None:
        """Return the pin of a folder; None if the folder has no pin."""
        return next((pin for pin in self.entries if pin.folder == str(folder)), None)

    def write(self, entries: Iterable[GenerationPin]) -> None:
        """Replace the pins durably, and remove the manifests of generations that have no pin any more.

        Raises:
            SwapIOError: the pins are unchanged. Only after a failed fsync of the directory, the file may have the new
                pins.
        """
        entries = [self._seen(pin) for pin in entries]
        value = {"run": self._run, "pins": [pin.model_dump() for pin in entries]}
        atomic_file.write_file(self.directory / PINS_NAME, document.write(_KIND, value))
        before, self.entries = self.entries, entries
        named = {pin.manifest_name for pin in entries}
        for name in {pin.manifest_name for pin in before} - named:
            try:
                atomic_file.remove(self.directory / name)
            except SwapIOError as error:  # harmless: the manifest has no pin, and the next resume removes it
                logger.warning("%s", error)

    def _seen(self, pin: GenerationPin) -> GenerationPin:
        return pin if pin.finished else pin.model_copy(update={"finished": self.holds(pin)})

    def mark(self, pin: GenerationPin, folder: Path, digests: Sequence[str], portable: str | None = None) -> None:
        """Write the marker of a pin into a folder.

        Args:
            pin: the pin.
            folder: directory to write the marker to.
            digests: digests of all ranks' generations; [] if the folder has a portable copy.
            portable: name of the subfolder that holds the portable copy.

        Raises:
            SwapIOError: the folder has its old marker, or no marker.
        """
        of_rank = rank_name(self._rank, self._ranks)
        own = [path.parent if path.name == of_rank else path for path in self._directories]
        marker = PinMarker(
            run=self._run,
            step=pin.step,
            digest=digests[0] if digests else None,
            digests=list(digests) if len(digests) > 1 else [],
            portable=portable,
            directories=list(map(str, own)),
        )
        write_marker(folder, marker)

    def unmark(self, pin: GenerationPin) -> None:
        """Remove the marker of a pin's folder, unless the marker belongs to another pin. Raises SwapIOError."""
        if self.holds(pin):
            remove_marker(Path(pin.folder))

    def holds(self, pin: GenerationPin) -> bool:
        """Return whether the pin's folder has the pin's marker."""
        try:
            marker = read_marker(Path(pin.folder))
        except ManifestError:
            return False
        return marker is not None and self._names(marker, pin)

    def _names(self, marker: PinMarker, pin: GenerationPin) -> bool:
        return (marker.run, marker.digest_of(self._rank, self._ranks)) == (self._run, pin.digest)

    def over(self, pin: GenerationPin) -> bool:
        """Return whether a pin's folder no longer needs the pinned generation.

        The generation is not needed if the folder has no marker after a crash, or if the folder now contains another
        checkpoint. If the folder does not exist, the generation is still needed, unless the folder was never finished.
        """
        folder = Path(pin.folder)
        if not os.path.lexists(folder):
            return not pin.finished and folder.parent.is_dir()
        try:
            marker = read_marker(folder)
        except ManifestError as error:
            logger.warning("%s: its generation %d stays pinned", error, pin.step)
            return False
        return marker is None or not self._names(marker, pin)


def is_gone(pin: GenerationPin) -> bool:
    """Return whether a pin's folder does not exist."""
    return not os.path.lexists(pin.folder)


def pins_text(pins: Collection[GenerationPin]) -> str:
    """Return the pins as text for messages: each folder with its step, and with a note if the folder does not exist."""
    return ", ".join(f"{pin}{', which is gone' if is_gone(pin) else ''}" for pin in pins)


def require_marker(folder: Path) -> PinMarker:
    """Return the marker of a checkpoint folder.

    Raises:
        ResumeError: the folder has no marker, or the marker cannot be read.
    """
    marker = read_marker(folder)
    if marker is None:
        where = "has no" if folder.is_dir() else "does not exist, nor does its"
        raise ResumeError(
            f"{folder} {where} {MARKER_NAME}: no run can resume from it. It was written without infinity, or was not "
            "finished when its run ended, or its generation was unpinned. Take another checkpoint folder (`infinity "
            "checkpoint list` names those that pin a generation); or start a new run that loads its weights as a model."
        )
    return marker
