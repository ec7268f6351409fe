"""Search for the module whose parameters an optimizer gets.

The search is for modules that the script makes itself, and not for models that a library loads.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

from torch import nn

WORTH_NUMEL = 1_000_000
"""Minimum number of parameters for which a script's own module is offloaded."""


def holder_of(parameters: Iterable[Any]) -> nn.Module | None:
    """Return the smallest module that has all of these parameters, if it is large enough to be offloaded.

    If several modules have the same parameters, return the outermost one, because the script calls this module.
    """
    wanted = {id(each) for each in parameters if isinstance(each, nn.Parameter)}
    if not wanted:
        return None
    if not _holders(wanted):  # usually the module is small, and no garbage collection is needed
        return None
    gc.collect()  # this frees modules that the script does not use any more
    numels = _holders(wanted)
    smallest = [each for each, numel in numels.items() if numel == min(numels.values())]
    return next((each for each in smallest if not any(each in _inside(other) for other in smallest)), None)


def _holders(wanted: set[int]) -> dict[nn.Module, int]:
    """Return the modules that are large enough and have all parameters with these ids.

    The value for a module is its number of parameters.
    """
    numels: dict[nn.Module, int] = {}
    for each in gc.get_objects():
        if issubclass(type(each), nn.Module) and "_parameters" in vars(each):
            try:
                found = {id(parameter): parameter.numel() for parameter in each.parameters()}
            except Exception:  # the module is lazy, or overrides parameters()
                continue
            if wanted.issubset(found) and sum(found.values()) >= WORTH_NUMEL:
                numels[each] = sum(found.values())
    return numels


def _inside(module: nn.Module) -> set[nn.Module]:
    """Return all modules inside a module, without the module itself."""
    return set(module.modules()) - {module}
