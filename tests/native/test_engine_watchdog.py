"""A device that never answers: an error in time, memory that is never reused, and no hang at the end."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from infinity import _native
from tests.native.children import run_child
from tests.native.test_engine_requests import PAGE, engine_name, finish, noise, pages, succeed

__all__ = ["engine_name"]

DEADLINE_S = 0.1


def broken(engine_name: str, index: int = 0, repeat: int = 1) -> _native.IOEngine:
    """Loses `repeat` operations from `index` on."""
    faults = [_native.Fault(index, "lose", repeat=repeat)]
    return _native.IOEngine(
        engine_name, block_bytes=PAGE, queue_depth=4, threads=2, deadline_s=DEADLINE_S, faults=faults
    )


def test_a_lost_block_fails_every_request_with_device_and_depth(engine_name: str, tmp_path: Path) -> None:
    file = _native.File(str(tmp_path / "swap"), create=True)
    engine = broken(engine_name, index=1)
    futures = [engine.write(file, index * 8 * PAGE, noise(8 * PAGE)) for index in range(3)]
    failures = [finish(future) for future in futures]
    lost = failures[0]
    assert lost is not None
    assert (lost.kind, lost.errno, lost.path) == ("timeout", errno.ETIMEDOUT, file.path)
    assert "blocks in flight" in lost.message
    assert "queue depth 4" in lost.message
    assert engine_name in lost.message
    late = finish(engine.read(file, 0, pages(PAGE)))
    assert late is not None
    assert late.kind == "timeout"
    engine.close()


def test_closing_does_not_wait_for_a_device_that_was_given_up(engine_name: str, tmp_path: Path) -> None:
    file = _native.File(str(tmp_path / "swap"), create=True)
    engine = broken(engine_name)
    future = engine.write(file, 0, noise(PAGE))
    while engine.counters()["in_flight"] == 0:
        pass
    engine.close()  # before the deadline: it passes while closing
    failure = finish(future)
    assert failure is not None
    assert failure.kind == "timeout"


def test_a_slow_device_is_not_given_up_while_it_answers(engine_name: str, tmp_path: Path) -> None:
    """The deadline is a block's, not a request's: a long queue takes longer than it."""
    file = _native.File(str(tmp_path / "swap"), create=True)
    deadline_s, data = 0.8, noise(8 << 20)
    engine = _native.IOEngine(engine_name, block_bytes=PAGE, queue_depth=1, deadline_s=deadline_s)
    succeed(engine.write(file, 0, data))  # the first one also takes blocks of the disk
    began = time.monotonic()
    succeed(engine.write(file, 0, data))
    longer = 1 + int(1.25 * deadline_s / (time.monotonic() - began))
    for future in [engine.write(file, 0, data) for _ in range(longer)]:
        succeed(future)


def test_memory_that_a_lost_device_may_write_to_is_never_freed(engine_name: str, tmp_path: Path) -> None:
    run_child(
        """
        import gc
        file = _native.File(sys.argv[2], create=True)
        file.preallocate(1 << 20)
        engine = _native.IOEngine(sys.argv[3], deadline_s=0.1, faults=[_native.Fault(0, "lose")])
        arena = _native.Arena(1 << 20)
        address = arena.address
        future = engine.read(file, 0, arena.view(0, 1 << 20))
        assert future.wait(60) and future.failure().kind == "timeout"
        del arena, future
        engine.close()
        del engine
        gc.collect()
        low = f"{address:x}"
        spans = [line.split()[0].split("-") for line in open("/proc/self/maps")]
        assert any(int(a, 16) <= address < int(b, 16) for a, b in spans), "the arena was unmapped"
        """,
        str(tmp_path / "swap"),
        engine_name,
    )


def test_the_process_ends_although_the_device_never_answers(engine_name: str, tmp_path: Path) -> None:
    run_child(
        """
        file = _native.File(sys.argv[2], create=True)
        engine = _native.IOEngine(sys.argv[3], deadline_s=0.1, faults=[_native.Fault(0, "lose")])
        futures = [engine.write(file, 0, _native.Arena(4096).view(0, 4096)) for _ in range(3)]
        """,
        str(tmp_path / "swap"),
        engine_name,
    )


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="needs a second file system")
def test_another_device_goes_on(engine_name: str, tmp_path: Path) -> None:
    elsewhere = Path("/dev/shm") / f"infinity-test-{os.getpid()}"
    lost, fine = _native.File(str(tmp_path / "swap"), create=True), _native.File(str(elsewhere), create=True)
    try:
        engine = broken(engine_name)
        failure = finish(engine.write(lost, 0, noise(PAGE)))
        assert failure is not None
        assert failure.kind == "timeout"
        data, back = noise(PAGE), pages(PAGE)
        succeed(engine.write(fine, 0, data))
        succeed(engine.read(fine, 0, back))
        assert back == data
        assert finish(engine.write(lost, 0, noise(PAGE))) is not None
    finally:
        elsewhere.unlink()


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_deadline_must_be_a_positive_time(deadline_s: float) -> None:
    with pytest.raises(ValueError, match="deadline"):
        _native.IOEngine("auto", deadline_s=deadline_s)
