"""Scratch files have no name, grow as far as they must, and compare what is read with what was written."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infinity import _native
from infinity.errors import SwapCorruptionError, SwapIOError
from infinity.io import scratch
from infinity.io.scratch import ScratchFiles
from infinity.io.store import SwapStore

PAGE = 4096


@pytest.fixture
def memory() -> Any:
    return _native.Arena(1 << 20, huge_pages=False).view(0, 1 << 20)


def opened(paths: list[Path], faults: Any = ()) -> SwapStore:
    engine = _native.IOEngine("auto", faults=list(faults))
    return SwapStore(paths, PAGE, engine)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SwapStore]:
    made = opened([tmp_path / "a", tmp_path / "b"])
    yield made
    made.engine.close()
    made.close()


def files(store: SwapStore) -> ScratchFiles:
    return ScratchFiles(store, "activations", "activations")


def test_what_is_written_is_read_and_no_name_is_left(store: SwapStore, memory: Any) -> None:
    made, names = files(store), [sorted(os.listdir(each.path)) for each in store.directories]
    places = [made.take(256 << 10) for _ in range(3)]
    for index, place in enumerate(places):
        memory[: 256 << 10] = bytes([index + 1]) * (256 << 10)
        made.write(place, memory[: 256 << 10], after=None).result()
    assert [sorted(os.listdir(each.path)) for each in store.directories] == names
    for index, place in enumerate(places):
        made.read(place, memory[: 256 << 10]).result()
        assert bytes(memory[: 256 << 10]) == bytes([index + 1]) * (256 << 10)
    made.close()


def test_places_are_used_again_before_the_files_grow(store: SwapStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_SEGMENT_BYTES_MIN", 1 << 20)
    made = files(store)
    places = [made.take(1 << 20) for _ in range(2)]
    assert len(made._segments) == 2
    places[0].lease.release()
    assert made.take(1 << 20).file is places[0].file
    assert made.take(5 << 20).lease.nbytes == 5 << 20  # more than a segment usually has
    made.close()


def test_a_full_disk_is_named(store: SwapStore, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Full:
        def __init__(self, path: str, **options: Any) -> None:
            Path(path).touch()

        @staticmethod
        def striped(*given: Any) -> Full:
            return Full(str(store.directories[0].path / "striped"))

        def preallocate(self, nbytes: int) -> None:
            asked.append(nbytes)
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            pass

    monkeypatch.setattr(scratch._native, "File", Full)
    with pytest.raises(SwapIOError, match=r"reserving 1.00 MiB of activations failed.*No space left") as caught:
        files(store).take(PAGE)
    assert all(str(directory.path) in str(caught.value) for directory in store.directories)
    assert asked == [64 << 20, 1 << 20]  # at last only as much as is needed


def test_a_flipped_bit_is_found(tmp_path: Path, memory: Any) -> None:
    store = opened([tmp_path / "a"], [_native.Fault(0, "flip", operation="read")])
    made = files(store)
    place = made.take(PAGE)
    made.write(place, memory[:PAGE], after=None).result()
    with pytest.raises(SwapCorruptionError, match="activations"):
        made.read(place, memory[:PAGE]).result()
    made.close()
    store.engine.close()
    store.close()
