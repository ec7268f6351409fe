"""Weights that ranks share: slices at their places, fetches that wait for them, and what is published when."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infinity.errors import InfinityError, PeerError
from infinity.io.arena import PinnedArena
from infinity.sharded.shared_homes import SharedHomes
from infinity.sharded.shared_slots import SharedFetchRules, SharedSlotPool
from infinity.sizes import PAGE_BYTES
from infinity.tiers.destination import StateDestination
from infinity.tiers.home import WeightsHome
from tests.sharded.sharing import SLICE_NUMEL, shared
from tests.units.fakes import unit_of

COUNT = 3


def local_homes(homes: SharedHomes, rank: int) -> list[WeightsHome]:
    found = []
    for complete in homes.complete:
        full: Any = complete.unit
        shard = homes._cut.of(full)
        layout: Any = SimpleNamespace(full=full, local=shard.local)
        found.append(homes.open(layout, [None] * len(full.groups), PinnedArena(PAGE_BYTES)))
    return found


@pytest.fixture
def ranks() -> Any:
    made = shared(COUNT, [unit_of(0, (8,)), unit_of(1, (4, 6))])
    yield made
    for each in made:
        each.close()


def test_the_slices_of_all_ranks_are_the_weights_of_the_complete_units(ranks: list[SharedHomes]) -> None:
    locals_ = [local_homes(homes, rank) for rank, homes in enumerate(ranks)]
    for rank, of_rank in enumerate(locals_):
        for home in of_rank:
            for group in home.groups:
                group.view()[:] = bytes([rank + 1]) * group.nbytes
    for homes in ranks:
        for index, complete in enumerate(homes.complete):
            assert complete.lease is not None
            found = complete.lease.tensor()
            expected = [
                bytes([rank + 1]) * locals_[rank][index].groups[number].nbytes
                for number in range(len(complete.groups))
                for rank in range(COUNT)
            ]
            assert found.numpy().tobytes() == b"".join(expected)
    assert SLICE_NUMEL * 4 % PAGE_BYTES == 0


@dataclass
class Collectives:
    """Counterpart of CollectiveQueue."""

    deadline_s: float = 20.0
    failure: PeerError | None = None

    def act(self) -> None:
        return

    def raise_if_broken(self) -> None:
        if self.failure is not None:
            raise self.failure


@dataclass
class Slots:
    """Counterpart of the pool below. Attributes: begun: homes whose fetch has begun."""

    begun: list[WeightsHome] = field(default_factory=list)

    def start(self, home: WeightsHome, after: Any, version: int) -> Any:
        self.begun.append(home)
        return home


def pool_of(homes: SharedHomes, collectives: Any) -> tuple[SharedSlotPool, Slots, list[WeightsHome]]:
    slots, local = Slots(), local_homes(homes, 0)
    below: Any = slots
    return SharedSlotPool(below, homes, local, collectives), slots, local


@pytest.mark.parametrize("late", range(COUNT))
def test_a_fetch_waits_for_the_slices_of_all_ranks(ranks: list[SharedHomes], late: int) -> None:
    pool, slots, local = pool_of(ranks[0], Collectives())
    for rank, homes in enumerate(ranks):
        homes.publish(1, 0, {})
        if rank != late:
            homes.publish(1, 1, {}).wait()
    fetching = threading.Thread(target=pool.start, args=(local[1], {}, 1))
    fetching.start()
    fetching.join(0.4)
    assert fetching.is_alive()
    assert not slots.begun
    ranks[late].publish(1, 1, {})
    fetching.join(20)
    assert slots.begun == [ranks[0].complete[1]]


def test_a_unit_is_not_prefetched_before_all_ranks_have_its_version(ranks: list[SharedHomes]) -> None:
    rules = SharedFetchRules(ranks[0])
    unit: Any = SimpleNamespace(index=0, version=2, can_be_fetched=lambda: True)
    for homes in ranks[1:]:
        homes.publish(0, 2, {}).wait()
    assert not rules.may_prefetch(unit)
    ranks[0].publish(0, 2, {}).wait()
    assert rules.may_prefetch(unit)


def test_a_fetch_names_the_ranks_that_are_late_or_have_failed(ranks: list[SharedHomes]) -> None:
    collectives = Collectives(deadline_s=0.1)
    pool, _, local = pool_of(ranks[0], collectives)
    ranks[1].publish(0, 0, {}).wait()
    with pytest.raises(PeerError, match=r"ranks 0, 2 did not update unit '0' within 0.1 s") as raised:
        pool.start(local[0], {}, 0)
    assert raised.value.ranks == (0, 2)
    collectives.failure = PeerError("rank 2 died", (2,))
    with pytest.raises(PeerError, match="rank 2 died"):
        pool.start(local[0], {}, 0)


class Work:
    """An update in progress. Attributes: error: its failure."""

    def __init__(self) -> None:
        self.ended, self.error = threading.Event(), ""

    def result(self) -> None:
        self.ended.wait()
        if self.error:
            raise InfinityError(self.error)


@pytest.mark.parametrize("fails", [False, True])
def test_new_weights_of_a_shadow_are_copied_before_they_are_published(ranks: list[SharedHomes], fails: bool) -> None:
    home = local_homes(ranks[1], 1)[1]
    shadow = PinnedArena(home.nbytes).lease(home.nbytes, "a shadow")
    shadow.tensor().fill_(7)
    for group in home.groups:
        group.view()[:] = bytes([3]) * group.nbytes
    work: Any = Work()
    changed = {
        index: StateDestination(group, shadow, group.lease, written=work) for index, group in enumerate(home.groups)
    }
    publication = ranks[1].publish(1, 4, changed)
    time.sleep(0.1)
    assert not publication.done()
    assert 1 in ranks[0].behind(1, 4)
    work.error = "no" if fails else ""
    work.ended.set()
    publication.wait()
    if fails:
        with pytest.raises(InfinityError, match="no"):
            publication.result()
    assert ranks[1]._world.failures == ["no"] * fails  # type: ignore[attr-defined]
    assert (1 in ranks[0].behind(1, 4)) == fails
    expected = 3 if fails else 7
    assert {value for group in home.groups for value in torch.frombuffer(group.view(), dtype=torch.uint8).tolist()} == {
        expected
    }


def test_the_memory_is_given_back_by_the_last_rank(ranks: list[SharedHomes]) -> None:
    lease: Any = ranks[0].complete[0].lease
    lease.tensor().fill_(5)
    for homes in ranks[:-1]:
        homes.give_back()
        assert lease.tensor()[0] == 5
    ranks[-1].give_back()
    assert lease.tensor()[0] == 0
