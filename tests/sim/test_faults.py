"""If a wait, an event or a last use is left out, the checker names the unordered uses, with every policy."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from tests.sim.accelerator import SimAccelerator
from tests.sim.clocks import Unordered
from tests.sim.queues import Policy
from tests.sim.test_accelerator import Bench, every_policy
from tests.sim.watch import watched

PART = 64


class Seam:
    """The transfers between a host and a device: two units' weights through one slot, and a gradient through a ring."""

    def __init__(self, policy: Policy) -> None:
        bench = Bench(policy)
        self.sim: SimAccelerator = bench.sim
        self.bench = bench
        self.up, self.down = self.sim.stream("up"), self.sim.stream("down")
        self.homes = [bench.host[index * PART : (index + 1) * PART].view(torch.float32) for index in range(2)]
        self.landed = bench.host[2 * PART : 3 * PART].view(torch.float32)
        self.slot = bench.device[:PART].view(torch.float32)
        self.ring = bench.device[PART : 2 * PART].view(torch.float32)
        for index, home in enumerate(self.homes):
            home.fill_(index + 1)

    def step(self, without: str) -> list[float]:
        """Compute two units, one after the other, and a gradient, and update the second unit."""
        sim, compute = self.sim, self.sim.current()
        first = sim.copy(self.slot, self.homes[0], on=self.up)
        if without != "wait before use":
            sim.wait(compute, first)
        one = float((self.slot * 2).sum())
        used = sim.record(compute)
        second = sim.copy(self.slot, self.homes[1], on=self.up, after=[] if without == "last use" else [used])
        sim.wait(compute, second)
        torch.mul(self.slot, 2, out=self.ring)
        packed = sim.record(compute)
        down = sim.copy(self.landed, self.ring, on=self.down, after=[] if without == "event" else [packed])
        if without != "use after release":
            sim.wait(compute, down)
        self.ring.fill_(0)
        if without != "wait for the landing":
            sim.synchronize(down)
        landed = float(self.landed.sum())
        self.homes[1].fill_(5)  # the landing was ordered behind the kernel, and the kernel behind the upload
        return [one, landed]


def watching(run: Callable[[], list[float]], sim: SimAccelerator) -> list[float]:
    with watched(sim):
        return run()


@every_policy
def test_a_whole_seam_is_ordered(policy: Policy) -> None:
    seam = Seam(policy)
    assert watching(lambda: seam.step(""), seam.sim) == [PART / 4 * 2, PART / 4 * 4]
    watching(lambda: seam.step(""), seam.sim)  # the next step uses memory that this one used
    seam.sim.check()


FAULTS = {
    "wait before use": ("read (aten.mul.Tensor) by the compute stream", "write (copy up of 64 bytes) by up"),
    "last use": ("write (copy up of 64 bytes) by up", "read (aten.mul.Tensor) by the compute stream"),
    "event": ("read (copy down of 64 bytes) by down", "write (aten.mul.out) by the compute stream"),
    "use after release": ("write (aten.fill_.Scalar) by the compute stream", "read (copy down of 64 bytes) by down"),
    "wait for the landing": ("read (aten.sum.default) by the host", "write (copy down of 64 bytes) by down"),
}


@every_policy
@pytest.mark.parametrize("without", FAULTS)
def test_what_is_missing_is_named_with_both_places(policy: Policy, without: str) -> None:
    seam = Seam(policy)
    with pytest.raises(Unordered) as error:
        watching(lambda: seam.step(without), seam.sim)
    assert_names(str(error.value), *FAULTS[without])


def assert_names(message: str, later: str, earlier: str) -> None:
    place = r" at tests/sim/test_faults\.py:\d+"
    assert re.match(f"{re.escape(later)}{place} is not ordered behind {re.escape(earlier)}{place}: ", message), message


@every_policy
def test_an_update_of_host_memory_that_a_copy_reads_is_named(policy: Policy) -> None:
    seam = Seam(policy)

    def run() -> list[float]:
        seam.sim.copy(seam.slot, seam.homes[0], on=seam.up)
        seam.homes[0].fill_(5)
        return []

    with pytest.raises(Unordered) as error:
        watching(run, seam.sim)
    assert_names(str(error.value), "write (aten.fill_.Scalar) by the host", "read (copy up of 64 bytes) by up")


@every_policy
def test_host_memory_that_is_given_back_while_a_copy_reads_it_is_named(policy: Policy) -> None:
    seam = Seam(policy)
    seam.sim.copy(seam.slot, seam.homes[0], on=seam.up)
    with pytest.raises(Unordered) as error:
        seam.sim.poison(seam.homes[0].data_ptr(), PART, "lease given back")
    assert_names(str(error.value), "write (lease given back) by the host", "read (copy up of 64 bytes) by up")


@every_policy
def test_a_kernel_on_another_stream_needs_an_event(policy: Policy) -> None:
    seam = Seam(policy)
    side = seam.sim.stream("side")

    def run(ordered: bool) -> list[float]:
        torch.mul(seam.ring, 0, out=seam.ring)
        if ordered:
            seam.sim.wait(side, seam.sim.record(seam.sim.current()))
        with seam.sim.on(side):
            return [float(seam.ring.add_(1).sum())]

    watching(lambda: run(True), seam.sim)
    seam = Seam(policy)
    side = seam.sim.stream("side")
    with pytest.raises(Unordered) as error:
        watching(lambda: run(False), seam.sim)
    assert_names(str(error.value), "write (aten.add_.Tensor) by side", "write (aten.mul.out) by the compute stream")
