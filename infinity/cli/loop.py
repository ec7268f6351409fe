"""The training loop of `infinity finetune`, and what it records."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from infinity.cli import job, limits, tracing
from infinity.cli.again import again
from infinity.cli.batches import Batch, Batches
from infinity.cli.loggers import Loggers
from infinity.cli.marked import Owner
from infinity.cli.meanwhile import History, Meanwhile
from infinity.cli.optimizers import make_optimizer, make_scaler, moments_of
from infinity.cli.progress import PlainProgress, RichProgress, StepFacts, open_progress
from infinity.cli.reading import Data
from infinity.cli.report import Report, make_report, without
from infinity.cli.separate import require_separates
from infinity.cli.stopping import stop_when_asked
from infinity.cli.world import World, told
from infinity.config import SwapConfig
from infinity.echo import raised
from infinity.errors import ConfigError, InfinityError, ModelError
from infinity.integrations.chunked_loss import use_chunked_loss
from infinity.runtime.methods import no_sync
from infinity.runtime.micro_batches import backward
from infinity.runtime.offload import synchronize
from infinity.runtime.statistics import Statistics, statistics
from infinity.runtime.track import finish_commit, track


class Run:
    """The training loop and what it records.

    Args:
        owner: of the directories beside the output; None on other ranks than the first.

    Attributes:
        model: the model that is trained.
        options, origin: those of the run.
        durable: whether generations are kept.
        history: of every step, including those before a resume.
        done: number of optimizer steps, including those before a resume.
        saved: models of steps that were saved.
        loggers: which stay open until they are closed.
    """

    def __init__(
        self,
        model: Any,
        data: Data,
        tokenizer: Any,
        options: argparse.Namespace,
        config: SwapConfig,
        world: World,
        origin: job.Origin,
        owner: Owner | None,
    ) -> None:
        self.model = model
        self._world = world
        self.origin = origin
        self.durable = statistics(model).plan.placement.commit_every > 0
        self.options = options
        self._promise = (
            "the run can be resumed from there (Ctrl-C again: stop at once, resume from the last commit)"
            if self.durable
            else "the model is saved as it is then (Ctrl-C again: stop at once, save nothing)"
        )
        _prepare(model, options)
        self._data = data
        self._batches = Batches(data.trained, options.batch_size, options.seed, world)
        self._optim = make_optimizer(
            options.optimizer,
            model.parameters(),
            lr=options.lr,
            weight_decay=options.weight_decay,
            **moments_of(options.optimizer, options.beta1, options.beta2, options.eps),
            max_grad_norm=options.max_grad_norm or None,
            seed=options.seed,
            accumulation_steps=options.gradient_accumulation,
        )
        limits.require_vocabulary(model.get_input_embeddings().num_embeddings, data.largest_token)
        if data.shares_sequences:
            require_separates(model)
        per_step = options.batch_size * options.micro_batches * options.gradient_accumulation * world.count
        self._steps = options.steps or max(data.trained.sequences * (options.epochs or 1) // per_step, 1)
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(self._optim, self._factor)
        self._scaler = make_scaler(model, wanted=not options.no_loss_scale)
        self.history = History()
        self._meanwhile = Meanwhile(model, data, tokenizer, options, world, self._steps, self.history, owner)
        self.saved = self._meanwhile.saved
        self.done = track(
            model=model,
            scheduler=self._scheduler,
            batches=self._batches,
            history=self.history,
            **({"scaler": self._scaler} if self._scaler.is_enabled() else {}),
            **{job.NAME: job.Job(options, config, world, origin)},
        )
        if self.done > self._steps:
            raise ConfigError(
                f"--epochs {options.epochs} are {self._steps} steps, and the run that is resumed has done {self.done}: "
                "give more epochs"
            )
        self._before = self.done
        self.saved.go_on(self.done, self.history.evaluations)
        self.loggers = self._loggers(owner)
        for group, peak in zip(self._optim.param_groups, self._scheduler.base_lrs, strict=True):
            group["lr"] = peak * self._factor(self._scheduler.last_epoch)  # --steps may have changed since
        if self.done:
            print(f"resumed after step {self.done} of {self._steps}", flush=True)
        self._say_if_never_warm()
        self._now: Statistics = statistics(model)
        self._began = self._first = self._now
        self._measured = time.perf_counter()  # the time of `_now`
        trace = options.trace if world.speaks else None
        self._traced = tracing.TracedSteps(model, trace, options.trace_steps, done=self.done, total=self._steps)

    def _loggers(self, owner: Owner | None) -> Loggers:
        history = self.history
        written = [history.written(each.step) for each in history.evaluations]
        return Loggers(self.options, self._steps, history.facts, history.evaluations, written, owner)

    def _say_if_never_warm(self) -> None:
        if self.options.warmup_steps >= self._steps:
            print(
                f"--warmup-steps {self.options.warmup_steps} are as many as the {self._steps} steps of the run, or "
                "more: the learning rate never reaches --lr",
                flush=True,
            )

    def _factor(self, step: int) -> float:
        warmup = self.options.warmup_steps
        if step < warmup:
            return float((step + 1) / (warmup + 1))
        progress, falls_to = (step - warmup) / max(self._steps - warmup, 1), self.options.min_lr / self.options.lr
        if self.options.schedule == "linear":
            return float(falls_to + (1.0 - falls_to) * (1.0 - progress))
        if self.options.schedule == "cosine":
            return float(falls_to + (1.0 - falls_to) * 0.5 * (1.0 + math.cos(math.pi * progress)))
        return 1.0

    def train(self) -> int:
        """Do all steps. Returns 0, or the exit code if a signal ended the run early."""
        with (
            self._traced,
            open_progress(self._steps, self.options.log_every) as progress,
            stop_when_asked(progress.say, f"stopping after this step; {self._promise}") as stop,
        ):
            self._measured = time.perf_counter()
            self._between_steps(progress)  # which an interruption has prevented
            for step in range(self.done + 1, self._steps + 1):
                self._traced.before(step)
                self.loggers.step(self._step(step, progress))
                self.done = step
                # A signal that comes from here on ends the next step.
                stopping: int = max(told(self.model, "whether to stop", stop.asked))
                if self._traced.after(step, stopping=bool(stopping)):
                    progress.say(f"trace of the steps until {step}: {self.options.trace} (open it in ui.perfetto.dev)")
                    self._measured = time.perf_counter()  # writing the trace is no part of a step
                if step == self._before + 1:
                    self._first = self._now  # the first step learns the order of units
                if stopping:
                    return stopping
                self._between_steps(progress)
        return 0

    def _step(self, step: int, progress: PlainProgress | RichProgress) -> StepFacts:
        learning_rate = float(self._optim.param_groups[0]["lr"])
        together = self.options.micro_batches
        batches = [next(self._batches) for _ in range(self.options.gradient_accumulation * together)]
        shared, of_batches = list(zip(batches, self._shares(batches), strict=True)), list[torch.Tensor]()
        for first in range(0, len(batches), together):
            is_last = first + together == len(batches)
            with nullcontext() if is_last or together == 1 else no_sync(self.model):
                some = shared[first : first + together]
                try:
                    of_batches += self._backward(some, len(batches))
                except torch.OutOfMemoryError as error:
                    raise _refusal(some[0][0], error) from error
        parts = torch.stack(of_batches).tolist()  # once: a device's host waits here for all that was queued
        tokens = sum(batch.ids.numel() for batch in batches) * self._world.count
        loss = self._mean(told(self.model, "the loss", parts))
        self._update(step, loss, progress)
        self._optim.zero_grad()
        self._scheduler.step()
        now, then = statistics(self.model), self._measured
        self._measured = time.perf_counter()
        facts = StepFacts(
            step=step,
            loss=loss,
            learning_rate=learning_rate,
            grad_norm=self._optim.last_grad_norm,
            seconds=self._measured - then,  # with the end of the earlier step's commit, as in the statistics
            tokens=tokens,
            read_bytes=now.read_bytes - self._now.read_bytes,
            written_bytes=now.written_bytes - self._now.written_bytes,
        )
        self._now = now
        self.history.facts.append(facts)
        finish_commit(self.model)  # a step that is shown is durable
        progress.update(facts)
        return facts

    def _between_steps(self, progress: PlainProgress | RichProgress) -> None:
        """What is due after the last step. It is no part of a step."""
        if not self._meanwhile.due(self.done):
            return
        synchronize(self.model)
        before, began = statistics(self.model), time.perf_counter()
        self._meanwhile.after(self.model, self.done, progress.say, self.loggers)
        after = statistics(self.model)
        self._measured += time.perf_counter() - began
        self._began, self._first, self._now = (
            without(each, before, after) for each in (self._began, self._first, self._now)
        )

    def _backward(self, shared: Sequence[tuple[Batch, float | None]], of_step: int) -> list[torch.Tensor]:
        """One backward pass. Returns the part that each batch has in the loss of the step, a number each.

        Args:
            shared: batches with their shares.
            of_step: how many batches the step has.
        """
        parts = dict[int, torch.Tensor]()

        def loss_of(index: int) -> torch.Tensor:
            batch, share = shared[index]
            loss = self._loss(batch)
            part = loss / of_step if share is None else loss * share
            parts[index] = part.detach()
            return self._scaler.scale(part)

        if len(shared) == 1:
            loss_of(0).backward()
        else:
            backward(self.model, loss_of, range(len(shared)))
        return [parts[index] for index in range(len(shared))]

    def _shares(self, batches: Sequence[Batch]) -> Sequence[float | None]:
        """What the mean loss of each batch counts for in the step: each token that is learned counts the same,
        whichever batch of whichever rank it is in. None where all batches have as many."""
        if not self._data.has_examples:
            return [None] * len(batches)
        learned = [batch.learned for batch in batches]
        of_step = sum(map(sum, told(self.model, "the tokens", learned)))
        return [count * self._world.count / of_step for count in learned]  # the ranks' gradients are averaged

    def _mean(self, parts: Sequence[Sequence[float]]) -> float:
        """The loss of a step, from the parts of all ranks: as one process with all their batches adds it up."""
        return sum((sum(of_ranks) / self._world.count for of_ranks in zip(*parts, strict=True)), 0.0)

    def _loss(self, batch: Batch) -> torch.Tensor:
        try:
            return batch.loss_of(self.model)
        except InfinityError:
            raise
        except (IndexError, RuntimeError) as error:
            raise _refusal(batch, error) from error

    def _update(self, step: int, loss: float, progress: PlainProgress | RichProgress) -> None:
        """The optimizer's step. It is skipped when the loss or a gradient is not finite. If the loss is scaled and a
        gradient overflowed, the scale is lowered as well."""
        skipped, scale = self._optim.skipped_steps, self._scaler.get_scale()
        stay = "the step is skipped and the weights stay as they are"
        if not math.isfinite(loss):
            self._optim.skip_next_step(f"the loss is {loss}")
            progress.say(f"step {step}: the loss is {loss}; {stay}")
        self._scaler.step(self._optim)
        self._scaler.update()
        lower = self._scaler.get_scale()
        if lower < scale:
            progress.say(f"step {step}: skipped, a gradient overflowed; the loss scale is {lower:g} now")
        elif self._optim.skipped_steps > skipped and math.isfinite(loss):
            progress.say(f"step {step}: a gradient is not finite; {stay}")

    def report(self) -> Report:
        """The report on the steps of this process. The first step is left out. If there is only one, it is reported,
        and its update is waited for first; other updates may run beside the next step, and are counted there."""
        mine = self.history.facts[self._before :]
        alone = len(mine) == 1
        if alone:
            began = time.perf_counter()
            synchronize(self.model)
            mine = [replace(mine[0], seconds=mine[0].seconds + time.perf_counter() - began)]
            self._now = statistics(self.model)
        measured, before = (mine, self._began) if alone else (mine[1:], self._first)
        losses = [fact.loss for fact in self.history.facts]
        return make_report(
            measured,
            before,
            self._now,
            self._optim.skipped_steps,
            losses,
            warm_up=alone,
            data=self._data.summary,
            notes=self._data.notes,
            evaluations=self.history.evaluations,
            again=again(self.options, extended=self.origin.extended),
        )


def _refusal(batch: Batch, error: Exception) -> ModelError:
    """What a model's forward raised, and what can be done about it, where its kind tells: an index or a size that does
    not fit is of a sequence that is too long."""
    asked = f"sequences of {batch.ids.shape[1]} tokens, {batch.ids.shape[0]} at a time"
    if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
        return ModelError(
            f"there is no memory for {asked} ({raised(error)}): give a smaller --sequence-length or --batch-size, or "
            "a smaller memory.device, which leaves more for activations"
        )
    if isinstance(error, IndexError) or any(word in str(error) for word in ("size", "shape")):
        return ModelError(
            f"the model cannot take {asked} ({raised(error)}): give a smaller --sequence-length or --batch-size"
        )
    return ModelError(f"the model's forward failed with {asked}: {raised(error)}")


def _prepare(model: Any, options: argparse.Namespace) -> None:
    """What a model is told before it is trained."""
    model.config.use_cache = False
    if not options.no_chunked_loss:
        use_chunked_loss(model)
