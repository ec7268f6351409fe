"""Weights on their way to a device: whole, in order, and without a thread of Python that waits for them."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from infinity import _native
from tests.native.children import run_child
from tests.native.runtime import Runtime
from tests.native.test_engine_requests import noise, succeed

PIECE = 16384
NBYTES = 64 * PIECE
COPY, OTHER = 1, 2  # handles of streams
READY = 500


class Rig:
    def __init__(self, path: Path, faults: list[_native.Fault] | None = None, pieces: int = 3) -> None:
        self.runtime = Runtime()
        self.file = _native.File(str(path / "swap"), create=True)
        self.file.preallocate(NBYTES)
        self.file.keep_checksums(NBYTES)
        self.weights = noise(NBYTES)
        with closing(_native.IOEngine("auto")) as engine:
            succeed(engine.write(self.file, 0, self.weights))
        self.engine = _native.IOEngine("auto", block_bytes=8192, faults=faults or [])
        self.bounce = _native.Arena(pieces * PIECE, huge_pages=False)
        self.memory = (ctypes.c_char * NBYTES)()  # of the device
        self.uploads = _native.Uploads(
            self.engine, self.runtime.gate(), self.bounce.view(0, pieces * PIECE), PIECE, range(100, 100 + pieces)
        )

    def part(self, begin: int, nbytes: int, after: _native.IOFuture | None = None) -> _native.UploadPart:
        address = ctypes.addressof(self.memory) + begin
        return _native.UploadPart(self.file, begin, nbytes, address, after=after)

    def upload(self, *parts: _native.UploadPart, stream: int = COPY, waits: tuple[int, ...] = ()) -> _native.IOFuture:
        return self.uploads.upload(parts, stream=stream, waits=waits, ready=READY)

    def there(self, begin: int, nbytes: int) -> bool:
        return self.memory[begin : begin + nbytes] == bytes(self.weights[begin : begin + nbytes])

    def close(self) -> None:
        self.uploads.close()
        self.engine.close()
        self.file.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with closing(Rig(tmp_path)) as rig:
        yield rig


def finish(future: _native.IOFuture) -> _native.Failure | None:
    assert future.wait(60)
    return future.failure()


def test_weights_arrive_and_are_ready_behind_the_event(rig: Rig) -> None:
    future = rig.upload(rig.part(0, 5 * PIECE + 100), rig.part(8 * PIECE, 2 * PIECE), waits=(300, 301))
    assert finish(future) is None
    assert rig.runtime.reach(READY)
    assert rig.there(0, 5 * PIECE + 100)
    assert rig.there(8 * PIECE, 2 * PIECE)
    assert not any(rig.memory[5 * PIECE + 100 : 8 * PIECE])
    calls = [name for name, *_ in rig.runtime.calls if name != "synchronize"]
    assert calls == ["enter", "wait", "wait", *["copy", "record"] * 8, "record"]
    counters = rig.uploads.counters()
    assert counters["read_bytes"] == 7 * PIECE + 100
    assert counters["pieces"] == 8
    assert counters["without_a_piece"] > 0
    assert threading.get_ident() not in rig.runtime.threads


def test_the_slot_is_not_touched_before_the_events_that_the_job_waits_for(rig: Rig) -> None:
    seen = []
    rig.runtime.launch(OTHER, lambda: seen.append(rig.memory[0]))
    rig.runtime.record(300, OTHER)
    assert finish(rig.upload(rig.part(0, PIECE), waits=(300,))) is None
    assert rig.runtime.reach(READY)
    assert seen == [b"\0"]
    assert rig.there(0, PIECE)


def test_threads_that_upload_at_once_get_their_own_weights(rig: Rig) -> None:
    failures: list[_native.Failure | None] = []

    def upload(share: int) -> None:
        for _ in range(6):
            part = rig.part(share * 16 * PIECE, 16 * PIECE)
            failures.append(finish(rig.uploads.upload([part], stream=10 + share % 2, ready=600 + share)))

    threads = [threading.Thread(target=upload, args=(share,)) for share in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [None] * 24
    rig.uploads.close()
    assert rig.there(0, NBYTES)


def test_an_upload_follows_what_writes_the_weights_and_fails_as_that_does(rig: Rig) -> None:
    new = noise(2 * PIECE)
    future = rig.upload(rig.part(0, 2 * PIECE, after=rig.engine.write(rig.file, 0, new)))
    assert finish(future) is None
    assert rig.runtime.reach(READY)
    assert rig.memory[: 2 * PIECE] == bytes(new)
    rig.runtime.refuse = {len(rig.runtime.calls): 700}
    with closing(_native.ThreadPool(1)) as pool, closing(_native.Landings(rig.runtime.gate(), pool)) as landings:
        future = rig.upload(rig.part(0, PIECE, after=landings.land(9, [])))
        failure = finish(future)
    assert failure is not None
    assert failure.cause == "the device's runtime returned error 700"
    assert finish(rig.upload(rig.part(0, PIECE))) is None


def test_a_failed_read_fails_its_job_and_not_the_next(tmp_path: Path) -> None:
    rig = Rig(tmp_path, [_native.Fault(5, "error", errno.EIO, operation="read")])
    failure = finish(rig.upload(rig.part(0, 8 * PIECE)))
    assert failure is not None
    assert (failure.errno, failure.operation) == (errno.EIO, "read")
    assert rig.runtime.queued() == 0
    assert finish(rig.upload(rig.part(0, 8 * PIECE))) is None
    rig.close()
    assert rig.there(0, 8 * PIECE)


def test_a_damaged_page_fails_the_job_unless_it_is_not_verified(rig: Rig) -> None:
    with open(rig.file.path, "r+b") as file:
        file.seek(3 * PIECE + 100)
        file.write(b"damage")
    failure = finish(rig.upload(rig.part(0, 8 * PIECE)))
    assert failure is not None
    assert (failure.kind, failure.offset) == ("corruption", 3 * PIECE)
    part = _native.UploadPart(rig.file, 0, 8 * PIECE, ctypes.addressof(rig.memory), verify=False)
    assert finish(rig.upload(part)) is None


@pytest.mark.parametrize("call", range(0, 30, 3))
def test_an_error_of_the_gate_fails_a_job_with_its_number(call: int, tmp_path: Path) -> None:
    rig = Rig(tmp_path, pieces=2)
    rig.uploads.close()
    rig.runtime.refuse = {len(rig.runtime.calls) + call: 719}
    rig.uploads = _native.Uploads(rig.engine, rig.runtime.gate(), rig.bounce.view(0, 2 * PIECE), PIECE, [100, 101])
    futures = [rig.upload(rig.part(begin * PIECE, 8 * PIECE), waits=(300,)) for begin in (0, 8)]
    failures = [failure for failure in map(finish, futures) if failure is not None]
    assert failures
    for failure in failures:
        assert (failure.kind, failure.errno, failure.path) == ("device", 0, "device 0")
        assert failure.cause == "the device's runtime returned error 719"
    rig.close()


def test_a_job_that_is_canceled_leaves_the_others_alone(rig: Rig) -> None:
    release = threading.Event()
    rig.runtime.synchronizing = lambda event: release.wait(60) and None
    try:
        begun, queued, last = (rig.upload(rig.part(begin * PIECE, 8 * PIECE)) for begin in (0, 20, 40))
        while "record" not in [name for name, *_ in rig.runtime.calls]:
            pass  # until the first job is under way: before, it would be canceled at once
        rig.uploads.cancel(begun)
        rig.uploads.cancel(queued)
        assert not begun.done()
    finally:
        release.set()  # else each piece waits for a minute
    for future in (begun, queued):
        failure = finish(future)
        assert failure is not None
        assert (failure.kind, failure.errno) == ("canceled", errno.ECANCELED)
    assert finish(last) is None
    rig.uploads.cancel(last)
    rig.uploads.close()
    assert last.failure() is None
    assert rig.there(40 * PIECE, 8 * PIECE)
    assert not any(rig.memory[20 * PIECE : 28 * PIECE])


def test_the_copies_of_a_canceled_job_are_over_when_its_future_fails(rig: Rig) -> None:
    """Then the slot is free: what is copied there afterwards stays."""
    other, release = Runtime(), threading.Event()
    other.synchronizing = lambda event: release.wait(60) and None
    with closing(_native.ThreadPool(1)) as pool, closing(_native.Landings(other.gate(), pool)) as landings:
        future = rig.upload(rig.part(0, 2 * PIECE), rig.part(2 * PIECE, PIECE, after=landings.land(9, [])))
        while [name for name, *_ in rig.runtime.calls].count("record") < 2:
            pass
        assert rig.runtime.queued() > 0
        rig.uploads.cancel(future)
        failure = finish(future)
        assert failure is not None
        assert failure.kind == "canceled"
        assert rig.runtime.queued() == 0
        release.set()
    assert finish(rig.upload(rig.part(0, NBYTES))) is None


def test_closing_waits_for_the_device_too(rig: Rig) -> None:
    futures = [rig.upload(rig.part(begin, 8 * PIECE)) for begin in range(0, NBYTES, 8 * PIECE)]
    rig.uploads.close()
    assert all(future.done() and future.failure() is None for future in futures)
    assert rig.there(0, NBYTES)
    rig.uploads.close()
    with pytest.raises(ValueError, match="after close"):
        rig.upload(rig.part(0, PIECE))


def test_the_gate_and_the_landing_memory_live_as_long_as_the_uploads(rig: Rig) -> None:
    runtime = Runtime()
    uploads = _native.Uploads(
        rig.engine, runtime.gate(), _native.Arena(4 * PIECE, huge_pages=False).view(0, 4 * PIECE), PIECE, [1, 2, 3, 4]
    )
    del runtime
    gc.collect()
    assert finish(uploads.upload([rig.part(0, NBYTES)], stream=COPY, ready=READY)) is None
    uploads.close()
    assert rig.there(0, NBYTES)


def test_a_file_can_be_closed_once_its_upload_is_done(rig: Rig) -> None:
    def is_open() -> bool:
        return any(os.path.realpath(link) == path for link in Path("/proc/self/fd").iterdir())

    path = os.path.realpath(rig.file.path)
    assert finish(rig.upload(rig.part(0, 4 * PIECE))) is None
    assert is_open()
    rig.file.close()
    assert not is_open()


def test_what_cannot_be_uploaded_is_refused(rig: Rig) -> None:
    with pytest.raises(ValueError, match="at least one part"):
        rig.upload()
    with pytest.raises(ValueError, match="at least one byte"):
        rig.upload(rig.part(0, 0))
    with pytest.raises(ValueError, match="multiple of 4 KiB"):
        rig.upload(rig.part(100, PIECE))
    with pytest.raises(ValueError, match="a file cannot have offset"):
        rig.upload(rig.part(NBYTES, PIECE))
    gate, bounce = rig.runtime.gate(), rig.bounce.view(0, 3 * PIECE)
    for piece, events, message in (
        (PIECE, [], "at least one piece"),
        (PIECE, [1, 1], "event of its own"),
        (PIECE, [1, 2, 3, 4], "a piece for each event"),
        (1000, [1], "multiple of 4096"),
    ):
        with pytest.raises(ValueError, match=message):
            _native.Uploads(rig.engine, gate, bounce, piece, events)


def test_a_device_that_is_given_up_fails_every_job_and_keeps_the_landing_memory(tmp_path: Path) -> None:
    run_child(
        """
        import ctypes, gc
        number, pointer = ctypes.c_int, ctypes.c_void_p
        signatures = {
            "copy": (pointer, pointer, ctypes.c_size_t, number, pointer),
            "record": (pointer, pointer),
            "wait": (pointer, pointer, ctypes.c_uint),
            "synchronize": (pointer,),
        }
        calls = {name: ctypes.CFUNCTYPE(number, *given)(lambda *_: 0) for name, given in signatures.items()}
        addresses = {name: ctypes.cast(call, pointer).value for name, call in calls.items()}
        gate = _native.DeviceGate(0, **addresses, keep=calls)
        file = _native.File(sys.argv[2], create=True)
        file.preallocate(1 << 20)
        engine = _native.IOEngine(deadline_s=0.1, faults=[_native.Fault(1, "lose")])
        arena = _native.Arena(1 << 20)
        address = arena.address
        uploads = _native.Uploads(engine, gate, arena.view(0, 1 << 20), 1 << 18, [1, 2, 3, 4])
        part = _native.UploadPart(file, 0, 1 << 20, 4096)
        futures = [uploads.upload([part], stream=1, ready=2) for _ in range(3)]
        assert all(future.wait(60) and future.failure().kind == "timeout" for future in futures)
        late = uploads.upload([part], stream=1, ready=2)
        assert late.wait(60) and late.failure().kind == "timeout"
        del arena
        uploads.close()
        del uploads
        engine.close()
        gc.collect()
        spans = [line.split()[0].split("-") for line in open("/proc/self/maps")]
        assert any(int(a, 16) <= address < int(b, 16) for a, b in spans), "the arena was unmapped"
        """,
        str(tmp_path / "swap"),
    )
