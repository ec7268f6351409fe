"""Changes of policy that the simulation tries, before anybody builds them. "as is" is the house as it stands.

* early in RAM: updates whose states are in RAM begin during backward, too, with new weights and states beside the old
  ones: in what the plan leaves of RAM, so not all of them may. Where there is nothing left they come late.
* gradients in 16 bit: gradients wait in 2 bytes, without the window that the planner keeps for a further pass.
* small groups first: a speculative update hands its unit's groups over in reverse, and a device sends their gradients
  in reverse, since an update waits for them. The newest job is the next, so that the norms come before the matrices.
  As it is they come after every later unit, and a unit whose norms are missing when the step is decided is updated
  again as a whole.
* all: the three together.
* no shadows: the planner keeps no RAM for new weights where it could hold states instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from infinity.plan import planner
from infinity.plan.placement import GradientPlacement
from infinity.units import update as update_module
from infinity.units.gradients import UnitGradients
from infinity.units.update import UpdateState
from infinity.units.updates import Updates
from simulation import rooms, scenario
from simulation.planning import plan_for

POLICIES = (
    "as is",
    "early in RAM",
    "gradients in 16 bit",
    "small groups first",
    "all",
    "no shadows",
)


@contextmanager
def policy(name: str) -> Iterator[None]:
    """In this context the house has that policy."""
    with ExitStack() as patches:
        for each, change in _CHANGES.items():
            if name == each or (name == "all" and each in _TOGETHER):
                change(patches)
        yield


def _early_in_ram(patches: ExitStack) -> None:
    can_speculate = Updates.can_speculate
    left = 0  # of RAM

    def can(self: Updates, unit: Any) -> bool:
        if unit.homes.states_in_store():
            return can_speculate(self, unit)
        taken = sum(_beside_bytes(other) for other in self._under_way.values() if _is_beside(other))
        return bool(unit.gradients.in_ram) and unit.update is None and taken + _beside_bytes(unit) <= left

    def of(self: Any, home: Any, memory: Any = None) -> Any:
        return None if home is None else self._stream(home, home.view() if home.in_memory else memory, None)

    def plan(*args: Any, **config: Any) -> Any:
        nonlocal left
        made = plan_for(*args, **config)
        left = made.budgets.limits.host - made.host_bytes
        if config.get("overlap", "auto") != "auto":
            return made
        placement = replace(made.placement, updates=replace(made.placement.updates, overlap="auto"))
        in_ram = sum(made.layout.units[index].weight_lease_bytes for index in placement.weights.in_ram)
        more = max(in_ram - made.budgets.shadow_bytes, 0)
        arena = replace(made.layout.arena, shadows=made.layout.arena.shadows + more)
        budgets = replace(made.budgets, shadow_bytes=made.budgets.shadow_bytes + more)
        return replace(made, placement=placement, budgets=budgets, layout=replace(made.layout, arena=arena))

    patches.enter_context(mock.patch.object(Updates, "can_speculate", can))
    patches.enter_context(mock.patch.object(update_module._Streams, "of", of))
    patches.enter_context(mock.patch.object(scenario, "plan_for", plan))


def _is_beside(unit: Any) -> bool:
    """Whether a unit's update has new values beside the old ones, all in RAM."""
    beside = unit.update is not None and unit.update.place.speculative and not unit.homes.states_in_store()
    return beside and unit.update.state in (UpdateState.SPECULATIVE, UpdateState.DECIDED)


def _beside_bytes(unit: Any) -> int:
    weights = unit.homes.weights
    states = sum(home.nbytes for of_group in unit.homes.states.values() for home in of_group.homes())
    return int(states + (0 if weights.lease is None else weights.nbytes))


def _gradients_in_16_bit(patches: ExitStack) -> None:
    def placements(problem: Any, room: int) -> Iterator[GradientPlacement]:
        yield GradientPlacement(problem, problem.trained, fp32=False, window=False)
        yield from original(problem, room)

    original = planner.gradient_placements
    patches.enter_context(mock.patch.object(planner, "gradient_placements", placements))


def _small_groups_first(patches: ExitStack) -> None:
    expected = rooms.Optimizer.expected_update

    def reverse(self: rooms.Optimizer, index: int) -> dict[int, Any]:
        return dict(reversed(expected(self, index).items()))

    def send(self: UnitGradients) -> None:
        for group in reversed(self.groups.values()):
            group.send()

    patches.enter_context(mock.patch.object(rooms.Optimizer, "expected_update", reverse))
    patches.enter_context(mock.patch.object(UnitGradients, "send", send))


def _no_shadows(patches: ExitStack) -> None:
    patches.enter_context(mock.patch.object(planner, "shadow_wanted", return_value=0))


_CHANGES = {
    "early in RAM": _early_in_ram,
    "gradients in 16 bit": _gradients_in_16_bit,
    "small groups first": _small_groups_first,
    "no shadows": _no_shadows,
}
_TOGETHER = tuple(_CHANGES)[:3]
