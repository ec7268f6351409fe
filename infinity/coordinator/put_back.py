"""The masters of weights that somebody wrote to, until the next step.

A write between steps gives the weights it changes a master of exactly the new values. An adversarial method (FGM, AWP)
changes weights, computes with them and puts the old ones back: their masters come back with them, and nothing of what
training had added below the last bit of a weight is lost. What load_state_dict gives a parameter that differs is new,
also where a weight of it has the bits that it had.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from infinity.plan.machine import available_device_bytes
from infinity.state.values import sum_of_bits

logger = logging.getLogger(__name__)

_SHARE = 4
"""Of the free RAM, one part of so many is used at most."""
_INTEGERS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class _Was:
    """Elements of a parameter as they were before the first write since the step.

    Attributes:
        at: int64 [n], among those that this rank has.
        bits: [n], of the weights. rest: [n], of the residual. Integers of their sizes.
    """

    at: torch.Tensor
    bits: torch.Tensor
    rest: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.at.nbytes + self.bits.nbytes + self.rest.nbytes

    def only(self, which: torch.Tensor) -> _Was:
        return _Was(self.at[which], self.bits[which], self.rest[which])

    def and_also(self, at: torch.Tensor, bits: torch.Tensor, rest: torch.Tensor) -> _Was:
        """With those of the elements `at` that are not here yet. Args: bits, rest: of all elements."""
        at = at[torch.isin(at, self.at, invert=True)]
        return _Was(torch.cat([self.at, at]), torch.cat([self.bits, bits[at]]), torch.cat([self.rest, rest[at]]))


class Masters:
    """By name of the parameter."""

    def __init__(self) -> None:
        self._was: dict[str, _Was] = {}
        self._not_kept: dict[str, int] = {}  # sums of the old weights' bits
        self._given: set[str] = set()

    def give(self, names: Iterable[str]) -> None:
        """These parameters are given by load_state_dict, until `written`."""
        self._given.update(names)

    def written(self) -> None:
        """A write is over."""
        self._given.clear()

    def after_write(
        self, name: str, old: torch.Tensor, new: torch.Tensor, residual: torch.Tensor, given: torch.Tensor
    ) -> torch.Tensor:
        """The residual of a piece of a parameter once its weights were written: what it was where the weights are as
        they were, now or before an earlier write since the step; else that of a master of the new value.

        Args:
            old, new: [numel] of the weights' dtype.
            residual: uint8, of the old weights. given: uint8, of a master of the new ones.
        """
        if name in self._given:
            self._was.pop(name, None)
            return given
        bits, fresh_bits = _integers(old, old.element_size()), _integers(new, new.element_size())
        itemsize = residual.numel() // max(old.numel(), 1)
        rest, fresh = _integers(residual, itemsize), _integers(given, itemsize).clone()
        same = bits == fresh_bits
        fresh[same] = rest[same]
        none = torch.empty(0, dtype=torch.int64)
        was = self._was.pop(name, None) or _Was(none, bits[none], rest[none])
        back = fresh_bits[was.at] == was.bits
        fresh[was.at[back]] = was.rest[back]
        if self._not_kept.get(name) == sum_of_bits(new):
            logger.warning(
                "the weights of '%s' were put back, and their fp32 masters were not: they were too many to keep",
                name,
            )
        changed = ~same
        changed[was.at[back]] = False
        if self._has_room(was, int(changed.sum()), itemsize):
            self._keep(name, was.only(~back).and_also(changed.nonzero().flatten(), bits, rest))
        else:
            logger.info("the old masters of '%s' are too many to keep", name)
            self._not_kept[name] = sum_of_bits(old)
        return fresh.view(torch.uint8)

    def _has_room(self, was: _Was, more: int, itemsize: int) -> bool:
        """Args: more: further elements, of a residual with `itemsize` bytes of each."""
        nbytes = was.nbytes + more * (8 + 4 + itemsize) + sum(each.nbytes for each in self._was.values())
        return nbytes <= available_device_bytes(torch.device("cpu")) // _SHARE

    def _keep(self, name: str, was: _Was) -> None:
        if was.at.numel():
            self._was[name] = was

    def forget(self) -> None:
        """A step gives all of them new values."""
        self._was.clear()
        self._not_kept.clear()


def _integers(tensor: torch.Tensor, itemsize: int) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).view(_INTEGERS[itemsize])
