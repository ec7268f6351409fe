"""The report at the end of a run.

It says how the time of a step is divided, how many bytes were moved, and how near the measured time is to a lower bound
(the efficiency).
"""

from __future__ import annotations

import csv
import json
import math
import operator
import resource
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path

from infinity.base.timeline import CAUSES, Cause
from infinity.cli.history import EvaluationLoss, GeneratedText, best_of
from infinity.cli.progress import StepFacts
from infinity.runtime.statistics import Statistics, counts_of_all_ranks, trained_of
from infinity.sizes import format_bytes
from infinity.units.speculation_choice import UpdateCounts

_LAST = 10
"""Number of steps over which the last loss is averaged, because the loss varies much between steps.

The first step is not averaged.
"""

_SMOOTH = 0.9
"""Weight of the earlier steps in the exponential mean of the loss."""

_STALLS: dict[Cause, str] = {
    "fetch": "waiting: weights",
    "update": "waiting: updates",
    "room": "waiting: room",
    "gradient": "landing gradients",
    "activation": "activations",
    "step": "optimizer step",
    "commit": "commit",
}
assert set(_STALLS) == set(CAUSES)


@dataclass(frozen=True)
class RunReport:
    """Losses of a run, and figures of the steps that one process has done.

    Times, bytes and updates are those of the measured steps. The first step of a process learns the order of the units,
    and is measured only if there is no other step. Losses and skipped steps are those of the whole run, with the steps
    before a resume.

    Attributes:
        steps: number of steps of the run, with the steps before the resume.
        first_step: the first step of this process; `steps` + 1 if it has done none.
        first_measured_step: the first measured step.
        skipped_steps: number of steps that were skipped.
        first_loss: the first finite loss; nan if there is none.
        last_loss: mean of the last `last_steps` finite losses; nan if there is none.
        step_s: seconds per step.
        stall_s: seconds of stalls per step by cause (base/timeline.py: Cause), measured with the host's clock.
        compute_s: seconds per step without stalls. With a GPU these are the seconds of the step minus `device_idle_s`,
            because a GPU may compute while the host waits.
        device_idle_s: seconds per step in which the GPU waited for weights or for optimizer.step, measured with the
            GPU's clock.
        adam_s: seconds per step of the update's arithmetic. Forward and backward may have run at the same time.
        bytes_per_parameter: bytes that the I/O engine moved per step, divided by the number of all parameters,
            including frozen parameters. The bytes are counted.
        planned_bytes_per_parameter: the value of bytes_per_parameter that the plan predicts if no weights are cached
            between passes and no updates are undone.
        read_bytes, written_bytes: bytes that the I/O engine moved in the measured steps.
        io_bound_s: lower bound of a step by I/O: seconds per step in which the I/O engine was busy.
        compute_bound_s: lower bound of a step by the processors (see processors_alone).
        efficiency: the larger bound / step_s.
        peak_rss_bytes: peak resident memory of the process.
        state_bytes: bytes of all states of the model: weights, masters and moments.
        cached_bytes: part of `state_bytes` that is kept in RAM.
        parameters, trained_parameters: number of all parameters of the model, and number of trained parameters.
        data: summary of the training data.
        notes: parts of the data that were left out, and why.
        evaluations: losses on held-out data.
        again: command that repeats the run.
    """

    steps: int
    first_step: int
    first_measured_step: int
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
    updates: UpdateCounts
    engine: str
    device: str
    parameters: int
    trained_parameters: int
    data: str
    notes: list[str]
    evaluations: list[EvaluationLoss]
    again: str

    @property
    def _uncounted(self) -> str:
        """Words for bytes that the plan does not count: activations, if some moved."""
        return "no activations, " if self.stall_s["activation"] else ""

    def _idle_row(self) -> list[tuple[str, str]]:
        """Return the row of the GPU's idle time; without a GPU the list is empty.

        Idle time and compute time add up to the time of the step. The stalls in the other rows are measured on the
        host, and do not add up with them.
        """
        if self.device == "cpu":
            return []
        idle = "the GPU waited for weights and for optimizer.step; the lines below are times of the host"
        return [("  GPU idle", f"{self.device_idle_s:.3f} s {idle}")]

    def _trained_row(self) -> list[tuple[str, str]]:
        if self.trained_parameters == self.parameters:
            return []
        return [("trained", trained_of(self.trained_parameters, self.parameters))]

    def _evaluation_row(self) -> list[tuple[str, str]]:
        best, finite = best_of(self.evaluations), [each for each in self.evaluations if math.isfinite(each.loss)]
        if best is None:
            return []
        first, last = finite[0], finite[-1]
        if first is last:
            return [("held-out loss", f"{last.loss:.4f} after step {last.step}")]
        return [
            (
                "held-out loss",
                f"{first.loss:.4f} after step {first.step} → {last.loss:.4f} after step {last.step}; the lowest is "
                f"{best.loss:.4f}, after step {best.step}",
            )
        ]

    def text(self) -> str:
        clipped = self.updates.clipped
        why = f" (gradients were clipped, or their scale changed, in {clipped} steps)" if clipped else ""
        rows = [
            (
                "steps",
                f"{_span(1, self.steps)} ({self.skipped_steps} skipped), loss {self.first_loss:.4f} → "
                f"{self.last_loss:.4f}"
                + (f" (mean of the last {self.last_steps})" if self.last_steps > 1 else "")
                + (f"; after the resume: {_span(self.first_step, self.steps)}" if self.first_step > 1 else ""),
            ),
            *self._trained_row(),
            ("data", self.data),
            *(("", note) for note in self.notes),
            *self._evaluation_row(),
            (
                "time per step",
                f"{self.step_s:.3f} s, {self.tokens_per_s:.0f} tokens/s; this and the lines below are of "
                + (
                    f"step {self.steps}, with its warm-up"
                    if self.first_measured_step == self.first_step
                    else f"steps {_span(self.first_measured_step, self.steps)}, after the warm-up"
                ),
            ),
            ("  compute", f"{self.compute_s:.3f} s"),
            *self._idle_row(),
            *((f"  {label}", f"{self.stall_s[cause]:.3f} s") for cause, label in _STALLS.items()),
            (
                "moved per parameter",
                f"{self.bytes_per_parameter:.1f} B per step, counted; planned {self.planned_bytes_per_parameter:.1f} B "
                f"(no weights cached between passes, {self._uncounted}and no discarded updates)",
            ),
            ("read, written", f"{format_bytes(self.read_bytes)}, {format_bytes(self.written_bytes)} by {self.engine}"),
            (
                "updates of blocks",
                f"{self.updates.early} begun during backward, {self.updates.late} with the step; {self.updates.undone} "
                f"begun during backward were discarded and done again{why}",
            ),
            (
                "peak memory",
                f"{format_bytes(self.peak_rss_bytes)} RSS; the model's states are {format_bytes(self.state_bytes)}, of "
                f"which {format_bytes(self.cached_bytes)} are in RAM",
            ),
            (
                "efficiency",
                f"{self.efficiency:.2f} = bound / measured; bounds: I/O {self.io_bound_s:.3f} s, compute and Adam "
                f"{self.compute_bound_s:.3f} s",
            ),
            *([("to repeat the run", self.again)] if self.again else []),
        ]
        return "\n".join(f"{name:<22}{value}" for name, value in rows)


def _span(first: int, last: int) -> str:
    return f"{first}–{last}" if first < last else str(last) if first == last else f"none after {last}"


def make_report(
    facts: Sequence[StepFacts],
    done: int,
    before: Statistics,
    after: Statistics,
    *,
    data: str = "",
    notes: Sequence[str] = (),
    evaluations: Sequence[EvaluationLoss] = (),
    again: str = "",
) -> RunReport:
    """Make the report of the steps of this process.

    `facts` has the figures of all steps of the run, of which this process has not done the first `done`. `before` and
    `after` are the counters before and after the measured steps. The other arguments are attributes of the report.
    """
    mine = facts[done:]
    measured = mine[1:] or mine
    steps = max(len(measured), 1)
    trained, parameters = counts_of_all_ranks(after.plan)
    seconds = sum(fact.seconds for fact in measured) / steps
    stalls: dict[Cause, float] = {cause: (after.stall_s[cause] - before.stall_s[cause]) / steps for cause in CAUSES}
    idle = (after.device_idle_s - before.device_idle_s) / steps
    compute = max(seconds - (sum(stalls.values()) if after.device == "cpu" else idle), 0.0)
    adam = (after.adam_s - before.adam_s) / steps
    read, written = after.read_bytes - before.read_bytes, after.written_bytes - before.written_bytes
    busy = (after.io_busy_s - before.io_busy_s) / steps
    compute_bound = processors_alone(seconds, compute, adam, device=after.device)
    finite = [fact.loss for fact in facts if math.isfinite(fact.loss)]
    last = finite[1:][-_LAST:] or finite
    return RunReport(
        steps=len(facts),
        first_step=done + 1,
        first_measured_step=len(facts) - len(measured) + 1,
        skipped_steps=sum(fact.skipped for fact in facts),
        first_loss=finite[0] if finite else math.nan,
        last_loss=sum(last) / len(last) if last else math.nan,
        last_steps=len(last),
        tokens_per_s=sum(fact.tokens for fact in measured) / max(seconds * steps, 1e-9),
        step_s=seconds,
        compute_s=compute,
        device_idle_s=idle,
        stall_s=stalls,
        adam_s=adam,
        bytes_per_parameter=(read + written) / steps / max(after.numel, 1),
        planned_bytes_per_parameter=after.plan.forecast.step_bytes / max(after.numel, 1),
        read_bytes=read,
        written_bytes=written,
        io_bound_s=busy,
        compute_bound_s=compute_bound,
        efficiency=max(busy, compute_bound) / max(seconds, 1e-9),
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        state_bytes=after.state_bytes,
        cached_bytes=after.cached_bytes + after.cached_weight_bytes,
        updates=UpdateCounts(*map(operator.sub, astuple(after.updates), astuple(before.updates))),
        engine=after.engine,
        device=after.device,
        parameters=parameters,
        trained_parameters=trained,
        data=data,
        notes=list(notes),
        evaluations=list(evaluations),
        again=again,
    )


def without(earlier: Statistics, before: Statistics, after: Statistics) -> Statistics:
    """Return `earlier` with the counts between `before` and `after` added.

    If the result is subtracted from later counters, the difference does not include what was counted between `before`
    and `after`.
    """
    summed = ("read_bytes", "written_bytes", "weight_bytes_read", "io_busy_s", "device_idle_s", "adam_s")
    moved = {name: getattr(earlier, name) + getattr(after, name) - getattr(before, name) for name in summed}
    stalls = {cause: earlier.stall_s[cause] + after.stall_s[cause] - before.stall_s[cause] for cause in earlier.stall_s}
    return replace(earlier, stall_s=stalls, **moved)


def processors_alone(step_s: float, compute_s: float, adam_s: float, *, device: str) -> float:
    """Return the seconds that a step would take if I/O took no time.

    Without a GPU, forward, backward and Adam use the same cores, and the result is the sum of their times. The sum is
    limited to the time of the step, because each is slower while the others run. With a GPU, Adam runs on another
    processor than forward and backward, and the result is the longer of the two times.

    Args:
        step_s: seconds per step.
        compute_s: seconds per step without stalls (see RunReport).
        adam_s: seconds per step of the update's arithmetic.
        device: type of the device that computes, such as "cpu".
    """
    return min(compute_s + adam_s, step_s) if device == "cpu" else max(compute_s, adam_s)


def write_report(
    report: RunReport, facts: Sequence[StepFacts], samples: Sequence[GeneratedText], directory: Path
) -> None:
    """Write report.json, report.txt, loss.csv and loss.png, and if there were samples, samples.jsonl.

    In JSON, nan is written as null.

    Args:
        report: the report.
        facts: all steps of the run.
        samples: all samples of the run.
        directory: existing directory for the files.

    Raises:
        OSError: a file cannot be written.
    """
    values = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(report).items()
    } | {
        "evaluations": [
            {"step": step, "loss": loss if math.isfinite(loss) else None} for step, loss in report.evaluations
        ]
    }
    (directory / "report.json").write_text(json.dumps(values, indent=2, allow_nan=False) + "\n")
    (directory / "report.txt").write_text(report.text() + "\n")
    with (directory / "loss.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "loss", "learning_rate", "grad_norm", "seconds"])
        writer.writerows((f.step, f.loss, f.learning_rate, f.grad_norm, f.seconds) for f in facts)
    if samples:
        lines = [json.dumps(sample._asdict(), ensure_ascii=False) + "\n" for sample in samples]
        (directory / "samples.jsonl").write_text("".join(lines), encoding="utf-8")
    _plot(facts, report.evaluations, directory / "loss.png")


def _plot(facts: Sequence[StepFacts], evaluations: Sequence[EvaluationLoss], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    steps, losses = [fact.step for fact in facts], [fact.loss for fact in facts]
    axes.plot(steps, losses, linewidth=0.8, alpha=0.4, color="tab:blue", label="training")
    axes.plot(steps, _smoothed(losses), linewidth=1.5, color="tab:blue", label="training, smoothed")
    if evaluations:
        axes.plot(*zip(*evaluations, strict=True), marker="o", markersize=4, color="tab:orange", label="held out")
    axes.legend()
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _smoothed(losses: Sequence[float]) -> list[float]:
    """Return the exponential mean of the losses after each step, corrected for the bias of the first steps.

    Losses that are infinite or nan are ignored.
    """
    mean, weight, smoothed = 0.0, 0.0, []
    for loss in losses:
        if math.isfinite(loss):
            mean, weight = _SMOOTH * mean + (1 - _SMOOTH) * loss, _SMOOTH * weight + (1 - _SMOOTH)
        smoothed.append(mean / weight if weight else math.nan)
    return smoothed
