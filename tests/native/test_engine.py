"""The engine moves every byte, checks every result, and says what went wrong; the same on both back ends."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from infinity import _native

PAGE = 4096


@pytest.fixture(params=["io_uring", "threads"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def engine(kind: str) -> Iterator[_native.IOEngine]:
    engine = _native.IOEngine(kind, block_bytes=16 * PAGE, queue_depth=4)
    yield engine
    engine.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[_native.File]:
    file = _native.File(str(tmp_path / "data"), create=True)
    file.preallocate(8 << 20)
    yield file
    file.close()


@pytest.fixture
def memory() -> memoryview:
    return _native.Arena(16 << 20, huge_pages=False).view(0, 16 << 20)


def fill(view: memoryview, seed: int) -> bytes:
    data = np.random.default_rng(seed).bytes(len(view))
    view[:] = data
    return data


def wait(future: _native.IOFuture) -> None:
    assert future.wait(60)
    failure = future.failure()
    assert failure is None, failure and failure.message


@pytest.mark.parametrize("pages", [1, 3, 16, 17, 100, 1000])
def test_what_was_written_is_read_back(
    pages: int, engine: _native.IOEngine, file: _native.File, memory: memoryview
) -> None:
    nbytes = pages * PAGE
    data = fill(memory[:nbytes], pages)
    wait(engine.write(file, 2 * PAGE, memory[:nbytes]))
    target = memory[8 << 20 : (8 << 20) + nbytes]
    wait(engine.read(file, 2 * PAGE, target, "states"))
    assert bytes(target) == data
    counters = engine.counters()
    assert counters["write_bytes_weights"] == nbytes
    assert counters["read_bytes_states"] == nbytes


def test_many_requests_at_once_do_not_mix(engine: _native.IOEngine, file: _native.File, memory: memoryview) -> None:
    pieces = [memory[i * 5 * PAGE : (i + 1) * 5 * PAGE] for i in range(100)]
    data = [fill(piece, i) for i, piece in enumerate(pieces)]
    classes = ("weights", "activations", "states")
    futures = [engine.write(file, i * 5 * PAGE, p, classes[i % 3]) for i, p in enumerate(pieces)]
    for future in futures:
        wait(future)
    targets = [memory[(8 << 20) + i * 5 * PAGE : (8 << 20) + (i + 1) * 5 * PAGE] for i in range(100)]
    for future in [engine.read(file, i * 5 * PAGE, t, classes[i % 3]) for i, t in enumerate(targets)]:
        wait(future)
    assert [bytes(target) for target in targets] == data


@pytest.mark.parametrize(("offset", "start", "nbytes"), [(1, 0, PAGE), (0, 8, PAGE), (0, 0, 100)])
def test_misaligned_direct_requests_are_refused(
    offset: int, start: int, nbytes: int, engine: _native.IOEngine, file: _native.File, memory: memoryview
) -> None:
    if not file.direct:
        pytest.skip("this file system has no direct I/O")
    with pytest.raises(ValueError, match="4 KiB"):
        engine.read(file, offset, memory[start : start + nbytes])


def test_bad_arguments_are_refused(engine: _native.IOEngine, file: _native.File) -> None:
    with pytest.raises(ValueError, match="read-only"):
        engine.read(file, 0, bytes(PAGE))
    with pytest.raises(TypeError, match="must be a buffer"):
        engine.read(file, 0, 3)
    with pytest.raises(ValueError, match="not contiguous"):
        engine.read(file, 0, np.zeros((64, 64), dtype=np.uint8)[::2, ::2])
    with pytest.raises(ValueError, match="unknown I/O class"):
        engine.read(file, 0, np.zeros(PAGE, dtype=np.uint8), "bulk")  # type: ignore[arg-type]
    for bad in ({"engine": "magic"}, {"queue_depth": 0}, {"block_bytes": 1000}, {"threads": 0}):
        with pytest.raises(ValueError, match="."):
            _native.IOEngine(**bad)  # type: ignore[arg-type]


def test_reading_past_the_end_is_an_error(engine: _native.IOEngine, file: _native.File, memory: memoryview) -> None:
    future = engine.read(file, 6 << 20, memory[: 4 << 20])
    assert future.wait(60)
    failure = future.failure()
    assert failure is not None
    assert "file ends before the data" in failure.message
    assert failure.path == file.path


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EINTR, errno.EAGAIN, 0])
def test_a_fault_at_any_block_is_named_or_survived(
    error: int, kind: str, file: _native.File, memory: memoryview
) -> None:
    nbytes, block = 40 * PAGE, 8 * PAGE
    for index in range(10):
        engine = _native.IOEngine(kind, block_bytes=block, queue_depth=2, faults=[_native.Fault(index, error)])
        data = fill(memory[:nbytes], index)
        future = engine.write(file, 0, memory[:nbytes])
        assert future.wait(60)
        failure = future.failure()
        target = memory[1 << 20 : (1 << 20) + nbytes]
        again = engine.read(file, 0, target)
        assert again.wait(60)
        failures = [f for f in (failure, again.failure()) if f is not None]
        if error in (errno.EIO, errno.ENOSPC):
            assert len(failures) == 1
            assert failures[0].errno == error
            assert failures[0].nbytes == block
            assert failures[0].offset % block == 0
            assert failures[0].path == file.path
            assert os.strerror(error) in failures[0].message
        else:
            assert not failures
            assert bytes(target) == data
            counters = engine.counters()
            assert counters["retries"] + counters["short_transfers"] == 1
        engine.close()


def test_endless_eintr_is_an_error(kind: str, file: _native.File, memory: memoryview) -> None:
    engine = _native.IOEngine(kind, faults=[_native.Fault(0, errno.EINTR, repeat=1 << 40)])
    future = engine.write(file, 0, memory[:PAGE])
    assert future.wait(60)
    failure = future.failure()
    assert failure is not None
    assert failure.errno == errno.EINTR
    assert engine.counters()["retries"] == 16


def test_dropping_a_future_waits_for_its_memory(engine: _native.IOEngine, file: _native.File) -> None:
    for _ in range(50):
        arena = _native.Arena(1 << 20, huge_pages=False)
        engine.read(file, 0, arena.view(0, 1 << 20))  # both are collected at once


def test_a_closed_engine_refuses(engine: _native.IOEngine, file: _native.File, memory: memoryview) -> None:
    engine.close()
    engine.close()
    with pytest.raises(ValueError, match="after close"):
        engine.read(file, 0, memory[:PAGE])


def test_what_is_queued_at_close_is_done_or_canceled(kind: str, file: _native.File, memory: memoryview) -> None:
    engine = _native.IOEngine(kind, block_bytes=PAGE, queue_depth=1)
    futures = [engine.write(file, 0, memory[: 1 << 20]) for _ in range(8)]
    engine.close()
    for future in futures:
        assert future.wait(60)
        failure = future.failure()
        assert failure is None or failure.errno == errno.ECANCELED


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"")
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(OSError, match="link") as caught:
        _native.File(str(tmp_path / "link"))
    assert caught.value.errno == errno.ELOOP


def test_files_are_private(file: _native.File) -> None:
    assert os.stat(file.path).st_mode & 0o777 == 0o600


def test_a_failed_preallocation_gives_its_space_back(tmp_path: Path) -> None:
    file = _native.File(str(tmp_path / "big"), create=True)
    with pytest.raises(OSError, match="preallocate") as caught:
        file.preallocate(1 << 60)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert os.stat(file.path).st_blocks == 0


BLOCK_IO_URING = """
    import ctypes, struct
    # seccomp: io_uring_setup (425) → EPERM, as Docker's default profile answers; everything else is allowed.
    code = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
    program = b"".join(struct.pack("HBBI", *line) for line in code)
    buffer = ctypes.create_string_buffer(program)
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.byref(Program(len(code), ctypes.addressof(buffer))), 0, 0) == 0
"""


def in_child(body: str) -> str:
    code = textwrap.dedent(BLOCK_IO_URING) + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the system call number is x86-64's")
def test_without_io_uring_auto_takes_threads_and_says_why() -> None:
    out = in_child("from infinity import _native; e = _native.IOEngine(); print(e.name, e.reason)")
    assert out.startswith("threads io_uring is not usable: the kernel refuses io_uring")
    assert "seccomp" in out


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the system call number is x86-64's")
def test_without_io_uring_asking_for_it_is_an_error_with_the_fix() -> None:
    body = """
    import infinity
    from infinity.io.engine import open_engine
    try:
        open_engine(infinity.load_config({"nvme": {"engine": "io_uring"}}).nvme)
    except infinity.ConfigError as error:
        print(error)
    """
    assert "Set nvme.engine: auto or threads" in in_child(body)


def test_a_forked_child_ends_without_hanging(engine: _native.IOEngine, file: _native.File, memory: memoryview) -> None:
    future = engine.read(file, 0, memory[:PAGE])
    child = os.fork()
    if child == 0:
        del future, engine
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    wait(future)
