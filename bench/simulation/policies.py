"""Changes of policy that are simulated before they are implemented. "as is" is infinity without changes.

* gradients in 16 bit: gradients take 2 bytes per parameter, and there is no window for a further pass.
* no shadows: the planner reserves no RAM for new weights if this RAM could contain states.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from infinity.plan import placement, planner
from infinity.plan.placement import GradientPlacement

POLICIES = (
    "as is",
    "gradients in 16 bit",
    "no shadows",
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


_CHANGES = {
    "gradients in 16 bit": _gradients_in_16_bit,
    "no shadows": _no_shadows,
}
