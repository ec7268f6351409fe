"""One scenario: a machine, a model and a policy, and the figures of its step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from infinity.errors import InfinityError
from infinity.plan.plan import Plan
from simulation import native
from simulation.machine import SimulatedMachine
from simulation.planning import plan_for
from simulation.shapes import Task
from simulation.training import Figures, Training

_WARMUP = {"clipped": 3, "unclipped": 2}
"""Number of steps before the measured steps: from the third clipped step on, `auto` no longer speculates."""
_MEASURED = 2
_LARGE, _LARGE_TILE = 20e9, 32 << 20
"""Number of parameters above which a tile has 8 Mi parameters and three tiles are staged, so that fewer tiles are
simulated."""


@dataclass(frozen=True)
class Outcome:
    """Result of a scenario.

    Attributes:
        refused: the reason why there is no plan (in this case the other fields are empty); '' if there is a plan.
    """

    plan: Plan | None = None
    figures: Figures | None = None
    refused: str = ""


def simulate(machine: SimulatedMachine, task: Task, *, clipped: bool, micro_batches: int = 1, **config: Any) -> Outcome:
    """Plan, train some steps and return the figures of one step.

    Args:
        machine: the simulated machine.
        task: the model and its batch.
        clipped: whether every step clips its gradients.
        micro_batches: number of micro-batches, each of the task's size; all micro-batches pass through a unit before
            the next unit begins.
        config: keys of the swap config.
    """
    if task.numel > _LARGE:
        config = {"tile": _LARGE_TILE} | config
    try:
        plan = plan_for(machine, task, clips=clipped, **config)
    except (InfinityError, ValueError) as error:
        return Outcome(refused=str(error))
    with native.imitated():
        training = Training(machine, task, plan, clipped=clipped, micro_batches=micro_batches)
        for _ in range(_WARMUP["clipped" if clipped else "unclipped"]):
            training.step()
        before = training.figures()
        for _ in range(_MEASURED):
            training.step()
    return Outcome(plan, training.figures().since(before, _MEASURED))


def bounds(machine: SimulatedMachine, figures: Figures) -> dict[str, float]:
    """Return for each resource the seconds that the step's transfers and computations would take if only this resource
    limited them."""
    names = {"cores": "processor", "dram": "memory", "disk": "disk", "device": "compute", "up": "up", "down": "down"}
    capacity = machine.capacity()
    return {label: figures.used.get(name, 0.0) / capacity[name] for name, label in names.items() if name in capacity}


def summary(machine: SimulatedMachine, task: Task, outcome: Outcome, serial: Outcome | None = None) -> dict[str, Any]:
    """Return the figures for the tables. Args: serial: the outcome with overlap off, for the hidden share."""
    figures = outcome.figures
    if figures is None or outcome.plan is None:
        return {"refused": outcome.refused}
    found = dict(sorted(bounds(machine, figures).items(), key=lambda each: -each[1]))
    largest, second = list(found.values())[:2]
    result: dict[str, Any] = {
        "seconds": figures.seconds,
        "bounds": found,
        "of_bound": figures.seconds / largest,
        "lead": largest / second if second else float("inf"),
        "read_per_parameter": figures.read_bytes / task.numel,
        "written_per_parameter": figures.written_bytes / task.numel,
        "counts": asdict(figures),
        "placed": _placed(outcome.plan),
    }
    if serial is not None and serial.figures is not None and serial.figures.in_step > 0:
        result["serial_seconds"] = serial.figures.seconds
        result["hidden"] = 1 - idle(machine, figures) / serial.figures.in_step
    return result


def idle(machine: SimulatedMachine, figures: Figures) -> float:
    """Return the seconds for which the computing device was idle."""
    if machine.is_gpu:
        return figures.seconds - figures.used.get("device", 0.0)
    return sum(figures.stalled.get(cause, 0.0) for cause in ("update", "fetch", "step", "room"))


def _placed(plan: Plan) -> dict[str, Any]:
    placement, budgets = plan.placement, plan.budgets
    trained = sum(bool(unit.groups) for unit in plan.layout.units)
    return {
        "weights_in_ram": len(placement.weights.in_ram) / trained,
        "states_in_ram": len(placement.optimizer.in_ram) / trained,
        "resident": len(placement.optimizer.resident) / trained,
        "resident_bytes": budgets.resident_bytes,
        "gradients_in_ram": len(placement.gradients.in_ram) / trained,
        "slot_bytes": budgets.slot_bytes,
        "ring_bytes": budgets.ring_bytes,
        "upload_bytes": budgets.upload_bytes,
        "bounce_bytes": budgets.bounce_bytes,
        "copies_bytes": budgets.copies_bytes,
        "shadow_bytes": budgets.shadow_bytes,
        "ahead_bytes": budgets.staging.ahead_bytes,
        "staging_bytes": budgets.staging.nbytes,
        "overlap": placement.updates.overlap,
        "reason": placement.updates.reason,
        "host_bytes": plan.host_bytes,
    }
