"""Masters of weights that were written to by hand, until the next step.

A write between steps changes weights, and sets the master of each changed weight to exactly the new value. An
adversarial method (FGM, AWP) changes weights, computes with the changed weights and restores the old weights. When old
weights are restored, their old masters are restored, too. So the low bits of the masters, which a weight cannot
represent, are kept. A parameter set by load_state_dict to a different value gets new masters for all of its weights,
even for weights whose bits did not change.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from infinity.plan.machine_resources import available_device_bytes
from infinity.state.values import sum_of_bits

logger = logging.getLogger(__name__)

_SHARE = 4
"""Divisor of the free RAM: the saved masters use at most 1 / _SHARE of the free RAM."""
_INTEGERS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class _SavedElements:
    """Elements of a parameter, with their values before the first write since the step.

    Attributes:
        at: int64 [n], indices among the elements that this rank has.
        bits: [n], bits of the weights, as integers of the same size.
        rest: [n], bits of the residual, as integers of the same size.
    """

    at: torch.Tensor
    bits: torch.Tensor
    rest: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.at.nbytes + self.bits.nbytes + self.rest.nbytes

    def only(self, which: torch.Tensor) -> _SavedElements:
        return _SavedElements(self.at[which], self.bits[which], self.rest[which])

    def and_also(self, at: torch.Tensor, bits: torch.Tensor, rest: torch.Tensor) -> _SavedElements:
        """Return these saved elements, and in addition the elements of `at` that are not saved yet.

        Args:
            at: indices of elements.
            bits: bits of the weights of all elements.
            rest: bits of the residual of all elements.
        """
        at = at[torch.isin(at, self.at, invert=True)]
        return _SavedElements(
            torch.cat([self.at, at]), torch.cat([self.bits, bits[at]]), torch.cat([self.rest, rest[at]])
        )


class MastersBeforeWrite:
    """Saved masters, by the name of the parameter."""

    def __init__(self) -> None:
        self._was: dict[str, _SavedElements] = {}
        # for a parameter whose old masters were not kept: sum of the bits of the old weights
        self._not_kept: dict[str, int] = {}
        self._given: set[str] = set()

    def give(self, names: Iterable[str]) -> None:
        """Mark parameters as set by load_state_dict, until the next call of `written`."""
        self._given.update(names)

    def written(self) -> None:
        """End a write: remove the marks that `give` set."""
        self._given.clear()

    def after_write(
        self, name: str, old: torch.Tensor, new: torch.Tensor, residual: torch.Tensor, given: torch.Tensor
    ) -> torch.Tensor:
        """Return the residual of a piece of a parameter after a write to its weights.

        An element keeps its residual if its weight has not changed. If a weight is restored to the value that it had
        before an earlier write since the step, its saved residual is restored, too. Any other element gets the residual
        of its new value. A parameter marked by `give` gets the new residual for all elements.

        Args:
            name: name of the parameter.
            old: [numel], old weights, in the weights' dtype.
            new: [numel], new weights, in the weights' dtype.
            residual: uint8, residual of the old weights.
            given: uint8, residual of masters equal to the new weights.
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
        was = self._was.pop(name, None) or _SavedElements(none, bits[none], rest[none])
        back = fresh_bits[was.at] == was.bits
        fresh[was.at[back]] = was.rest[back]
        if self._not_kept.get(name) == sum_of_bits(new):
            logger.warning(
                "the weights of '%s' were restored, but not their fp32 masters: there was too little RAM to keep them",
                name,
            )
        changed = ~same
        changed[was.at[back]] = False
        if self._has_room(was, int(changed.sum()), itemsize):
            self._keep(name, was.only(~back).and_also(changed.nonzero().flatten(), bits, rest))
        else:
            logger.info("there is too little RAM to keep the old masters of '%s'", name)
            self._not_kept[name] = sum_of_bits(old)
        return fresh.view(torch.uint8)

    def _has_room(self, was: _SavedElements, more: int, itemsize: int) -> bool:
        """Return whether there is RAM to save further elements.

        Args:
            was: elements saved so far.
            more: number of further elements.
            itemsize: bytes per element of the residual.
        """
        nbytes = was.nbytes + more * (8 + 4 + itemsize) + sum(each.nbytes for each in self._was.values())
        return nbytes <= available_device_bytes(torch.device("cpu")) // _SHARE

    def _keep(self, name: str, was: _SavedElements) -> None:
        if was.at.numel():
            self._was[name] = was

    def forget(self) -> None:
        """Forget the saved masters, since a step gives new values to all masters."""
        self._was.clear()
        self._not_kept.clear()


def _integers(tensor: torch.Tensor, itemsize: int) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).view(_INTEGERS[itemsize])
