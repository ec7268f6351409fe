"""While a trace is on every request and every tile is recorded, or counted; off, nothing is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from infinity import _native
from infinity.io.events import IO_CLASSES, OPERATIONS, take
from tests.native.test_engine_requests import noise, pages, succeed
from tests.native.test_update import NUMEL, STATES, Bench, segment

NBYTES = 1 << 20


@pytest.fixture(params=["auto", "threads"])
def engine(request: pytest.FixtureRequest) -> Iterator[_native.IOEngine]:
    opened = _native.IOEngine(request.param, block_bytes=64 << 10)
    yield opened
    opened.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[_native.File]:
    opened = _native.File(str(tmp_path / "swap"), create=True)
    opened.preallocate(4 * NBYTES)
    yield opened
    opened.close()


def test_a_request_is_one_event_with_what_it_was_and_when(engine: _native.IOEngine, file: _native.File) -> None:
    engine.trace(True)
    succeed(engine.write(file, NBYTES, noise(NBYTES), "states"))
    succeed(engine.read(file, NBYTES, pages(NBYTES), "weights"))
    succeed(engine.sync(file))
    recorded = take(engine)
    assert recorded.dropped == 0
    events = recorded.events
    assert [OPERATIONS[event["operation"]] for event in events] == ["write", "read", "sync"]
    assert [IO_CLASSES[event["io_class"]] for event in events[:2]] == ["states", "weights"]
    assert events["offset"].tolist() == [NBYTES, NBYTES, 0]
    assert events["nbytes"].tolist() == [NBYTES, NBYTES, 0]
    assert not events["failed"].any()
    assert (events["begin_ns"] <= events["start_ns"]).all()
    assert (events["start_ns"] <= events["end_ns"]).all()
    assert (events["end_ns"][:-1] <= events["begin_ns"][1:]).all()


def test_the_bytes_of_the_events_are_those_the_engine_counts(engine: _native.IOEngine, file: _native.File) -> None:
    succeed(engine.write(file, 0, noise(4 * NBYTES)))
    before = engine.counters()
    engine.trace(True)
    futures = [engine.read(file, index << 16, pages((index % 3 + 1) << 14)) for index in range(40)]
    for future in futures:
        succeed(future)
    counted = engine.counters()["read_bytes_weights"] - before["read_bytes_weights"]
    assert take(engine).events["nbytes"].sum() == counted


def test_off_nothing_is_recorded_and_what_was_recorded_stays_until_taken(
    engine: _native.IOEngine, file: _native.File
) -> None:
    succeed(engine.write(file, 0, noise(NBYTES)))
    assert len(take(engine).events) == 0
    engine.trace(True)
    succeed(engine.write(file, 0, noise(NBYTES)))
    engine.trace(False)
    succeed(engine.write(file, 0, noise(NBYTES)))
    assert len(take(engine).events) == 1
    assert len(take(engine).events) == 0


def test_what_does_not_fit_is_counted(engine: _native.IOEngine, file: _native.File) -> None:
    engine.trace(True, events_max=3)
    for _ in range(5):
        succeed(engine.write(file, 0, noise(4096)))
    recorded = take(engine)
    assert (len(recorded.events), recorded.dropped) == (3, 2)


def test_a_failed_request_says_so_and_moved_nothing(file: _native.File) -> None:
    engine = _native.IOEngine("threads", faults=[_native.Fault(0, "error", 5)])
    engine.trace(True)
    future = engine.write(file, 0, noise(NBYTES))
    future.wait()
    event = take(engine).events[0]
    assert event["failed"]
    assert event["nbytes"] == 0
    engine.close()


def test_tiles_and_their_transfers_carry_the_tag_of_their_job(tmp_path: Path) -> None:
    tile = 8192
    bench = Bench(tmp_path, "auto", tile, 2)
    streams = {name: bench.stream(name, "file") for name in STATES}
    bench.engine.trace(True)
    bench.pipeline.trace(True)
    succeed(bench.submit(streams, [segment(0, NUMEL)], tag=(7 << 40) + 3))
    tiles, requests = take(bench.pipeline).events, take(bench.engine).events
    assert set(tiles["tag"].tolist()) == {(7 << 40) + 3}
    assert set(requests["tag"].tolist()) == {(7 << 40) + 3}
    assert tiles["first"].tolist() == list(range(0, NUMEL, tile))
    assert tiles["numel"].sum() == NUMEL
    assert (tiles["begin_ns"] < tiles["end_ns"]).all()
    assert (tiles["end_ns"] - tiles["begin_ns"]).sum() == bench.pipeline.counters()["adam_ns"]
    bench.close()
