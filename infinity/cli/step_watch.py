"""The callback that measures, commits and prints each step of a run, and that ends the run after a signal."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import TrainerCallback

from infinity.cli import run_directory
from infinity.cli.finetune_options import FinetuneOptions
from infinity.cli.history import RunHistory, best_of
from infinity.cli.progress import PlainProgress, RichProgress, StepFacts
from infinity.cli.run_ranks import gather_values
from infinity.cli.run_report import without
from infinity.cli.stopping import StopRequest
from infinity.cli.tracing import TracedSteps
from infinity.cli.trainer import FinetuneTrainerMixin
from infinity.errors import printable
from infinity.optim.offloaded import OffloadedOptimizer
from infinity.quoting import raised
from infinity.runtime.commit_api import finish_commit
from infinity.runtime.offload import synchronize
from infinity.runtime.statistics import Statistics, statistics

_STAY = "the step is skipped and the weights do not change"


class StepCallback(TrainerCallback):  # type: ignore[misc]
    """The callback for each step. A Trainer calls its other callbacks before this callback.

    Args:
        scaler: scaler of the loss, enabled or not.
        step_tokens: tokens of a step on all ranks.
        options: options of the run.

    Attributes:
        began: counters before the first step of this process. `began`, `first` and `now` do not include evaluations and
            saving.
        first: counters after the first step of this process.
        now: counters after the last step.
        stopped: exit code if a signal ended the run early, else 0.
    """

    def __init__(
        self,
        trainer: FinetuneTrainerMixin,
        optimizer: OffloadedOptimizer,
        scaler: torch.amp.GradScaler,
        history: RunHistory,
        progress: PlainProgress | RichProgress,
        traced: TracedSteps,
        stop: StopRequest,
        step_tokens: int,
        options: FinetuneOptions,
    ) -> None:
        self._trainer = trainer
        self._model = trainer.model
        self._optimizer = optimizer
        self._scaler = scaler
        self._history = history
        self._progress = progress
        self._traced = traced
        self._stop = stop
        self._tokens = step_tokens
        self._options = options
        self._unlogged: list[StepFacts] = []
        self._before = trainer.state.global_step
        self._loss, self._rate, self._skipped, self._scale = 0.0, 0.0, 0, 1.0
        self.began = self.first = self.now = statistics(self._model)
        self._measured = time.perf_counter()  # the time at which `now` was read
        # a resumed run may begin with an evaluation
        self._paused: tuple[Statistics, float] | None = (self.now, self._measured)
        self.stopped = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._go_on()
        self._traced.before(state.global_step + 1)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # here the host waits for the work that the device has queued
        parts = torch.stack(self._trainer.take_losses()).tolist()
        self._loss = _mean(gather_values(self._model, "the loss", parts))
        self._rate = float(self._optimizer.param_groups[0]["lr"])
        self._skipped, self._scale = self._optimizer.skipped_steps, self._scaler.get_scale()
        if not math.isfinite(self._loss):
            self._optimizer.skip_next_step(f"the loss is {self._loss}")
            self._progress.say(f"step {state.global_step + 1}: the loss is {self._loss}; {_STAY}")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step = state.global_step
        self._finish(step)
        self.stopped = max(gather_values(self._model, "whether to stop", self._stop.asked))
        self._end_trace(step)
        if self.stopped:
            control.should_training_stop = True
            control.should_evaluate = control.should_save = False  # the run evaluates and saves when it is resumed
        if step == state.max_steps:
            control.should_log = True
            control.should_save = False  # the output contains the model of the last step
        if control.should_evaluate or control.should_save:
            synchronize(self._model)
            self._pause()

    def _finish(self, step: int) -> None:
        """Record the figures of the step, finish its commit, and show it."""
        self._say_if_skipped(step)
        now, then = statistics(self._model), self._measured
        self._measured = time.perf_counter()
        facts = StepFacts(
            step=step,
            loss=self._loss,
            learning_rate=self._rate,
            grad_norm=self._optimizer.last_grad_norm,
            # this includes the end of the commit of the step before, as the statistics do
            seconds=self._measured - then,
            tokens=self._tokens,
            read_bytes=now.read_bytes - self.now.read_bytes,
            written_bytes=now.written_bytes - self.now.written_bytes,
        )
        self.now = now
        if step == self._before + 1:
            self.first = now  # the first step is slower, because it learns the order of the units
        self._history.facts.append(facts)
        self._unlogged.append(facts)
        finish_commit(self._model)  # the step is durable before it is shown
        self._progress.update(facts)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        best = best_of(self._history.evaluations)
        is_best = best is not None and best.step == state.global_step
        if self._options.save_best and is_best and state.global_step < state.max_steps:
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step, best = state.global_step, best_of(self._history.evaluations)
        why = self._trainer.failed.get(step)
        if state.is_world_process_zero:
            self._rotate()
        if why is None:
            is_best = self._options.save_best and best is not None and best.step == step
            so_far = " (the best so far)" if is_best else ""
            self._progress.say(f"step {step}: the model is saved in {self._trainer.folder_of(step)}{so_far}")
        elif state.is_world_process_zero:
            print(f"warning: {printable(why)}; the run continues", file=sys.stderr, flush=True)

    def _rotate(self) -> None:
        try:
            run_directory.rotate(self._options, self._history.evaluations)
        except OSError as error:
            print(
                f"warning: a model cannot be removed: {raised(error)}; the run continues", file=sys.stderr, flush=True
            )

    def figures(self) -> dict[str, float]:
        """Return figures of the steps since the last entry in a tracker. A Trainer adds its own figures."""
        since, self._unlogged = self._unlogged, []
        if not since:
            return {}
        seconds = sum(each.seconds for each in since)
        return {
            "loss": sum(each.loss for each in since) / len(since),
            "grad_norm": since[-1].grad_norm,
            "seconds": seconds,
            "tokens_per_s": sum(each.tokens for each in since) / max(seconds, 1e-9),
        }

    def _end_trace(self, step: int) -> None:
        if self._traced.after(step, stopping=bool(self.stopped)):
            self._progress.say(f"trace of the steps until {step}: {self._traced.path} (open it in ui.perfetto.dev)")
            self._measured = time.perf_counter()  # the time for writing the trace does not count as time of a step

    def _say_if_skipped(self, step: int) -> None:
        lower = self._scaler.get_scale()
        if lower < self._scale:
            self._progress.say(f"step {step}: skipped, a gradient overflowed; the loss scale is {lower:g} now")
        elif self._optimizer.skipped_steps > self._skipped and math.isfinite(self._loss):
            self._progress.say(f"step {step}: a gradient is not finite; {_STAY}")

    def _pause(self) -> None:
        """Exclude the time between this call and the next step, and what is counted in it, from the measurements."""
        self._paused = statistics(self._model), time.perf_counter()

    def _go_on(self) -> None:
        if self._paused is None:
            return
        (before, began), self._paused = self._paused, None
        after = statistics(self._model)
        self._measured += time.perf_counter() - began
        self.began, self.first, self.now = (without(each, before, after) for each in (self.began, self.first, self.now))


def _mean(parts: Sequence[Sequence[float]]) -> float:
    """Return the loss of a step from the losses of all ranks.

    The losses are added in the order in which a single process with all batches would add them.

    Args:
        parts: losses of the micro-batches, by rank.
    """
    return sum((sum(of_ranks) / len(parts) for of_ranks in zip(*parts, strict=True)), 0.0)
