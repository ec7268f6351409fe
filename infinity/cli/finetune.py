"""`infinity finetune`: a causal language model, text, a swap config; out comes a model that transformers loads."""

from __future__ import annotations

import argparse
import math
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from infinity.checkpoint.load import load_pretrained
from infinity.checkpoint.save import save_pretrained
from infinity.cli.data import PackedData
from infinity.cli.optimizers import make_optimizer
from infinity.cli.progress import PlainProgress, RichProgress, StepFacts, open_progress
from infinity.cli.report import make_report, write_report
from infinity.config import load_config
from infinity.errors import ConfigError, InfinityError, ModelError
from infinity.runtime.offload import close
from infinity.runtime.statistics import Statistics, statistics

INTERRUPTED = 130


def finetune(options: argparse.Namespace) -> int:
    """Run the job; returns the exit code. Everything cheap is checked before anything expensive.

    Raises:
        InfinityError, OSError: nothing is left behind in the output directory.
    """
    _check(options)
    config = load_config(options.config)
    output: Path = options.output.expanduser().absolute()
    tokenizer = _load_tokenizer(options.model)
    torch.manual_seed(options.seed)
    if options.threads:
        torch.set_num_threads(options.threads)
    work = _working_directory(output)
    try:
        data = PackedData(options.data, tokenizer, options.sequence_length, work / "tokens.u32")
        print(f"{data.tokens} tokens in {data.sequences} sequences of {data.sequence_length}", flush=True)
        model = load_pretrained(options.model, config, optimizer=options.optimizer)
        try:
            run = _Run(model, data, options)
            interrupted = run.train()
            batch = next(data.batches(1, options.seed))
            logits = _logits(model, batch) if options.verify_output else None
            report = run.report()
            result = work / "model"
            save_pretrained(model, result)
        finally:
            close(model)
        tokenizer.save_pretrained(result)
        write_report(report, run.facts, result)
        _publish(result, output)
    finally:
        shutil.rmtree(work, ignore_errors=True)  # ours, made above
    print(report.text())
    print(f"model, report and loss curve: {output}")
    if logits is not None:
        _verify(output, batch, logits)
    return INTERRUPTED if interrupted else 0


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


def _working_directory(output: Path) -> Path:
    """Beside the output, so that the result is renamed into place and a full disk shows here."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot write to {output.parent}: {error.strerror}") from error


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
    """Set by the first Ctrl-C; the second one interrupts at once."""

    asked: bool = False


@contextmanager
def _stop_at_a_step(say: Callable[[str], None]) -> Iterator[_Stop]:
    stop = _Stop()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True
        say("stopping after this step; the model is saved as it is then (Ctrl-C again: stop at once, save nothing)")

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous)


class _Run:
    """The training loop and what it records."""

    def __init__(self, model: Any, data: PackedData, options: argparse.Namespace) -> None:
        self.facts: list[StepFacts] = []
        self._model = model
        self._options = options
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
        )
        per_step = options.batch_size * options.gradient_accumulation
        self._steps = options.steps or max(data.sequences // per_step, 1)
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(self._optim, self._factor)
        self._now: Statistics = statistics(model)
        self._first = self._now
        self._vocabulary = vocabulary

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

    def train(self) -> bool:
        """All steps; True when Ctrl-C ended it early."""
        with open_progress(self._steps) as progress, _stop_at_a_step(progress.say) as stop:
            for step in range(1, self._steps + 1):
                self._step(step, progress)
                if step == 1:
                    self._first = self._now  # the first step learns the order of units
                if stop.asked:
                    return True
        return False

    def _step(self, step: int, progress: PlainProgress | RichProgress) -> None:
        began = time.perf_counter()
        learning_rate = float(self._optim.param_groups[0]["lr"])
        loss, tokens = 0.0, 0
        for _ in range(self._options.gradient_accumulation):
            batch = next(self._batches)
            self._check_tokens(batch)
            part = self._model(input_ids=batch, labels=batch).loss / self._options.gradient_accumulation
            part.backward()
            loss += part.item()
            tokens += batch.numel()
        if not math.isfinite(loss):
            progress.say(f"step {step}: the loss is {loss}; the step is skipped and the weights stay as they are")
        self._optim.step()
        self._optim.zero_grad()
        self._scheduler.step()
        now = statistics(self._model)
        facts = StepFacts(
            step=step,
            loss=loss,
            learning_rate=learning_rate,
            grad_norm=self._optim.last_grad_norm,
            seconds=time.perf_counter() - began,
            tokens=tokens,
            read_bytes=now.read_bytes - self._now.read_bytes,
            written_bytes=now.written_bytes - self._now.written_bytes,
        )
        self._now = now
        self.facts.append(facts)
        progress.update(facts)

    def _check_tokens(self, batch: torch.Tensor) -> None:
        if int(batch.max()) >= self._vocabulary:
            raise ModelError(
                f"the tokenizer gives token {int(batch.max())}, the model's vocabulary has {self._vocabulary}; are "
                f"they a pair?"
            )

    def report(self) -> Any:
        measured = self.facts[1:] or self.facts
        before = self._first
        losses = [fact.loss for fact in self.facts]
        return make_report(measured, before, self._now, self._optim.skipped_steps, losses)


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
