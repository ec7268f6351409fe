"""`infinity finetune`: trains a causal language model on text with a swap config, and saves it for transformers."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from infinity.base.accelerator import current_device
from infinity.cli import finetuned_model, job, model_limits, run_directory, tracing, verifying
from infinity.cli.batches import TokenBatch
from infinity.cli.config_checks import require_new_store, require_ready, require_whole_store
from infinity.cli.default_dtype import Source, dtype_line
from infinity.cli.documents import find_files, of_option
from infinity.cli.finetune_options import SCHEDULES, FinetuneOptions
from infinity.cli.finished_run import finish, nothing_to_go_on_with
from infinity.cli.loading import loading
from infinity.cli.optimizers import moments_of
from infinity.cli.order import SequenceSampler
from infinity.cli.output import OutputDirectory, require_disjoint
from infinity.cli.ownership_mark import DirectoryOwner
from infinity.cli.rerun_command import write_rerun_command
from infinity.cli.run_data import RunData, read
from infinity.cli.run_ranks import RunRank, follow, gather_values, joined, lead, meeting
from infinity.cli.run_report import RunReport, write_report
from infinity.cli.stopping import stop_when_asked
from infinity.cli.streams import interruptible_imports
from infinity.cli.suggested_command import command
from infinity.cli.tokenizer import load_tokenizer
from infinity.config import SwapConfig, load_config
from infinity.errors import (
    ConfigError,
    InfinityError,
    ModelError,
    NotAvailableError,
    PeerError,
    StoreNotEmptyError,
    SwapIOError,
    printable,
)
from infinity.io.headers import header_in
from infinity.ranks.paths import rank_path
from infinity.runtime.commit_api import commit
from infinity.runtime.offload import close
from infinity.runtime.statistics import statistics
from infinity.sharded.rank_agreement import Tell

if TYPE_CHECKING:
    from infinity.cli.training import FinetuneRun


def finetune(options: argparse.Namespace) -> int:
    """Run the job and return the exit code. All quick checks are made before any slow work.

    Raises:
        InfinityError, OSError: the job failed, and the output directory is empty. If the complete model was already
            written, the message says where the model is.
    """
    with joined() as world, meeting() as tell, ExitStack() as held, finetuned_model.naming_the_option():
        begun = _begin(options, world, tell, held)
        return 0 if begun is None else _carry_out(begun, tell, held)


@dataclass(frozen=True)
class _CheckedJob:
    """A job whose options, swap config and data were read and checked.

    Attributes:
        resuming: whether the job resumes a run.
        output, owner: the output directory, and the owner of the directories beside it. Both are None on all ranks
            except rank 0.
    """

    world: RunRank
    options: FinetuneOptions
    config: SwapConfig
    origin: job.RunOrigin
    resuming: bool
    output: OutputDirectory | None
    owner: DirectoryOwner | None
    tokenizer: Any
    data: RunData


def _begin(found: argparse.Namespace, world: RunRank, tell: Tell, held: ExitStack) -> _CheckedJob | None:
    """Check the job on all ranks, and read its data.

    Args:
        found: options of the command line.
        world: this process among the ranks.
        tell: function that sends a value to all ranks and returns the values of all.
        held: exit stack that closes the files of the data.

    Returns:
        The job, with equal options and data on all ranks; None if the resumed run has already ended with a complete
        output.
    """
    resumed = job.directory_of(found, None if found.config is None else load_config(found.config))
    has_ended = world.speaks and resumed is not None and nothing_to_go_on_with(found, resumed.expanduser().absolute())
    if tell("whether the run has ended", has_ended)[0]:
        return None
    given = found.dtype is not None
    resolved = job.resolve(found, world, tell)
    options, resuming = resolved.options, resolved.steps is not None
    _say_dtype(options.dtype, "run" if resuming else "option" if given else "default")
    config = _as_asked(resolved.config, options)
    _check(options, config)
    output = _output(options, config, resolved.steps) if world.speaks else None
    owner = _beside(options, config, resolved.origin, resuming=resuming) if world.speaks else None
    disk = Path(tell("the output", "" if output is None else str(output.disk))[0])
    require_ready(config)
    if world.count == 1:
        _require_store(config, options, resuming=resuming)
    _require_model(options.model, resuming=resuming)
    verifying.require_possible(options)
    named = finetuned_model.named(options)
    tokenizer = load_tokenizer(options.model, **named)
    torch.manual_seed(options.seed % 2**64)  # all ranks initialize adapters, or a new head, with the same values
    data = read(options, tokenizer, disk, held)
    for note in data.notes:
        print(note)
    print(data.summary, flush=True)
    model_limits.require_fit(options.model, options.sequence_length, data.largest_token, **named)
    if len(set(tell("the text", data.digest))) > 1:
        raise ConfigError("--data: not all ranks read the same text; give all of them the same files")
    return _CheckedJob(world, options, config, resolved.origin, resuming, output, owner, tokenizer, data)


def _say_dtype(name: str, source: Source) -> None:
    line = dtype_line(name, source, current_device().type)
    if line is not None:
        print(line, flush=True)


def _as_asked(config: SwapConfig, options: FinetuneOptions) -> SwapConfig:
    """Return the swap config. If an option replaces a key of the swap config, the key has the option's value."""
    vertical = {"vertical": True} if options.micro_batches > 1 else {}
    return config.model_copy(update=vertical | ({"frozen": options.frozen} if options.frozen else {}))


def _carry_out(begun: _CheckedJob, tell: Tell, held: ExitStack) -> int:
    """Train, and save the result. Return the exit code.

    Args:
        begun: the job.
        tell: function that sends a value to all ranks and returns the values of all.
        held: exit stack that removes the run's temporary directory and closes the reference model.
    """
    options, config, data, world = begun.options, begun.config, begun.data, begun.world
    # TRL takes long to import, so the data are read first
    with loading("libraries"), interruptible_imports():
        from infinity.cli.training import FinetuneRun
    try:
        with loading("model"):
            model, reference = finetuned_model.load(options, config, resuming=begun.resuming)
    except StoreNotEmptyError as error:
        raise _holds_a_run(config) from error
    if world.rank and not begun.resuming:  # each rank needs its own random numbers in the training
        torch.manual_seed((options.seed + world.rank) % 2**64)
    try:
        if reference is not None:
            held.callback(reference.close)
        model_bytes = sum(gather_values(model, "the size", finetuned_model.output_bytes(model, options)))
        store = _store_of(model, config, world)
        directory = run_directory.made(options, begun.owner, held)
        run = FinetuneRun(model, data, begun.tokenizer, options, config, world, begun.origin, directory, reference)
        if begun.output is not None:
            begun.output.require_room(model_bytes)
            run_directory.tidy(options, run.done)
            run_directory.require_room(options, run.steps, run.done, model_bytes)
        stopped = run.train()
        if reference is not None:  # the ranks close the model together
            reference.close()
        if stopped and store is not None:
            return _leave(model, config, stopped, run.done)
        report = run.report()
        first = SequenceSampler(data.trained.sequences, 1, options.seed)
        batch = data.trained.rows(first) if options.verify_output else None
        if begun.output is None:
            return _follow(model, options, batch, tell, stopped)
        expected, late = _save(begun.output, run, config, begun.tokenizer, report, batch, tell)
    finally:
        close(model)
    print(report.text())
    print(printable(f"{_result(options)}, report and loss curve: {options.output}"))
    for line in run_directory.said(options, run.history.evaluations, run.failed):
        print(printable(line))
    if batch is not None and expected is not None:
        verifying.verify(options.output, options, batch, expected)
    if store is not None and options.keep_store:
        swap = config.nvme.paths[0]
        more = command("finetune", "--resume", swap, "--steps", "MORE", "--output", "DIRECTORY")
        print(printable(f"checkpoint of step {run.done}: {swap} (`{command('checkpoint')}` exports or removes it)"))
        print(printable(f"to resume it: {more}"))
    elif store is not None:
        passes = None if options.steps is not None else options.epochs or 1
        finish(config.nvme.paths, store, options.output, run.done, passes)
    return int(max(tell("the end", late or stopped)))


def _require_store(config: SwapConfig, options: FinetuneOptions, *, resuming: bool) -> None:
    """Check that the store can be opened. Opening it makes the same checks again, after half a minute of imports.

    Raises:
        StoreNotEmptyError, StoreLockedError, ResumeError, SwapIOError: the store cannot be opened.
    """
    try:
        if not resuming or options.from_checkpoint is not None:
            require_new_store(config)
        else:
            require_whole_store(config)
    except StoreNotEmptyError as error:
        raise _holds_a_run(config) from error


def _holds_a_run(config: SwapConfig) -> StoreNotEmptyError:
    """Return the error for nvme.paths that contain the generations of an earlier run.

    The error names the commands that resume or remove the run.
    """
    paths = config.nvme.paths
    return StoreNotEmptyError(
        f"{printable(paths[0])} contains the generations of an earlier run\n"
        f"to resume it: `{command('finetune', '--resume', paths[0])}`\n"
        f"to remove it: `{command('checkpoint', 'remove', *paths)}`\n"
        "or name another directory in nvme.paths"
    )


def _result(options: FinetuneOptions) -> str:
    if options.lora is None:
        return "model"
    return "model, with the adapters merged into it" if options.merge else "adapters"


def _follow(model: Any, options: FinetuneOptions, batch: TokenBatch | None, tell: Tell, stopped: int) -> int:
    """Take part in the collective operations that rank 0 names, until the output is complete.

    All other ranks call this.

    Returns:
        0, or another exit code if a signal ended the run.

    Raises:
        PeerError: another rank failed.
    """

    def save(directory: str) -> None:
        try:
            finetuned_model.save_model(model, directory, options)
        except (PeerError, SwapIOError):
            raise
        except InfinityError:
            pass  # rank 0 could not write the model, reports the error, and decides how to continue

    def compute() -> None:
        if batch is not None:
            verifying.expected_of(model, options, batch)

    with stop_when_asked(print, "") as stop:
        follow(model, {"save": save, "commit": lambda: commit(model), "logits": compute})
        close(model)
        tell("closing the model", None)
        return int(max(tell("the end", stopped or stop.asked)))


def _store_of(model: Any, config: SwapConfig, world: RunRank) -> str | None:
    """Print how often commits are made. Return the run id of the store, or None if the run keeps no generations."""
    commits = statistics(model).plan.placement.commits
    print(printable(f"commits: {commits}"), flush=True)
    if not commits.every:
        return None
    store = rank_path(config.nvme.paths[0].expanduser(), world.rank, world.count)
    return header_in(store).header.run


def _beside(options: FinetuneOptions, config: SwapConfig, origin: job.RunOrigin, *, resuming: bool) -> DirectoryOwner:
    """Return the owner of the directories beside the output directory.

    Raises:
        ConfigError: one of the directories belongs to another run, or cannot be made.
    """
    owner = DirectoryOwner.of(options, config, origin, resumes=resuming)
    run_directory.prepare(options, owner)
    return owner


def _output(options: FinetuneOptions, config: SwapConfig, done: int | None) -> OutputDirectory:
    """Return the output directory.

    Raises:
        ConfigError: the result cannot be written to the directory.
    """
    if done is not None and options.steps is not None and done >= options.steps:
        _require_new(options.output, config, done)
        print(
            f"the run has done all of its {options.steps} steps: its model is written again (to train further, give a "
            "larger --steps and another --output)",
            flush=True,
        )
    directories = [path for path in options.data if path.is_dir()]
    for path in directories:
        for swap in config.nvme.paths:
            require_disjoint(f"--data {printable(path)}", path, "nvme.paths", swap)
    try:
        return OutputDirectory(options.output, {"nvme.paths": config.nvme.paths, "--data": directories})
    except ConfigError as error:
        raise (
            error if done is None else ConfigError(f"{error} (it is the output of the resumed run; --output DIR)")
        ) from None


def _require_new(output: Path, config: SwapConfig, steps: int) -> None:
    """Check that the output directory is missing or empty, for a resumed run that has already done all of its steps.

    Raises:
        ConfigError: the output directory is not empty. It probably contains the result of the run already.
    """
    if output.is_dir() and any(output.iterdir()):
        remove = command("checkpoint", "remove", *config.nvme.paths)
        raise ConfigError(
            f"the run has done all of its {steps} steps, and {printable(output)} exists and is not an empty directory: "
            f"if it is the run's output, nothing is left to do, and `{remove}` frees the store. To write the model "
            "again, give another --output."
        )


def _save(
    output: OutputDirectory,
    run: FinetuneRun,
    config: SwapConfig,
    tokenizer: Any,
    report: RunReport,
    batch: TokenBatch | None,
    tell: Tell,
) -> tuple[verifying.ExpectedResults | None, int]:
    """Write the model and the other files, and move them to the output.

    The model is written first: a later failure cannot lose it.

    Returns:
        The model's results for `batch`, or None if there is no batch; and 0, or another exit code if a signal arrived
        during the call.

    Raises:
        InfinityError: the output is not complete. The error says where the model is, or how to write the model again.
    """
    model = run.model
    # If the run keeps no generations, the weights exist only in this process. Therefore other disks are tried if the
    # output's disk fails.
    elsewhere = [] if run.durable else [path.expanduser() for path in config.nvme.paths]
    promise = "the model is being saved (Ctrl-C again: stop at once, save nothing)"

    expected: verifying.ExpectedResults | None = None

    def write(directory: Path) -> None:
        lead(model, "save", str(directory))
        try:
            finetuned_model.save_model(model, directory, run.options, run.model_config)
        except PeerError:
            if not directory.is_dir():
                raise
            # The model is complete, so it is kept. The next collective operation raises the error of the rank that
            # failed.

    def write_rest(directory: Path) -> None:
        nonlocal expected
        if batch is not None:
            lead(model, "logits")
            expected = verifying.expected_of(model, run.options, batch)
        lead(model, "end")
        close(model)
        tell("closing the model", None)  # after this call no rank reads or writes its store
        tokenizer.save_pretrained(directory)
        write_report(report, run.history.facts, run.history.samples, directory)
        write_rerun_command(run.options, config, run.origin, directory)

    with stop_when_asked(print, promise) as stop:
        try:
            saved = output.save(write, elsewhere)
        except InfinityError as error:
            if not run.durable or isinstance(error, SwapIOError):
                raise
            lead(model, "commit")
            commit(model)
            lead(model, "end")
            again = command("finetune", "--resume", config.nvme.paths[0], "--output", "DIRECTORY")
            raise InfinityError(f"{error} Step {run.done} is committed, and can be saved with: {again}") from error
        output.publish(saved, write_rest)
    return expected, stop.asked


def _require_model(name: str, *, resuming: bool) -> None:
    """Check that the model can be trained with the options of the run.

    Raises:
        ModelError: the model cannot be trained; the error names the option.
    """
    try:
        finetuned_model.require(name, lambda text: print(printable(text), flush=True), adapters=False)
    except ModelError as error:
        raise ModelError(f"--model: {error}{'. Where is it now? Give --model' if resuming else ''}") from None


def _leave(model: Any, config: SwapConfig, code: int, step: int) -> int:
    """Commit the last step of a run that a signal stopped, print how to resume the run, and return the exit code."""
    commit(model)
    print(printable(f"stopped after step {step}; resume with: {command('finetune', '--resume', config.nvme.paths[0])}"))
    return code


def _check(options: FinetuneOptions, config: SwapConfig) -> None:
    if options.method != "sft" and config.vertical:
        raise NotAvailableError(
            "vertical micro-batches (--micro-batches, or `vertical` in the swap config) are not available yet with "
            f"--method {options.method}: use --gradient-accumulation instead"
        )
    if options.sequence_length < 2:
        raise ConfigError(
            "--sequence-length must be at least 2, not 1: each token is predicted from the tokens before it"
        )
    if (options.min_lr or 0.0) > options.lr:
        raise ConfigError(f"--min-lr is {options.min_lr:g}, but the rate falls from --lr {options.lr:g}")
    moments_of(options.optimizer, options.beta1, options.beta2, options.eps)
    for named, paths in (("--data", options.data), ("--eval-data", options.eval_data)):
        with of_option(named):
            find_files(paths or ())
    tracing.check(options)
    finetuned_model.check(options)
    run_directory.check(options)
    if options.trainer or options.min_lr or options.schedule not in SCHEDULES:
        with interruptible_imports():  # TRL takes long to import, and may refuse only these options
            from infinity.cli import trainer_arguments
        trainer_arguments.check(options)
