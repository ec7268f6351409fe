"""How units are cut over ranks: each rank keeps a slice of every unit, and works on it as on a unit of its own.

[Note: slices]
A slice is one range of elements of a group's flat buffers, the same range of each: weights, residual, moments and
gradients. Every slice begins at a multiple of SHARD_NUMEL elements. So no partial of a sum of squares is cut, no block
of int8 moments, no page, and a slice that is read with O_DIRECT lands at its place among the others. The last ranks
have less than the others, or nothing. Nothing is padded.

A parameter meets a slice in one range at most, so a slice is a unit like any other, whose parameters are pieces
(`Shard.local`). What a piece is updated by does not depend on where it lies: N ranks compute the bits of one.

Source: ZeRO (arXiv 1910.02054) cuts the states over ranks; FSDP2 cuts along the first dimension of each parameter, for
the sake of its DTensors, and copies on the way in and out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from infinity.sizes import PAGE_BYTES, round_up
from infinity.state.request import GroupUpdate, SegmentRequest
from infinity.state.unit import Group, ParameterSpec, Unit

SHARD_NUMEL = 64 << 10
"""Elements: every slice begins at a multiple of it. The least number that partials (65,536), blocks of int8 moments
(256) and pages of 16-bit values (2,048) divide."""
SHARD_NUMEL_MIN = PAGE_BYTES // 2
"""The same without the partials: then the norm of the gradients differs in the last bits with the number of ranks."""

Range = tuple[int, int]
"""Elements [begin, end)."""


def slices_of(numel: int, count: int, multiple: int = SHARD_NUMEL) -> tuple[Range, ...]:
    """The slice of each of `count` ranks of `numel` elements, in the order of the ranks: equal ones, rounded up to
    `multiple` elements, until nothing is left."""
    size = round_up(-(-numel // count), multiple)
    return tuple((min(rank * size, numel), min((rank + 1) * size, numel)) for rank in range(count))


@dataclass(frozen=True)
class Cut:
    """Over how many ranks units are cut, and which of the slices are this rank's.

    Attributes:
        count: ranks that have a slice each.
        index: this rank among them.
        numel: elements that every slice begins at a multiple of.
    """

    count: int
    index: int
    numel: int = SHARD_NUMEL

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"rank {self.index} of {self.count}")
        if self.numel < 1 or self.numel % SHARD_NUMEL_MIN:
            raise ValueError(f"slices begin at multiples of {SHARD_NUMEL_MIN} elements, not of {self.numel}")

    @property
    def whole(self) -> bool:
        """There is one rank, which has all of every unit."""
        return self.count == 1

    def of(self, unit: Unit) -> Shard:
        return Shard(unit, self)


@dataclass(frozen=True)
class Shard:
    """A rank's slice of a unit.

    Attributes:
        unit: the whole.
    """

    unit: Unit
    cut: Cut

    @property
    def whole(self) -> bool:
        """There is one rank, which has all of the unit."""
        return self.cut.whole

    @cached_property
    def slices(self) -> tuple[tuple[Range, ...], ...]:
        """By group, the slice of each rank."""
        return tuple(slices_of(group.numel, self.cut.count, self.cut.numel) for group in self.unit.groups)

    def mine(self, group_index: int) -> Range:
        """This rank's elements of a group."""
        return self.slices[group_index][self.cut.index]

    @cached_property
    def local(self) -> Unit:
        """This rank's slice as a unit of its own, with the groups of the whole, in their order; one of which the rank
        has nothing has 0 elements."""
        if self.whole:
            return self.unit
        groups, weight_offset = [], 0
        for index, group in enumerate(self.unit.groups):
            begin, end = self.mine(index)
            weight_bytes = round_up((end - begin) * group.dtype.itemsize, PAGE_BYTES)
            specs = tuple(piece for spec in group.specs if (piece := _piece(spec, begin, end)) is not None)
            groups.append(
                Group(group.dtype, group.trainable, group.moments, specs, end - begin, weight_offset, weight_bytes)
            )
            weight_offset += weight_bytes
        return replace(self.unit, groups=tuple(groups), weight_bytes=weight_offset)

    def weight_range(self, group_index: int, rank: int) -> Range:
        """Bytes [begin, end) of a rank's slice of a group in the weights of the whole unit; to the end of the last page
        where the slice is the last one of the group."""
        group, (begin, end) = self.unit.groups[group_index], self.slices[group_index][rank]
        first, last = begin * group.dtype.itemsize, round_up(end * group.dtype.itemsize, PAGE_BYTES)
        if begin == end:
            last = first = min(round_up(first, PAGE_BYTES), group.weight_bytes)
        return group.weight_offset + first, group.weight_offset + last

    def piece(self, spec: ParameterSpec, group_index: int) -> ParameterSpec | None:
        """What this rank has of a parameter; None where that is nothing."""
        return _piece(spec, *self.mine(group_index))

    def localize(self, wanted: Mapping[int, GroupUpdate]) -> dict[int, GroupUpdate]:
        """What this rank does of an update of the unit: nothing to a group of which no segment meets its slice."""
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
