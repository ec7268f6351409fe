"""Broadcast of the initial values of rank 0 to all ranks, before each rank keeps only a slice of them.

Values that were initialized in memory (a model without a seed, a new head, adapters) may differ between ranks. All
ranks then use the values of rank 0, as in DistributedDataParallel. Values from files must be the same, because all
ranks must load the same checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from infinity.errors import ModelError, PeerError
from infinity.ranks.operations import AllGather, CollectiveOperation
from infinity.ranks.world import MultiRankWorld
from infinity.state.frozen_codecs import encoded_form
from infinity.state.values import Source, sum_of_bits
from infinity.units.unit import OffloadedUnit

logger = logging.getLogger(__name__)

_SAMPLE_NUMEL = 16 << 10
"""Number of elements that the ranks compare at the beginning, in the middle and at the end of a large value from a
file.

The ranks do not compare the complete value, because then each rank would have to read it completely.
"""


class InitialValuesBroadcast(Protocol):
    """Broadcast of the initial values of rank 0. All ranks make the same calls in the same order."""

    def values_of(self, unit: OffloadedUnit, source: Source | None, in_memory: Callable[[str], bool]) -> Source | None:
        """Return a source of the values of a unit's parameters, with the same values on all ranks.

        The arguments are the same as for `ingest`.

        Raises:
            PeerError: values from files differ. The message names the parameter and the rank.
        """

    def take(self, what: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Set tensors in memory to the values of rank 0, in place."""

    def say(self) -> None:
        """Log the names of values that were different and became the values of rank 0."""


class NoBroadcast:
    """InitialValuesBroadcast of a single process, which changes nothing."""

    def values_of(self, unit: OffloadedUnit, source: Source | None, in_memory: Callable[[str], bool]) -> Source | None:
        return source

    def take(self, what: str, tensors: Mapping[str, torch.Tensor]) -> None:
        return

    def say(self) -> None:
        return


class BroadcastFromFirst:
    """InitialValuesBroadcast of several ranks."""

    def __init__(self, world: MultiRankWorld) -> None:
        self._world = world
        self._taken: list[str] = []

    def values_of(self, unit: OffloadedUnit, source: Source | None, in_memory: Callable[[str], bool]) -> Source:
        values, marks = dict[str, torch.Tensor](), dict[str, object]()
        for group in unit.full.groups:
            for name in (spec.name for spec in group.specs):
                known = encoded_form(unit.parameters[name])
                if known is not None and known.codec == group.codec:  # ingest copies the bytes of the file
                    marks[name] = [known.codec, _mark(known.read(), all_of_it=False)]
                    continue
                value = values[name] = unit.parameters[name].detach() if source is None else source(name)
                marks[name] = [str(value.dtype), _mark(value, all_of_it=in_memory(name))]
        for name, rank in self._differing(f"loading unit '{unit.name}'", marks).items():
            if name not in values or not in_memory(name):
                raise PeerError(
                    f"parameter '{name}' has different values in the files of rank {rank} and in the files of rank 0",
                    (rank,),
                    "Give all ranks the same checkpoint.",
                )
            values[name] = self.of_rank_0(name, values[name])
        return values.__getitem__

    def take(self, what: str, tensors: Mapping[str, torch.Tensor]) -> None:
        marks = {name: [str(tensor.dtype), _mark(tensor, all_of_it=True)] for name, tensor in tensors.items()}
        for name in self._differing(what, marks):
            tensors[name].copy_(self.of_rank_0(name, tensors[name]))

    def _differing(self, what: str, marks: Mapping[str, object]) -> dict[str, int]:
        """Return the names of tensors that differ between ranks, each with a rank whose tensor differs from that of
        rank 0.

        All ranks get the same result.
        """
        told = self._world.tell(what, marks)
        first, found = told[0], dict[str, int]()
        for rank, each in enumerate(told):
            if each.keys() != first.keys():
                raise PeerError(
                    f"rank {rank} and rank 0 have different tensors while {what}: "
                    f"'{min(each.keys() ^ first.keys())}' is not on both",
                    (rank,),
                    "Give all ranks the same model.",
                )
            for name in first:
                if each[name] != first[name]:
                    found.setdefault(name, rank)
        return found

    def of_rank_0(self, name: str, mine: torch.Tensor) -> torch.Tensor:
        """Return the value of rank 0. All ranks must call this."""
        if mine.is_meta:
            raise ModelError(f"'{name}' is on the meta device on some ranks: it has no values there")
        value = mine.detach().clone(memory_format=torch.contiguous_format)
        buffer = value.reshape(-1).view(torch.uint8)
        slices = [buffer.numel(), *[0] * (self._world.size - 1)]
        self._world.collectives.submit(
            CollectiveOperation(AllGather(buffer, slices, False), 0, f"the values of '{name}'")
        ).result()
        self._taken.append(name)
        return value

    def say(self) -> None:
        if self._taken and self._world.leads:
            more = f" and {len(self._taken) - 1} more" if len(self._taken) > 1 else ""
            logger.warning(
                "the ranks initialized '%s'%s with different values: all ranks start with the values of rank 0, as "
                "with DistributedDataParallel",
                self._taken[0],
                more,
            )


def _mark(value: torch.Tensor, *, all_of_it: bool) -> int:
    if all_of_it or value.is_meta or value.numel() <= 3 * _SAMPLE_NUMEL:
        return sum_of_bits(value)
    flat, middle = value.detach().reshape(-1), value.numel() // 2
    begins = (0, middle, value.numel() - _SAMPLE_NUMEL)
    return sum((at + 1) * sum_of_bits(flat[begin : begin + _SAMPLE_NUMEL]) for at, begin in enumerate(begins))
