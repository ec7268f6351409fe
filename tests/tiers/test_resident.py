"""Memory of resident units: every pair of uses by two streams is ordered, and the host does not wait."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from infinity.tiers.resident import ResidentMemory, ResidentUses
from tests.sim.accelerator import SimAccelerator
from tests.sim.queues import LAZY
from tests.sim.test_accelerator import Bench
from tests.sim.watch import watched

HALF = 2048


class Resident:
    """Memory of a resident unit, and two streams."""

    def __init__(self) -> None:
        self.bench = Bench(LAZY)
        self.sim: SimAccelerator = self.bench.sim
        self.uses = ResidentUses(self.sim)
        self.memory = self.bench.device
        self.streams = [self.sim.stream(name) for name in ("one", "other")]

    def read(self, stream: int) -> None:
        with self.sim.on(self.streams[stream]):
            self.uses.begin_reading()
            self.memory.sum()

    def read_once(self, stream: int) -> None:
        with self.sim.on(self.streams[stream]), self.uses.reading():
            self.memory.sum()

    def write(self, stream: int) -> None:
        with self.sim.on(self.streams[stream]), self.uses.writing():
            self.memory.fill_(1)

    def copy(self, stream: int) -> None:
        self.uses.copied(
            self.sim.copy(
                self.bench.host[stream * HALF : (stream + 1) * HALF],
                self.memory[:HALF],
                on=self.streams[stream],
                after=self.uses.written,
            )
        )


USES: dict[str, Callable[[Resident, int], None]] = {
    "reads": Resident.read,
    "reads once": Resident.read_once,
    "writes": Resident.write,
    "copies": Resident.copy,
}


@pytest.mark.parametrize("rests", [False, True])
@pytest.mark.parametrize("then", USES)
@pytest.mark.parametrize("first", USES)
def test_any_two_uses_by_two_streams_are_ordered(first: str, then: str, *, rests: bool) -> None:
    made = Resident()
    with watched(made.sim):
        made.write(1)
        USES[first](made, 0)
        if rests:
            made.uses.end_reading()
        USES[then](made, 1)
        made.write(0)
        USES[first](made, 1)
        made.write(1)
    made.sim.check()
    assert made.sim.counts["synchronize"] == 0


def test_reads_that_go_on_are_waited_for_after_a_write_by_their_own_stream() -> None:
    made = Resident()
    with watched(made.sim):
        made.read(0)
        made.write(0)
        made.read_once(0)
        with made.sim.on(made.streams[0]):
            made.memory.sum()
        made.write(1)
    made.sim.check()


def test_bytes_are_read_and_written_from_the_host() -> None:
    made = Resident()
    with watched(made.sim):
        state = ResidentMemory(made.memory[8:16], made.uses)
        state.write(0, torch.arange(8, dtype=torch.uint8))
        assert state.read(2, 3).tolist() == [2, 3, 4]
    assert state.nbytes == 8
    assert state.view(torch.int16, 3).numel() == 3
    made.sim.check()


def test_no_context_is_left_open() -> None:
    made = Resident()
    context: AbstractContextManager[None] = made.uses.reading()
    with watched(made.sim), context:
        pass
    assert None not in made.uses._readers.values()
