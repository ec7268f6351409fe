"""Only futures order the requests of native threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from infinity import _native
from infinity.io.arena import PinnedArena
from tests.sim.accelerator import SimAccelerator
from tests.sim.clocks import Unordered
from tests.sim.host import follow_the_host
from tests.sim.queues import LAZY, SimEvent
from tests.sim.watch import watched

PAGE = 4096


class Rig:
    """An engine with a file, an update pipeline, and 16 pinned pages. The uses of this thread are watched."""

    def __init__(self, sim: SimAccelerator, path: Path) -> None:
        self.sim = sim
        self.arena = PinnedArena(16 * PAGE)
        assert self.arena.pin(sim) == ""
        self.file = _native.File(str(path / "swap"), create=True)
        self.file.preallocate(16 * PAGE)
        self.engine = _native.IOEngine("threads")
        self.pool = _native.ThreadPool(1)
        self.staging = _native.Arena(1 << 20)
        self.pipeline = _native.UpdatePipeline(self.engine, self.pool, self.staging.view(0, 1 << 20), 4096, 1 << 16)
        self.gate = sim.gate()
        self.slab = sim.slab(4 * PAGE)

    def device_gate(self) -> _native.DeviceGate:
        gate = self.gate
        return _native.DeviceGate(
            0, copy=gate.copy, record=gate.record, wait=gate.wait, synchronize=gate.synchronize, keep=gate
        )

    def page(self, index: int) -> memoryview:
        return self.arena.memory.view(index * PAGE, PAGE)

    def values(self, index: int) -> torch.Tensor:
        return torch.frombuffer(self.page(index), dtype=torch.float32)

    def update(self, *, after: tuple[_native.IOFuture, ...] = ()) -> _native.UpdateFuture:
        """Submit an update of weights in page 0 and in the file, with moments in pages 1 and 2, and the gradients in
        page 3."""
        stream = _native.StateStream
        return self.pipeline.submit(
            numel=PAGE // 4,
            weight_dtype="fp32",
            master="weight",
            grad_dtype="fp32",
            segments=[_native.Segment(0, PAGE // 4, lr=0.1, eps=1e-8, step=1)],
            weight=stream(self.page(0), self.file, 0),
            exp_avg=stream(memory=self.page(1)),
            exp_avg_sq=stream(memory=self.page(2)),
            grad=self.page(3),
            after=after,
        )

    def copy_down(self) -> SimEvent:
        """Queue a copy of a page of the device, which a kernel has just written, to page 3."""
        self.slab[:PAGE].fill_(0)
        packed, down = self.sim.record(self.sim.current()), self.sim.stream("down")
        return self.sim.copy(self.values(3).view(torch.uint8), self.slab[:PAGE], on=down, after=[packed])

    def close(self) -> None:
        self.pipeline.close()
        self.pool.close()
        self.engine.close()
        self.file.close()


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    sim = SimAccelerator(LAZY)
    follow_the_host(monkeypatch, sim)
    with closing(Rig(sim, tmp_path)) as rig, watched(sim):
        yield rig


def test_what_is_read_must_be_waited_for(rig: Rig) -> None:
    future = rig.engine.read(rig.file, 0, rig.page(0))
    with pytest.raises(Unordered, match=r"read \(aten.sum.default\) by the host .* write \(read of the store\)"):
        rig.values(0).sum()
    future.wait()
    rig.values(0).sum()


def test_who_is_told_that_a_read_is_done_knows_it(rig: Rig) -> None:
    future = rig.engine.read(rig.file, 0, rig.page(0))
    while not future.done():
        pass
    rig.values(0).sum()


def test_who_drops_a_read_has_waited_for_it(rig: Rig) -> None:
    rig.engine.read(rig.file, 0, rig.page(0))
    rig.values(0).sum()


def test_what_is_being_written_must_not_change(rig: Rig) -> None:
    future = rig.engine.write(rig.file, 0, rig.page(0))
    rig.values(0).sum()
    with pytest.raises(Unordered, match=r"write \(aten.fill_.Scalar\) by the host .* read \(write of the store\)"):
        rig.values(0).fill_(0)
    future.wait()


def test_a_read_into_what_is_being_written_must_be_chained(rig: Rig) -> None:
    written = rig.engine.write(rig.file, 0, rig.page(0))
    chained = rig.engine.read(rig.file, PAGE, rig.page(0), after=written)
    with pytest.raises(Unordered, match=r"write \(read of the store\) .* write \(read of the store\)"):
        rig.engine.read(rig.file, PAGE, rig.page(0))
    chained.wait()


def test_an_update_must_wait_for_copies_of_what_it_changes(rig: Rig) -> None:
    up = rig.sim.stream("up")
    copied = rig.sim.copy(rig.slab[:PAGE], rig.values(0).view(torch.uint8), on=up)
    with pytest.raises(Unordered, match=r"write \(update: weight\) by an update .* read \(copy up of 4096 bytes\)"):
        rig.update()
    rig.sim.synchronize(copied)
    rig.update().wait()


def test_gradients_are_free_once_an_update_is_computed(rig: Rig) -> None:
    update = rig.update()
    with pytest.raises(Unordered, match="update: grad"):
        rig.values(3).fill_(0)
    update.computed.wait()
    rig.values(3).fill_(0)
    rig.values(1).fill_(0)
    update.wait()


def test_weights_that_are_written_to_the_store_are_free_once_they_are_there(rig: Rig) -> None:
    update = rig.update()
    update.computed.wait()
    rig.values(0).sum()
    with pytest.raises(Unordered, match="update: weight to the store"):
        rig.values(0).fill_(0)
    update.weights.wait()
    rig.values(0).fill_(0)
    update.wait()


def test_a_lease_must_not_be_given_back_while_it_is_used(rig: Rig) -> None:
    lease = rig.arena.lease(PAGE, "a test")
    future = rig.engine.read(rig.file, 0, lease.view())
    with pytest.raises(Unordered, match=r"write \(lease given back\) by the host"):
        lease.release()
    future.wait()
    lease.release()
    assert bytes(rig.page(0)) == b"\xff" * PAGE


def test_a_landing_is_behind_its_event_and_an_update_behind_the_landing(rig: Rig) -> None:
    sim = rig.sim
    copied = rig.copy_down()
    with closing(_native.Landings(rig.device_gate(), rig.pool)) as landings:
        landing = landings.land(sim.handle(copied), [_native.LandingPiece(rig.page(3), "fp32")])
        with pytest.raises(Unordered, match=r"read \(write of the store\) .* write \(copy down of 4096 bytes\)"):
            rig.engine.write(rig.file, PAGE, rig.page(3))
        rig.update(after=(landing,)).wait()
        landing.wait()
        rig.values(3).sum()
    sim.check_but_for(Unordered)


def test_the_end_of_a_canceled_update_says_nothing_of_the_landing_before_it(rig: Rig) -> None:
    sim = rig.sim
    copied = rig.copy_down()
    with closing(_native.Landings(rig.device_gate(), rig.pool)) as landings:
        with sim.lock:  # so that the landing cannot end before the update is canceled
            landing = landings.land(sim.handle(copied), [_native.LandingPiece(rig.page(3), "fp32")])
            update = rig.update(after=(landing,))
            rig.pipeline.cancel(update)
            assert update.wait(10.0)
            assert not sim.reached(copied)
            with pytest.raises(Unordered, match=r"write \(.*\) by the host .* write \(copy down of 4096 bytes\)"):
                rig.values(3).zero_()
        landing.wait()
        rig.values(3).zero_()
        rig.values(0).zero_()
    sim.check_but_for(Unordered)


def test_a_withdrawn_update_says_as_little_and_a_job_that_reads_ahead_may_be_canceled(rig: Rig) -> None:
    sim = rig.sim
    copied = rig.copy_down()
    with closing(_native.Landings(rig.device_gate(), rig.pool)) as landings:
        with sim.lock:
            landing = landings.land(sim.handle(copied), [_native.LandingPiece(rig.page(3), "fp32")])
            assert rig.pipeline.withdraw([[rig.update(after=(landing,))]]) == [True]
            assert not sim.reached(copied)
        landing.wait()
    stream = _native.StateStream(None, rig.file, 0)
    states = {"weight": stream, "exp_avg": stream, "exp_avg_sq": stream}
    rig.pipeline.cancel(rig.pipeline.read_ahead(numel=PAGE // 4, weight_dtype="fp32", master="weight", **states))


def test_landings_are_in_the_order_of_the_calls(rig: Rig) -> None:
    with closing(_native.Landings(rig.device_gate(), rig.pool)) as landings:
        landings.land(0, [_native.LandingPiece(rig.page(3), "fp32")])
        second = landings.land(0, [_native.LandingPiece(rig.page(3), "fp32", source=rig.page(4), add=True)])
        with (
            closing(_native.Landings(rig.device_gate(), rig.pool)) as others,
            pytest.raises(Unordered, match=r"write \(landing\) by a landing .* write \(landing\) by a landing"),
        ):
            others.land(0, [_native.LandingPiece(rig.page(3), "fp32", source=rig.page(4), add=True)])
        second.wait()
        rig.values(3).sum()


def test_an_upload_is_ordered_by_the_event_behind_it(rig: Rig) -> None:
    sim, up = rig.sim, rig.sim.stream("up")
    ready, pieces = sim.event(), [sim.event() for _ in range(2)]
    bounce = rig.arena.memory.view(8 * PAGE, 2 * PAGE)
    rig.engine.write(rig.file, 0, rig.arena.memory.view(0, 4 * PAGE)).wait()
    handles = [sim.handle(event) for event in pieces]
    with closing(_native.Uploads(rig.engine, rig.device_gate(), bounce, PAGE, handles)) as uploads:
        part = _native.UploadPart(rig.file, 0, 4 * PAGE, rig.slab.data_ptr())
        future = uploads.upload([part], stream=sim.handle(up), ready=sim.handle(ready))
        future.wait()
        with pytest.raises(
            Unordered, match=r"read \(aten.sum.default\) by the compute stream .*/test_host.py:\d+: 4096"
        ):
            rig.slab.sum()
        sim.wait(sim.current(), ready)
        rig.slab.sum()
    assert sim.counts["bytes up"] == 4 * PAGE
    sim.check_but_for(Unordered)
