"""`infinity finetune`: train a causal language model on text with a swap config, and save it for transformers."""

from __future__ import annotations

import argparse
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from infinity.checkpoint.load import load_pretrained, require_directory_or_id
from infinity.checkpoint.save import save_pretrained
from infinity.cli import job, limits, tracing
from infinity.cli.command import command
from infinity.cli.data import PackedData
from infinity.cli.documents import find_files
from infinity.cli.finished import finish, nothing_to_go_on_with
from infinity.cli.optimizers import DTYPES, make_optimizer, make_scaler, say_if_slow
from infinity.cli.output import Output, require_apart
from infinity.cli.progress import PlainProgress, RichProgress, StepFacts, open_progress
from infinity.cli.ready import require_ready
from infinity.cli.report import Report, make_report, write_report
from infinity.cli.tokenizer import load_tokenizer
from infinity.config import SwapConfig, load_config
from infinity.echo import raised
from infinity.errors import ConfigError, InfinityError, ModelError, SwapIOError, printable
from infinity.io.headers import header_in
from infinity.ranks.ranks import require_one_process
from infinity.runtime.offload import close, synchronize
from infinity.runtime.statistics import Statistics, statistics
from infinity.runtime.track import commit, finish_commit, track


def finetune(options: argparse.Namespace) -> int:
    """Run the job and return the exit code. Cheap checks come before expensive work.

    Raises:
        InfinityError, OSError: nothing is left in the output directory. If the model was already complete, the message
            says where it is.
    """
    require_one_process("infinity finetune")
    resumed = job.directory_of(options, None if options.config is None else load_config(options.config))
    if resumed is not None and nothing_to_go_on_with(options, resumed.expanduser().absolute()):
        return 0
    options, config, past = job.resolve(options)
    _check(options)
    output = _output(options, config, past)
    require_ready(config)
    _require_model(options.model, resuming=past is not None)
    tokenizer = load_tokenizer(options.model)
    torch.manual_seed(options.seed)
    if options.threads:
        torch.set_num_threads(options.threads)
    with closing(_read_data(options, tokenizer, output)) as data:
        _say_what_was_read(data)
        limits.require_fit(options.model, options.sequence_length, data.largest_token)
        model = _load_model(options, config, resuming=past is not None)
        try:
            output.require_room(statistics(model).plan.layout.weight_bytes)
            store = _store_of(model, config)
            run = _Run(model, data, options, config)
            stopped = run.train()
            if stopped and store is not None:
                return _leave(model, config, stopped, run.done)
            report = run.report()
            batch = next(data.batches(1, options.seed)) if options.verify_output else None
            logits, late = _save(output, run, config, tokenizer, report, batch)
        finally:
            close(model)
    print(report.text())
    print(printable(f"model, report and loss curve: {options.output}"))
    if batch is not None and logits is not None:
        _verify(options.output, batch, logits)
    if store is not None and options.keep_store:
        swap = config.nvme.paths[0]
        print(printable(f"checkpoint of step {run.done}: {swap} (`{command('checkpoint')}` exports or removes it)"))
    elif store is not None:
        finish(config.nvme.paths, store, options.output, run.done)
    return late or stopped


def _store_of(model: Any, config: SwapConfig) -> str | None:
    """The run of the store that keeps the model's generations; None where none are kept. Says how often commits are
    made."""
    commits = statistics(model).plan.placement.commits
    print(printable(f"commits: {commits}"), flush=True)
    return header_in(config.nvme.paths[0].expanduser()).header.run if commits.every else None


def _output(options: argparse.Namespace, config: SwapConfig, past: job.Past | None) -> Output:
    """The output directory. Raises ConfigError if the result cannot be written there."""
    if past is not None and options.steps is not None and past.steps >= options.steps:
        _require_new(options.output, config, past.steps)
        print(
            f"the run has done all of its {options.steps} steps: its model is written again (to go on, give a larger "
            "--steps and another --output)",
            flush=True,
        )
    directories = [path for path in options.data if path.is_dir()]
    for path in directories:
        for swap in config.nvme.paths:
            require_apart(f"--data {printable(path)}", path, "nvme.paths", swap)
    return Output(options.output, {"nvme.paths": config.nvme.paths, "--data": directories})


def _require_new(output: Path, config: SwapConfig, steps: int) -> None:
    """Raises ConfigError if the output of a run that has done all of its steps seems to be there."""
    if output.is_dir() and any(output.iterdir()):
        remove = command("checkpoint", "remove", *config.nvme.paths)
        raise ConfigError(
            f"the run has done all of its {steps} steps, and {printable(output)} exists and is not an empty directory: "
            f"if it is the run's output, nothing is left to do, and `{remove}` frees the store. To write the model "
            "again give another --output."
        )


def _save(
    output: Output, run: _Run, config: SwapConfig, tokenizer: Any, report: Report, batch: torch.Tensor | None
) -> tuple[torch.Tensor | None, int]:
    """Write the result and move it to the output. The model is written first, so that a later failure does not lose it.

    Returns:
        The model's logits for `batch`; and 0, or the exit code if a signal came meanwhile.

    Raises:
        InfinityError: the result is not in the output; says where the model is, or how it can be written again.
    """
    model = run.model
    # Without generations the weights are in this process only: if the output's disk fails, try the others.
    elsewhere = [] if run.durable else [path.expanduser() for path in config.nvme.paths]
    promise = "the model is being saved (Ctrl-C again: stop at once, save nothing)"

    logits: torch.Tensor | None = None

    def write_rest(directory: Path) -> None:
        nonlocal logits
        if batch is not None:
            logits = _logits(model, batch)
        close(model)
        tokenizer.save_pretrained(directory)
        write_report(report, run.facts, directory)

    with _stop_when_asked(print, promise) as stop:
        try:
            saved = output.save(lambda directory: save_pretrained(model, directory), elsewhere)
        except InfinityError as error:
            if not run.durable or isinstance(error, SwapIOError):
                raise
            commit(model)
            again = command("finetune", "--resume", config.nvme.paths[0], "--output", "DIRECTORY")
            raise InfinityError(f"{error} Step {run.done} is committed, and can be saved with: {again}") from error
        output.publish(saved, write_rest)
    return logits, stop.asked


def _load_model(options: argparse.Namespace, config: SwapConfig, *, resuming: bool) -> Any:
    made: dict[str, Any] = {
        "dtype": DTYPES[options.dtype],
        "optimizer": options.optimizer,
        "accumulation_steps": options.gradient_accumulation,
    }
    if options.from_checkpoint is not None:
        return load_pretrained(options.from_checkpoint.expanduser(), config, from_checkpoint=True, **made)
    return load_pretrained(options.model, config, resume=resuming, **made)


def _require_model(name: str, *, resuming: bool) -> None:
    """Raises ModelError for a name that is neither a directory nor a hub id. Says when the hub is asked, which may take
    long."""
    try:
        if not require_directory_or_id(name):
            print(
                f"--model {printable(str(name))}: there is no such directory; asking the Hugging Face hub for it",
                flush=True,
            )
    except ModelError as error:
        raise ModelError(f"--model: {error}{'. Where is it now? Give --model' if resuming else ''}") from None


def _read_data(options: argparse.Namespace, tokenizer: Any, output: Output) -> PackedData:
    """The data of --data; their tokens are written to a file on the output's disk."""
    try:
        return PackedData(options.data, tokenizer, options.sequence_length, output.disk)
    except OSError as error:
        raise ConfigError(
            f"--output {printable(options.output)}: cannot write the tokens of --data to {printable(output.disk)}: "
            f"{error.strerror or error}"
        ) from error


def _say_what_was_read(data: PackedData) -> None:
    for note in data.notes():
        print(note)
    print(f"{data.tokens} tokens in {data.sequences} sequences of {data.sequence_length}", flush=True)


def _leave(model: Any, config: SwapConfig, code: int, step: int) -> int:
    """End a run that was asked to stop, so that it can be resumed from here."""
    commit(model)
    print(printable(f"stopped after step {step}; go on with: {command('finetune', '--resume', config.nvme.paths[0])}"))
    return code


def _check(options: argparse.Namespace) -> None:
    for name in ("batch_size", "gradient_accumulation", "sequence_length", "steps", "threads"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    if options.sequence_length < 2:
        raise ConfigError("--sequence-length must be at least 2, not 1: each token is learned from those before it")
    if not options.lr > 0:
        raise ConfigError(f"--lr must be positive, not {options.lr}")
    if options.max_grad_norm < 0 or options.warmup_steps < 0:
        raise ConfigError("--max-grad-norm and --warmup-steps cannot be negative")
    find_files(options.data)
    tracing.check(options)


@dataclass
class _Stop:
    """Whether the run was asked to stop.

    Attributes:
        asked: the exit code, once a Ctrl-C or SIGTERM came; a second one interrupts at once.
    """

    asked: int = 0


@contextmanager
def _stop_when_asked(say: Callable[[str], None], promise: str) -> Iterator[_Stop]:
    """In the block, the first Ctrl-C or SIGTERM only says `promise` and is noted."""
    stop = _Stop()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = 128 + number
        say(promise)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _History:
    """The facts of all steps of a run, which generations keep as a table."""

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
        model: the model that is trained.
        durable: whether generations are kept.
        facts: of every step, including those before a resume.
        done: number of optimizer steps, including those before a resume.
    """

    def __init__(self, model: Any, data: PackedData, options: argparse.Namespace, config: SwapConfig) -> None:
        self.model = model
        self.durable = statistics(model).plan.placement.commit_every > 0
        self._options = options
        self._promise = (
            "the run can be resumed from there (Ctrl-C again: stop at once, resume from the last commit)"
            if self.durable
            else "the model is saved as it is then (Ctrl-C again: stop at once, save nothing)"
        )
        model.config.use_cache = False
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
        limits.require_vocabulary(model.get_input_embeddings().num_embeddings, data.largest_token)
        per_step = options.batch_size * options.gradient_accumulation
        self._steps = options.steps or max(data.sequences // per_step, 1)
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(self._optim, self._factor)
        self._scaler = make_scaler(model, wanted=not options.no_loss_scale)
        say_if_slow(model)
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
        for group, peak in zip(self._optim.param_groups, self._scheduler.base_lrs, strict=True):
            group["lr"] = peak * self._factor(self._scheduler.last_epoch)  # --steps may have changed since
        if self.done:
            print(f"resumed after step {self.done} of {self._steps}", flush=True)
        if options.warmup_steps >= self._steps:
            print(
                f"--warmup-steps {options.warmup_steps} are as many as the {self._steps} steps of the run, or more: "
                "the learning rate never reaches --lr",
                flush=True,
            )
        self._now: Statistics = statistics(model)
        self._began = self._first = self._now
        self._measured = time.perf_counter()  # the time of `_now`
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
        """Do all steps. Returns 0, or the exit code if a signal ended the run early."""
        self._measured = time.perf_counter()
        with (
            self._traced,
            open_progress(self._steps) as progress,
            _stop_when_asked(progress.say, f"stopping after this step; {self._promise}") as stop,
        ):
            for step in range(self.done + 1, self._steps + 1):
                self._traced.before(step)
                self._step(step, progress)
                self.done = step
                stopping = stop.asked  # a signal that comes from here on ends the next step
                if self._traced.after(step, stopping=bool(stopping)):
                    progress.say(f"trace of the steps until {step}: {self._options.trace} (open it in ui.perfetto.dev)")
                    self._measured = time.perf_counter()  # writing the trace is no part of a step
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
            part = self._loss(batch) / self._options.gradient_accumulation
            self._scaler.scale(part).backward()
            loss += part.item()
            tokens += batch.numel()
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
        self.facts.append(facts)
        finish_commit(self.model)  # a step that is shown is durable
        progress.update(facts)

    def _loss(self, batch: torch.Tensor) -> torch.Tensor:
        try:
            loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        except InfinityError:
            raise
        except (IndexError, RuntimeError) as error:  # sequences too long, or too many: only the model knows
            raise ModelError(
                f"the model cannot take sequences of {batch.shape[1]} tokens, {batch.shape[0]} at a time "
                f"({raised(error)}): give a smaller --sequence-length or --batch-size"
            ) from error
        return loss

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
        mine = self.facts[self._before :]
        alone = len(mine) == 1
        if alone:
            began = time.perf_counter()
            synchronize(self.model)
            mine = [replace(mine[0], seconds=mine[0].seconds + time.perf_counter() - began)]
            self._now = statistics(self.model)
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
