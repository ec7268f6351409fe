"""Partition of units over ranks. Each rank keeps a slice of every unit, and treats this slice as a unit.

[Note: slices]
In each group, a slice is a range of elements of the group's flat buffers. The range is the same for weights, residual,
moments and gradients. Every slice begins at a multiple of SHARD_NUMEL elements. So a slice boundary divides no partial
sum of squares, no block of int8 moments and no page, and a slice can be read with O_DIRECT directly to its place among
the other slices. The slices of the last ranks may be shorter than the others, or empty. Slices are not padded.

An encoded group (codec.py) is different: the bytes of the group at home are divided. A slice of these bytes begins at a
multiple of 4 KiB, and has no parameters. The ranks put the slices together before they decode the group.

A slice of any other group contains at most one contiguous piece of each parameter. It can therefore be treated as a
unit whose parameters are these pieces (`Shard.local`). The arithmetic of an update does not depend on the place of a
piece, so N ranks compute the same bits as one rank.

Source: ZeRO (arXiv 1910.02054), which shards the states over ranks. FSDP2 instead shards along the first dimension of
each parameter, because its DTensors need this, and must copy the data before and after each all-gather.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from infinity.sizes import PAGE_BYTES, round_up
from infinity.state.unit import FlatParameterGroup, ParameterSpec, Unit
from infinity.state.update_request import GroupUpdate, SegmentRequest

SHARD_NUMEL = 64 << 10
"""Number of elements; every slice begins at a multiple of this number.

It is the least common multiple of the number of elements of a partial sum (65,536), of a block of int8 moments (256)
and of a page of 16-bit values (2,048).
"""
SHARD_NUMEL_MIN = PAGE_BYTES // 2
"""Smallest number that is allowed in place of SHARD_NUMEL.

With this number, slice boundaries may divide partial sums, so the last bits of the gradients' norm depend on the number
of ranks.
"""

Range = tuple[int, int]
"""Elements [begin, end); bytes for an encoded group."""


def slices_of(numel: int, count: int, multiple: int = SHARD_NUMEL) -> tuple[Range, ...]:
    """Divide `numel` elements over `count` ranks, and return the slices in the order of the ranks.

    The slices have equal sizes, rounded up to a multiple of `multiple` elements, until no element is left.
    """
    size = round_up(-(-numel // count), multiple)
    return tuple((min(rank * size, numel), min((rank + 1) * size, numel)) for rank in range(count))


def slices_of_encoded(nbytes: int, count: int) -> tuple[Range, ...]:
    """Divide the bytes of an encoded group at home over `count` ranks, and return the slices in the order of the
    ranks."""
    return slices_of(nbytes, count, PAGE_BYTES)


@dataclass(frozen=True)
class RankPartition:
    """Partition of units over a number of ranks, and this rank's index among these ranks.

    Attributes:
        count: number of ranks, each of which has a slice.
        index: this rank's position among the ranks.
        numel: number of elements; every slice begins at a multiple of this number.
    """

    count: int
    index: int
    numel: int = SHARD_NUMEL

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"rank {self.index} of {self.count}")
        if self.numel < 1 or self.numel % SHARD_NUMEL_MIN:
            raise ValueError(f"slices must begin at multiples of {SHARD_NUMEL_MIN} elements, not of {self.numel}")

    @property
    def whole(self) -> bool:
        """Whether there is only one rank, which has every unit completely."""
        return self.count == 1

    def of(self, unit: Unit) -> Shard:
        return Shard(unit, self)


@dataclass(frozen=True)
class Shard:
    """One unit and its partition over the ranks, with this rank's slice.

    Attributes:
        full: the complete unit.
        cut: the partition over ranks.
    """

    full: Unit
    cut: RankPartition

    @property
    def whole(self) -> bool:
        """Whether there is only one rank, which has the complete unit."""
        return self.cut.whole

    @cached_property
    def slices(self) -> tuple[tuple[Range, ...], ...]:
        """Slices of the ranks, by group."""
        return tuple(
            slices_of(group.numel, self.cut.count, self.cut.numel)
            if group.codec is None
            else slices_of_encoded(group.home_bytes, self.cut.count)
            for group in self.full.groups
        )

    def mine(self, group_index: int) -> Range:
        """Return this rank's slice of a group."""
        return self.slices[group_index][self.cut.index]

    @cached_property
    def local(self) -> Unit:
        """This rank's slice as a unit, with all groups of the complete unit in the same order.

        If this rank has no elements of a group, the group has 0 elements.
        """
        if self.whole:
            return self.full
        groups, weight_offset = [], 0
        for index, group in enumerate(self.full.groups):
            begin, end = self.mine(index)
            if group.codec is not None:
                groups.append(_slice_of_encoded(group, end - begin, weight_offset))
                weight_offset += end - begin
                continue
            weight_bytes = round_up((end - begin) * group.dtype.itemsize, PAGE_BYTES)
            specs = tuple(piece for spec in group.specs if (piece := _piece(spec, begin, end)) is not None)
            groups.append(
                FlatParameterGroup(
                    group.dtype, group.trainable, group.moments, specs, end - begin, weight_offset, weight_bytes
                )
            )
            weight_offset += weight_bytes
        return replace(self.full, groups=tuple(groups), weight_bytes=weight_offset)

    def weight_range(self, group_index: int, rank: int) -> Range:
        """Return bytes [begin, end) of a rank's slice of a group, in the weights of the complete unit; for an encoded
        group, in the encoded weights of the complete unit (Unit.encoded_bytes).

        The last slice of a group extends to the end of the last page.
        """
        group, (begin, end) = self.full.groups[group_index], self.slices[group_index][rank]
        if group.codec is not None:
            offset = self.full.encoded_offset(group_index)
            return offset + begin, offset + end
        first, last = begin * group.dtype.itemsize, round_up(end * group.dtype.itemsize, PAGE_BYTES)
        if begin == end:
            last = first = min(round_up(first, PAGE_BYTES), group.weight_bytes)
        return group.weight_offset + first, group.weight_offset + last

    def piece(self, spec: ParameterSpec, group_index: int) -> ParameterSpec | None:
        """Return this rank's piece of a parameter of a group that is not encoded; None if the rank has no element of
        the parameter."""
        return _piece(spec, *self.mine(group_index))

    def localize(self, wanted: Mapping[int, GroupUpdate]) -> dict[int, GroupUpdate]:
        """Return this rank's part of an update of the unit.

        Groups without a segment in this rank's slice are omitted.
        """
        if self.whole:
            return dict(wanted)
        found = {}
        for index, update in wanted.items():
            begin, end = self.mine(index)
            segments = tuple(
                _segment(segment, begin, end)
                for segment in update.segments
                if segment.begin < end and segment.end > begin
            )
            if segments:
                found[index] = replace(update, segments=segments)
        return found


def _slice_of_encoded(group: FlatParameterGroup, nbytes: int, weight_offset: int) -> FlatParameterGroup:
    numel = round(group.values_numel * nbytes / max(group.home_bytes, 1))
    return FlatParameterGroup(torch.uint8, False, "fp32", (), nbytes, weight_offset, nbytes, group.codec, numel)


def _piece(spec: ParameterSpec, begin: int, end: int) -> ParameterSpec | None:
    first, last = max(spec.offset, begin), min(spec.offset + spec.numel, end)
    if first >= last:
        return None
    if last - first == spec.numel:
        return replace(spec, offset=first - begin)
    return ParameterSpec(
        spec.name, torch.Size([last - first]), last - first, first - begin, spec.index + first - spec.offset
    )


def _segment(segment: SegmentRequest, begin: int, end: int) -> SegmentRequest:
    first, last = max(segment.begin, begin), min(segment.end, end)
    return segment._replace(
        begin=first - begin, end=last - begin, model_index=segment.model_index + first - segment.begin
    )
