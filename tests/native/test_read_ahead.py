"""Held jobs: what is read before the decision is used after it, in the same bits, and is in nobody's way."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity import _native
from tests.native.test_update import NUMEL, SEGMENTS, STATES, Bench, expected, segment

__all__ = ["expected"]


def read_ahead(bench: Bench, streams: dict[str, _native.StateStream]) -> _native.UpdateFuture:
    return bench.pipeline.read_ahead(numel=NUMEL, weight_dtype="bf16", master="split16", **streams)


def decide(
    bench: Bench,
    streams: dict[str, _native.StateStream],
    ahead: _native.UpdateFuture,
    segments: list[_native.Segment],
    grad: _native.StateStream | None = None,
) -> _native.UpdateFuture:
    return bench.submit(streams, segments, grad=grad, ahead=ahead)


def wait_until_read(bench: Bench, before: int, tile: int, names: tuple[str, ...]) -> None:
    """Until a job has read ahead its share of the staging, which is one tile."""
    item = {"weight": 2, "residual": 2, "exp_avg": 4, "exp_avg_sq": 4}
    wanted = sum(-(-min(tile, NUMEL) * item[name] // 4096) * 4096 for name in names)
    while bench.engine.counters()["read_bytes_states"] - before < wanted:
        pass


@pytest.mark.parametrize("tile", [4096, 1 << 17])
@pytest.mark.parametrize("names", [STATES, STATES[1:], STATES[2:3]])
@pytest.mark.parametrize("wait", [True, False])
def test_what_is_read_ahead_ends_in_the_same_bits_and_is_read_once(
    wait: bool, names: tuple[str, ...], tile: int, expected: dict[str, bytes], tmp_path: Path
) -> None:
    bench = Bench(tmp_path, "io_uring", tile, 2)
    bench.file.keep_checksums(8 << 20)
    assert bench.pipeline.ahead_tiles_max == 1
    streams = {name: bench.stream(name, "file") for name in STATES}
    before = bench.engine.counters()["read_bytes_states"]
    ahead = read_ahead(bench, {name: streams[name] for name in names})
    if wait:
        wait_until_read(bench, before, tile, names)
    future = decide(bench, streams, ahead, SEGMENTS)
    assert future.wait(60)
    assert ahead.done()
    assert ahead.failure() is None
    assert future.failure() is None
    if wait:
        assert bench.pipeline.counters()["ahead"] == 1
    for name in STATES:
        assert bench.result(name, from_file=True) == expected[name], name
    bench.close()


def test_the_gradients_come_with_the_decision(expected: dict[str, bytes], tmp_path: Path) -> None:
    bench = Bench(tmp_path, "io_uring", 8192, 2)
    assert bench.engine.write(bench.file, 6 << 20, bench.grad).wait(60)
    streams = {name: bench.stream(name, "file") for name in STATES}
    before = bench.engine.counters()["read_bytes_states"]
    ahead = read_ahead(bench, streams)
    wait_until_read(bench, before, 8192, STATES)
    future = decide(bench, streams, ahead, SEGMENTS, _native.StateStream(file=bench.file, offset=6 << 20))
    assert future.wait(60)
    assert future.failure() is None
    assert bench.pipeline.counters()["ahead"] == 1
    for name in STATES:
        assert bench.result(name, from_file=True) == expected[name], name
    bench.close()


def test_what_is_in_memory_when_it_is_decided_is_taken_from_there(expected: dict[str, bytes], tmp_path: Path) -> None:
    bench = Bench(tmp_path, "io_uring", 8192, 2)
    streams = {name: bench.stream(name, "file") for name in STATES}
    before = bench.engine.counters()["read_bytes_states"]
    ahead = read_ahead(bench, streams)
    wait_until_read(bench, before, 8192, STATES)
    fetched = bench.take(len(bench.values["weight"]))
    fetched[:] = bench.values["weight"].tobytes()
    streams["weight"] = _native.StateStream(fetched, bench.file, bench.offsets["weight"])
    assert decide(bench, streams, ahead, SEGMENTS).wait(60)
    assert bench.pipeline.counters()["ahead"] == 1
    assert bytes(fetched)[: len(expected["weight"])] == expected["weight"]
    for name in STATES:
        assert bench.result(name, from_file=True) == expected[name], name
    bench.close()


def test_tiles_that_nothing_is_done_to_are_dropped(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "io_uring", 4096, 2)
    streams = {name: bench.stream(name, "file") for name in STATES}
    for wanted in ([segment(50_016, 60_000)], []):
        before = bench.engine.counters()["read_bytes_states"]
        ahead = read_ahead(bench, streams)
        wait_until_read(bench, before, 4096, STATES)
        future = decide(bench, streams, ahead, wanted)
        assert future.wait(60)
        assert future.failure() is None
    assert bench.pipeline.counters()["ahead"] == 0
    again = bench.submit(streams, SEGMENTS)
    assert again.wait(60)
    assert again.failure() is None
    bench.close()


def test_jobs_that_read_ahead_are_in_nobodys_way(expected: dict[str, bytes], tmp_path: Path) -> None:
    """The others are done meanwhile; what was taken back has touched nothing."""
    bench = Bench(tmp_path, "io_uring", 4096, 2)
    streams = {name: bench.stream(name, "file") for name in STATES}
    aside = {name: _native.StateStream(file=bench.file, offset=(4 << 20) + bench.offsets[name]) for name in STATES}
    ahead = [read_ahead(bench, aside) for _ in range(3)]
    future = bench.submit(streams, SEGMENTS)
    assert future.wait(60)
    assert future.failure() is None
    assert not any(each.done() for each in ahead)
    assert bench.pipeline.withdraw([[ahead[1]]]) == [True]
    bench.pipeline.cancel(ahead[0])
    for each in ahead[:2]:
        failure = each.failure()
        assert failure is not None
        assert failure.kind == "canceled"
    for name in STATES:
        assert bench.result(name, from_file=True) == expected[name], name
    bench.close()
    failure = ahead[2].failure()
    assert failure is not None
    assert failure.kind == "canceled"


@pytest.mark.parametrize("wait", [True, False])
def test_a_read_that_failed_ahead_fails_the_job_that_takes_it_over(wait: bool, tmp_path: Path) -> None:
    good = Bench(tmp_path, "threads", 8192, 1)
    streams = {name: good.stream(name, "file") for name in STATES}
    good.pipeline.close()
    engine = _native.IOEngine("threads", faults=[_native.Fault(0, "error", 5)])
    nbytes = 3 * _native.UpdatePipeline.staging_tile_bytes(8192, weight_dtype="bf16", master="split16", moments="fp32")
    pipeline = _native.UpdatePipeline(engine, good.pool, good.take(nbytes), 8192, nbytes // 3, ahead_tiles_max=1)
    good.pipeline = pipeline
    ahead = read_ahead(good, streams)
    if wait:
        assert ahead.wait(60)
        assert ahead.failure() is not None
    future = decide(good, streams, ahead, SEGMENTS)
    assert future.wait(60)
    failure = future.failure()
    assert failure is not None
    assert failure.errno == 5
    again = good.submit(streams, SEGMENTS)
    assert again.wait(60)
    assert again.failure() is None
    good.close()
    engine.close()


def test_a_job_of_another_form_cannot_be_taken_over(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "threads", 8192, 1)
    streams = {name: bench.stream(name, "file") for name in STATES}
    ahead = bench.pipeline.read_ahead(
        numel=NUMEL - 1, weight_dtype="bf16", master="split16", residual=streams["residual"]
    )
    with pytest.raises(ValueError, match="another form"):
        decide(bench, streams, ahead, SEGMENTS)
    assert bench.pipeline.withdraw([[ahead]]) == [True]
    with pytest.raises(ValueError, match="does not read ahead"):
        decide(bench, streams, ahead, SEGMENTS)
    with pytest.raises(ValueError, match="cannot be read ahead"):
        read_ahead(bench, {"exp_avg": bench.stream("exp_avg", "both")})
    bench.close()


def test_lent_memory_is_staging_until_it_is_reclaimed(expected: dict[str, bytes], tmp_path: Path) -> None:
    tile = 4096
    bench = Bench(tmp_path, "io_uring", tile, 2)
    streams = {name: bench.stream(name, "file") for name in STATES}
    nbytes = _native.UpdatePipeline.staging_tile_bytes(
        tile, weight_dtype="bf16", master="split16", moments="fp32", gradients=True
    )
    first, second = bench.take(4 * nbytes + 4096), bench.take(2 * nbytes)
    bench.pipeline.lend(first)
    bench.pipeline.lend(second)
    assert bench.pipeline.ahead_tiles_max == 1 + 4 + 2
    with pytest.raises(ValueError, match="lent before"):
        bench.pipeline.lend(first)
    before = bench.engine.counters()["read_bytes_states"]
    ahead = read_ahead(bench, streams)
    while bench.engine.counters()["read_bytes_states"] - before < 7 * tile * 12:
        pass
    future = decide(bench, streams, ahead, SEGMENTS)
    assert bench.pipeline.reclaim(first), "while the update is under way"
    assert bench.pipeline.ahead_tiles_max == 1 + 2
    first[:] = b"\xa5" * first.nbytes
    assert future.wait(60)
    assert future.failure() is None
    assert bench.pipeline.counters()["ahead"] == 7
    for name in STATES:
        assert bench.result(name, from_file=True) == expected[name], name
    assert bench.submit(streams, SEGMENTS).wait(60)
    assert bytes(first) == b"\xa5" * first.nbytes
    with pytest.raises(ValueError, match="not lent"):
        bench.pipeline.reclaim(first)
    assert bench.pipeline.reclaim(second)
    assert bench.pipeline.ahead_tiles_max == 1
    bench.close()


def test_memory_that_a_lost_device_may_use_is_not_given_back(tmp_path: Path) -> None:
    good = Bench(tmp_path, "io_uring", 8192, 1)
    streams = {name: good.stream(name, "file") for name in STATES}
    good.pipeline.close()
    lost = _native.Fault(0, "lose", repeat=1 << 20)
    engine = _native.IOEngine("io_uring", deadline_s=1.0, faults=[lost])
    nbytes = _native.UpdatePipeline.staging_tile_bytes(8192, weight_dtype="bf16", master="split16", moments="fp32")
    good.pipeline = _native.UpdatePipeline(engine, good.pool, good.take(2 * nbytes), 8192, nbytes)
    lent = good.take(2 * nbytes)
    good.pipeline.lend(lent)
    ahead = read_ahead(good, streams)
    assert ahead.wait(60)
    assert not good.pipeline.reclaim(lent)
    good.close()
    engine.close()
