"""The report at the end of a run: where the time went, what was moved, how near the bound it came."""

from __future__ import annotations

import csv
import json
import math
import resource
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from infinity.base.timeline import CAUSES, Cause
from infinity.cli.progress import StepFacts
from infinity.runtime.statistics import Statistics
from infinity.sizes import format_bytes
from infinity.units.speculation import Counts

_LAST = 10
"""Steps whose mean loss is the last one's, the first step not among them: the loss of one step says little."""

_STALLS: dict[Cause, str] = {
    "fetch": "waiting: weights",
    "update": "waiting: updates",
    "room": "waiting: room",
    "gradient": "landing gradients",
    "step": "optimizer step",
    "commit": "commit",
}
assert set(_STALLS) == set(CAUSES)


@dataclass(frozen=True)
class Report:
    """Per-step figures are means over the steps of the run, the first left out where there are more (it learns the
    order of units).

    Attributes:
        first_loss, last_loss: of the steps with a finite loss (nan where there are none) the first one's, and the mean
            of the last `last_steps`.
        warm_up: there was one step only, so that the figures have the first step's warm-up in them.
        step_s: seconds per step; `stall_s` of them by cause (base/timeline.py: Cause), by the host's clock.
        compute_s: the rest of the step. On a GPU, which computes while the host waits, the step without
            `device_idle_s`: the seconds in which the GPU waited for weights or for optimizer.step, by its own clock.
        fetch_wait_s, gradient_s, update_s: of the stalls: fetch and room; gradient; step and update.
        adam_s: the update's arithmetic, whether or not compute went on meanwhile.
        bytes_per_parameter: moved by the engine per step and trained parameter, counted;
            `planned_bytes_per_parameter` is the design's formula for this placement.
        io_bound_s: the I/O alone: seconds the engine was busy. `compute_bound_s`: the processors alone, see
            processors_alone.
        efficiency: the larger bound / step_s.
        peak_rss_bytes: of the whole process; `state_bytes`: weights, master and moments of the model, `cached_bytes`
            of them in RAM for good.
    """

    steps: int
    skipped_steps: int
    first_loss: float
    last_loss: float
    last_steps: int
    tokens_per_s: float
    step_s: float
    compute_s: float
    device_idle_s: float
    stall_s: dict[Cause, float]
    adam_s: float
    fetch_wait_s: float
    gradient_s: float
    update_s: float
    bytes_per_parameter: float
    planned_bytes_per_parameter: float
    read_bytes: int
    written_bytes: int
    io_bound_s: float
    compute_bound_s: float
    efficiency: float
    peak_rss_bytes: int
    state_bytes: int
    cached_bytes: int
    updates: Counts
    engine: str
    device: str
    warm_up: bool

    def _idle_row(self) -> list[tuple[str, str]]:
        """On a GPU, the line that compute adds up with to the step; the stalls are the host's there."""
        if self.device == "cpu":
            return []
        idle = "waiting for weights and for optimizer.step; the lines below are the host's, beside it"
        return [("  GPU idle", f"{self.device_idle_s:.3f} s {idle}")]

    def text(self) -> str:
        clipped = self.updates.clipped
        why = f" (gradients were clipped, or their scale changed, in {clipped} steps)" if clipped else ""
        rows = [
            (
                "steps",
                f"{self.steps} ({self.skipped_steps} skipped), loss {self.first_loss:.4f} → {self.last_loss:.4f} "
                f"(mean of the last {self.last_steps})",
            ),
            (
                "time per step",
                f"{self.step_s:.3f} s, {self.tokens_per_s:.0f} tokens/s"
                + (" (one step only: with the warm-up of the first one)" if self.warm_up else ""),
            ),
            ("  compute", f"{self.compute_s:.3f} s"),
            *self._idle_row(),
            *((f"  {label}", f"{self.stall_s[cause]:.3f} s") for cause, label in _STALLS.items()),
            (
                "moved per parameter",
                f"{self.bytes_per_parameter:.1f} B per step, counted; planned upper bound (no weights cached "
                f"between passes, no update begun for nothing) {self.planned_bytes_per_parameter:.1f} B",
            ),
            ("read, written", f"{format_bytes(self.read_bytes)}, {format_bytes(self.written_bytes)} by {self.engine}"),
            (
                "updates of blocks",
                f"{self.updates.early} begun during backward, {self.updates.late} with the step, "
                f"{self.updates.undone} begun for nothing{why}",
            ),
            (
                "peak memory",
                f"{format_bytes(self.peak_rss_bytes)} RSS; the model's states are {format_bytes(self.state_bytes)}, of "
                f"which {format_bytes(self.cached_bytes)} rest in RAM",
            ),
            (
                "efficiency",
                f"{self.efficiency:.2f} = bound / measured; bounds: I/O {self.io_bound_s:.3f} s, compute and "
                f"Adam {self.compute_bound_s:.3f} s",
            ),
        ]
        return "\n".join(f"{name:<22}{value}" for name, value in rows)


def make_report(
    facts: Sequence[StepFacts],
    before: Statistics,
    after: Statistics,
    skipped_steps: int,
    losses: Sequence[float],
    *,
    warm_up: bool,
) -> Report:
    """Figures of the steps between two snapshots of the counters.

    Args:
        facts: the steps between `before` and `after`.
        losses: of the whole run.
        warm_up: the first step of the process is among them.
    """
    steps = max(len(facts), 1)
    seconds = sum(fact.seconds for fact in facts) / steps
    stalls: dict[Cause, float] = {cause: (after.stall_s[cause] - before.stall_s[cause]) / steps for cause in CAUSES}
    idle = (after.device_idle_s - before.device_idle_s) / steps
    compute = max(seconds - (sum(stalls.values()) if after.device == "cpu" else idle), 0.0)
    adam = (after.adam_s - before.adam_s) / steps
    moved = (after.read_bytes - before.read_bytes + after.written_bytes - before.written_bytes) / steps
    busy = (after.io_busy_s - before.io_busy_s) / steps
    compute_bound = processors_alone(seconds, compute, adam, device=after.device)
    finite = [loss for loss in losses if math.isfinite(loss)]
    last = finite[1:][-_LAST:] or finite
    return Report(
        steps=len(losses),
        skipped_steps=skipped_steps,
        first_loss=finite[0] if finite else math.nan,
        last_loss=sum(last) / len(last) if last else math.nan,
        last_steps=len(last),
        tokens_per_s=sum(fact.tokens for fact in facts) / max(seconds * steps, 1e-9),
        step_s=seconds,
        compute_s=compute,
        device_idle_s=idle,
        stall_s=stalls,
        adam_s=adam,
        fetch_wait_s=stalls["fetch"] + stalls["room"],
        gradient_s=stalls["gradient"],
        update_s=stalls["step"] + stalls["update"],
        bytes_per_parameter=moved / max(after.trainable_numel, 1),
        planned_bytes_per_parameter=after.plan.forecast.step_bytes / max(after.trainable_numel, 1),
        read_bytes=after.read_bytes,
        written_bytes=after.written_bytes,
        io_bound_s=busy,
        compute_bound_s=compute_bound,
        efficiency=max(busy, compute_bound) / max(seconds, 1e-9),
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        state_bytes=after.state_bytes,
        cached_bytes=after.cached_bytes + after.cached_weight_bytes,
        updates=Counts(
            after.updates.early - before.updates.early,
            after.updates.undone - before.updates.undone,
            after.updates.late - before.updates.late,
            after.updates.clipped - before.updates.clipped,
        ),
        engine=after.engine,
        device=after.device,
        warm_up=warm_up,
    )


def processors_alone(step_s: float, compute_s: float, adam_s: float, *, device: str) -> float:
    """Seconds of a step in which nothing waits for I/O.

    On the CPU compute and Adam have the same cores, so it is their sum; no more than the step, for what ran at the same
    time slowed each other down. A GPU computes beside Adam, so there it is the longer one.
    """
    return min(compute_s + adam_s, step_s) if device == "cpu" else max(compute_s, adam_s)


def write_report(report: Report, facts: Sequence[StepFacts], directory: Path) -> None:
    """report.json, report.txt, loss.csv and loss.png. JSON has no nan: null stands for it. Raises OSError."""
    values = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(report).items()
    }
    (directory / "report.json").write_text(json.dumps(values, indent=2, allow_nan=False) + "\n")
    (directory / "report.txt").write_text(report.text() + "\n")
    with (directory / "loss.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "loss", "learning_rate", "grad_norm", "seconds"])
        writer.writerows((f.step, f.loss, f.learning_rate, f.grad_norm, f.seconds) for f in facts)
    _plot(facts, directory / "loss.png")


def _plot(facts: Sequence[StepFacts], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot([fact.step for fact in facts], [fact.loss for fact in facts], linewidth=1)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
