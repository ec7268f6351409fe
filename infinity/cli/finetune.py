"""`infinity finetune`: a causal language model, text, a swap config; out comes a model that transformers loads."""

from __future__ import annotations

import argparse
import math
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from infinity.checkpoint.load import load_pretrained
from infinity.checkpoint.save import save_pretrained
from infinity.cli import job, tracing
from infinity.cli.data import PackedData
from infinity.cli.optimizers import make_optimizer
from infinity.cli.progress import PlainProgress, RichProgress, StepFacts, open_progress
from infinity.cli.report import make_report, write_report
from infinity.cli.scaling import DTYPES, make_scaler
from infinity.config import SwapConfig
from infinity.errors import ConfigError, InfinityError, ModelError
from infinity.runtime.offload import close, synchronize
from infinity.runtime.statistics import Statistics, statistics
from infinity.runtime.track import commit, finish_commit, track


def finetune(options: argparse.Namespace) -> int:
    """Run the job; returns the exit code. Everything cheap is checked before anything expensive.

    Raises:
        InfinityError, OSError: nothing is left behind in the output directory.
    """
    options, config, resuming = job.resolve(options)
    _check(options)
    output: Path = options.output
    tokenizer = _load_tokenizer(options.model)
    torch.manual_seed(options.seed)
    if options.threads:
        torch.set_num_threads(options.threads)
    with closing(_read_data(options, tokenizer)) as data:
        print(f"{data.tokens} tokens in {data.sequences} sequences of {data.sequence_length}", flush=True)
        model = _load_model(options, config, resuming)
        try:
            run = _Run(model, data, options, config)
            stopped = run.train()
            if stopped and config.commit_every:
                return _leave(model, config, stopped, run.done)
            report = run.report()
            batch = next(data.batches(1, options.seed))
            logits = _logits(model, batch) if options.verify_output else None
            with _working_directory(output) as work:
                save_pretrained(model, work / "model")
                close(model)
                tokenizer.save_pretrained(work / "model")
                write_report(report, run.facts, work / "model")
                _publish(work / "model", output)
        finally:
            close(model)
    print(report.text())
    print(f"model, report and loss curve: {output}")
    if config.commit_every:
        swap = config.nvme.paths[0]
        print(f"checkpoint of step {run.done}: {swap} (`infinity checkpoint` exports or removes it)")
    if logits is not None:
        _verify(output, batch, logits)
    return stopped


def _load_model(options: argparse.Namespace, config: SwapConfig, resuming: bool) -> Any:
    made: dict[str, Any] = {
        "dtype": DTYPES[options.dtype],
        "optimizer": options.optimizer,
        "accumulation_steps": options.gradient_accumulation,
    }
    if options.from_checkpoint is not None:
        return load_pretrained(options.from_checkpoint.expanduser(), config, from_checkpoint=True, **made)
    return load_pretrained(options.model, config, resume=resuming, **made)


def _read_data(options: argparse.Namespace, tokenizer: Any) -> PackedData:
    """The tokens are spilled beside the output, which shows that one can write there."""
    parent = options.output.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return PackedData(options.data, tokenizer, options.sequence_length, parent)
    except OSError as error:
        raise ConfigError(f"--output {options.output}: cannot write to {parent}: {error.strerror}") from error


def _leave(model: Any, config: SwapConfig, code: int, step: int) -> int:
    """End a run that was asked to stop: it goes on from here another time."""
    commit(model)
    print(f"stopped after step {step}; go on with: infinity finetune --resume {config.nvme.paths[0]}")
    return code


def _check(options: argparse.Namespace) -> None:
    for name in ("batch_size", "gradient_accumulation", "sequence_length", "steps", "threads"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    if not options.lr > 0:
        raise ConfigError(f"--lr must be positive, not {options.lr}")
    if options.max_grad_norm < 0 or options.warmup_steps < 0:
        raise ConfigError("--max-grad-norm and --warmup-steps cannot be negative")
    for path in options.data:
        if not path.exists():
            raise ConfigError(f"--data {path}: no such file or directory")
        if path.is_file() and path.stat().st_size == 0:
            raise ConfigError(f"--data {path}: the file is empty")
    output = options.output.expanduser()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output}: exists and is not an empty directory; choose another")
    tracing.check(options)


@contextmanager
def _working_directory(output: Path) -> Iterator[Path]:
    """Beside the output, so that the result is renamed into place."""
    work = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)  # ours, made above


def _publish(result: Path, output: Path) -> None:
    if output.exists():
        output.rmdir()  # empty: checked at the start
    result.replace(output)


def _load_tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot load the tokenizer of '{name}': {error}") from error


@dataclass
class _Stop:
    """Set by the first Ctrl-C or SIGTERM, to the exit code; a second one interrupts at once."""

    asked: int = 0


@contextmanager
def _stop_at_a_step(say: Callable[[str], None], *, resumable: bool) -> Iterator[_Stop]:
    stop = _Stop()
    if resumable:
        promise = "the run can be resumed from there (Ctrl-C again: stop at once, resume from the last commit)"
    else:
        promise = "the model is saved as it is then (Ctrl-C again: stop at once, save nothing)"

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = 128 + number
        say(f"stopping after this step; {promise}")

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _History:
    """The steps of a run, as generations keep them: a table."""

    def __init__(self) -> None:
        self.facts: list[StepFacts] = []

    def state_dict(self) -> dict[str, Any]:
        return {"steps": torch.tensor([astuple(fact) for fact in self.facts], dtype=torch.float64)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        whole = {"step", "tokens", "read_bytes", "written_bytes"}
        names = [field.name for field in fields(StepFacts)]
        for row in state["steps"].tolist():
            values = {name: int(value) if name in whole else value for name, value in zip(names, row, strict=True)}
            self.facts.append(StepFacts(**values))


class _Run:
    """The training loop and what it records.

    Attributes:
        facts: of every step, those before a resume included.
        done: optimizer steps, likewise.
    """

    def __init__(self, model: Any, data: PackedData, options: argparse.Namespace, config: SwapConfig) -> None:
        self._model = model
        self._options = options
        self._resumable = config.commit_every > 0
        model.config.use_cache = False
        vocabulary = model.get_input_embeddings().num_embeddings
        self._batches = data.batches(options.batch_size, options.seed)
        self._optim = make_optimizer(
            options.optimizer,
            model.parameters(),
            lr=options.lr,
            weight_decay=options.weight_decay,
            max_grad_norm=options.max_grad_norm or None,
            seed=options.seed,
            accumulation_steps=options.gradient_accumulation,
        )
        per_step = options.batch_size * options.gradient_accumulation
        self._steps = options.steps or max(data.sequences // per_step, 1)
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(self._optim, self._factor)
        self._scaler = make_scaler(model, wanted=not options.no_loss_scale)
        history = _History()
        self.facts = history.facts
        self.done = track(
            model=model,
            scheduler=self._scheduler,
            batches=self._batches,
            history=history,
            **({"scaler": self._scaler} if self._scaler.is_enabled() else {}),
            **{job.NAME: job.Job(options, config)},
        )
        self._before = self.done
        if self.done:
            print(f"resumed after step {self.done} of {self._steps}", flush=True)
        self._now: Statistics = statistics(model)
        self._began = self._first = self._now
        self._measured = time.perf_counter()  # when `_now` was
        self._vocabulary = vocabulary
        self._traced = tracing.TracedSteps(model, options.trace, options.trace_steps, done=self.done, total=self._steps)

    def _factor(self, step: int) -> float:
        warmup = self._options.warmup_steps
        if step < warmup:
            return float((step + 1) / (warmup + 1))
        progress = (step - warmup) / max(self._steps - warmup, 1)
        if self._options.schedule == "linear":
            return float(1.0 - progress)
        if self._options.schedule == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        return 1.0

    def train(self) -> int:
        """All steps; 0, or the exit code when a signal ended it early."""
        self._measured = time.perf_counter()
        with (
            self._traced,
            open_progress(self._steps) as progress,
            _stop_at_a_step(progress.say, resumable=self._resumable) as stop,
        ):
            for step in range(self.done + 1, self._steps + 1):
                self._traced.before(step)
                self._step(step, progress)
                self.done = step
                stopping = stop.asked  # what comes from here on is for the next step's end
                if self._traced.after(step, stopping=bool(stopping)):
                    progress.say(f"trace of the steps until {step}: {self._options.trace} (open it in ui.perfetto.dev)")
                    self._measured = time.perf_counter()  # writing it is no part of a step
                if step == self._before + 1:
                    self._first = self._now  # the first step learns the order of units
                if stopping:
                    return stopping
        return 0

    def _step(self, step: int, progress: PlainProgress | RichProgress) -> None:
        learning_rate = float(self._optim.param_groups[0]["lr"])
        loss, tokens = 0.0, 0
        for _ in range(self._options.gradient_accumulation):
            batch = next(self._batches)
            self._check_tokens(batch)
            part = self._model(input_ids=batch, labels=batch).loss / self._options.gradient_accumulation
            self._scaler.scale(part).backward()
            loss += part.item()
            tokens += batch.numel()
        if not math.isfinite(loss):
            progress.say(f"step {step}: the loss is {loss}; the step is skipped and the weights stay as they are")
        self._update(step, progress)
        self._optim.zero_grad()
        self._scheduler.step()
        now, then = statistics(self._model), self._measured
        self._measured = time.perf_counter()
        facts = StepFacts(
            step=step,
            loss=loss,
            learning_rate=learning_rate,
            grad_norm=self._optim.last_grad_norm,
            seconds=self._measured - then,  # with the end of the commit before, as the statistics
            tokens=tokens,
            read_bytes=now.read_bytes - self._now.read_bytes,
            written_bytes=now.written_bytes - self._now.written_bytes,
        )
        self._now = now
        self.facts.append(facts)
        finish_commit(self._model)  # what is shown as done is done
        progress.update(facts)

    def _update(self, step: int, progress: PlainProgress | RichProgress) -> None:
        """The optimizer's step; where the loss is scaled and a gradient overflowed, a lower scale instead."""
        scale = self._scaler.get_scale()
        self._scaler.step(self._optim)
        self._scaler.update()
        lower = self._scaler.get_scale()
        if lower < scale:
            progress.say(f"step {step}: skipped, a gradient overflowed; the loss scale is {lower:g} now")

    def _check_tokens(self, batch: torch.Tensor) -> None:
        if int(batch.max()) >= self._vocabulary:
            raise ModelError(
                f"the tokenizer gives token {int(batch.max())}, the model's vocabulary has {self._vocabulary}; are "
                f"they a pair?"
            )

    def report(self) -> Any:
        """Of the steps done here. A step's update may go on beside the next step and is counted there; that of a step
        alone is waited for."""
        mine = self.facts[self._before :]
        alone = len(mine) == 1
        if alone:
            began = time.perf_counter()
            synchronize(self._model)
            mine = [replace(mine[0], seconds=mine[0].seconds + time.perf_counter() - began)]
            self._now = statistics(self._model)
        measured, before = (mine, self._began) if alone else (mine[1:], self._first)
        losses = [fact.loss for fact in self.facts]
        return make_report(measured, before, self._now, self._optim.skipped_steps, losses, warm_up=alone)


def _logits(model: Any, batch: torch.Tensor) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=batch).logits
    return logits


def _verify(output: Path, batch: torch.Tensor, logits: torch.Tensor) -> None:
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(output).eval()
    with torch.no_grad():
        again = plain(input_ids=batch).logits
    if not torch.equal(again, logits):
        difference = (again.float() - logits.float()).abs().max().item()
        raise InfinityError(f"the saved model's logits differ from the trained one's by up to {difference}")
    print("verified: the saved model, loaded by plain transformers, gives the trained model's logits, bit for bit")
