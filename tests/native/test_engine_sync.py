"""fdatasync through the engine: it reaches the system, its failure is told, and it is never tried again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infinity import _native

ENGINES = ["io_uring", "threads"]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_what_was_written_can_be_synced(engine: str, tmp_path: Path) -> None:
    opened = _native.IOEngine(engine)
    file = _native.File(str(tmp_path / "file"), create=True)
    file.preallocate(1 << 20)
    view = _native.Arena(1 << 20).view(0, 1 << 20)
    opened.write(file, 0, view).wait()
    future = opened.sync(file)
    assert future.wait(10)
    assert future.failure() is None
    assert opened.counters()["write_bytes_weights"] == 1 << 20
    opened.close()


def test_every_member_is_synced(engine: str, tmp_path: Path) -> None:
    """A fault in any of the three shows: none is left out."""
    for index in range(4):
        opened = _native.IOEngine(engine, faults=[_native.Fault(index, "error", errno=5, operation="sync")])
        members = [_native.File(str(tmp_path / f"file{member}"), create=True) for member in range(3)]
        file = _native.File.striped(members, [1, 2, 1], 4096)
        future = opened.sync(file)
        assert future.wait(10)
        failure = future.failure()
        assert (failure is None) == (index == 3)
        if failure is not None:
            assert (failure.operation, failure.errno, failure.path) == (
                "fdatasync",
                5,
                str(tmp_path / f"file{index}"),
            )
        opened.close()


def test_the_system_is_asked(engine: str, tmp_path: Path) -> None:
    """A pipe cannot be synced: EINVAL comes from the system."""
    os.mkfifo(tmp_path / "pipe")
    opened = _native.IOEngine(engine)
    future = opened.sync(_native.File(str(tmp_path / "pipe"), direct=False))
    assert future.wait(10)
    failure = future.failure()
    assert failure is not None
    assert failure.errno == 22
    opened.close()


@pytest.mark.parametrize("errno", [4, 5, 11, 28])
def test_a_failed_sync_is_not_tried_again(errno: int, engine: str, tmp_path: Path) -> None:
    """Also after EINTR and EAGAIN, which a transfer would survive."""
    opened = _native.IOEngine(engine, faults=[_native.Fault(0, "error", errno=errno, operation="sync")])
    file = _native.File(str(tmp_path / "file"), create=True)
    future = opened.sync(file)
    assert future.wait(10)
    failure = future.failure()
    assert failure is not None
    assert failure.errno == errno
    assert opened.counters()["operations"] == 1
    opened.close()


def test_a_sync_that_never_ends_is_given_up(tmp_path: Path) -> None:
    opened = _native.IOEngine("threads", deadline_s=0.2, faults=[_native.Fault(0, "lose", operation="sync")])
    future = opened.sync(_native.File(str(tmp_path / "file"), create=True))
    assert future.wait(10)
    failure = future.failure()
    assert failure is not None
    assert failure.kind == "timeout"
    opened.close()


def test_the_sums_of_blocks_change_with_any_page(tmp_path: Path) -> None:
    file = _native.File(str(tmp_path / "file"), create=True)
    file.keep_checksums(1 << 20)
    view = _native.Arena(1 << 20).view(0, 1 << 20)
    assert len(file.block_sums(0, 1 << 20)) == 4 * 8
    before = file.block_sums(4096, 300 << 10)
    assert len(before) == 2 * 8
    for page in range(1, 76):
        view[page * 4096 + 17] = 1
        file.remember(page * 4096, view[page * 4096 : (page + 1) * 4096])
        after = file.block_sums(4096, 300 << 10)
        block = 0 if page <= 64 else 1
        assert after[block * 8 : block * 8 + 8] != before[block * 8 : block * 8 + 8]
        assert after[(1 - block) * 8 : (2 - block) * 8] == before[(1 - block) * 8 : (2 - block) * 8]
        before = after
    with pytest.raises(ValueError, match="whole pages"):
        file.block_sums(0, 1 << 21)
    with pytest.raises(ValueError, match="whole pages"):
        file.remember(100, view[:4096])
