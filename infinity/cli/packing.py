"""Packing of examples into sequences of equal length, with little padding."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Return the indices of the examples of each sequence.

    The examples are placed from the longest to the shortest. Each example is placed into the fullest sequence that
    still has room for the example (best fit decreasing, as in TRL). The result depends only on the lengths.

    Args:
        lengths: tokens of each example, at most `room`.
        room: tokens of a sequence.
    """
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (free room, sequence), ascending
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        at = bisect_left(free, (lengths[index], -1))
        if at == len(free):
            bins.append([index])
            left, bin_index = room - lengths[index], len(bins) - 1
        else:
            left, bin_index = free.pop(at)
            left -= lengths[index]
            bins[bin_index].append(index)
        if left:
            insort(free, (left, bin_index))
    return bins
