"""Changes of policy that are simulated before they are implemented. "as is" is infinity without changes.

* gradients in 16 bit: gradients take 2 bytes per parameter, and there is no window for a further pass.
* no shadows: the planner reserves no RAM for new weights if this RAM could contain states.
* 0 to 100 % resident: this share of the trained units, by bytes, is kept and updated on the device, in place of the
  share that the planner chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from infinity.errors import PlanError
from infinity.plan import placement, planner
from infinity.plan.fastest_plan import KeptActivations, MakePlan
from infinity.plan.placement import GradientPlacement
from infinity.plan.plan import Plan
from infinity.plan.plan_input import UnitBytes
from infinity.plan.speculation_memory import spread_out
from infinity.sizes import format_bytes

POLICIES = (
    "as is",
    "gradients in 16 bit",
    "no shadows",
    *(f"{share} % resident" for share in range(0, 101, 10)),
)


@contextmanager
def policy(name: str) -> Iterator[None]:
    """Apply a policy to infinity within the context."""
    with ExitStack() as patches:
        for each, change in _CHANGES.items():
            if name == each:
                change(patches)
        yield


def _gradients_in_16_bit(patches: ExitStack) -> None:
    def placements(problem: Any, room: int) -> Iterator[GradientPlacement]:
        yield GradientPlacement(problem, problem.trained, fp32=False, window=False)
        yield from original(problem, room)

    original = placement.gradient_placements
    patches.enter_context(mock.patch.object(planner, "gradient_placements", placements))


def _no_shadows(patches: ExitStack) -> None:
    patches.enter_context(mock.patch.object(planner, "shadow_wanted", return_value=0))


def _default(made: MakePlan, config: object, step: object, ways: Sequence[KeptActivations]) -> Plan:
    """Return the only plan: the share of resident units is given."""
    return made(ways[0], 1.0)


def _resident(percent: int) -> Callable[[ExitStack], None]:
    def choose(config: Any, limits: Any, units: Sequence[UnitBytes], *given: Any, adds_up: bool, **_: Any) -> Any:
        if limits.in_place:
            return frozenset()
        costs = [(unit.index, unit.resident_bytes(fp32=adds_up)) for unit in units if unit.state]
        room = sum(nbytes for _, nbytes in costs) * percent // 100
        if room > limits.device:
            raise PlanError(f"{percent} % of the units need {format_bytes(room)} of memory.device")
        return spread_out(costs, room)

    def change(patches: ExitStack) -> None:
        patches.enter_context(mock.patch.object(planner, "resident_units", choose))
        patches.enter_context(mock.patch.object(planner, "fastest", _default))

    return change


_CHANGES: dict[str, Callable[[ExitStack], None]] = {
    "gradients in 16 bit": _gradients_in_16_bit,
    "no shadows": _no_shadows,
    **{f"{share} % resident": _resident(share) for share in range(0, 101, 10)},
}
