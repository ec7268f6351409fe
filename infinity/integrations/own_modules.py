"""Modules that a script defines itself and that no library loaded: the search for the one that an optimizer is made
for.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

from torch import nn

WORTH_NUMEL = 1_000_000
"""Minimum number of parameters of a module that is offloaded."""


def holder_of(parameters: Iterable[Any]) -> nn.Module | None:
    """Return the smallest module that has all of these parameters, if it is large enough to be offloaded.

    Of several modules with the same parameters, return the outermost one, because that is the one that is called.
    """
    wanted = {id(each) for each in parameters if isinstance(each, nn.Parameter)}
    if not wanted:
        return None
    if not _holders(wanted):  # the usual case, small modules: no garbage collection for these
        return None
    gc.collect()  # a module without references does not belong to the script
    numels = _holders(wanted)
    smallest = [each for each, numel in numels.items() if numel == min(numels.values())]
    return next((each for each in smallest if not any(each in _inside(other) for other in smallest)), None)


def _holders(wanted: set[int]) -> dict[nn.Module, int]:
    """Return the modules that have all parameters of these ids and are large enough, with their numbers of
    parameters.
    """
    numels: dict[nn.Module, int] = {}
    for each in gc.get_objects():
        if issubclass(type(each), nn.Module) and "_parameters" in vars(each):
            try:
                found = {id(parameter): parameter.numel() for parameter in each.parameters()}
            except Exception:  # a lazy module, or one that overrides parameters()
                continue
            if wanted.issubset(found) and sum(found.values()) >= WORTH_NUMEL:
                numels[each] = sum(found.values())
    return numels


def _inside(module: nn.Module) -> set[nn.Module]:
    """Return the modules inside a module, without itself."""
    return set(module.modules()) - {module}
