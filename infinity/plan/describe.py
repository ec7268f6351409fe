"""A plan in words, for the log and the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infinity.plan.budgets import Budgets
from infinity.plan.layout import Layout, SwapBytes
from infinity.plan.placement import Placement
from infinity.sizes import format_bytes

if TYPE_CHECKING:
    from infinity.plan.plan import Plan

_OVERLAP = {
    "auto": "during backward as long as that turns out right, else before the next forward",
    "during_backward": "during backward, redone where the step decides otherwise",
    "before_forward": "from the step on, before each unit's next use",
    "off": "in the step",
}


def describe(plan: Plan) -> str:
    """A few lines: every tier, every budget, and what is predicted."""
    placement, layout, limits, forecast = plan.placement, plan.layout, plan.budgets.limits, plan.forecast
    weights, optimizer, form = placement.weights, placement.optimizer, placement.form
    predicted = "" if forecast.io_s is None else f", {forecast.io_s:.2f} s at the measured rate"
    per_parameter = forecast.step_bytes / max(layout.trainable_numel, 1)
    weights_share = _share(layout.arena.weights, len(weights.in_ram), len(layout.units))
    states_share = _share(layout.arena.states, len(optimizer.in_ram), layout.trained_count)
    return "\n".join(
        [
            f"{layout.numel / 1e6:.1f} M parameters, {layout.trainable_numel / 1e6:.1f} M trained, on {plan.device}",
            f"  weights      {weights.tier:<7}{format_bytes(layout.weight_bytes):>12}"
            f"{weights_share if weights.tier == 'nvme' else ''}",
            f"  optimizer    {optimizer.tier:<7}{format_bytes(layout.state_bytes):>12}  (master {form.master}, "
            f"{form.moments} {' and '.join(form.stored) or 'no moments'})"
            f"{states_share if optimizer.tier == 'nvme' else ''}",
            f"  gradients    {_gradients(placement, plan.budgets, layout)}",
            f"  activations  {placement.activations}",
            f"  memory.device {format_bytes(plan.device_bytes)} of {format_bytes(limits.device)} for weights, the "
            "rest for activations",
            f"  memory.host   {format_bytes(plan.host_bytes)} of {format_bytes(limits.host)}",
            f"  swap file     {_swap(layout.swap, placement.keep)}; one step moves about "
            f"{format_bytes(forecast.step_bytes)} ({per_parameter:.1f} B per trained parameter{predicted})",
            f"  generations   {_generations(placement)}",
            f"  updates       {_updates(placement, plan.budgets)}",
        ]
    )


def _share(held_bytes: int, held: int, count: int) -> str:
    """How much of what is on NVMe is in RAM all the same; '' where that is nothing."""
    return f", {format_bytes(held_bytes)} of it in RAM ({held} of {count} units)" if held else ""


def _gradients(placement: Placement, budgets: Budgets, layout: Layout) -> str:
    accumulation = "any number of micro-batches" if placement.accumulates else "one backward pass per step"
    if placement.gradients.tier == "nvme":
        passes = "" if placement.form.gradient_fp32 else "of one backward pass "
        held = f"{passes}those of {len(placement.gradients.in_ram)} of {layout.trained_count} units in RAM"
        accumulation += f"; {held}, and a window of {format_bytes(budgets.landing_bytes)}"
    size = format_bytes(layout.arena.gradients + budgets.landing_bytes)
    fp32 = "fp32, " if placement.form.gradient_fp32 else ""
    return f"{placement.gradients.tier:<7}{size:>12}  ({fp32}{accumulation})"


def _swap(swap: SwapBytes, keep: int) -> str:
    """What the swap file is made of; the parts add up to it."""
    parts = {
        "of states": swap.states,
        "of free copies" if keep == 1 else "of free copies and earlier generations": swap.further_copies,
        "for gradients": swap.scratch,
    }
    said = " + ".join(f"{format_bytes(nbytes)} {what}" for what, nbytes in parts.items() if nbytes)
    return f"{format_bytes(swap.nbytes)}{f' = {said}' if said else ''}"


def _generations(placement: Placement) -> str:
    if not placement.commit_every:
        return "none (commit_every: 0): a run that dies starts again from a saved model"
    when = "every step" if placement.commit_every == 1 else f"every {placement.commit_every} steps"
    return f"{when}, {placement.keep} kept, each state in {placement.keep + 1} copies: all of it reserved now"


def _updates(placement: Placement, budgets: Budgets) -> str:
    updates = placement.updates
    text = f"{_OVERLAP[updates.overlap]} (overlap: {updates.overlap})"
    if budgets.staging.ahead_bytes:
        text += f", {format_bytes(budgets.staging.ahead_bytes)} to read states ahead"
    if budgets.shadow_bytes:
        text += f", {format_bytes(budgets.shadow_bytes)} for that or for new weights"
    return f"{text}; {updates.reason}" if updates.reason else text
