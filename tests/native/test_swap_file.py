"""A swap file over several files: where each byte lies, and that damage is found wherever it happened."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from infinity import _native
from tests.native.test_engine_requests import PAGE, engine_name, finish, noise, pages, succeed

__all__ = ["engine_name"]

STRIPE = 4 * PAGE
NBYTES = 64 * STRIPE


def members(tmp_path: Path, count: int) -> list[_native.File]:
    return [_native.File(str(tmp_path / f"member{index}"), create=True) for index in range(count)]


# ------------------------------------------------------------------------------------------------------------ striping


@pytest.mark.parametrize("shares", [[1, 1], [3, 1], [5, 2, 1]])
@pytest.mark.parametrize("block_bytes", [PAGE, 3 * PAGE, 1 << 20])
def test_a_striped_file_holds_every_byte_once(
    engine_name: str, tmp_path: Path, shares: list[int], block_bytes: int
) -> None:
    parts = members(tmp_path, len(shares))
    file = _native.File.striped(parts, shares, STRIPE)
    file.preallocate(NBYTES)
    engine = _native.IOEngine(engine_name, block_bytes=block_bytes, threads=2)
    data, back = noise(NBYTES), pages(NBYTES)
    succeed(engine.write(file, 0, data))
    for at, nbytes in ((0, NBYTES), (PAGE, 3 * STRIPE), (5 * STRIPE - PAGE, 2 * PAGE), (NBYTES - PAGE, PAGE)):
        succeed(engine.read(file, at, back[:nbytes]))
        assert back[:nbytes] == data[at : at + nbytes], (at, nbytes)
    on_disk = [np.frombuffer(Path(part.path).read_bytes(), np.uint8).reshape(-1, STRIPE) for part in parts]
    stripes = {stripe.tobytes() for rows in on_disk for stripe in rows}
    assert stripes == {data[at : at + STRIPE].tobytes() for at in range(0, NBYTES, STRIPE)}


def test_stripes_lie_in_proportion_to_the_shares_in_any_longer_range(tmp_path: Path) -> None:
    file = _native.File.striped(members(tmp_path, 3), [5, 2, 1], STRIPE)
    for stripes in (8, 16, 80, 803):
        held = [file.member_bytes(index, stripes * STRIPE) // STRIPE for index in range(3)]
        assert sum(held) == stripes
        assert all(abs(part - stripes * share / 8) <= 1 for part, share in zip(held, (5, 2, 1), strict=True))


@pytest.mark.parametrize(
    ("shares", "stripe_bytes", "message"),
    [([1], STRIPE, "each with a share"), ([1, 0], STRIPE, "share"), ([1, 1], 5000, "4 KiB"), ([1, 1], 0, "4 KiB")],
)
def test_a_layout_that_cannot_work_is_refused(
    tmp_path: Path, shares: list[int], stripe_bytes: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _native.File.striped(members(tmp_path, 2), shares, stripe_bytes)


def test_a_full_member_gives_the_space_of_all_back(tmp_path: Path) -> None:
    parts = members(tmp_path, 2)
    file = _native.File.striped(parts, [1000, 1], STRIPE)
    with pytest.raises(OSError, match="member0") as caught:
        file.preallocate(1 << 55)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert [Path(part.path).stat().st_blocks for part in parts] == [0, 0]


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="needs a second file system")
def test_two_devices_have_a_queue_each_and_one_future(engine_name: str, tmp_path: Path) -> None:
    elsewhere = Path("/dev/shm") / f"infinity-test-{os.getpid()}"
    parts = [_native.File(str(tmp_path / "here"), create=True), _native.File(str(elsewhere), create=True)]
    try:
        file = _native.File.striped(parts, [1, 1], STRIPE)
        file.preallocate(NBYTES)
        file.keep_checksums(NBYTES)
        engine = _native.IOEngine(engine_name, block_bytes=2 * PAGE, queue_depth=2, threads=2)
        data, back = noise(NBYTES), pages(NBYTES)
        succeed(engine.write(file, 0, data))
        for at in range(0, NBYTES, 3 * PAGE):
            nbytes = min(3 * PAGE, NBYTES - at)
            succeed(engine.read(file, at, back[at : at + nbytes]))
        assert back == data
        counters = engine.counters()
        assert counters["read_bytes_weights"] == counters["write_bytes_weights"] == NBYTES
        os.truncate(elsewhere, 0)  # one of the two fails: the request fails, the other half does no harm
        failure = finish(engine.read(file, 0, back))
        assert failure is not None
        assert failure.path == str(elsewhere)
    finally:
        elsewhere.unlink()


# ----------------------------------------------------------------------------------------------------------- checksums


@pytest.fixture
def checked(tmp_path: Path) -> _native.File:
    file = _native.File(str(tmp_path / "swap"), create=True)
    file.preallocate(NBYTES)
    file.keep_checksums(NBYTES)
    return file


@pytest.mark.parametrize("nbytes", [1, 512, PAGE])
@pytest.mark.parametrize("page", [0, 7, NBYTES // PAGE - 1])
def test_damage_on_the_disk_is_found_and_named(engine_name: str, checked: _native.File, page: int, nbytes: int) -> None:
    engine = _native.IOEngine(engine_name, block_bytes=4 * PAGE)
    data, back = noise(NBYTES), pages(NBYTES)
    succeed(engine.write(checked, 0, data))
    with open(checked.path, "r+b") as raw:
        raw.seek(page * PAGE + PAGE - nbytes)
        old = raw.read(nbytes)
        raw.seek(page * PAGE + PAGE - nbytes)
        raw.write(bytes(255 - byte for byte in old))
        raw.flush()
        os.fsync(raw.fileno())
    failure = finish(engine.read(checked, 0, back))
    assert failure is not None
    assert (failure.kind, failure.offset, failure.nbytes) == ("corruption", page * PAGE, PAGE)
    assert checked.path in failure.message
    others = NBYTES // PAGE - 1 - page
    if others:
        succeed(engine.read(checked, (page + 1) * PAGE, back[: others * PAGE]))
    succeed(engine.write(checked, page * PAGE, data[page * PAGE : (page + 1) * PAGE]))
    succeed(engine.read(checked, 0, back))
    assert back == data


def test_what_was_never_written_must_read_as_zeros(engine_name: str, checked: _native.File) -> None:
    engine = _native.IOEngine(engine_name)
    back = noise(NBYTES)
    succeed(engine.read(checked, 0, back))
    assert not np.frombuffer(back, np.uint8).any()
    Path(checked.path).write_bytes(b"\0" * (3 * PAGE) + b"x" + b"\0" * (NBYTES - 3 * PAGE - 1))
    failure = finish(engine.read(checked, 0, back))
    assert failure is not None
    assert (failure.kind, failure.offset) == ("corruption", 3 * PAGE)


@pytest.mark.parametrize("kind", ["flip", "stale", "misdirect"])
@pytest.mark.parametrize("when", ["write", "read"])
def test_a_device_that_lies_is_found_out(engine_name: str, tmp_path: Path, kind: str, when: str) -> None:
    blocks = 4
    nbytes = blocks * 2 * PAGE
    for index in range(blocks):
        file = _native.File(str(tmp_path / f"{index}"), create=True)
        file.preallocate(2 * nbytes)
        file.keep_checksums(2 * nbytes)
        fault = _native.Fault(index + (0 if when == "write" else blocks), kind)  # type: ignore[arg-type]
        engine = _native.IOEngine(engine_name, block_bytes=2 * PAGE, queue_depth=1, threads=1, faults=[fault])
        data, back = noise(nbytes), pages(nbytes)
        succeed(engine.write(file, 0, data))
        failure = finish(engine.read(file, 0, back))
        overwritten = kind == "misdirect" and when == "write" and index == 0  # its place is written right afterwards
        assert failure is not None
        assert failure.kind == "corruption"
        assert overwritten or failure.offset // (2 * PAGE) in (index, index - 1)
        file.close()


def test_requests_beyond_the_checksums_are_refused(engine_name: str, checked: _native.File) -> None:
    with pytest.raises(ValueError, match="a file cannot have offset"):
        _native.IOEngine(engine_name).write(checked, NBYTES - PAGE, pages(2 * PAGE))


def test_checksummed_pages_are_moved_whole_through_the_page_cache_too(engine_name: str, tmp_path: Path) -> None:
    file = _native.File(str(tmp_path / "swap"), create=True, direct=False)
    file.keep_checksums(NBYTES)
    engine = _native.IOEngine(engine_name)
    with pytest.raises(ValueError, match="4 KiB"):
        engine.write(file, 0, bytes(100))
    data, back = noise(PAGE), pages(PAGE)
    succeed(engine.write(file, PAGE, data))
    succeed(engine.read(file, PAGE, back))
    assert back == data
