"""Each kind of fault at each operation of a small run: the right bytes, or a failure that names the block."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from infinity import _native
from tests.native.test_engine_requests import PAGE, RETRIES_MAX, engine_name, file, finish, noise, pages, succeed

__all__ = ["engine_name", "file"]

BLOCK = 2 * PAGE
REQUEST = 3 * BLOCK
OPERATIONS = 12  # two writes and two reads of three blocks each

pytestmark = pytest.mark.parametrize("queue_depth", [1, 4])


class Run:
    """Two writes, then two reads of the same bytes, on an engine with these faults."""

    def __init__(self, engine_name: str, file: _native.File, queue_depth: int, *faults: _native.Fault) -> None:
        self.file = file
        self.engine = _native.IOEngine(
            engine_name, block_bytes=BLOCK, queue_depth=queue_depth, threads=2, faults=list(faults)
        )
        self.data = [noise(REQUEST, seed) for seed in range(2)]
        self.back = [pages(REQUEST) for _ in range(2)]
        self.sources = [bytes(view) for view in self.data]
        starts = [0, REQUEST]
        writes = [self.engine.write(file, at, view, "states") for at, view in zip(starts, self.data, strict=True)]
        self.failures = [finish(future) for future in writes]
        reads = [self.engine.read(file, at, view) for at, view in zip(starts, self.back, strict=True)]
        self.failures += [finish(future) for future in reads]
        self.counters = self.engine.counters()

    def failed(self) -> list[int]:
        """Which of the four requests failed."""
        return [index for index, failure in enumerate(self.failures) if failure is not None]

    def check_names(self, index: int, error: int) -> None:
        """Check that the failure of request `index` names operation, path, a block of the request, and errno."""
        failure = self.failures[index]
        assert failure is not None
        start = index % 2 * REQUEST
        assert (failure.operation, failure.path) == ("write" if index < 2 else "read", self.file.path)
        assert (failure.errno, failure.nbytes) == (error, BLOCK)
        assert failure.offset in range(start, start + REQUEST, BLOCK)
        for part in (failure.operation, self.file.path, str(failure.offset), str(BLOCK), os.strerror(error)):
            assert part in failure.message


@pytest.mark.covering
@pytest.mark.parametrize("index", range(OPERATIONS))
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.ENODEV, errno.EINVAL, errno.ENOMEM])
def test_an_error_fails_its_request_alone_and_the_next_attempt_works(
    engine_name: str, file: _native.File, queue_depth: int, error: int, index: int
) -> None:
    os.truncate(file.path, 2 * REQUEST)  # so that a read after a failed write finds the file long enough
    run = Run(engine_name, file, queue_depth, _native.Fault(index, "error", error))
    (failed,) = run.failed() or pytest.fail("the fault was lost")
    run.check_names(failed, error)
    assert [bytes(view) for view in run.data] == run.sources  # a failed write leaves its source to write elsewhere
    succeed(run.engine.write(file, failed % 2 * REQUEST, run.data[failed % 2]))
    succeed(run.engine.read(file, failed % 2 * REQUEST, run.back[failed % 2]))
    assert run.back == run.data


@pytest.mark.covering
@pytest.mark.parametrize("index", range(OPERATIONS))
@pytest.mark.parametrize("error", [errno.EINTR, errno.EAGAIN])
def test_an_interrupted_block_is_tried_again(
    engine_name: str, file: _native.File, queue_depth: int, error: int, index: int
) -> None:
    run = Run(engine_name, file, queue_depth, _native.Fault(index, "error", error))
    assert run.failed() == []
    assert run.back == run.data
    assert (run.counters["retries"], run.counters["operations"]) == (1, OPERATIONS + 1)


@pytest.mark.covering
@pytest.mark.parametrize("index", range(OPERATIONS))
def test_a_short_transfer_goes_on_from_where_it_stopped(
    engine_name: str, file: _native.File, queue_depth: int, index: int
) -> None:
    run = Run(engine_name, file, queue_depth, _native.Fault(index, "cut"))
    assert run.failed() == []
    assert run.back == run.data
    assert (run.counters["short_transfers"], run.counters["operations"]) == (1, OPERATIONS + 1)
    assert run.counters["read_bytes_weights"] == run.counters["write_bytes_states"] == 2 * REQUEST


def test_transfers_that_are_all_short_arrive_in_full(engine_name: str, file: _native.File, queue_depth: int) -> None:
    run = Run(engine_name, file, queue_depth, _native.Fault(0, "cut", repeat=1000))
    assert run.failed() == []
    assert run.back == run.data
    assert run.counters["short_transfers"] == OPERATIONS


@pytest.mark.parametrize("error", [errno.EINTR, errno.EAGAIN])
def test_trying_again_has_an_end(engine_name: str, file: _native.File, queue_depth: int, error: int) -> None:
    run = Run(engine_name, file, queue_depth, _native.Fault(0, "error", error, repeat=100_000))
    assert run.failed() == [0, 1, 2, 3]
    for index in range(4):
        run.check_names(index, error)
    most = OPERATIONS * RETRIES_MAX
    assert RETRIES_MAX <= run.counters["retries"] <= most


@pytest.mark.parametrize(("repeat", "outcome"), [(RETRIES_MAX, []), (RETRIES_MAX + 1, [0])])
def test_a_block_is_tried_again_exactly_as_often_as_promised(
    engine_name: str, tmp_path: Path, queue_depth: int, repeat: int, outcome: list[int]
) -> None:
    if queue_depth > 1:
        pytest.skip("only one block at a time meets all the faults")
    file = _native.File(str(tmp_path / "swap"), create=True)
    os.truncate(file.path, 2 * REQUEST)
    run = Run(engine_name, file, queue_depth, _native.Fault(0, "error", errno.EAGAIN, repeat=repeat))
    assert run.failed() == outcome
    assert run.counters["retries"] == RETRIES_MAX


def test_many_faults_of_many_kinds_leave_no_wrong_byte(engine_name: str, file: _native.File, queue_depth: int) -> None:
    kinds = [("cut", 0), ("error", errno.EINTR), ("delay", 0), ("error", errno.EAGAIN)]
    faults = (_native.Fault(index, *kinds[index % len(kinds)]) for index in range(24))
    run = Run(engine_name, file, queue_depth, *faults)
    assert run.failed() == []
    assert run.back == run.data
