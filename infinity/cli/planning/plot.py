"""`infinity plan --plot`: where every byte lives, and the step as a bar for each link."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infinity.cli.planning.report import LINKS, duration
from infinity.cli.planning.scenario import Outcome, Scenario

_GIB = 1 << 30


def resting(outcome: Outcome) -> dict[str, dict[str, float]]:
    """GiB of weights, optimizer states, gradients, what moves them, and activations, by where they are."""
    plan = outcome.plan
    layout, budgets = plan.layout, plan.budgets
    arena = layout.arena
    stored: dict[str, int] = {"weights": 0, "optimizer": 0}
    for unit in layout.units:
        for group in unit.groups:
            stored["weights"] += group.weight.nbytes if group.weight.offsets else 0
            stored["optimizer"] += sum(state.nbytes for state in group.states.values() if state.offsets)
    moving = arena.nbytes - arena.weights - arena.states - arena.gradients
    on_device = 0 if budgets.limits.in_place else budgets.slot_bytes + budgets.ring_bytes + budgets.decoding_bytes
    found = {
        "device": {"slots": on_device, "activations": outcome.work.peak_bytes},
        "RAM": {"weights": arena.weights, "optimizer": arena.states, "gradients": arena.gradients, "moving": moving},
        "NVMe": {
            **stored,
            "gradients": layout.swap.scratch,
            "further copies": layout.swap.further_copies,
        },
    }
    return {place: {what: nbytes / _GIB for what, nbytes in parts.items() if nbytes} for place, parts in found.items()}


def plot(scenario: Scenario, outcome: Outcome, path: Path) -> None:
    """Write a PNG. Raises OSError: the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _bytes(left, resting(outcome))
    busy = sorted(outcome.prediction.busy.items(), key=lambda each: each[1])
    right.barh([LINKS[name] for name, _ in busy], [seconds for _, seconds in busy], color="tab:blue")
    right.axvline(outcome.prediction.seconds, color="tab:red", label=f"a step: {duration(outcome.prediction.seconds)}")
    right.set_xlabel("seconds of one step, predicted")
    right.legend()
    figure.suptitle(
        f"{outcome.plan.layout.numel / 1e9:.3g} B parameters on {scenario.machine.name}, "
        f"{outcome.work.tokens * scenario.ranks:,} tokens"
    )
    figure.savefig(path, dpi=120, format="png")


def _bytes(axes: Any, places: dict[str, dict[str, float]]) -> None:
    kinds = list(dict.fromkeys(what for parts in places.values() for what in parts))
    left = dict.fromkeys(places, 0.0)
    for kind in kinds:
        sizes = [parts.get(kind, 0.0) for parts in places.values()]
        axes.barh(list(places), sizes, left=list(left.values()), label=kind)
        left = {place: before + size for (place, before), size in zip(left.items(), sizes, strict=True)}
    axes.set_xlabel("GiB")
    axes.set_title("where every byte lives")
    axes.legend(fontsize="small")
