"""Files and the engine: every byte arrives, or a failure names what did not, on io_uring and on threads alike."""

from __future__ import annotations

import errno
import gc
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from infinity import _native
from tests.native.children import REFUSE, run_child

PAGE = 4096
RETRIES_MAX = 16  # IoEngine::kRetriesMax


@pytest.fixture(params=["io_uring", "threads"])
def engine_name(request: pytest.FixtureRequest) -> str:
    if request.param == "io_uring" and _native.IOEngine("auto").name != "io_uring":
        pytest.skip(_native.IOEngine("auto").reason)
    return str(request.param)


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[_native.File]:
    opened = _native.File(str(tmp_path / "swap"), create=True, direct=request.param)
    if opened.direct != request.param:
        pytest.skip(f"no direct I/O on {tmp_path}")
    yield opened
    opened.close()


def pages(nbytes: int) -> memoryview:
    """Aligned, zeroed memory."""
    return _native.Arena(nbytes, huge_pages=False).view(0, nbytes)


def noise(nbytes: int, seed: int = 0) -> memoryview:
    """Aligned memory in which no two blocks are alike."""
    view = pages(nbytes)
    np.frombuffer(view, np.uint8)[:] = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return view


def finish(future: _native.IOFuture) -> _native.Failure | None:
    assert future.wait(120)
    return future.failure()


def succeed(future: _native.IOFuture) -> None:
    failure = finish(future)
    assert failure is None, failure and failure.message


# ---------------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("block_bytes", [PAGE, 64 * 1024, 1 << 20])
@pytest.mark.parametrize("nbytes", [PAGE, 3 * PAGE, (1 << 20) + PAGE, 5 << 20])
def test_what_was_written_is_read_back(engine_name: str, file: _native.File, nbytes: int, block_bytes: int) -> None:
    engine = _native.IOEngine(engine_name, block_bytes=block_bytes, queue_depth=8, threads=2)
    data, back, offset = noise(nbytes), pages(nbytes), 7 * PAGE
    succeed(engine.write(file, offset, data))
    succeed(engine.read(file, offset, back))
    assert back == data
    assert Path(file.path).read_bytes()[offset:] == bytes(data)
    blocks = -(-nbytes // block_bytes)
    counters = engine.counters()
    assert (counters["operations"], counters["retries"]) == (2 * blocks, 0)
    assert counters["read_bytes_weights"] == counters["write_bytes_weights"] == nbytes


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE + 1, 1_000_001])
def test_buffered_files_take_any_size_and_offset(engine_name: str, tmp_path: Path, nbytes: int) -> None:
    file = _native.File(str(tmp_path / "swap"), create=True, direct=False)
    engine = _native.IOEngine(engine_name, block_bytes=PAGE)
    data, back = bytes(noise(nbytes)), bytearray(nbytes)
    succeed(engine.write(file, 13, data))
    succeed(engine.read(file, 13, back))
    assert back == data
    assert Path(file.path).stat().st_size == 13 + nbytes


@pytest.mark.parametrize("queue_depth", [1, 4, 64])
def test_many_requests_of_all_classes_share_the_queue(engine_name: str, file: _native.File, queue_depth: int) -> None:
    engine = _native.IOEngine(engine_name, block_bytes=PAGE, queue_depth=queue_depth, threads=3)
    classes = ["weights", "activations", "states", "writeback"]
    sizes = [(1 + index * 7 % 5) * PAGE for index in range(96)]
    offsets = [sum(sizes[:index]) for index in range(96)]
    data = [noise(nbytes, seed) for seed, nbytes in enumerate(sizes)]
    back = [pages(nbytes) for nbytes in sizes]
    writes = [engine.write(file, at, view, classes[at % 4]) for at, view in zip(offsets, data, strict=True)]
    for future in writes:
        succeed(future)
    reads = [engine.read(file, at, view, classes[at % 4]) for at, view in zip(offsets, back, strict=True)]
    for future in reads:
        succeed(future)
    assert back == data
    counters = engine.counters()
    assert sum(counters[f"read_bytes_{name}"] for name in classes) == sum(sizes)
    assert counters["busy_ns"] > 0


@pytest.mark.parametrize("waiting", ["activations", "states"])
def test_no_class_waits_for_the_others_to_run_dry(engine_name: str, tmp_path: Path, waiting: str) -> None:
    """Which request an operation served is seen by failing that operation: one of the first few is of `waiting`."""
    file = _native.File(str(tmp_path / "swap"), create=True)
    classes = ["weights", "activations", "states", "writeback"]
    bulk = pages(512 * PAGE)
    served = None
    for index in range(1, 200):
        engine = _native.IOEngine(
            engine_name, block_bytes=PAGE, queue_depth=1, faults=[_native.Fault(index, "error", errno.EIO)]
        )
        futures = {name: engine.write(file, 0, bulk, name) for name in classes}
        failed = next(name for name in classes if finish(futures[name]) is not None)
        if failed == waiting:
            served = index
            break
    assert served is not None


# ---------------------------------------------------------------------------------------------------- requests refused


def test_misaligned_direct_requests_are_refused(engine_name: str, tmp_path: Path) -> None:
    file = _native.File(str(tmp_path / "swap"), create=True)
    if not file.direct:
        pytest.skip(f"no direct I/O on {tmp_path}")
    engine = _native.IOEngine(engine_name)
    view = pages(3 * PAGE)
    for offset, buffer in [(512, view), (0, view[512 : 512 + PAGE]), (0, view[:1000]), (0, view[: PAGE + 512])]:
        with pytest.raises(ValueError, match="4 KiB"):
            engine.write(file, offset, buffer)
        with pytest.raises(ValueError, match="4 KiB"):
            engine.read(file, offset, buffer)
    assert engine.counters()["operations"] == 0


def test_buffers_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    file, engine = _native.File(str(tmp_path / "swap"), create=True, direct=False), _native.IOEngine("threads")
    with pytest.raises(TypeError, match="into must be a buffer"):
        engine.read(file, 0, 5)
    with pytest.raises(ValueError, match="into is read-only"):
        engine.read(file, 0, b"abcd")
    with pytest.raises(ValueError, match="data is not contiguous"):
        engine.write(file, 0, np.zeros(8, np.uint8)[::2])
    with pytest.raises(ValueError, match="at least one byte"):
        engine.write(file, 0, b"")
    with pytest.raises(ValueError, match="unknown I/O class 'gradients'"):
        engine.write(file, 0, b"abcd", "gradients")


@pytest.mark.parametrize("offset", [(1 << 64) - 1, (1 << 64) - PAGE, (1 << 63) - 2])
def test_an_offset_no_file_has_is_refused(engine_name: str, tmp_path: Path, offset: int) -> None:
    """-1 means 'the current position' to the kernel: such a request must not get there."""
    file, engine = _native.File(str(tmp_path / "swap"), create=True, direct=False), _native.IOEngine(engine_name)
    with pytest.raises(ValueError, match="offset"):
        engine.write(file, offset, b"abcd")
    assert Path(file.path).stat().st_size == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engine": "libaio"}, "unknown engine 'libaio'"),
        ({"queue_depth": 0}, "queue_depth"),
        ({"block_bytes": 0}, "multiple of 4 KiB"),
        ({"block_bytes": 5000}, "multiple of 4 KiB"),
        ({"threads": 0}, "threads"),
    ],
)
def test_an_engine_refuses_options_it_cannot_honour(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _native.IOEngine(**arguments)


# ------------------------------------------------------------------------------------------------- the end of the file


@pytest.mark.parametrize(
    ("size", "offset", "nbytes"),
    [(0, 0, PAGE), (2 * PAGE, 2 * PAGE, PAGE), (2 * PAGE, PAGE, 3 * PAGE), (PAGE + 512, 0, 4 * PAGE)],
)
def test_a_read_past_the_end_fails_and_says_so(
    engine_name: str, file: _native.File, size: int, offset: int, nbytes: int
) -> None:
    os.truncate(file.path, size)
    engine = _native.IOEngine(engine_name)
    failure = finish(engine.read(file, offset, pages(nbytes)))
    assert failure is not None
    assert "file ends" in failure.message
    assert file.path in failure.message
    assert (failure.errno, failure.path) == (0, file.path)
    _, alignment = file.alignment
    assert failure.offset == max(size // alignment * alignment, offset)
    if size % PAGE == 0:  # nothing came: no reason to ask again
        assert engine.counters()["operations"] <= 2


# --------------------------------------------------------------------------------------------------------------- wait()


def test_a_future_tells_done_from_not_done(engine_name: str, tmp_path: Path) -> None:
    file = _native.File(str(tmp_path / "swap"), create=True)
    engine = _native.IOEngine(engine_name, block_bytes=PAGE, queue_depth=1)
    future = engine.write(file, 0, pages(64 << 20))
    assert future.wait(0) is False
    assert future.wait(-1.0) is False
    with pytest.raises(RuntimeError, match="not done"):
        future.failure()
    engine.close()
    assert future.done()
    assert future.wait() is True
    assert future.wait(float("inf")) is True


def test_a_wait_without_end_serves_signals(engine_name: str, tmp_path: Path) -> None:
    file = _native.File(str(tmp_path / "swap"), create=True)
    engine = _native.IOEngine(engine_name, block_bytes=PAGE, queue_depth=1)
    future = engine.write(file, 0, pages(512 << 20))
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            future.wait(float("inf"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not future.done()
    engine.close()
    assert future.done()


def test_dropping_a_future_waits_for_its_buffer(engine_name: str, file: _native.File) -> None:
    engine = _native.IOEngine(engine_name, block_bytes=PAGE, queue_depth=2)
    data = noise(1 << 20)
    succeed(engine.write(file, 0, data))
    back = pages(1 << 20)
    engine.read(file, 0, back)
    assert back == data
    engine.read(file, 0, pages(1 << 20))  # a buffer that nobody else holds
    gc.collect()


def test_closing_the_engine_finishes_what_is_in_flight_and_cancels_the_rest(engine_name: str, tmp_path: Path) -> None:
    file = _native.File(str(tmp_path / "swap"), create=True)
    engine = _native.IOEngine(engine_name, block_bytes=PAGE, queue_depth=1)
    part = noise(1 << 20)
    futures = [engine.write(file, at << 20, part, "states") for at in range(64)]
    engine.close()
    assert all(future.done() for future in futures)
    failures = [future.failure() for future in futures]
    assert failures[-1] is not None
    for failure in filter(None, failures):
        assert (failure.errno, failure.operation, failure.path) == (errno.ECANCELED, "write", file.path)
        assert "closed" in failure.message
    assert (failures[-1].offset, failures[-1].nbytes) == (63 << 20, 1 << 20)


# -------------------------------------------------------------------------------------------- where io_uring is blocked


@pytest.mark.parametrize(
    ("system_call", "error", "advice"),
    [(425, errno.EPERM, "seccomp"), (425, errno.ENOSYS, "kernel"), (426, errno.EPERM, "seccomp")],
    ids=["io_uring_setup-EPERM", "io_uring_setup-ENOSYS", "io_uring_enter-EPERM"],
)
def test_auto_falls_back_to_threads_and_says_why(tmp_path: Path, system_call: int, error: int, advice: str) -> None:
    script = """
        refuse(int(sys.argv[2]), int(sys.argv[3]))
        engine = _native.IOEngine("auto")
        assert engine.name == "threads", engine.name
        assert "io_uring" in engine.reason and sys.argv[4] in engine.reason, engine.reason
        try:
            _native.IOEngine("io_uring")
        except OSError as refused:
            assert refused.errno == int(sys.argv[3]) and sys.argv[4] in str(refused), refused
        else:
            raise AssertionError("io_uring was not refused")
        file = _native.File(sys.argv[5], create=True)
        back = _native.Arena(4096).view(0, 4096)
        data = _native.Arena(4096).view(0, 4096)
        data[:] = b"q" * 4096
        for start in (lambda: engine.write(file, 0, data), lambda: engine.read(file, 0, back)):
            future = start()
            assert future.wait(60) and future.failure() is None
        assert bytes(back) == bytes(data)
    """
    run_child(script, str(system_call), str(error), advice, str(tmp_path / "swap"), prelude=REFUSE)


def test_the_reason_names_what_the_ring_was_set_up_with() -> None:
    engine = _native.IOEngine("auto")
    if engine.name != "io_uring":
        pytest.skip(engine.reason)
    assert "flags" in engine.reason
    assert _native.IOEngine("threads", threads=3).name == "threads"


# ------------------------------------------------------------------------------------------------ forks, few threads


def test_a_forked_child_exits_without_hanging_and_the_parent_goes_on(engine_name: str, tmp_path: Path) -> None:
    """The child has neither the I/O thread nor the workers: its destructors, at exit too, must not wait for them."""
    run_child(
        """
        import os

        engine = _native.IOEngine(sys.argv[2], block_bytes=4096, queue_depth=1)
        pool = _native.ThreadPool(2)
        file = _native.File(sys.argv[3], create=True)
        view = _native.Arena(16 << 20).view(0, 16 << 20)
        view[:] = b"p" * len(view)
        future = engine.write(file, 0, view)
        child = os.fork()
        if child == 0:
            engine.close()
            del future, view, pool, file
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert future.wait(60) and future.failure() is None
        assert os.path.getsize(sys.argv[3]) == 16 << 20
        """,
        engine_name,
        str(tmp_path / "swap"),
    )


@pytest.mark.parametrize("thing", ['IOEngine("threads", threads=64)', "ThreadPool(64)"])
def test_too_few_threads_are_an_os_error_and_not_the_end_of_the_process(thing: str) -> None:
    run_child(
        """
        import resource

        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (96 << 20),) * 2)
        try:
            eval("_native." + sys.argv[2])
        except OSError as refused:
            assert "thread" in str(refused), refused
        else:
            raise AssertionError("64 stacks fit into 96 MiB?")
        """,
        thing,
    )


def test_a_read_can_wait_for_what_comes_before_it_and_fails_as_that_does(tmp_path: Path) -> None:
    arena = _native.Arena(1 << 20, huge_pages=False)
    new, into = arena.view(0, 8192), arena.view(8192, 8192)
    new[:] = bytes(range(256)) * 32
    faults = [_native.Fault(2, "error", 5, operation="write")]
    with closing(_native.IOEngine("threads", block_bytes=4096, faults=faults)) as engine:
        file = _native.File(str(tmp_path / "swap"), create=True)
        file.preallocate(1 << 20)
        write = engine.write(file, 0, new)
        read = engine.read(file, 0, into, after=write)
        assert read.wait(60)
        assert read.failure() is None
        assert bytes(into) == bytes(new)
        failing = engine.write(file, 8192, new)
        read = engine.read(file, 8192, into, after=failing)
        assert read.wait(60)
        failure = read.failure()
        assert failure is not None
        assert failure.operation == "write"
        file.close()


def test_a_write_can_wait_for_what_it_writes_and_fails_as_that_does(tmp_path: Path) -> None:
    arena = _native.Arena(1 << 20, huge_pages=False)
    data, landing, back = arena.view(0, 8192), arena.view(8192, 8192), arena.view(16384, 8192)
    data[:] = bytes(range(256)) * 32
    faults = [_native.Fault(0, "delay", operation="read"), _native.Fault(4, "error", 5, operation="read")]
    with closing(_native.IOEngine("threads", block_bytes=4096, faults=faults)) as engine:
        file = _native.File(str(tmp_path / "swap"), create=True)
        file.preallocate(1 << 20)
        file.keep_checksums(1 << 20)
        succeed(engine.write(file, 0, data))
        write = engine.write(file, 65536, landing, after=engine.read(file, 0, landing))
        succeed(write)
        succeed(engine.read(file, 65536, back))
        assert bytes(back) == bytes(data)
        written = engine.counters()["write_bytes_weights"]
        write = engine.write(file, 0, back, after=engine.read(file, 0, landing))
        assert write.wait(60)
        failure = write.failure()
        assert failure is not None
        assert (failure.operation, failure.errno) == ("read", 5)
        assert engine.counters()["write_bytes_weights"] == written
        file.close()
