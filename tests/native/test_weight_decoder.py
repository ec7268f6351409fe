"""Weights that are decoded as soon as they are read: in order, with the failures of their reads, and without leaks."""

from __future__ import annotations

import errno
import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from infinity import _native
from tests.native.children import run_child

NUMEL = 300_001
NBYTES = _native.encoded_weight_bytes("int8", NUMEL)
PAGES = -(-NBYTES // 4096) * 4096


def stored(seed: int) -> np.ndarray:
    data = np.zeros(PAGES, np.uint8)
    values = np.random.default_rng(seed).standard_normal(NUMEL).astype(np.float32)
    parts = {name: data[at : at + nbytes] for name, (at, nbytes) in _native.weight_parts("int8", NUMEL).items()}
    _native.encode_weights(values, "fp32", "int8", parts["codes"], parts["scales"], _native.ThreadPool(1))
    return data


def decoded(data: np.ndarray) -> np.ndarray:
    out = np.empty(NUMEL, np.float32)
    _native.decode_weights(data, "int8", NUMEL, 0, out, "fp32", _native.ThreadPool(1))
    return out


class Rig:
    def __init__(self, path: Path, *faults: _native.Fault, deadline_s: float = 300.0) -> None:
        self.file = _native.File(str(path / "swap"), create=True)
        self.file.preallocate(4 * PAGES)
        self.file.keep_checksums(4 * PAGES)
        self.weights = [stored(seed) for seed in range(4)]
        self.memory = _native.Arena(4 * PAGES, huge_pages=False)
        with closing(_native.IOEngine("auto")) as engine:
            for index, data in enumerate(self.weights):
                self.landing(index)[:] = memoryview(data)
                assert engine.write(self.file, index * PAGES, self.landing(index)).wait(60)
                self.landing(index)[:] = bytes(PAGES)
        self.engine = _native.IOEngine("auto", faults=faults, deadline_s=deadline_s)
        self.decoder = _native.WeightDecoder(_native.ThreadPool(2))

    def landing(self, index: int) -> memoryview:
        return self.memory.view(index * PAGES, PAGES)

    def read(self, index: int) -> _native.IOFuture:
        return self.engine.read(self.file, index * PAGES, self.landing(index))

    def part(self, index: int, out: np.ndarray) -> _native.DecodePart:
        return _native.DecodePart(self.landing(index), "int8", NUMEL, 0, out, "fp32")

    def close(self) -> None:
        self.decoder.close()
        self.engine.close()
        self.file.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with closing(Rig(tmp_path)) as rig:
        yield rig


def finish(future: _native.IOFuture) -> _native.Failure | None:
    assert future.wait(60)
    return future.failure()


def test_weights_are_decoded_once_they_are_read(rig: Rig) -> None:
    outs = [np.empty(NUMEL, np.float32) for _ in range(4)]
    jobs = [rig.decoder.decode([rig.part(i, outs[i])], [rig.read(i)]) for i in (0, 1)]
    both = rig.decoder.decode([rig.part(i, outs[i]) for i in (2, 3)], [rig.read(i) for i in (2, 3)])
    assert [finish(job) for job in (*jobs, both)] == [None] * 3
    for index, out in enumerate(outs):
        assert np.array_equal(out, decoded(rig.weights[index]))


def test_a_job_without_reads_is_decoded_at_once_and_one_without_parts_is_done(rig: Rig) -> None:
    out = np.empty(NUMEL, np.float32)
    assert finish(rig.read(0)) is None
    assert finish(rig.decoder.decode([rig.part(0, out)])) is None
    assert np.array_equal(out, decoded(rig.weights[0]))
    assert finish(rig.decoder.decode([])) is None


def test_a_read_that_does_not_end_holds_nobody_else_back_and_its_failure_is_passed_on(tmp_path: Path) -> None:
    lost = _native.Fault(0, "lose", operation="read", end=PAGES)
    with closing(Rig(tmp_path, lost, deadline_s=2.0)) as rig:
        outs = [np.full(NUMEL, 7.0, np.float32) for _ in range(2)]
        soon = rig.read(1)
        assert finish(soon) is None
        late = rig.read(0)
        waits = rig.decoder.decode([rig.part(0, outs[0])], [late])
        assert finish(rig.decoder.decode([rig.part(1, outs[1])], [soon])) is None
        assert not waits.done()
        assert np.array_equal(outs[1], decoded(rig.weights[1]))
        failure = finish(waits)
        assert failure is not None
        assert (failure.kind, failure.errno, failure.path) == ("timeout", errno.ETIMEDOUT, rig.file.path)
        assert (outs[0] == 7.0).all()


@pytest.mark.parametrize(("fault", "kind"), [("error", "io"), ("flip", "corruption")])
def test_a_job_fails_as_its_read_and_decodes_nothing(fault: str, kind: str, tmp_path: Path) -> None:
    bad = _native.Fault(0, fault, errno.EIO if fault == "error" else 0, repeat=1000, operation="read", end=PAGES)
    with closing(Rig(tmp_path, bad)) as rig:
        out = np.full(NUMEL, 7.0, np.float32)
        reads = [rig.read(1), rig.read(0)]
        failure = finish(rig.decoder.decode([rig.part(0, out)], reads))
        own = finish(reads[1])
        assert failure is not None
        assert own is not None
        assert failure.kind == kind
        assert (failure.kind, failure.errno, failure.path, failure.offset, failure.message) == (
            own.kind,
            own.errno,
            rig.file.path,
            own.offset,
            own.message,
        )
        assert (out == 7.0).all()


def test_threads_that_decode_at_once_get_their_own_weights(rig: Rig) -> None:
    outs = [[np.empty(NUMEL, np.float32) for _ in range(5)] for _ in range(4)]

    def decode(index: int) -> None:
        assert finish(rig.read(index)) is None
        for out in outs[index]:
            assert finish(rig.decoder.decode([rig.part(index, out)])) is None

    threads = [threading.Thread(target=decode, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, mine in enumerate(outs):
        expected = decoded(rig.weights[index])
        assert all(np.array_equal(out, expected) for out in mine)


def test_the_future_keeps_the_buffers_and_lets_them_go() -> None:
    class Buffer(np.ndarray):
        pass

    data, out = stored(0).view(Buffer), np.empty(NUMEL, np.float32).view(Buffer)
    kept = weakref.ref(data), weakref.ref(out)
    with closing(_native.WeightDecoder(_native.ThreadPool(2))) as decoder:
        future = decoder.decode([_native.DecodePart(data, "int8", NUMEL, 0, out, "fp32")])
        del data, out
        gc.collect()
        assert all(reference() is not None for reference in kept)
        assert finish(future) is None
        del future
        gc.collect()
    assert all(reference() is None for reference in kept)


def test_a_future_that_nobody_waits_for_is_decoded_all_the_same(rig: Rig) -> None:
    out = np.empty(NUMEL, np.float32)
    rig.decoder.decode([rig.part(0, out)], [rig.read(0)])
    assert np.array_equal(out, decoded(rig.weights[0]))


def test_a_closed_decoder_is_not_used_and_is_closed_again(rig: Rig) -> None:
    out = np.empty(NUMEL, np.float32)
    assert finish(rig.read(0)) is None
    job = rig.decoder.decode([rig.part(0, out)])
    rig.decoder.close()
    rig.decoder.close()
    assert job.done()
    assert job.failure() is None
    with pytest.raises(ValueError, match=r"used after close\(\)"):
        rig.decoder.decode([])


def test_a_job_that_waits_when_the_decoder_is_closed_is_canceled(tmp_path: Path) -> None:
    lost = _native.Fault(0, "lose", operation="read", end=PAGES)
    with closing(Rig(tmp_path, lost, deadline_s=1.0)) as rig:
        out = np.full(NUMEL, 7.0, np.float32)
        read = rig.read(0)
        job = rig.decoder.decode([rig.part(0, out)], [read])
        rig.decoder.close()
        assert not read.done()
        assert job.done()
        failure = job.failure()
        assert failure is not None
        assert (failure.kind, failure.errno) == ("canceled", errno.ECANCELED)
        assert failure.message == "the weight decoder was closed"
        assert (out == 7.0).all()


def test_nothing_but_parts_and_futures_is_taken(rig: Rig) -> None:
    with pytest.raises(ValueError, match="a part is None"):
        rig.decoder.decode([None])
    with pytest.raises(ValueError, match="a future is None"):
        rig.decoder.decode([], [None])


def test_a_forked_child_may_not_use_it_and_ends() -> None:
    run_child(
        """
        import os
        decoder = _native.WeightDecoder(_native.ThreadPool(2))
        data, out = bytearray(_native.encoded_weight_bytes("int8", 64)), bytearray(128)
        future = decoder.decode([_native.DecodePart(data, "int8", 64, 0, out, "bf16")])
        assert future.wait(60)
        child = os.fork()
        if child == 0:
            try:
                decoder.decode([])
            except ValueError as error:
                assert "forked child" in str(error)
                decoder.close()
                del decoder, future
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert decoder.decode([]).wait(60)
        decoder.close()
        """
    )
