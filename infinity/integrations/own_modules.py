"""Modules of a script's own, which nobody loaded from files: which of them an optimizer is made for."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

from torch import nn

WORTH_NUMEL = 1_000_000
"""A module with fewer parameters is left alone."""


def holder_of(parameters: Iterable[Any]) -> nn.Module | None:
    """The smallest module that has all of these parameters, if it is worth offloading. Of several with the same
    parameters, the one around the others, which is the one that is called."""
    wanted = {id(each) for each in parameters if isinstance(each, nn.Parameter)}
    if not wanted:
        return None
    if not _holders(wanted):  # most optimizers of small modules: nothing is collected for them
        return None
    gc.collect()  # what nobody refers to is no module of the script
    numels = _holders(wanted)
    smallest = [each for each, numel in numels.items() if numel == min(numels.values())]
    return next((each for each in smallest if not any(each in _inside(other) for other in smallest)), None)


def _holders(wanted: set[int]) -> dict[nn.Module, int]:
    """The modules that have all parameters of these ids and are worth it, with how many parameters they have."""
    numels: dict[nn.Module, int] = {}
    for each in gc.get_objects():
        if issubclass(type(each), nn.Module) and "_parameters" in vars(each):
            try:
                found = {id(parameter): parameter.numel() for parameter in each.parameters()}
            except Exception:  # a lazy module, or one with parameters() of its own
                continue
            if wanted.issubset(found) and sum(found.values()) >= WORTH_NUMEL:
                numels[each] = sum(found.values())
    return numels


def _inside(module: nn.Module) -> set[nn.Module]:
    """The modules in it, without itself."""
    return set(module.modules()) - {module}
