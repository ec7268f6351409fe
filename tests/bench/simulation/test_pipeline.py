"""The driver told again: what it does in which order."""

from __future__ import annotations

from typing import Any

from simulation.clock import Clock, Future
from simulation.disk import Disk
from simulation.fluid import Fluid
from simulation.native import Stream
from simulation.pipeline import CANCELED, Pipeline, UpdateFuture
from simulation.resources import FILE

from infinity.plan.budgets import UpdateStaging
from tests.bench.simulation.machines import CPU

TILE = 1 << 20


class World:
    """A pipeline with room for `tiles`, and the order in which its jobs are computed."""

    def __init__(self, tiles: int = 4, ahead: int = 0) -> None:
        self.clock = Clock()
        fluid = Fluid(self.clock, CPU.capacity())
        self.disk = Disk(self.clock, fluid, CPU)
        staging = UpdateStaging(TILE, TILE * 20, TILE * 20 * tiles, 2, TILE * 20 * ahead)
        self.pipeline = Pipeline(self.clock, fluid, self.disk, CPU, staging)
        self.computed: list[str] = []

    def job(self, tiles: int = 2) -> dict[str, Any]:
        state = Stream(file=FILE)
        return {
            "numel": TILE * tiles, "moments": "fp32", "weight_dtype": "bf16", "grad_dtype": "bf16",
            "weight": Stream(memory=memoryview(b"")), "residual": state, "exp_avg": state, "exp_avg_sq": state,
            "grad": Stream(memory=memoryview(b"")),
        }  # fmt: skip

    def submit(self, name: str, *, in_memory: bool = False, **given: Any) -> UpdateFuture:
        job = self.job()
        if in_memory:
            job |= dict.fromkeys(("residual", "exp_avg", "exp_avg_sq"), Stream(memory=memoryview(b"")))
        future = self.pipeline.submit(**job, **given)
        future.computed.then(lambda: self.computed.append(name) if future.computed.failure() is None else None)
        return future


def test_jobs_are_computed_in_their_order_and_a_speculative_one_is_the_next() -> None:
    world = World(tiles=3)
    futures = [world.submit("first"), world.submit("second"), world.submit("next", speculative=True)]
    for future in futures:
        future.wait()
    assert world.computed == ["next", "first", "second"]


def test_a_job_moves_what_it_has_in_the_file_both_ways() -> None:
    world = World()
    world.submit("it").wait()
    assert (world.disk.read_bytes, world.disk.written_bytes) == (2 * TILE * 10, 2 * TILE * 10)


def test_computed_comes_before_written() -> None:
    world = World()
    future = world.submit("it")
    future.computed.wait()
    assert not future.done()
    future.wait()


def test_a_job_that_was_not_begun_is_taken_back_and_one_that_was_goes_on() -> None:
    world = World(tiles=1)
    first, second = world.submit("first"), world.submit("second")
    world.clock.run_until(lambda: world.disk.read_bytes > 0)
    assert world.pipeline.withdraw([[first], [second]]) == [False, True]
    first.wait()
    assert second.failure() is CANCELED
    assert world.computed == ["first"]


def test_jobs_are_taken_back_together_or_not_at_all() -> None:
    world = World(tiles=1)
    first, second, third = (world.submit(name) for name in ("first", "second", "third"))
    world.clock.run_until(lambda: world.disk.read_bytes > 0)
    assert world.pipeline.withdraw([[second, first], [third]]) == [False, True]
    second.wait()
    assert world.computed == ["first", "second"]


def test_a_unit_that_was_begun_is_finished_before_a_speculative_job_of_another_one_comes() -> None:
    world = World(tiles=1)
    futures = [world.submit("big", in_memory=True, speculative=True, unit=2)]
    world.clock.sleep(1e-9)
    for name, unit in (("small", 2), ("later", 1), ("other", 1)):
        futures.append(world.submit(name, in_memory=True, speculative=True, unit=unit))
    for future in futures:
        future.wait()
    assert world.computed == ["big", "small", "other", "later"]


def test_jobs_in_memory_are_computed_while_another_waits_for_the_disk() -> None:
    world = World(tiles=1)
    futures = [world.submit("file"), world.submit("memory", in_memory=True)]
    futures += [world.submit("next", in_memory=True, speculative=True), world.submit("late", in_memory=True)]
    assert world.pipeline.withdraw([futures[3:]]) == [True]
    for future in futures:
        future.wait()
    assert world.computed == ["next", "memory", "file"]
    assert world.disk.read_bytes == 2 * TILE * 10


def test_a_tile_that_is_read_comes_before_those_in_memory() -> None:
    world = World(ahead=2)
    ahead = world.pipeline.read_ahead(**(world.job() | {"weight": None, "grad": None}))
    world.clock.sleep(1.0)
    memory, file = world.submit("memory", in_memory=True), world.submit("file", ahead=ahead)
    memory.wait()
    file.wait()
    assert world.computed == ["file", "memory"]


def test_a_job_enters_the_queue_when_its_inputs_are_there() -> None:
    world = World(tiles=1)
    landed = Future(world.clock)
    held, free = world.submit("held", after=[landed]), world.submit("free")
    free.wait()
    assert not held.computed.done()
    landed.complete()
    held.wait()
    assert world.computed == ["free", "held"]


def test_a_job_that_is_held_is_taken_back_with_what_was_read_for_it() -> None:
    world = World(tiles=3, ahead=2)
    ahead = world.pipeline.read_ahead(**(world.job() | {"weight": None, "grad": None}))
    landed = Future(world.clock)
    held = world.submit("held", ahead=ahead, after=[landed])
    assert world.pipeline.withdraw([[held]]) == [True]
    assert held.failure() is CANCELED
    assert ahead.failure() is CANCELED
    landed.complete()
    world.submit("next").wait()
    assert world.computed == ["next"]


def test_what_was_read_ahead_is_not_read_again() -> None:
    world = World(tiles=3, ahead=2)
    ahead = world.pipeline.read_ahead(**(world.job() | {"weight": None, "grad": None}))
    world.clock.run_until(lambda: world.disk.read_bytes == 2 * TILE * 10)
    world.submit("it", ahead=ahead).wait()
    assert world.disk.read_bytes == 2 * TILE * 10
    assert world.pipeline.tiles_ahead_used == 2


def test_memory_that_was_lent_comes_back_when_its_tiles_are_written() -> None:
    world = World(tiles=2)
    lent = memoryview(bytearray(3 * TILE * 20))
    world.pipeline.lend(lent)
    assert world.pipeline.ahead_tiles_max == 3
    future = world.submit("it")
    future.computed.wait()
    assert world.pipeline.reclaim(lent)
    assert world.pipeline.ahead_tiles_max == 0
    future.wait()
