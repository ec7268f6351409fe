"""Who the ranks are, over one machine and several, and the groups in which weights are gathered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from infinity.errors import PeerError
from infinity.ranks.collective_queue import CollectiveQueue
from infinity.ranks.operations import AllGather, CollectiveOperation
from infinity.ranks.ranks import RankGroup, Ranks
from tests.ranks.tasks import done, opened, operation
from tests.ranks.workers import run


def test_without_torch_distributed_there_are_no_ranks() -> None:
    assert Ranks.of_world() is None
    assert Ranks.of_world(even_alone=True) is None


def alone() -> Any:
    ranks = Ranks.of_world(even_alone=True)
    assert ranks is not None
    ranks.assemble("offload")
    told = ranks.rank, ranks.world, ranks.local_rank, ranks.local_world, ranks.node, ranks.gather, ranks.shard
    ranks.close()
    ranks.close()
    return Ranks.of_world() is None, told


def test_one_rank_has_ranks_where_it_asks_for_them() -> None:
    assert run(1, alone) == [(True, (0, 1, 0, 1, 0, RankGroup((0,), 0), RankGroup((0,), 0)))]


def on_machines(machines: str, gather: Any) -> Any:
    """Where this rank is, and what a gather of a byte from each rank of G brings."""
    ranks = Ranks.of_world(gather, machine=machines[dist.get_rank()])
    assert ranks is not None
    collectives, group = CollectiveQueue(ranks), ranks.gather
    exchanged = done(collectives, operation("exchange", 0, nbytes=1))
    buffer = torch.zeros(group.size, dtype=torch.uint8)
    buffer[group.position] = ranks.rank + 1
    collectives.submit(CollectiveOperation(AllGather(buffer, [1] * group.size, near=True), 1, "unit 'head'")).result()
    collectives.close()
    assert exchanged == bytes(range(1, ranks.world + 1))
    assert len(dist.distributed_c10d._world.pg_map) == 1
    return ranks.node, ranks.local_rank, ranks.local_world, buffer.tolist()


@pytest.mark.parametrize(
    ("machines", "gather", "expected"),
    [
        ("aabb", "world", [(0, 0, 2, [1, 2, 3, 4]), (0, 1, 2, [1, 2, 3, 4]), (1, 0, 2, [1, 2, 3, 4])]),
        ("abab", "node", [(0, 0, 2, [1, 3]), (1, 0, 2, [2, 4]), (0, 1, 2, [1, 3]), (1, 1, 2, [2, 4])]),
        ("aab", "node", [(0, 0, 2, [1, 2]), (0, 1, 2, [1, 2]), (1, 0, 1, [3])]),
        ("aa", "none", [(0, 0, 2, [1]), (0, 1, 2, [2])]),
        pytest.param("aa", "node", [(0, 0, 2, [1, 2]), (0, 1, 2, [1, 2])], marks=pytest.mark.long),
    ],
)
def test_weights_are_gathered_over_the_world_a_machine_or_nobody(machines: str, gather: str, expected: Any) -> None:
    assert run(len(machines), on_machines, machines, gather)[: len(expected)] == expected


def of_different_minds() -> Any:
    with pytest.raises(PeerError) as caught:
        Ranks.of_world("none" if dist.get_rank() == 1 else "world")
    return str(caught.value)


def test_ranks_that_gather_over_different_groups_say_so() -> None:
    for told in run(2, of_different_minds):
        assert "ranks.gather must be the same on all ranks" in told


def several_models() -> Any:
    first, second = opened(), opened()
    told = [second.all_gather(0, "b", b"2"), first.all_gather(0, "a", b"1")]
    first.close()
    told.append(second.all_gather(1, "b", b"3"))
    dist.destroy_process_group()  # before we leave, as scripts do
    second.close()
    return told


def test_models_have_collective_queues_of_their_own() -> None:
    assert run(2, several_models) == [[[b"2"] * 2, [b"1"] * 2, [b"3"] * 2]] * 2
