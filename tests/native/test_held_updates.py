"""Updates whose inputs are not there yet: they begin when all of these are, and fail as these do."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity import _native
from tests.native.test_update import SEGMENTS, STATES, Bench, expected

__all__ = ["expected"]

GRADIENTS = 6 << 20  # where they are in the file


def submit(
    bench: Bench, streams: dict[str, _native.StateStream], after: list[_native.IOFuture], speculative: bool = False
) -> _native.UpdateFuture:
    return bench.pipeline.submit(
        numel=100_000,
        weight_dtype="bf16",
        master="split16",
        grad_dtype="bf16",
        segments=SEGMENTS,
        grad=bench.grad,
        speculative=speculative,
        after=after,
        **streams,
    )


@pytest.mark.parametrize("speculative", [True, False])
def test_an_update_waits_for_its_gradients(speculative: bool, expected: dict[str, bytes], tmp_path: Path) -> None:
    bench = Bench(tmp_path, "io_uring", 8192, 2)
    assert bench.engine.write(bench.file, GRADIENTS, bench.grad).wait(60)
    streams = {name: bench.stream(name, "file") for name in STATES}
    bench.grad[:] = bytes(len(bench.grad))
    half = len(bench.grad) // 8192 * 4096
    other = bench.take(16 << 20)  # on the same device, so that the gradients come late
    late = bench.engine.write(bench.file, 8 << 20, other)
    first = bench.engine.read(bench.file, GRADIENTS, bench.grad[:half], after=late)
    rest = bench.engine.read(bench.file, GRADIENTS + half, bench.grad[half:], after=first)
    future = submit(bench, streams, [first, rest], speculative)
    assert future.wait(60)
    assert future.failure() is None
    for name in STATES:
        assert bench.result(name, from_file=True) == expected[name], name
    bench.close()


def test_an_update_fails_with_its_gradients_and_touches_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "io_uring", 8192, 2)
    streams = {name: bench.stream(name, "file") for name in STATES}
    before = {name: bench.result(name, from_file=True) for name in STATES}
    beyond = bench.engine.read(bench.file, 1 << 40, bench.grad[:4096])  # the file is not so long
    future = submit(bench, streams, [beyond])
    assert future.wait(60)
    cause, failure = beyond.failure(), future.failure()
    assert cause is not None
    assert failure is not None
    assert failure.message == cause.message
    assert {name: bench.result(name, from_file=True) for name in STATES} == before
    bench.close()


def test_none_is_no_input(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "threads", 8192, 1)
    streams = {name: bench.stream(name, "memory") for name in STATES}
    with pytest.raises((ValueError, TypeError)):
        submit(bench, streams, [None])  # type: ignore[list-item]
    bench.close()
