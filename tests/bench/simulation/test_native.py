"""The simulated counterparts of the C++ classes for devices, and the order in which they wait."""

from __future__ import annotations

import pytest
from simulation.clock import Clock, Future
from simulation.disk import Disk
from simulation.fluid import Activity, Fluid
from simulation.gpu import Event, Gpu
from simulation.native import LandingPiece, Landings, Pool, UploadPart, Uploads

from tests.bench.simulation.machines import GPU

PIECE = 1 << 20


class World:
    """A GPU, and a bounce buffer of `pieces`."""

    def __init__(self, pieces: int = 4) -> None:
        self.clock = Clock()
        self.fluid = Fluid(self.clock, GPU.capacity())
        self.disk = Disk(self.clock, self.fluid, GPU)
        self.gpu = Gpu(self.clock, self.fluid, GPU)
        self.up = self.gpu.stream()
        self.uploads = Uploads(self.disk, self.gpu, memoryview(b""), PIECE, [self.gpu.event() for _ in range(pieces)])

    def compute(self, seconds: float) -> Event:
        self.gpu.compute.run(Activity(seconds, 1.0, {"device": 1.0}))
        return self.gpu.record(self.gpu.compute)

    def upload(self, pieces: int, *waits: Event, after: Future | None = None) -> tuple[Future, Event]:
        ready = self.gpu.event()
        part = UploadPart("a file", 0, pieces * PIECE, 0, after)
        return self.uploads.upload([part], stream=self.up, waits=waits, ready=ready), ready


def test_a_stream_does_its_work_in_order_and_waits_for_events_of_others() -> None:
    world = World()
    computed = world.compute(2.0)
    world.gpu.wait(world.up, computed)
    world.gpu.transfer(int(GPU.up), world.up, up=True)
    copied = world.gpu.record(world.up)
    world.gpu.synchronize(copied)
    assert world.clock.now == pytest.approx(3.0)
    assert world.gpu.seconds(computed, copied) == pytest.approx(1.0)


def test_a_stream_tells_how_long_it_stood_still_and_what_for() -> None:
    world = World()
    world.gpu.transfer(int(GPU.up), world.up, up=True)
    world.gpu.wait(world.gpu.compute, world.gpu.record(world.up))
    world.gpu.synchronize(world.compute(1.0))
    assert world.gpu.compute.waited == {"weights": pytest.approx(1.0)}


def test_an_event_behind_nothing_was_reached() -> None:
    world = World()
    assert world.gpu.reached(world.gpu.record(world.up))


def test_an_upload_is_done_when_its_copies_are_queued_and_ready_when_they_are_over() -> None:
    world = World()
    done, ready = world.upload(3, world.compute(5.0))
    done.wait()
    assert world.clock.now < 0.1
    assert not world.gpu.reached(ready)
    world.gpu.synchronize(ready)
    assert world.clock.now == pytest.approx(5.0, abs=0.1)


def test_an_upload_waits_for_what_is_on_its_way_to_the_store() -> None:
    world = World()
    written = Future(world.clock)
    world.clock.after(1.0, written.complete)
    done, _ = world.upload(1, after=written)
    done.wait()
    assert world.clock.now == pytest.approx(1.0, abs=0.1)


def test_a_piece_of_landing_memory_is_used_again_when_the_device_has_read_it() -> None:
    world = World(pieces=2)
    done, _ = world.upload(3, world.compute(5.0))
    world.clock.run_until(lambda: world.clock.now > 4.0)
    assert world.disk.read_bytes == 2 * PIECE
    done.wait()
    assert world.disk.read_bytes == 3 * PIECE


def test_gradients_land_in_the_order_in_which_they_were_given() -> None:
    world, order = World(), []
    landings = Landings(world.gpu, Pool(world.clock, world.fluid, GPU))
    late, early = world.compute(2.0), world.gpu.record(world.up)
    piece = LandingPiece(memoryview(bytearray(8)), "bf16")
    first, second = landings.land(late, [piece, piece]), landings.land(early, [])
    second.then(lambda: order.append("second"))
    first.then(lambda: order.append("first"))
    second.wait()
    assert order == ["first", "second"]
    assert (len(first.sums), len(second.sums)) == (2, 0)
