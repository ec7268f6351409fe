"""Which units' weights must be on the device at once.

While a module runs, its own units and those of the modules around it are in use: these may go on with theirs
afterwards. And the next module's are fetched while views of the last one's may still be held, by autograd or by
recomputation. So there is room for two modules at once, beside the units that stay while the model runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from infinity.state.discover import HookSite
from infinity.state.unit import Unit


@dataclass(frozen=True)
class Needed:
    """The most that is needed at once: `nbytes` of weights, of these units; those that stay come last."""

    nbytes: int
    units: tuple[Unit, ...]


def needed_at_once(units: Sequence[Unit], sites: Sequence[HookSite], fetched: Collection[int]) -> Needed:
    """What the largest two modules need, and what stays.

    Args:
        sites: whose forward needs which units; none: every unit has a module of its own.
        fetched: the units that take room, by index.
    """
    staying = {unit.index for unit in units if unit.stays and unit.index in fetched}

    def nbytes(indices: Iterable[int]) -> int:
        return sum(units[index].weight_bytes for index in indices)

    moving: set[frozenset[int]] = {frozenset(each & set(fetched) - staying) for each in _sets(units, sites)}
    ordered = sorted(moving, key=lambda each: (-nbytes(each), sorted(each)))
    best, most = frozenset[int](), 0
    for position, one in enumerate(ordered):
        if 2 * nbytes(one) <= most:
            break  # no two that come later are larger
        for other in ordered[position:]:
            if nbytes(one) + nbytes(other) <= most:
                break
            if nbytes(one | other) > most:
                best, most = one | other, nbytes(one | other)
    indices = [*sorted(best), *sorted(staying)]
    return Needed(nbytes(indices), tuple(units[index] for index in indices))


def _sets(units: Sequence[Unit], sites: Sequence[HookSite]) -> list[set[int]]:
    """Of each module, with what is around it."""
    if not sites:
        return [{unit.index} for unit in units]
    own: dict[str, set[int]] = {}
    for site in sites:
        own.setdefault(site.name, set()).update(site.units)
    return [set().union(*(own.get(name, ()) for name in _around(site.name))) for site in sites]


def _around(name: str) -> list[str]:
    """The module's own name and those of the modules that it is in; '' is the model's."""
    parts = name.split(".") if name else []
    return [".".join(parts[:length]) for length in range(len(parts) + 1)]
