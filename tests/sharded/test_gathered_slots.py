"""Encoded weights that ranks gather: two buffers take turns, and a slot is ready when its weights are decoded."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infinity import _native
from infinity.io.arena import PinnedArena
from infinity.sharded.gather_memory import HostMemories
from infinity.sharded.gathered_slots import GatheredSlotPool
from infinity.sizes import PAGE_BYTES
from infinity.state.shard import RankPartition, Shard
from infinity.state.unit import FlatParameterGroup, ParameterSpec, Unit
from infinity.tiers.home import StateHome, WeightsHome

NUMEL = 64 * 1024


def unit_of(index: int) -> Unit:
    """Return a unit with a small trained group and an encoded one."""
    plain = ParameterSpec(f"{index}.norm", torch.Size([256]), 256, 0, 0)
    matrix = ParameterSpec(f"{index}.matrix", torch.Size([64, 1024]), NUMEL, 0, 256)
    groups = (
        FlatParameterGroup(torch.float32, True, "fp32", (plain,), 256, 0, PAGE_BYTES),
        FlatParameterGroup(torch.bfloat16, False, "fp32", (matrix,), NUMEL, PAGE_BYTES, 2 * NUMEL, "nf4"),
    )
    return Unit(index, f"unit{index}", groups, PAGE_BYTES + 2 * NUMEL)


@dataclass
class Decoder:
    """A decoder that reports what is waited for."""

    encoded_space: Any
    said: list[str]
    begun: list[bytes] = field(default_factory=list)

    def start(self, groups: Any, data: memoryview, slot: memoryview, after: Any) -> Any:
        self.begun.append(bytes(data))
        return _Decoding(len(self.begun) - 1, self.said)


@dataclass
class _Decoding:
    number: int
    said: list[str]

    def wait(self, timeout_s: float = 0.0) -> bool:
        self.said.append(f"decoded {self.number}")
        return True

    def done(self) -> bool:
        return True

    def failure(self) -> None:
        return None


@dataclass
class Queue:
    """Collectives of a rank whose peers have no bytes but zeros; they are carried out when a test asks for it."""

    submitted: list[Any] = field(default_factory=list)

    def submit(self, operation: Any) -> Any:
        self.submitted.append(operation)
        return _Ticket()

    def carry_out(self, said: list[str]) -> None:
        for number, operation in enumerate(self.submitted):
            for each in operation.after:
                each()
            said.append(f"gathered {number}")
            operation.arrived()
        self.submitted.clear()


class _Ticket:
    def wait(self) -> None:
        return

    def result(self) -> list[bytes]:
        return []


@dataclass
class Model:
    """Units of which this process is rank 0 of 2, in RAM; the slice of each unit has the number of the unit in all
    bytes."""

    pool: GatheredSlotPool
    homes: list[WeightsHome]
    decoder: Decoder
    queue: Queue
    said: list[str]


@pytest.fixture
def model() -> Model:
    shards = [Shard(unit_of(index), RankPartition(2, 0)) for index in range(3)]
    encoded = shards[0].full.encoded_bytes
    arena = PinnedArena(8 << 20)
    said: list[str] = []
    decoder = Decoder(arena.lease(2 * encoded, "buffers").space(), said)
    homes = []
    for shard in shards:
        lease, begin, groups = arena.lease(shard.local.home_bytes, "home"), 0, []
        lease.tensor().fill_(shard.full.index + 1)
        for group in shard.local.groups:
            groups.append(StateHome(lease, begin, group.home_bytes, None))
            begin += group.home_bytes
        homes.append(WeightsHome(tuple(groups), shard.local.home_bytes, shard.local))
    resources: Any = _Resources(arena, decoder, [_Homes(home) for home in homes])
    queue: Any = Queue()
    return Model(GatheredSlotPool(resources, queue, shards, HostMemories(resources)), homes, decoder, queue, said)


@dataclass
class _Homes:
    weights: WeightsHome


@dataclass
class _Resources:
    transfers: PinnedArena
    decoding: Decoder
    units: list[_Homes]
    secondary: Any = None

    @property
    def plan(self) -> Any:
        return SimpleNamespace(peers=SimpleNamespace(near=None))


def test_a_buffer_is_written_after_what_was_in_it_is_decoded(model: Model) -> None:
    """The operations are the plain and the encoded group of three units. Operation 5 uses the buffer of operation 1."""
    for home in model.homes:
        assert model.pool.start(home, {}, 0) is not None
    model.queue.carry_out(model.said)
    assert model.said == [*(f"gathered {number}" for number in range(5)), "decoded 0", "gathered 5"]


def test_each_unit_is_decoded_from_the_bytes_of_all_slices(model: Model) -> None:
    for home in model.homes:
        model.pool.start(home, {}, 0)
    model.queue.carry_out(model.said)
    own = model.homes[0].groups[1].nbytes
    assert 0 < own < len(model.decoder.begun[0])
    for number, data in enumerate(model.decoder.begun):
        assert set(data[:own]) == {number + 1}


def test_a_slot_is_ready_when_its_weights_are_decoded(model: Model) -> None:
    fetch = model.pool.start(model.homes[0], {}, 0)
    assert fetch is not None
    model.queue.carry_out(model.said)
    assert model.said[-1] == "gathered 1"
    fetch.finish()
    assert model.said[-1] == "decoded 0"


def test_a_slice_of_an_encoded_group_has_pages_and_no_parameters() -> None:
    unit = unit_of(0)
    slices = [Shard(unit, RankPartition(3, rank)).local.groups[1] for rank in range(3)]
    assert sum(each.home_bytes for each in slices) == unit.groups[1].home_bytes
    assert all(each.home_bytes % PAGE_BYTES == 0 and not each.specs for each in slices)
    assert sum(each.values_numel for each in slices) == pytest.approx(NUMEL, abs=3)
    assert unit.groups[1].home_bytes >= _native.encoded_weight_bytes("nf4", NUMEL, 1024)
