"""The tiled update: the same bits wherever the states are, errors named, nothing moved in vain."""

from __future__ import annotations

import errno
import functools
from pathlib import Path

import numpy as np
import pytest
import torch

from infinity import _native

NUMEL = 100_000
PADDED = 102_400  # whole pages in every state
STATES = ("weight", "residual", "exp_avg", "exp_avg_sq")
ITEM = {"weight": 2, "residual": 2, "exp_avg": 4, "exp_avg_sq": 4}


@functools.cache
def initial() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    weight, rest = np.empty(PADDED, np.uint16), np.empty(PADDED, np.int16)
    _native.encode_split16(rng.standard_normal(PADDED).astype(np.float32), weight, rest)
    values = {
        "weight": weight,
        "residual": rest,
        "exp_avg": rng.standard_normal(PADDED).astype(np.float32),
        "exp_avg_sq": rng.random(PADDED).astype(np.float32),
        "grad": torch.from_numpy(rng.standard_normal(PADDED)).bfloat16().view(torch.int16).numpy(),
    }
    return {name: value.view(np.uint8) for name, value in values.items()}


def segment(begin: int, end: int, **options: bool) -> _native.Segment:
    return _native.Segment(begin, end, lr=1e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=2, **options)


SEGMENTS = [segment(begin, end, grad_scale=0.5) for begin, end in ((0, 30_000), (30_016, 70_000), (80_000, NUMEL))]


class Bench:
    """States in an arena, in a file, or in both, and a pipeline over them."""

    def __init__(
        self, path: Path, engine: str, tile: int, threads: int, faults: list[_native.Fault] | None = None
    ) -> None:
        self.arena = _native.Arena(64 << 20, huge_pages=False)
        self.used = 0
        self.engine = _native.IOEngine(engine, block_bytes=64 << 10, queue_depth=8, faults=faults or [])
        self.file = _native.File(str(path / "states"), create=True)
        self.file.preallocate(8 << 20)
        self.pool = _native.ThreadPool(threads)
        nbytes = _native.UpdatePipeline.staging_tile_bytes(
            tile, weight_dtype="bf16", master="split16", moments="fp32", gradients=True
        )
        self.pipeline = _native.UpdatePipeline(
            self.engine, self.pool, self.take(3 * nbytes), tile, nbytes, ahead_tiles_max=1
        )
        self.values = initial()
        self.memory: dict[str, memoryview] = {}
        self.offsets = {name: index * (1 << 20) for index, name in enumerate(STATES)}
        self.grad = self.take(len(self.values["grad"]))
        self.grad[:] = self.values["grad"].tobytes()

    def take(self, nbytes: int) -> memoryview:
        view = self.arena.view(self.used, nbytes)
        self.used += -(-nbytes // 4096) * 4096
        return view

    def stream(self, name: str, where: str) -> _native.StateStream:
        view = self.take(len(self.values[name]))
        view[:] = self.values[name].tobytes()
        if where != "memory":
            future = self.engine.write(self.file, self.offsets[name], view)
            assert future.wait(60)
        if where == "file":
            return _native.StateStream(file=self.file, offset=self.offsets[name])
        self.memory[name] = view
        file = self.file if where == "both" else None
        return _native.StateStream(memory=view, file=file, offset=self.offsets[name])

    def submit(
        self,
        streams: dict[str, _native.StateStream],
        segments: list[_native.Segment],
        *,
        whole: bool = False,
        grad: _native.StateStream | None = None,
        tag: int = 0,
        ahead: _native.UpdateFuture | None = None,
    ) -> _native.UpdateFuture:
        return self.pipeline.submit(
            numel=NUMEL,
            weight_dtype="bf16",
            master="split16",
            grad_dtype="bf16",
            segments=segments,
            whole=whole,
            grad=self.grad if grad is None else grad,
            tag=tag,
            ahead=ahead,
            **streams,
        )

    def result(self, name: str, *, from_file: bool) -> bytes:
        if not from_file:
            return bytes(self.memory[name])[: NUMEL * ITEM[name]]
        view = self.take(len(self.values[name]))
        assert self.engine.read(self.file, self.offsets[name], view).wait(60)
        return bytes(view)[: NUMEL * ITEM[name]]

    def close(self) -> None:
        self.pipeline.close()
        self.engine.close()
        self.file.close()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    bench = Bench(tmp_path_factory.mktemp("expected"), "threads", 4096 * 32, 1)
    future = bench.submit({name: bench.stream(name, "memory") for name in STATES}, SEGMENTS)
    assert future.wait(60)
    assert future.failure() is None
    found = {name: bench.result(name, from_file=False) for name in STATES}
    bench.close()
    return found


@pytest.mark.covering
@pytest.mark.parametrize("engine", ["io_uring", "threads"])
@pytest.mark.parametrize("tile", [4096, 8192, 1 << 17])
@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("where", ["file", "both", "mixed"])
def test_wherever_the_states_are_the_bits_are_the_same(
    where: str, threads: int, tile: int, engine: str, expected: dict[str, bytes], tmp_path: Path
) -> None:
    bench = Bench(tmp_path, engine, tile, threads)
    mixed = dict(zip(STATES, ("both", "memory", "file", "file"), strict=True))
    places = {name: mixed[name] if where == "mixed" else where for name in STATES}
    future = bench.submit({name: bench.stream(name, place) for name, place in places.items()}, SEGMENTS)
    assert future.wait(60)
    assert future.failure() is None
    for name, place in places.items():
        if place != "memory":
            assert bench.result(name, from_file=True) == expected[name], name
        if place != "file":
            assert bench.result(name, from_file=False) == expected[name], name
    bench.close()


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("tile", [4096, 1 << 17])
@pytest.mark.parametrize("where", ["file", "both"])
def test_states_can_be_written_to_another_place_and_then_go_there_as_a_whole(
    where: str, tile: int, checksums: bool, expected: dict[str, bytes], tmp_path: Path
) -> None:
    """The states that were read stay unchanged. Elements that no segment touches are written, too. The checksums are
    those of the new place."""
    bench = Bench(tmp_path, "io_uring", tile, 2)
    if checksums:
        bench.file.keep_checksums(8 << 20)
    for name in STATES:
        bench.stream(name, where)
    there = 4 << 20
    streams = {
        name: _native.StateStream(
            memory=bench.memory.get(name),
            file=bench.file,
            offset=bench.offsets[name],
            write_offset=bench.offsets[name] + there,
        )
        for name in STATES
    }
    before = {name: bench.result(name, from_file=True) for name in STATES}
    written = written_bytes(bench)
    future = bench.submit(streams, [segment(0, 20_000, grad_scale=0.5)], whole=True)
    assert future.wait(60)
    assert future.failure() is None
    moved = written_bytes(bench) - written
    assert moved == sum(-(-NUMEL * ITEM[name] // 4096) * 4096 for name in STATES)
    assert {name: bench.result(name, from_file=True) for name in STATES} == before
    for name in STATES:
        bench.offsets[name] += there
    touched = 20_000
    for name in STATES:
        found = bench.result(name, from_file=True)
        assert found[: touched * ITEM[name]] == expected[name][: touched * ITEM[name]], name
        assert found[touched * ITEM[name] :] == before[name][touched * ITEM[name] :], name
    bench.close()


def written_bytes(bench: Bench) -> int:
    counters = bench.engine.counters()
    return counters["write_bytes_weights"] + counters["write_bytes_writeback"]


def test_jobs_are_done_in_order_and_flow_into_each_other(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "io_uring", 4096, 2)
    streams = {name: bench.stream(name, "file") for name in STATES}
    for future in [bench.submit(streams, SEGMENTS) for _ in range(5)]:
        assert future.wait(60)
        assert future.failure() is None
    got = {name: bench.result(name, from_file=True) for name in STATES}
    bench.close()
    alone = Bench(tmp_path, "threads", 1 << 17, 1)
    streams = {name: alone.stream(name, "memory") for name in STATES}
    for _ in range(5):
        assert alone.submit(streams, SEGMENTS).wait(60)
    assert got == {name: alone.result(name, from_file=False) for name in STATES}
    alone.close()


def test_tiles_with_nothing_to_do_are_not_moved(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "threads", 4096, 1)
    streams = {name: bench.stream(name, "file") for name in STATES}
    before = written_bytes(bench)
    future = bench.submit(streams, [segment(0, 50_000, skip=True), segment(60_000, 60_100)])
    assert future.wait(60)
    assert bench.engine.counters()["read_bytes_states"] == 4096 * 12
    assert written_bytes(bench) - before == 4096 * 12
    assert bench.pipeline.counters()["tiles"] == 1
    bench.close()


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_a_fault_at_every_operation_fails_the_job_and_not_the_next(engine: str, tmp_path: Path) -> None:
    setup = 22  # block operations of the four streams' first writes
    failed = 0
    for index in range(setup, setup + 40):
        bench = Bench(tmp_path, engine, 8192, 2, [_native.Fault(index, "error", errno.EIO)])
        streams = {name: bench.stream(name, "file") for name in STATES}
        first, second = bench.submit(streams, SEGMENTS), bench.submit(streams, SEGMENTS)
        assert first.wait(60)
        assert second.wait(60)
        failures = [f for f in (first.failure(), second.failure()) if f is not None]
        for failure in failures:
            assert failure.errno == errno.EIO
            assert failure.path.endswith("states")
            assert failure.nbytes > 0
        failed += len(failures)
        third = bench.submit(streams, SEGMENTS)
        assert third.wait(60)
        assert third.failure() is None
        bench.close()
    assert failed == 40


def test_inconsistent_jobs_are_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "threads", 4096, 1)
    streams = {name: bench.stream(name, "memory") for name in STATES}
    with pytest.raises(ValueError, match="sorted and disjoint"):
        bench.submit(streams, [segment(10, 20), segment(0, 5)])
    with pytest.raises(ValueError, match="ends after the buffers"):
        bench.submit(streams, [segment(0, NUMEL + 1)])
    with pytest.raises(ValueError, match="neither in memory nor in a file"):
        bench.submit(streams | {"exp_avg": _native.StateStream()}, SEGMENTS)
    with pytest.raises(ValueError, match="multiple of 4096"):
        _native.UpdatePipeline(bench.engine, bench.pool, bench.take(1 << 20), 1000, 4096)
    with pytest.raises(ValueError, match="two tiles beside"):
        _native.UpdatePipeline(bench.engine, bench.pool, bench.take(1 << 16), 4096, 1 << 16)
    bench.close()


def test_damage_in_one_page_leaves_the_others_what_they_were(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "threads", 8192, 2)
    bench.file.keep_checksums(8 << 20)
    streams = {name: bench.stream(name, "file") for name in STATES}
    damaged = bench.offsets["exp_avg"] + 5 * 4096
    with open(tmp_path / "states", "r+b") as file:
        file.seek(damaged + 100)
        file.write(b"damage")
    future = bench.submit(streams, [segment(0, NUMEL)])
    assert future.wait(60)
    failure = future.failure()
    assert failure is not None
    assert (failure.kind, failure.offset) == ("corruption", damaged)
    # The tile with the damage was updated in part and never written: what its file holds is still what it should hold.
    page = bench.take(4096)
    for name in STATES:
        for at in range(0, len(bench.values[name]), 4096):
            read = bench.engine.read(bench.file, bench.offsets[name] + at, page)
            assert read.wait(60)
            assert (read.failure() is not None) == (bench.offsets[name] + at == damaged), (name, at)
    bench.close()


def test_moments_no_rule_uses_are_not_moved(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "threads", 8192, 1)
    streams = {name: bench.stream(name, "file") for name in STATES}
    for rule, beta1, moved in (("adamw", 0.9, 4 + 8), ("lion", 0.9, 4 + 4), ("sgd", 0.9, 4 + 4), ("sgd", 0.0, 4)):
        before = bench.engine.counters()["read_bytes_states"]
        future = bench.submit(streams, [_native.Segment(0, NUMEL, rule=rule, lr=0.0, beta1=beta1, eps=1e-8, step=2)])
        assert future.wait(60)
        assert future.failure() is None
        pages = {2: 49, 4: 98}  # of NUMEL elements
        expected = {12: 2 * pages[2] + 2 * pages[4], 8: 2 * pages[2] + pages[4], 4: 2 * pages[2]}[moved]
        assert bench.engine.counters()["read_bytes_states"] - before == expected * 4096
    bench.close()


def test_a_job_whose_tiles_do_not_fit_the_staging_is_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "threads", 4096, 1)
    streams = {name: bench.stream(name, "file") for name in STATES}
    bench.pipeline.close()
    bench.pipeline = _native.UpdatePipeline(bench.engine, bench.pool, bench.take(1 << 16), 4096, 8192)
    with pytest.raises(ValueError, match="does not fit into the staging"):
        bench.submit(streams, SEGMENTS)
    bench.close()


def test_closing_with_jobs_queued_cancels_them(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "threads", 4096, 1)
    streams = {name: bench.stream(name, "file") for name in STATES}
    futures = [bench.submit(streams, SEGMENTS) for _ in range(20)]
    bench.pipeline.close()
    for future in futures:
        assert future.wait(60)
        failure = future.failure()
        assert failure is None or failure.errno == errno.ECANCELED
    bench.close()


@pytest.mark.parametrize("tile", [4096, 1 << 17])
@pytest.mark.parametrize("write", [True, False])
def test_new_weights_go_elsewhere_and_the_old_ones_stay(
    write: bool, tile: int, expected: dict[str, bytes], tmp_path: Path
) -> None:
    """To other memory, to the file alone, or to both; what no segment touches goes there, too."""
    for to_memory in (True, False):
        if not (write or to_memory):
            continue
        bench = Bench(tmp_path, "io_uring", tile, 2)
        bench.file.keep_checksums(8 << 20)
        streams = {name: bench.stream(name, "file") for name in STATES}
        source = bench.take(len(bench.values["weight"]))
        source[:] = bench.values["weight"].tobytes()
        target = bench.take(len(source)) if to_memory else None
        streams["weight"] = _native.StateStream(
            memory=target, source=source, file=bench.file if write else None, offset=bench.offsets["weight"]
        )
        future = bench.submit(streams, SEGMENTS, whole=True)
        assert future.wait(60)
        assert future.failure() is None
        assert bytes(source) == bench.values["weight"].tobytes()
        if target is not None:
            assert bytes(target)[: len(expected["weight"])] == expected["weight"]
        for name in STATES[0 if write else 1 :]:
            assert bench.result(name, from_file=True) == expected[name], name
        bench.close()


@pytest.mark.parametrize("tile", [4096, 1 << 17])
def test_gradients_are_read_from_the_file(tile: int, expected: dict[str, bytes], tmp_path: Path) -> None:
    bench = Bench(tmp_path, "io_uring", tile, 2)
    bench.file.keep_checksums(8 << 20)
    assert bench.engine.write(bench.file, 6 << 20, bench.grad).wait(60)
    streams = {name: bench.stream(name, "file") for name in STATES}
    written = written_bytes(bench)
    future = bench.submit(streams, SEGMENTS, grad=_native.StateStream(file=bench.file, offset=6 << 20))
    assert future.wait(60)
    assert future.failure() is None
    moved = written_bytes(bench) - written
    assert moved <= sum(-(-NUMEL * ITEM[name] // 4096) * 4096 for name in STATES), "gradients are only read"
    for name in STATES:
        assert bench.result(name, from_file=True) == expected[name], name
    bench.close()


def test_a_job_is_taken_back_before_it_begins_or_stopped_after(tmp_path: Path) -> None:
    """The first job touches nothing. The second one leaves the states that it read unchanged, if it writes to another
    place."""
    bench = Bench(tmp_path, "threads", 4096, 1)
    for name in STATES:
        bench.stream(name, "file")
    there = 4 << 20
    streams = {
        name: _native.StateStream(file=bench.file, offset=bench.offsets[name], write_offset=bench.offsets[name] + there)
        for name in STATES
    }
    before = {name: bench.result(name, from_file=True) for name in STATES}
    first, *_, second = [bench.submit(streams, SEGMENTS, whole=True) for _ in range(8)]
    assert bench.pipeline.withdraw([[second]]) == [True]
    failure = second.failure()
    assert failure is not None
    assert failure.kind == "canceled"
    bench.pipeline.cancel(first)
    assert first.wait(60)
    assert bench.pipeline.withdraw([[first], [second]]) == [False, False]
    bench.pipeline.cancel(first)
    assert {name: bench.result(name, from_file=True) for name in STATES} == before
    third = bench.submit(streams, SEGMENTS, whole=True)
    assert third.wait(60)
    assert third.failure() is None
    bench.close()


def test_it_is_computed_before_it_is_written(expected: dict[str, bytes], tmp_path: Path) -> None:
    bench = Bench(tmp_path, "io_uring", 8192, 2)
    streams = {name: bench.stream(name, "memory" if name == "weight" else "file") for name in STATES}
    bench.pipeline.close()
    lost = _native.Fault(0, "lose", repeat=1 << 20, operation="write")
    engine = _native.IOEngine("io_uring", block_bytes=64 << 10, deadline_s=2.0, faults=[lost])
    nbytes = _native.UpdatePipeline.staging_tile_bytes(8192, weight_dtype="bf16", master="split16", moments="fp32")
    tiles = -(-NUMEL // 8192)
    bench.pipeline = _native.UpdatePipeline(engine, bench.pool, bench.take(tiles * nbytes), 8192, nbytes)
    future = bench.submit(streams, SEGMENTS)
    assert future.computed.wait(60)
    assert future.computed.failure() is None
    assert bench.result("weight", from_file=False) == expected["weight"]
    assert future.wait(60)
    failure = future.failure()
    assert failure is not None
    assert failure.kind == "timeout"
    assert future.computed.failure() is None, "what is known does not change"
    bench.close()
    engine.close()


def test_what_fails_before_it_is_computed_says_so_once_nothing_is_in_flight(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "threads", 4096, 1, [_native.Fault(20, "error", 5, operation="read")])
    streams = {name: bench.stream(name, "file") for name in STATES}
    future = bench.submit(streams, SEGMENTS)
    assert future.computed.wait(60)
    assert future.wait(60)
    for each in (future, future.computed):
        failure = each.failure()
        assert failure is not None
        assert failure.errno == 5
    bench.close()
