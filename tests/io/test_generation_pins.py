"""Pins: whatever is written, made, pinned, unpinned, killed and gone back to, a folder that looks resumable leads to
its values, and what nothing names can be written again."""

from __future__ import annotations

import errno
import logging
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from infinity import _native
from infinity.errors import ConfigError, InfinityError, ManifestError, PlanError, ResumeError, SwapIOError
from infinity.io import atomic_file
from infinity.io.directory import pinned_in
from infinity.io.generation_pins import (
    MARKER_NAME,
    PINS_NAME,
    GenerationPin,
    GenerationPins,
    PinMarker,
    begin_folder,
    digest_of,
    folder_path,
    read_marker,
    read_pins,
    write_marker,
)
from infinity.io.generations import Generations
from infinity.io.manifest import read_manifest
from infinity.io.store import Extent, SwapStore
from infinity.sizes import PAGE_BYTES
from tests.io.extents import ExtentMap
from tests.sampling import number

Values = tuple[int, ...]


class Killed(BaseException):
    pass


class Kept:
    """A store of three states, of which the last never changes, and its generations. A value fills a state's page.

    Attributes:
        known: the values of every generation that was made, by the digest of its manifest.
    """

    def __init__(self, root: Path, keep: int = 1, pins: int = 2) -> None:
        self.root, self._keep, self._pins = root, keep, pins
        root.mkdir(exist_ok=True)
        self.known: dict[str, Values] = {}
        self.step = 0
        self._memory = _native.Arena(64 << 10, huge_pages=False).view(0, 64 << 10)
        self.open("generations")
        for index, _ in enumerate(self.extents):
            self.write(index, index)
        self.make()

    def open(self, mode: Any, digest: str | None = None, step: int | None = None) -> None:
        laid = ExtentMap()
        copies = self._keep + self._pins + 1
        self.extents = [laid.add(name, "weight", PAGE_BYTES, copies=copies) for name in ("a", "b")]
        self.extents.append(laid.add("frozen", "weight", PAGE_BYTES))
        self.engine = _native.IOEngine()
        self.store = SwapStore([self.root / "swap"], laid.nbytes, self.engine, mode=mode)
        self.kept = Generations(self.store, self.extents, self._keep, self._pins)
        if mode == "resume":
            try:
                self.step = self.kept.recover(self._memory, digest=digest, step=step).step
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        self.engine.close()
        self.store.close()

    def again(self, digest: str | None = None, step: int | None = None) -> None:
        self.close()
        self.open("resume", digest, step)

    def write(self, index: int, value: int) -> None:
        self.kept.finish_recovery()
        extent, page = self.extents[index], self._memory[:PAGE_BYTES]
        np.frombuffer(page, np.int64)[:] = value
        copy = self.kept.copy_to_write(extent)
        self.store.write(extent, page, copy_index=copy).result()
        extent.turn_to(copy)

    def make(self) -> int:
        """Make a generation of the next step."""
        self.kept.finish_recovery()
        self.step += 1
        self.store.sync().result()
        manifest = self.kept.make(self.step, {}, {"salt": random.Random(len(self.known)).random()})
        self.known[digest_of(manifest.read_bytes())] = self.values
        return self.step

    def next(self, value: int) -> int:
        """Do a step that changes both states."""
        self.write(0, value)
        self.write(1, -value)
        return self.make()

    @property
    def values(self) -> Values:
        return tuple(self._read(extent, extent.newest_copy) for extent in self.extents)

    def _read(self, extent: Extent, copy: int) -> int:
        page = self._memory[:PAGE_BYTES]
        self.store.read(extent, page, copy_index=copy, verify=False).result()
        found = set(np.frombuffer(page, np.int64).tolist())
        assert len(found) == 1
        return int(found.pop())

    def folder(self, name: object) -> Path:
        return self.root / "out" / f"checkpoint-{name}"

    def pin(self, name: object, step: int | None = None) -> Path:
        folder = self.folder(name)
        self.kept.require_free_pin(folder)
        begin_folder(folder)
        self.kept.mark(folder, None, [self.kept.pin(self.step if step is None else step, folder)])
        self.kept.finish(folder)
        return folder

    def require_whole(self) -> None:
        """Each folder with a marker leads to the values of its generation."""
        pins = {pin.folder: pin for pin in read_pins(self.root / "swap")}
        for folder in self.root.glob("out/*"):
            marker = read_marker(folder)
            if marker is None:
                continue
            pin = pins[str(folder)]
            assert (marker.digest, marker.step) == (pin.digest, pin.step)
            manifest = read_manifest(self.root / "swap" / pin.manifest_name)
            found = tuple(
                self._read(extent, record.slot) for extent, record in zip(self.extents, manifest.extents, strict=True)
            )
            assert found == self.known[pin.digest], f"{folder} lost its values"


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    made = Kept(tmp_path)
    yield made
    made.close()


class Machine(RuleBasedStateMachine):
    """Random acts; some of them end in the middle, and the store is opened again."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="infinity-pins-"))
        self.count = 0

    @initialize(keep=st.integers(1, 2), pins=st.integers(1, 3))
    def begin(self, keep: int, pins: int) -> None:
        self.pins_max = pins
        self.kept = Kept(self.root, keep, pins)

    def teardown(self) -> None:
        self.kept.close()
        shutil.rmtree(self.root)

    def attempt(self, act: Callable[[], object], at: int | None) -> None:
        """Do it; or leave it before its act on small files number `at`, and open the store again."""
        if at is None:
            act()
            return
        left = at

        def count(moment: str, *_: Any) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed

        try:
            with atomic_file.observed(count):
                act()
        except Killed:
            self.kept.again()

    @rule(which=st.sampled_from([(0,), (1,), (0, 1)]))
    def train(self, which: tuple[int, ...]) -> None:
        self.count += 1
        for index in which:
            self.kept.write(index, 100 * self.count + index)
        self.kept.make()

    @rule(name=st.integers(0, 3), at=st.none() | st.integers(0, 24))
    def pin(self, name: int, at: int | None) -> None:
        folder = self.kept.folder(name)
        free = self.kept.kept.has_free_pin(folder)
        others = {pin.digest for pin in self.kept.kept.pin_list if pin.folder != str(folder)}
        assert free == (len(others) < self.pins_max)
        if free:
            self.attempt(lambda: self.kept.pin(name), at)
            return
        with pytest.raises(PlanError):
            self.kept.pin(name)

    @precondition(lambda self: self.kept.kept.pins)
    @rule(data=st.data(), at=st.none() | st.integers(0, 8))
    def unpin(self, data: st.DataObject, at: int | None) -> None:
        folder = data.draw(st.sampled_from(list(self.kept.kept.pins)))
        self.attempt(lambda: self.kept.kept.unpin(folder), at)

    @precondition(lambda self: self.kept.kept.pins)
    @rule(data=st.data())
    def vanish(self, data: st.DataObject) -> None:
        shutil.rmtree(data.draw(st.sampled_from(list(self.kept.kept.pins))), ignore_errors=True)

    @rule()
    def resume(self) -> None:
        before = self.kept.values
        newest = self.kept.kept.newest
        self.kept.again()
        assert self.kept.step == newest
        assert self.kept.values == before

    @precondition(lambda self: self.kept.kept.pins)
    @rule(data=st.data(), at=st.none() | st.integers(0, 8))
    def go_back(self, data: st.DataObject, at: int | None) -> None:
        pin = data.draw(st.sampled_from(self.kept.kept.pin_list))
        self.kept.again(pin.digest)
        assert self.kept.values == self.kept.known[pin.digest]
        self.attempt(self.kept.kept.finish_recovery, at)

    @invariant()
    def folders_lead_to_their_values(self) -> None:
        self.kept.require_whole()

    @invariant()
    def what_nothing_names_can_be_written(self) -> None:
        for extent in self.kept.extents[:2]:
            assert self.kept.kept.spare_copy(extent) is not None or extent.newest_copy not in self.kept.kept._named(
                extent
            )


# Not shrunk: each act goes to a disk, and what fails is short enough.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
Machine.TestCase.settings = settings(max_examples=number(25, 500), stateful_step_count=25, deadline=None, phases=PHASES)
test_random_acts_lose_no_folder = Machine.TestCase


def test_a_pinned_generation_outlives_keep_and_an_unpinned_one_gives_its_copies_back(kept: Kept) -> None:
    folder = kept.pin("x")
    expected = kept.values
    for value in range(1, 6):
        kept.next(value)
    kept.require_whole()
    assert kept.kept.pins == {folder: 1}
    named = [kept.kept._named(extent) for extent in kept.extents]
    assert [len(each) for each in named] == [2, 2, 1]
    assert kept.kept.unpin(folder)
    assert not kept.kept.unpin(folder)
    assert [len(kept.kept._named(extent)) for extent in kept.extents] == [1, 1, 1]
    assert pinned_in(kept.root / "swap") == []
    assert kept.values != expected


def test_two_folders_share_a_generation_which_goes_with_the_second(kept: Kept) -> None:
    one, other = kept.pin("one"), kept.pin("other")
    kept.next(1)
    third = kept.pin("third")
    kept.kept.unpin(one)
    kept.require_whole()
    assert kept.kept.pins == {other: 1, third: 2}
    kept.kept.unpin(other)
    assert len(pinned_in(kept.root / "swap")) == 1


def test_what_leads_to_something_is_durable_after_what_it_leads_to(kept: Kept) -> None:
    folder, acts = kept.folder("x"), list[str]()
    folder.mkdir(parents=True)

    def note(moment: str, path: Path, *_: Any) -> None:
        when, _, act = moment.partition(" ")
        if when == "end" and act not in ("create", "write"):
            acts.append(f"{act} {path.name.removesuffix(atomic_file.ASIDE).split('-')[0]}")

    with atomic_file.observed(note):
        kept.pin("x")
        written = len(acts)
        kept.kept.unpin(folder)
    aside = {name: [f"fsync {name}", f"rename {name}"] for name in ("pinned", PINS_NAME, MARKER_NAME)}
    manifest, pins = ([*aside[name], "fsync directory swap"] for name in ("pinned", PINS_NAME))
    marker = [*aside[MARKER_NAME], "fsync directory checkpoint"]
    assert acts[:written] == [*manifest, *pins, *marker, *pins]
    assert acts[written:] == [f"unlink {MARKER_NAME}", "fsync directory checkpoint", *pins, "unlink pinned"]


def failing(moment: str, name: str) -> Any:
    def fail(said: str, path: Path, *_: Any) -> None:
        if said == moment and path.name.startswith(name):
            raise OSError(errno.EIO, "no")

    return atomic_file.observed(fail)


def test_pins_that_could_not_be_written_leave_old_and_new_protected(kept: Kept) -> None:
    """After a failed fsync of the directory either may be on the disk."""
    first = kept.pin("x")
    kept.next(1)
    with (
        failing("begin fsync directory", "swap"),
        pytest.raises((SwapIOError, OSError)),
    ):
        kept.kept.unpin(first)
    assert len(kept.kept._named(kept.extents[0])) == 2, "it may still be pinned"
    kept.next(2)
    kept.again()
    kept.next(3)
    kept.require_whole()


def test_where_generations_name_all_copies_an_error_says_so_before_anything_is_written(kept: Kept) -> None:
    kept.pin("x")
    kept.next(1)
    kept.pin("y")
    kept.next(2)
    kept.kept._pinned["lost"] = [next(iter({0, 1, 2, 3} - kept.kept._named(extent)), 0) for extent in kept.extents]
    before = (kept.root / "swap" / "states.infinity-swap").read_bytes()
    with pytest.raises(
        PlanError, match="weight of unit 'a' has 4 copies .*name all of them: 3 are kept, pinned by .*x"
    ):
        kept.kept.finish_recovery()
    with pytest.raises(PlanError, match="Nothing was written"):
        kept.kept.copy_to_write(kept.extents[0])
    assert (kept.root / "swap" / "states.infinity-swap").read_bytes() == before
    del kept.kept._pinned["lost"]


def test_a_run_that_went_back_and_ended_before_it_made_a_generation_is_still_back(kept: Kept) -> None:
    older = kept.pin("older")
    expected = kept.values
    kept.next(1)
    newer = kept.pin("newer")
    kept.next(2)
    kept.again(next(pin.digest for pin in kept.kept.pin_list if pin.folder == str(older)))
    kept.write(0, 7)
    kept.again()
    assert (kept.step, kept.values) == (1, expected)
    assert kept.kept.pins == {older: 1, newer: 2}


def test_a_generation_that_is_not_there_cannot_be_pinned(kept: Kept) -> None:
    kept.next(1)
    with pytest.raises(ResumeError, match="no generation 1 to pin"):
        kept.pin("x", step=1)
    assert read_marker(kept.folder("x")) is None


def test_a_pinned_generation_whose_manifest_is_damaged_is_named_and_holds_no_copies(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    folder = kept.pin("x")
    kept.next(1)
    (manifest,) = pinned_in(kept.root / "swap")
    manifest.write_bytes(manifest.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING, "infinity"):
        kept.again()
    assert f"no run can resume from the checkpoint folder {folder}" in caplog.text
    kept.next(2)
    assert kept.kept.pins == {folder: 1}
    assert len(kept.kept._named(kept.extents[0])) == 1
    with pytest.raises(ResumeError, match="is damaged"):
        kept.again(kept.kept.pin_list[0].digest)
    kept.open("resume")
    kept.kept.unpin(folder)
    assert kept.kept.pins == {}


def test_a_marker_that_cannot_be_read_keeps_its_pin(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    folder = kept.pin("x")
    (folder / MARKER_NAME).write_text("{")
    with caplog.at_level(logging.WARNING, "infinity"):
        kept.again()
    kept.next(1)
    assert kept.kept.pins == {folder: 1}
    assert "stays pinned" in caplog.text


def test_the_file_of_the_pins_is_for_its_owner_alone(kept: Kept) -> None:
    kept.pin("x")
    assert (kept.root / "swap" / PINS_NAME).stat().st_mode & 0o777 == 0o600


def test_pins_of_another_run_are_refused(kept: Kept, tmp_path: Path) -> None:
    kept.pin("x")
    other = Kept(tmp_path / "other")
    shutil.copy(kept.root / "swap" / PINS_NAME, other.root / "swap" / PINS_NAME)
    with pytest.raises(ManifestError, match="belongs to run"):
        other.again()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"folder": "relative"}, "not an absolute path"),
        ({"step": -1}, "step"),
        ({"digest": "x"}, "digest"),
        ({"more": 1}, "more"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)
def test_pins_that_make_no_sense_are_refused(change: dict[str, Any], problem: str, kept: Kept) -> None:
    from infinity.io import document

    kept.pin("x")
    path = kept.root / "swap" / PINS_NAME
    value = document.read(path, "pins")
    path.write_bytes(b"".join(document.write("pins", value | {"pins": [value["pins"][0] | change]})))
    with pytest.raises(ManifestError, match=f"{PINS_NAME} has a wrong value: .*{problem}.*put an undamaged copy back"):
        read_pins(kept.root / "swap")


def test_a_folder_is_pinned_under_its_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    assert {folder_path(each) for each in ("real/x", tmp_path / "link" / "x", "./link/../real/x")} == {
        tmp_path / "real" / "x"
    }
    with pytest.raises(ConfigError, match="UTF-8"):
        folder_path("bad\udcff")


def test_the_marker_of_something_else_is_left_alone(tmp_path: Path) -> None:
    marker = PinMarker(run="other", step=3, digest="0" * 32, directories=[str(tmp_path)])
    write_marker(tmp_path, marker)
    pin = GenerationPin(folder=str(tmp_path), step=3, digest="0" * 32, finished=True)
    pins = GenerationPins([tmp_path], "mine")
    pins.unmark(pin)
    assert read_marker(tmp_path) == marker
    assert pins.over(pin), "the folder belongs to another run by now"


def test_a_marker_is_read_or_named(tmp_path: Path) -> None:
    folder, marker = tmp_path / "folder", PinMarker(run="r", step=1, digest="0" * 32, directories=["/a"])
    begin_folder(folder)
    assert read_marker(folder) is None
    write_marker(folder, marker)
    assert read_marker(folder) == marker
    assert read_marker(folder / MARKER_NAME) is None  # a file, and no folder
    for text, problem in ((b"\xff", "is damaged"), (b"{", "is damaged"), (b"[]", MARKER_NAME)):
        (folder / MARKER_NAME).write_bytes(text)
        with pytest.raises(ManifestError, match=problem):
            read_marker(folder)
    begin_folder(folder)
    assert not list(folder.iterdir())
    (folder / MARKER_NAME).mkdir()
    with pytest.raises(ManifestError, match="cannot be read"):
        read_marker(folder)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InfinityError, match="cannot make the checkpoint folder .*/file/folder: Not a directory"):
        begin_folder(tmp_path / "file" / "folder")


def test_a_marker_names_a_generation_for_each_of_its_own_number_of_ranks() -> None:
    alone = PinMarker(run="r", step=1, digest="0" * 32, directories=["/a"])
    several = alone.model_copy(update={"digests": ["0" * 32, "1" * 32]})
    assert [alone.digest_of(0, 1), alone.digest_of(0, 2)] == ["0" * 32, None]
    assert [several.digest_of(1, 2), several.digest_of(0, 1), several.digest_of(2, 3)] == ["1" * 32, None, None]


def test_comparing_pins_writes_nothing_where_all_ranks_have_those_that_stay(kept: Kept) -> None:
    """A resume removes the pins that it gives up only before a write."""
    folder = kept.pin("x")
    kept.next(1)
    (folder / MARKER_NAME).unlink()
    kept.again()
    before = sorted((path.name, path.stat().st_mtime_ns) for path in (kept.root / "swap").iterdir())
    kept.kept.keep_pins([pin.folder for pin in kept.kept.pin_list])
    assert sorted((path.name, path.stat().st_mtime_ns) for path in (kept.root / "swap").iterdir()) == before
