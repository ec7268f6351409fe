"""Gradients that come down from a device: in the right bits, in order, and nothing is let go too early."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from infinity import _native
from tests.native.runtime import Runtime
from tests.native.test_update import SEGMENTS, STATES, Bench, expected

__all__ = ["expected"]

NUMEL = 150_000
COMPUTE = 1  # the handle of a stream


def values(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(NUMEL).astype(np.float32)


def finish(future: _native.LandingFuture) -> _native.Failure | None:
    assert future.wait(60)
    return future.failure()


@pytest.fixture
def runtime() -> Runtime:
    return Runtime()


@pytest.fixture
def pool() -> Iterator[_native.ThreadPool]:
    with closing(_native.ThreadPool(2)) as pool:
        yield pool


@pytest.mark.parametrize("isa", _native.supported_isas())
def test_what_lands_is_what_the_functions_of_the_same_arithmetic_give(
    isa: str, runtime: Runtime, pool: _native.ThreadPool
) -> None:
    first, second = values(1), values(2)
    added, widened, copied = second.copy(), np.empty(2 * NUMEL, np.float32), np.empty_like(first)
    sums = [
        _native.sums_of_squares(first, "fp32", pool, isa),
        _native.land_gradient(added, "fp32", first, "fp32", add=True, pool=pool, isa=isa),
        _native.land_gradient(widened, "fp32", first, "bf16", add=False, pool=pool, isa=isa),
        _native.sums_of_squares(first, "fp32", pool, isa),
        _native.sums_of_squares(first, "fp16", pool, isa),
    ]
    wide = np.empty(2 * NUMEL, np.float32)
    pieces = [
        _native.LandingPiece(first, "fp32"),
        _native.LandingPiece(second, "fp32", source=first, add=True),
        _native.LandingPiece(wide, "fp32", source=first, source_dtype="bf16"),
        _native.LandingPiece(copied, "fp32", source=first),
        _native.LandingPiece(first, "fp16"),
    ]
    with closing(_native.Landings(runtime.gate(), pool, isa)) as landings:
        future = landings.land(0, pieces)
        assert finish(future) is None
    assert [np.array(each).tobytes() for each in future.sums] == [np.array(each).tobytes() for each in sums]
    assert second.tobytes() == added.tobytes()
    assert wide.tobytes() == widened.tobytes()
    assert copied.tobytes() == first.tobytes()
    assert [name for name, *_ in runtime.calls] == ["enter"]


def test_a_gradient_lands_once_its_event_is_reached(runtime: Runtime, pool: _native.ThreadPool) -> None:
    source, target = values(1), np.zeros(NUMEL, np.float32)
    runtime.launch(COMPUTE, lambda: target.__setitem__(slice(None), source))
    runtime.record(7, COMPUTE)
    with closing(_native.Landings(runtime.gate(), pool)) as landings:
        future = landings.land(7, [_native.LandingPiece(target, "fp32")])
        assert finish(future) is None
    assert future.sums == [_native.sums_of_squares(source, "fp32", pool)]
    assert threading.get_ident() not in runtime.threads


def test_landings_come_in_the_order_of_the_calls_of_each_thread(runtime: Runtime, pool: _native.ThreadPool) -> None:
    data = values(1)
    with closing(_native.Landings(runtime.gate(), pool)) as landings:
        futures: list[_native.LandingFuture] = []

        def land(first: int) -> None:
            for event in range(first, first + 20):
                runtime.record(event, COMPUTE)
                futures.append(landings.land(event, [_native.LandingPiece(data, "fp32")]))

        threads = [threading.Thread(target=land, args=(first,)) for first in (100, 200, 300)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for future in futures:
            assert finish(future) is None
    order = [event for name, event, _ in runtime.calls if name == "synchronize"]
    for first in (100, 200, 300):
        assert [event for event in order if first <= event < first + 100] == list(range(first, first + 20))


def test_closing_waits_for_all_that_was_given(runtime: Runtime, pool: _native.ThreadPool) -> None:
    release = threading.Event()
    runtime.synchronizing = lambda event: release.wait(60) and None
    landings = _native.Landings(runtime.gate(), pool)
    futures = [landings.land(event, [_native.LandingPiece(values(event), "fp32")]) for event in (1, 2, 3)]
    assert not futures[0].done()
    with pytest.raises(RuntimeError, match="not done"):
        _ = futures[0].sums
    closing_thread = threading.Thread(target=landings.close)
    closing_thread.start()
    assert not futures[0].done()
    release.set()
    closing_thread.join()
    assert all(future.done() for future in futures)
    assert [finish(future) for future in futures] == [None] * 3
    landings.close()
    with pytest.raises(ValueError, match="after close"):
        landings.land(0, [])


@pytest.mark.parametrize("call", [0, 1, 2, 3])
def test_an_error_of_the_gate_fails_that_landing_and_every_later_one(
    call: int, runtime: Runtime, pool: _native.ThreadPool
) -> None:
    runtime.refuse = {call: 700}
    source = values(1)
    with closing(_native.Landings(runtime.gate(), pool)) as landings:
        for event in range(1, 6):
            target = np.zeros(NUMEL, np.float32)
            future = landings.land(event, [_native.LandingPiece(target, "fp32", source=source, add=True)])
            failure = finish(future)
            if event < call:
                assert failure is None
                assert len(future.sums) == 1
            else:
                assert failure is not None
                assert (failure.kind, failure.errno, failure.path) == ("device", 0, "device 0")
                assert failure.cause == "the device's runtime returned error 700"
                assert not target.any()
                with pytest.raises(RuntimeError, match="error 700"):
                    _ = future.sums
    assert len(runtime.calls) == call + 1


def test_pieces_that_cannot_land_are_refused(runtime: Runtime, pool: _native.ThreadPool) -> None:
    data, other = values(1), values(2)
    with pytest.raises(ValueError, match="overlap"):
        _native.LandingPiece(data, "fp32", source=data, add=True)
    with pytest.raises(ValueError, match="adds nothing"):
        _native.LandingPiece(data, "fp32", add=True)
    with pytest.raises(ValueError, match="bytes are needed|are needed"):
        _native.LandingPiece(data[:10], "fp32", source=other)
    with pytest.raises(ValueError, match="whole number"):
        _native.LandingPiece(data.view(np.uint8)[:6], "fp32")
    with pytest.raises(TypeError, match="buffer"):
        _native.LandingPiece(None, "fp32")
    with closing(_native.Landings(runtime.gate(), pool)) as landings:
        with pytest.raises(ValueError, match="own dtype or in fp32"):
            landings.land(0, [_native.LandingPiece(data, "bf16", source=other[:10], source_dtype="fp16")])
        with pytest.raises(ValueError, match="added up in fp32"):
            landings.land(0, [_native.LandingPiece(data, "bf16", source=other[:10], add=True)])


def test_buffers_live_until_the_landing_is_done(runtime: Runtime, pool: _native.ThreadPool) -> None:
    source = values(1)
    with closing(_native.Landings(runtime.gate(), pool)) as landings:
        targets = [np.zeros(NUMEL, np.float32) for _ in range(8)]
        pieces = [_native.LandingPiece(target, "fp32", source=source.copy()) for target in targets]
        future = landings.land(0, pieces)
        del pieces, targets
        gc.collect()
        assert finish(future) is None
    assert future.sums == [_native.sums_of_squares(source, "fp32", pool)] * 8


def test_the_gate_and_its_callbacks_live_as_long_as_the_landings(pool: _native.ThreadPool) -> None:
    landings = _native.Landings(Runtime().gate(), pool)
    gc.collect()
    assert finish(landings.land(5, [_native.LandingPiece(values(1), "fp32")])) is None
    landings.close()


def test_an_update_and_a_write_follow_a_landing(expected: dict[str, bytes], runtime: Runtime, tmp_path: Path) -> None:
    """Gradients come down, are written and update the states, and nobody in Python waits in between."""
    bench = Bench(tmp_path, "io_uring", 8192, 2)
    streams = {name: bench.stream(name, "file") for name in STATES}
    gradients = bytes(bench.grad)
    bench.grad[:] = bytes(len(gradients))
    runtime.launch(COMPUTE, lambda: bench.grad.__setitem__(slice(None), gradients))
    runtime.record(7, COMPUTE)
    release = threading.Event()
    runtime.synchronizing = lambda event: release.wait(60) and None
    with closing(_native.Landings(runtime.gate(), bench.pool)) as landings:
        landing = landings.land(7, [_native.LandingPiece(bench.grad, "bf16")])
        write = bench.engine.write(bench.file, 6 << 20, bench.grad[:4096], after=landing)
        update = bench.pipeline.submit(
            numel=100_000,
            weight_dtype="bf16",
            master="split16",
            grad_dtype="bf16",
            segments=SEGMENTS,
            grad=bench.grad,
            after=[landing],
            **streams,
        )
        assert bench.pipeline.counters()["tiles"] == 0
        assert not write.done()
        release.set()
        assert update.wait(60)
        assert update.failure() is None
        assert write.wait(60)
    for name in STATES:
        assert bench.result(name, from_file=True) == expected[name], name
    page = bench.take(4096)
    assert bench.engine.read(bench.file, 6 << 20, page).wait(60)
    assert bytes(page) == gradients[:4096]
    bench.close()


def test_an_update_waits_for_all_its_inputs_and_lets_others_pass(
    expected: dict[str, bytes], runtime: Runtime, tmp_path: Path
) -> None:
    bench = Bench(tmp_path, "io_uring", 8192, 2)
    streams = {name: bench.stream(name, "file") for name in STATES}
    release = threading.Event()
    runtime.synchronizing = lambda event: release.wait(60) and None

    def submit(after: list[_native.IOFuture], *, arithmetic: bool) -> _native.UpdateFuture:
        return bench.pipeline.submit(
            numel=100_000,
            weight_dtype="bf16",
            master="split16",
            grad_dtype="bf16",
            segments=SEGMENTS,
            grad=bench.grad,
            after=after,
            arithmetic=arithmetic,
            **streams,
        )

    with closing(_native.Landings(runtime.gate(), bench.pool)) as landings:
        there = bench.engine.read(bench.file, bench.offsets["weight"], bench.take(4096))
        assert there.wait(60)
        held = submit([there, landings.land(7, [])], arithmetic=True)
        bench.pipeline.counters()  # the answer comes once the job is held
        other = submit([], arithmetic=False)
        assert other.wait(60)
        assert not held.computed.done()  # as it would be, had it entered before the other one
        release.set()
        assert held.wait(60)
        assert held.failure() is None
    for name in STATES:
        assert bench.result(name, from_file=True) == expected[name], name
    bench.close()


def test_an_update_that_waits_for_a_landing_can_be_taken_back(runtime: Runtime, tmp_path: Path) -> None:
    bench = Bench(tmp_path, "threads", 8192, 2)
    streams = {name: bench.stream(name, "file") for name in STATES}
    before = {name: bench.result(name, from_file=True) for name in STATES}
    release = threading.Event()
    runtime.synchronizing = lambda event: release.wait(60) and None
    with closing(_native.Landings(runtime.gate(), bench.pool)) as landings:
        landing = landings.land(7, [_native.LandingPiece(bench.grad, "bf16")])
        held = [
            bench.pipeline.submit(
                numel=100_000,
                weight_dtype="bf16",
                master="split16",
                grad_dtype="bf16",
                segments=SEGMENTS,
                grad=bench.grad,
                after=[landing],
                **streams,
            )
            for _ in range(3)
        ]
        assert bench.pipeline.withdraw([held[:1]]) == [True]
        bench.pipeline.cancel(held[1])
        assert [future.done() for future in held] == [True, True, False]
        bench.pipeline.close()
        release.set()
        for future in held:
            assert future.wait(60)
            failure = future.failure()
            assert failure is not None
            assert failure.kind == "canceled"
        assert finish(landing) is None
    assert {name: bench.result(name, from_file=True) for name in STATES} == before
    bench.close()
