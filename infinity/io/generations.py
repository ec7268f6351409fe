"""Generations of a store.

A generation consists of all states after the same step. Its manifest names the copy of each state in the store.

This module makes a generation durable, pins a generation for a checkpoint folder, and resumes from an undamaged
generation (generation_scan.py).

[Note: why no crash loses a generation]
1. A copy that a kept or pinned manifest names is never written (`Generations.copy_to_write`).
2. A manifest is written only after an fdatasync of the swap files. The fdatasync begins when all data of the generation
   have been written.
3. A manifest gets its name only when it is complete: it is written under another name, fsynced and renamed. After that
   the directory is fsynced.
4. Older manifests are removed only after the new manifest is durable, and the next step may write only after their
   removal (Commits). If several ranks train, each rank has its own store, and a generation exists only when every rank
   has a manifest of it. Older manifests are then removed only after all ranks have confirmed that their new manifest is
   durable (`prepare`, `retire`).
5. A resumed run fsyncs the directory before it continues from a manifest. Before the run writes anything, it removes
   all manifests that it does not keep, and fsyncs the directory again.
6. A pinned generation has a separate manifest (generation_pins.py), which the actions above do not change. A pin is
   durable before pin() returns, so the kept manifest may be removed afterwards. The removal of a pin is durable before
   any copy that the pinned manifest names may be overwritten. A resumed run keeps all pinned generations, including
   generations that are newer than the generation from which it resumes. It keeps them even if it makes a generation of
   the same step again.
7. Each state that changes has more copies than the number of generations that can be kept and pinned at the same time.
   If there are too few copies, nothing is written and an error is raised (`Generations.require_room`).

After a power cut, a removed manifest may exist again, although its copies have been overwritten. Such a manifest is
older than an undamaged manifest, and the next resume removes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.errors import ManifestError, PlanError, ResumeError, SwapIOError
from infinity.io import atomic_file
from infinity.io.directory import StoreDirectory, pinned_in
from infinity.io.generation_pins import GenerationPin, GenerationPins, digest_of, is_gone, pins_text
from infinity.io.generation_scan import (
    ANY,
    EligibleGenerations,
    ResumeCandidate,
    candidates,
    name_of,
    newest_whole,
    require_readable,
)
from infinity.io.manifest import (
    ExtentRecord,
    Manifest,
    manifest_bytes,
    read_own,
    require_known,
    write_manifest,
)
from infinity.io.rank_paths import place_of
from infinity.io.store import Extent, SwapStore, now

logger = logging.getLogger(__name__)

_AGAIN = "is of a step that the run computes again, to the same bits if the script is unchanged,"
"""Reason why a generation is removed that is newer than the generation from which a run resumes."""


class Generations:
    """Generations of a store: the kept generations, and the copies that their manifests name.

    Args:
        extents: extents of all states, in layout order.
        keep: number of generations to keep.
        pins: number of further generations that may be pinned. Each extent has keep + pins + 1 copies, or one copy if
            its state never changes.
        rank, ranks: rank that owns the store, and the number of ranks.
        life: id of the ranks that make generations together (Manifest.life).
    """

    def __init__(
        self, store: SwapStore, extents: Sequence[Extent], keep: int, pins: int = 0, rank: int = 0, ranks: int = 1,
        life: str = "",
    ) -> None:  # fmt: skip
        self._store = store
        self._life = life or None
        self._extents = list(extents)
        self._index = {id(extent): index for index, extent in enumerate(self._extents)}
        self._keep = keep
        self._kept: dict[int, list[int]] = {}  # by step, oldest first: for each extent the index of its copy
        self._pins_max = pins
        self._pins = GenerationPins([directory.path for directory in store.directories], store.run, rank, ranks)
        self._pinned: dict[str, list[int]] = {}  # by digest, perhaps pinned: for each extent its copy
        self._given_up: dict[Path, str] = {}  # manifests that finish_recovery() removes, with the reason
        self._retires = False  # whether retire() must still be called
        self._pending_recovery: _PendingRecovery | None = None

    @property
    def newest(self) -> int | None:
        """Step of the newest generation; None before the first generation."""
        return max(self._kept, default=None)

    def copy_to_write(self, extent: Extent) -> int:
        """Return the copy to which new values of a state may be written. No generation uses this copy."""
        if extent.newest_copy not in self._named(extent):
            return extent.newest_copy
        free = self.spare_copy(extent)
        if free is None:
            raise self._no_room(extent)
        return free

    def spare_copy(self, extent: Extent) -> int | None:
        """Return a copy that no generation uses and that does not have the newest values; None if there is none."""
        taken = self._named(extent) | {extent.newest_copy}
        return next((copy for copy in range(len(extent.offsets)) if copy not in taken), None)

    def _named(self, extent: Extent) -> set[int]:
        index = self._index[id(extent)]
        return {copies[index] for named in (self._kept, self._pinned) for copies in named.values()}

    def require_room(self) -> None:
        """Check that each state has a copy to which its new values can be written. Call this before anything is
        written.

        Raises:
            PlanError: generations use all copies of a state.
        """
        if self._retires:
            return
        if len(self._kept) + len(self._pinned) <= self._keep + self._pins_max:
            return
        for extent in self._extents:
            if (
                len(extent.offsets) > 1
                and extent.newest_copy in self._named(extent)
                and self.spare_copy(extent) is None
            ):
                raise self._no_room(extent)

    def _no_room(self, extent: Extent) -> PlanError:
        pinned = pins_text(self.pin_list) or "none"
        return PlanError(
            f"{extent.state} of unit '{extent.unit}' has {len(extent.offsets)} copies in {self._directory.path}, and "
            f"generations name all of them: {', '.join(map(str, self._kept))} are kept, pinned by {pinned}. Nothing "
            f"was written. Unpin a folder and resume: `infinity checkpoint unpin {self._place} --folder FOLDER`."
        )

    @property
    def _directory(self) -> StoreDirectory:
        """First directory of the store, which contains the manifests and the pins."""
        return self._store.directories[0]

    @property
    def _place(self) -> Path:
        """Path of this store, in the form of an argument of `infinity checkpoint`."""
        return place_of(self._directory.path)

    @property
    def steps(self) -> list[int]:
        """Steps of the kept generations, oldest first."""
        return sorted(self._kept)

    def candidates(self, step: int | None) -> list[ResumeCandidate]:
        """Return the generations from which recover() may resume; see `candidates` in generation_scan.py."""
        return candidates(self._directory, self._store.run, step)

    def make(self, step: int, facts: dict[str, Any], body: dict[str, Any]) -> Path:
        """Make generation `step` durable in a process that trains alone.

        The arguments and errors are the same as for prepare().
        """
        path = self.prepare(step, facts, body)
        self.retire(self.steps)
        return path

    def prepare(self, step: int, facts: dict[str, Any], body: dict[str, Any]) -> Path:
        """Write the manifest of generation `step`, which consists of the newest values of all states.

        The values must already be durable. After this call, no state may be written before retire().

        Raises:
            SwapIOError: the generation was not made; the older generations still exist.
            TypeError: `body` contains a value that cannot be stored in a document.
        """
        file = self._store.file
        sums = [file.block_sums(extent.offset, extent.nbytes) for extent in self._extents]
        manifest = Manifest(
            run=self._store.run,
            step=step,
            created=now(),
            extents=[
                ExtentRecord(
                    unit=extent.unit,
                    group=extent.group,
                    state=extent.state,
                    slot=extent.newest_copy,
                    offset=extent.offset,
                    nbytes=extent.nbytes,
                )
                for extent in self._extents
            ],
            sums=b"".join(sums) if self._store.checksums else None,
            facts=facts,
            body=body,
            store=self._store.record,
            life=self._life,
        )
        directory = self._directory
        path = directory.generation_path(step)
        atomic_file.write_file(path, write_manifest(manifest))
        self._kept[step] = [extent.newest_copy for extent in self._extents]
        self._retires = True
        return path

    def retire(self, whole: Collection[int]) -> None:
        """Keep the newest `keep` generations that every rank has made, and remove all others.

        Args:
            whole: the steps of the generations that every rank has made.
        """
        staying = [step for step in self.steps if step in whole][-self._keep :]
        for step in self.steps:
            if step in staying:
                continue
            del self._kept[step]
            try:
                atomic_file.remove(self._directory.generation_path(step))
            except SwapIOError as error:  # the newest generation is durable, and an old manifest is harmless
                logger.warning("%s", error)
        self._retires = False

    def recover(
        self,
        memory: memoryview,
        step: int | None = None,
        check: Callable[[Manifest], None] = lambda _: None,
        digest: str | None = None,
        eligible: EligibleGenerations = ANY,
    ) -> Manifest:
        """Find the newest undamaged generation, and make its values the newest values of the extents.

        Every byte of the generation is read once, and the store remembers the checksums of these bytes. The log names
        the newer generations that are damaged. finish_recovery() removes their manifests.

        Args:
            memory: 4 KiB-aligned buffer for reading.
            step: take the generation of this step in place of the newest one.
            check: function that raises ManifestError for a manifest that cannot be used.
            digest: take the pinned generation with this digest.
            eligible: generations from which the run may resume.

        Raises:
            NewerVersionError: a newer infinity wrote one of the manifests, even a manifest that was not requested.
            ResumeError: every generation is damaged, or `step` has no generation; the message names the problem of each
                generation. Also raised if a rebuilt header is not proven by the generation (headers.py), or if a swap
                file has a second name.
            SwapIOError: a part of a generation cannot be read, or a rebuilt header cannot be written. The extents are
                unchanged, and only headers may have changed on disk. Try again, or pass `step`.
        """
        directory = self._directory
        self._store.require_sole_names()
        # The last rename of a killed run may exist only in the page cache. It must be durable before the run resumes.
        atomic_file.sync_directory(directory.path)
        found = directory.generations()
        # finish_recovery() would remove manifests that this run does not resume from
        require_known([*found.values(), *pinned_in(directory.path)])

        def point_to(manifest: Manifest, path: Path) -> tuple[tuple[Manifest, Path], list[Extent]]:
            self._require_fitting(manifest, path)
            check(manifest)
            for extent, record in zip(self._extents, manifest.extents, strict=True):
                extent.turn_to(record.slot)
            return (manifest, path), self._extents

        before = [extent.newest_copy for extent in self._extents]
        try:
            self._pins.load()
            staying, pinned = self._staying_pins(eligible)
            manifest, path = newest_whole(self._store, memory, step, point_to, "resume", digest, eligible.candidate)
            self._store.write_rebuilt_headers(self._extents)
            newest = step is None and digest is None and eligible.candidate is None
            self._keep_with(manifest, found, eligible, "is damaged" if newest else _AGAIN)
        except BaseException:
            for extent, copy in zip(self._extents, before, strict=True):
                extent.turn_to(copy)
            raise
        self._pinned = pinned
        staying.sort(key=lambda pin: pin.digest == digest)  # the run's next folder comes after the one it resumes from
        stays = {pin.manifest_name for pin in staying}
        unpinned = (path for path in pinned_in(directory.path) if path.name not in stays)
        self._given_up |= dict.fromkeys(unpinned, "is not needed by any checkpoint folder")
        self._pending_recovery = _PendingRecovery(
            staying,
            None if path == found.get(manifest.step) else manifest_bytes(path),
            next((pin.folder for pin in staying if pin.digest == digest), ""),
        )
        logger.info("resuming generation %d of %s, committed %s", manifest.step, directory.path, manifest.created)
        return manifest

    def _staying_pins(self, eligible: EligibleGenerations) -> tuple[list[GenerationPin], dict[str, list[int]]]:
        """Return the pins that a resumed run keeps, and the copies that the pinned generations use.

        Raises:
            ResumeError: there are more pinned generations than `pins` allows, or a manifest cannot be read at present.
        """
        staying, pinned = list[GenerationPin](), dict[str, list[int]]()
        for pin in self._pins.entries:
            if self._pins.over(pin) or pin.folder not in eligible.folders:
                continue
            staying.append(pin)
            path = self._directory.path / pin.manifest_name
            try:
                manifest = read_own(path, pin.step, self._store.run)
                self._require_fitting(manifest, path)
                pinned[pin.digest] = [record.slot for record in manifest.extents]
            except ManifestError as error:
                require_readable(error)
                logger.warning("no run can resume from the checkpoint folder %s any more: %s", pin.folder, error)
        if len(pinned) > self._pins_max:
            raise ResumeError(
                f"{len(pinned)} generations in {self._directory.path} are pinned, and pins is {self._pins_max}: "
                f"{pins_text(staying)}. Set pins: {len(pinned)}, or unpin some with `infinity checkpoint unpin "
                f"{self._place} --folder FOLDER`."
            )
        gone = [pin for pin in staying if is_gone(pin)]
        if gone:
            logger.warning(
                "checkpoint folders that no longer exist pin generations in %s: %s. `infinity checkpoint unpin %s "
                "--all-gone` frees their space.", self._directory.path, pins_text(gone), self._place,
            )  # fmt: skip
        return staying, pinned

    def _require_fitting(self, manifest: Manifest, path: Path) -> None:
        """Check that a manifest fits this store's layout. Raises ManifestError."""
        if len(manifest.extents) != len(self._extents):
            raise ManifestError(path, f"names {len(manifest.extents)} extents, the model has {len(self._extents)}")
        for extent, record in zip(self._extents, manifest.extents, strict=True):
            mine, its = (extent.unit, extent.group, extent.state), (record.unit, record.group, record.state)
            if mine != its or extent.nbytes != record.nbytes:
                raise ManifestError(
                    path,
                    f"has {its[2]} of unit '{its[0]}' (group {its[1]}, {record.nbytes} bytes) where the model has "
                    f"{mine[2]} of unit '{mine[0]}' (group {mine[1]}, {extent.nbytes} bytes)",
                )
            if record.slot >= len(extent.offsets) or extent.offsets[record.slot] != record.offset:
                problem = f"places {record.state} of unit '{record.unit}' at an offset that does not belong to it"
                raise ManifestError(path, problem)

    def _keep_with(
        self, chosen: Manifest, found: Mapping[int, Path], eligible: EligibleGenerations, newer: str
    ) -> None:
        """Choose the generations that a resumed run keeps: the resumed generation, and older generations.

        All other generations are given up. These are the generations that are newer than the resumed one, the oldest
        generations if there are more than the run keeps, and older generations that another rank does not have. A crash
        can leave generations of each kind.

        Args:
            chosen: the manifest that the run resumes from.
            found: all kept manifests in the directory, by step.
            eligible: the generations that all ranks have.
            newer: the reason why newer generations are given up, for the message.
        """
        self._kept = {chosen.step: [extent.newest_copy for extent in self._extents]}
        self._given_up = {path: newer for number, path in found.items() if number > chosen.step}
        older = {number: path for number, path in found.items() if number < chosen.step}
        for number, path in older.items():
            why = "is older than the generations that are kept"
            try:
                manifest = read_own(path, number, self._store.run)
                self._require_fitting(manifest, path)
                if len(self._kept) < self._keep and name_of(manifest) in eligible.names:
                    self._kept[number] = [record.slot for record in manifest.extents]
                    continue
            except ManifestError as error:
                require_readable(error)
                logger.warning("%s", error)
                why = "is damaged"
            self._given_up[path] = why  # its copies have been or will be overwritten
        self._kept = dict(sorted(self._kept.items()))

    def finish_recovery(self) -> None:
        """Make the result of recover() durable: remove the manifests that recover() gave up, and the pins that it
        dropped.

        Call this before anything is written.

        Raises:
            SwapIOError: a manifest cannot be written or removed.
            PlanError: see require_room.
        """
        source = ""
        if self._pending_recovery is not None:
            source = f", of {self._pending_recovery.folder}" if self._pending_recovery.folder else ""
            if self._pending_recovery.manifest is not None and self.newest is not None:
                # The pinned generation is now also the newest generation of the run, and must be found even after the
                # folder is unpinned.
                atomic_file.write_file(self._directory.generation_path(self.newest), [self._pending_recovery.manifest])
            over = [pin for pin in self._pins.entries if pin not in self._pending_recovery.pins]
            if over:
                logger.warning("no checkpoint folder needs these generations any more: %s", pins_text(over))
            if self._pending_recovery.pins != self._pins.entries:
                self._write_pins(self._pending_recovery.pins)
            self._pending_recovery = None
        if self._given_up:
            for path, why in self._given_up.items():
                step = int(path.name.partition(".")[0].split("-")[1])
                then = "stays for its checkpoint folder" if self._is_pinned(path) else f"is removed ({path})"
                gone = f"generation {step} {why} and {then}"
                logger.warning("the run resumes from generation %s%s; %s", self.newest, source, gone)
                atomic_file.remove(path)
            atomic_file.sync_directory(self._directory.path)
            self._given_up = {}
        self.require_room()

    def _is_pinned(self, path: Path) -> bool:
        """Return whether a checkpoint folder pins the generation of a manifest; False for a damaged manifest."""
        with suppress(ManifestError):
            return digest_of(manifest_bytes(path)) in self._pinned
        return False

    # -- pins ---------------------------------------------------------------------------------------------------------

    @property
    def pins(self) -> dict[Path, int]:
        """Step of each pinned generation, by the folder that pins the generation; the oldest pin is first."""
        return {Path(pin.folder): pin.step for pin in self.pin_list}

    @property
    def pin_list(self) -> list[GenerationPin]:
        """The pins, oldest first, without those that finish_recovery() will remove."""
        return list(self._pins.entries if self._pending_recovery is None else self._pending_recovery.pins)

    def has_free_pin(self, folder: Path) -> bool:
        """Return whether there is a free pin for a folder."""
        others = {pin.digest for pin in self.pin_list if pin.folder != str(folder)}
        return len(others & self._pinned.keys()) < self._pins_max

    def require_free_pin(self, folder: Path) -> None:
        """Check that there is a free pin for `folder`. Raises PlanError if other folders use all `pins`."""
        if self.has_free_pin(folder):
            return
        taken = f"are taken by {pins_text(self.pin_list)}" if self._pins_max else "(the default) allows none"
        raise PlanError(
            f"{folder} cannot pin a generation: pins: {self._pins_max} {taken}. Remove a folder that pins a "
            f"generation, or begin a run with a larger `pins`; `infinity checkpoint unpin {self._place} --all-gone` "
            "unpins the generations of folders that are gone. Nothing was written."
        )

    def pin(self, step: int, folder: Path) -> str:
        """Pin generation `step` for a folder, durably, and return the digest of the generation.

        The folder must have no marker (begin_folder).

        Args:
            step: step of a kept generation.
            folder: absolute path, links resolved (folder_path).

        Raises:
            ResumeError: the store keeps no such generation.
            SwapIOError: the pin may or may not be durable, so unpin the folder.
        """
        self.finish_recovery()
        self._require_kept(step)
        manifest = manifest_bytes(self._directory.generation_path(step))
        new = GenerationPin(folder=str(folder), step=step, digest=digest_of(manifest), finished=False)
        if new.digest not in self._pinned:
            atomic_file.write_file(self._directory.path / new.manifest_name, [manifest])
        self._pinned[new.digest] = self._kept[step]  # also if the write fails: it may have reached the disk
        self._write_pins([*(pin for pin in self._pins.entries if pin.folder != new.folder), new])
        return new.digest

    def _require_kept(self, step: int) -> None:
        if step not in self._kept:
            raise ResumeError(f"{self._directory.path} has no generation {step} to pin")

    def mark(self, folder: Path, into: Path | None, digests: Sequence[str]) -> None:
        """Write the marker of a folder that pins a generation. Raises SwapIOError.

        Args:
            folder: path of the folder, the same as in pin().
            into: directory in which the folder's files are written, if this directory is renamed to the folder later.
            digests: digests of all ranks' generations.
        """
        self._pins.mark(self.pin_of(folder), into or folder, digests)

    def finish(self, folder: Path) -> None:
        """Record in the list of pins that the marker of a checkpoint folder has been written. Raises SwapIOError."""
        self._write_pins(self._pins.entries)

    def keep_pins(self, folders: Collection[str]) -> None:
        """Unpin the generations of all folders except `folders`, because another rank has unpinned these generations.
        Raises SwapIOError."""
        if any(pin.folder not in folders for pin in self.pin_list):
            self.finish_recovery()
            self._write_pins([pin for pin in self._pins.entries if pin.folder in folders])

    def pins_found(self) -> list[str]:
        """Read the pins from the file, and return their folders. Call this before recover(). Raises ManifestError."""
        self._pins.load()
        return [pin.folder for pin in self._pins.entries]

    def is_over(self, pin: GenerationPin) -> bool:
        """Return whether a pin's folder no longer needs the pinned generation; see GenerationPins.over."""
        return self._pins.over(pin)

    def pin_of(self, folder: Path) -> GenerationPin:
        pin = self._pins.of(folder)
        if pin is None:
            raise AssertionError(f"{folder} pins nothing")
        return pin

    def unpin(self, folder: Path) -> bool:
        """Unpin a folder's generation durably, so that its copies may be overwritten.

        Return whether the folder pinned a generation.

        Raises:
            SwapIOError: the generation is still pinned, and the folder may have lost its marker. Try again.
        """
        self.finish_recovery()
        pin = self._pins.of(folder)
        if pin is None:
            return False
        self._pins.unmark(pin)
        self._write_pins(each for each in self._pins.entries if each is not pin)
        return True

    def mark_portable(self, folder: Path, name: str) -> None:
        """Record that a folder now has a portable copy in its subfolder `name`, and unpin the folder's generation.

        A folder that has lost its marker gets no new marker, because its other files may belong to another step.
        """
        pin = self.pin_of(folder)
        if self._pins.holds(pin):
            self._pins.mark(pin, folder, [], name)
        self.unpin(folder)

    def _write_pins(self, pins: Iterable[GenerationPin]) -> None:
        # Invariant: until the new pins are written, the generations of the old pins and of the new pins are both
        # protected.
        self._pins.write(pins)
        named = {pin.digest for pin in self._pins.entries}
        self._pinned = {digest: copies for digest, copies in self._pinned.items() if digest in named}


@dataclass(frozen=True)
class _PendingRecovery:
    """The part of recover() that finish_recovery() must still write to disk, without the removal of manifests.

    Attributes:
        pins: the pins that the run keeps.
        manifest: the bytes of the pinned manifest that the run resumes from; None if the run resumes from a kept
            generation.
        folder: the checkpoint folder that the run resumes from; "" if there is none.
    """

    pins: list[GenerationPin]
    manifest: bytes | None
    folder: str
