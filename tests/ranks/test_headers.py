"""Headers that ranks exchange before an operation: they are short, and give the same error on all ranks."""

from __future__ import annotations

import random

import pytest
import torch

from infinity.errors import PeerError
from infinity.ranks import headers
from infinity.ranks.headers import OperationHeader
from infinity.ranks.operations import AllGather, AllToAll, CollectiveOperation, ControlMessage
from infinity.ranks.ranks import RankGroup


def _group(rank: int, n: int) -> RankGroup:
    return RankGroup(tuple(range(n)), rank)


Moved = AllGather | AllToAll | ControlMessage


def _of(rank: int, n: int, moved: Moved, name: str = "unit 'a'") -> tuple[OperationHeader, list[list[int]]]:
    operation = CollectiveOperation(moved, 5, name)
    header = OperationHeader.of(operation, 2, _group(rank, n), _group(rank, n))
    return OperationHeader.decode(header.encode()), headers.sizes_of(operation)


def _exchange(rank: int, sizes: list[list[int]]) -> AllToAll:
    sent, received = sizes[rank], [row[rank] for row in sizes]
    return AllToAll(torch.empty(sum(sent)), sent, torch.empty(sum(received)), received)


def test_a_header_has_one_length_and_keeps_what_is_compared() -> None:
    operation = CollectiveOperation(ControlMessage(b"x" * 70_000), -3, "ünit " * 60)
    encoded = OperationHeader.of(operation, 2**40, _group(1, 3), _group(1, 3)).encode()
    assert len(encoded) == headers.NBYTES
    header = OperationHeader.decode(encoded)
    assert (header.index, header.kind, header.subject, header.sent) == (2**40, 2, -3, 70_000)
    assert operation.name.startswith(header.name)
    assert header.what.startswith("is at ünit ")


def test_pieces_fit_exactly_where_each_is_expected_as_it_is_sent() -> None:
    chance = random.Random(0)
    for n in (2, 3, 7):
        sizes = [[chance.randrange(100) for _ in range(n)] for _ in range(n)]
        said = [_of(rank, n, _exchange(rank, sizes))[0] for rank in range(n)]
        headers.require_same(said)
        assert headers.sizes_fit(said)
        wrong = _exchange(1, sizes)
        swapped = [wrong.send_splits[1] + 1, wrong.send_splits[0], *wrong.send_splits[2:]]
        odd = AllToAll(wrong.send, swapped, wrong.receive, wrong.receive_splits)
        said[1], _ = _of(1, n, odd)
        assert not headers.sizes_fit(said)
        told = [_of(rank, n, odd if rank == 1 else _exchange(rank, sizes))[1] for rank in range(n)]
        error = headers.misfit(said, told)
        assert 1 in error.ranks
        assert f"rank 1 sends {swapped[0]} bytes of unit 'a' to rank 0, which expects {sizes[1][0]}" in error.cause


def test_the_ranks_that_differ_from_most_are_named() -> None:
    usual = _of(0, 4, ControlMessage(b""), "step 7")[0]
    odd = _of(3, 4, AllGather(torch.empty(4), [1] * 4), "unit 'b'")[0]
    for said, ranks in (([usual, usual, odd, usual], (2,)), ([odd, usual, usual, odd], (1, 2))):
        with pytest.raises(PeerError) as caught:
            headers.require_same(said)
        assert caught.value.ranks == ranks
        assert "while rank 0" in caught.value.cause
    headers.require_same([usual] * 4)


def test_a_rank_that_gathers_over_other_ranks_is_named() -> None:
    far, near = (_of(rank, 2, AllGather(torch.empty(4), [2, 2], bool(rank)), "unit 'a'")[0] for rank in range(2))
    with pytest.raises(PeerError, match="rank 1 gathers again unit 'a' while rank 0 gathers unit 'a'"):
        headers.require_same([far, near])


def test_slices_are_compared_among_those_that_gather_together() -> None:
    """On two machines with two ranks and one."""
    near, far = RankGroup((0, 1), 0), RankGroup((2,), 0)
    pair, single = AllGather(torch.empty(4), [2, 2], near=True), AllGather(torch.empty(4), [4], near=True)
    said = [OperationHeader.of(CollectiveOperation(pair, 0, "u"), 0, near, _group(rank, 3)) for rank in range(2)]
    said.append(OperationHeader.of(CollectiveOperation(single, 0, "u"), 0, far, _group(2, 3)))
    assert headers.sizes_fit(said)
    said[1] = OperationHeader.of(
        CollectiveOperation(AllGather(torch.empty(4), [1, 3], near=True), 0, "u"), 0, near, _group(1, 3)
    )
    assert not headers.sizes_fit(said)
    error = headers.misfit(said, [[[2, 2]], [[1, 3]], [[4]]])
    assert error.ranks == (1,)
    assert error.cause == "rank 1 gathers u as slices of [1, 3] bytes, rank 0 as [2, 2]"
