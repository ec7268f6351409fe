"""Slices cover each group once, begin on the grid, and the pieces of a rank are updated as in the whole."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from infinity.sizes import PAGE_BYTES
from infinity.state.discover import discover
from infinity.state.shard import SHARD_NUMEL, RankPartition, Shard, slices_of
from infinity.state.unit import Unit
from infinity.state.update_request import GroupUpdate, SegmentRequest
from tests.sampling import number


def unit_of(*sizes: int, dtype: torch.dtype = torch.bfloat16, frozen: int = 0) -> Unit:
    model = nn.Module()
    for index, numel in enumerate(sizes):
        model.register_parameter(f"p{index}", nn.Parameter(torch.empty(numel, dtype=dtype)))
    for index in range(frozen):
        model.register_parameter(f"f{index}", nn.Parameter(torch.empty(300, dtype=dtype), requires_grad=False))
    return discover(model).units[0]


def shards_of(unit: Unit, count: int, numel: int = SHARD_NUMEL) -> list[Shard]:
    return [RankPartition(count, index, numel).of(unit) for index in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 64, 512])
@pytest.mark.parametrize("numel", [1, 255, SHARD_NUMEL - 1, SHARD_NUMEL, SHARD_NUMEL + 1, 10 * SHARD_NUMEL + 17])
def test_slices_cover_everything_once_and_begin_on_the_grid(numel: int, count: int) -> None:
    slices = slices_of(numel, count)
    assert len(slices) == count
    assert slices[0][0] == 0
    assert slices[-1][1] == numel
    for (begin, end), (after, _) in zip(slices, [*slices[1:], (numel, numel)], strict=True):
        assert begin <= end == after
        assert begin % SHARD_NUMEL == 0 or begin == end == numel
    assert max(end - begin for begin, end in slices) - SHARD_NUMEL < -(-numel // count)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_pieces_of_all_ranks_are_the_parameters(count: int) -> None:
    unit = unit_of(1000, 70_000, 1, 200_000, 0, 3)
    pieces = [spec for shard in shards_of(unit, count) for spec in shard.local.groups[0].specs]
    for spec in unit.groups[0].specs:
        mine = [piece for piece in pieces if piece.name == spec.name]
        assert sum(piece.numel for piece in mine) == spec.numel
        assert [piece.index for piece in mine] == sorted(piece.index for piece in mine)
        at = spec.index
        for piece in mine:
            assert piece.index == at
            at += piece.numel
            assert piece.numel == piece.shape.numel()


@pytest.mark.parametrize("count", [2, 3, 8])
def test_the_slices_lie_in_the_weights_one_behind_the_other(count: int) -> None:
    unit = unit_of(100_000, 65_536, 17, frozen=2)
    for index, group in enumerate(unit.groups):
        at = group.weight_offset
        for rank, shard in enumerate(shards_of(unit, count)):
            begin, end = shard.weight_range(index, rank)
            assert begin == at
            assert begin % PAGE_BYTES == end % PAGE_BYTES == 0
            assert end - begin == shard.local.groups[index].weight_bytes
            at = end
        assert at == group.weight_offset + group.weight_bytes


def test_a_local_unit_is_laid_out_as_any_other() -> None:
    unit = unit_of(100_000, 65_536, 17, frozen=2)
    for shard in shards_of(unit, 3):
        at = 0
        for group, whole in zip(shard.local.groups, unit.groups, strict=True):
            assert (group.dtype, group.trainable, group.moments) == (whole.dtype, whole.trainable, whole.moments)
            assert group.weight_offset == at
            at += group.weight_bytes
        assert shard.local.weight_bytes == at
        assert (shard.local.index, shard.local.name, shard.local.stays) == (unit.index, unit.name, unit.stays)


def test_ranks_beyond_the_last_slice_have_nothing() -> None:
    last = shards_of(unit_of(70_000), 4)[3]
    assert last.local.weight_bytes == 0
    assert last.local.groups[0].numel == 0
    assert not last.local.groups[0].specs
    assert last.localize({0: GroupUpdate((SegmentRequest(0, 70_000, 1, 0, True, 1.0, ()),), None)}) == {}


def test_one_rank_has_the_unit_itself() -> None:
    unit = unit_of(1000, 17)
    assert RankPartition(1, 0).of(unit).local is unit


@pytest.mark.parametrize("seed", range(number(6, 20)))
def test_every_element_is_updated_once_and_as_in_the_whole(seed: int) -> None:
    draw = random.Random(seed)
    unit = unit_of(*(draw.randrange(1, 9000) for _ in range(6)))
    segments = tuple(
        SegmentRequest(spec.offset, spec.offset + spec.numel, step, spec.index, step == 1, 0.5, (("lr", step),))
        for step, spec in enumerate(unit.groups[0].specs, 1)
        if draw.random() < 0.7
    )
    update = GroupUpdate(segments, frozenset({"exp_avg"}), arithmetic=True)
    done = {}
    for shard in shards_of(unit, draw.randrange(2, 6), numel=2048):
        begin, _ = shard.mine(0)
        for local in shard.localize({0: update}).get(0, update if not segments else GroupUpdate((), None)).segments:
            for element in range(local.begin, local.end):
                assert begin + element not in done
                done[begin + element] = (local.model_index + element - local.begin, local[2:3], local[4:])
    expected = {
        element: (segment.model_index + element - segment.begin, segment[2:3], segment[4:])
        for segment in segments
        for element in range(segment.begin, segment.end)
    }
    assert done == expected


@pytest.mark.parametrize(("count", "index", "numel"), [(2, 2, 2048), (2, -1, 2048), (2, 0, 0), (2, 0, 1024)])
def test_what_is_no_cut_is_refused(count: int, index: int, numel: int) -> None:
    with pytest.raises(ValueError, match="rank|multiples"):
        RankPartition(count, index, numel)
