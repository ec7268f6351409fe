"""The training of `infinity finetune`: TRL's trainer, its callbacks, and the objects that generations track."""

from __future__ import annotations

import copy
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from infinity.cli import job, model_limits, tracing, trackers
from infinity.cli.evaluation_callback import EvaluationCallback, prompts_of
from infinity.cli.finetune_options import FinetuneOptions
from infinity.cli.finetuned_model import save_model
from infinity.cli.history import RunHistory
from infinity.cli.optimizers import make_optimizer, make_scaler, moments_of
from infinity.cli.order import DataFingerprint, SequenceSampler
from infinity.cli.packing_support import require_separates
from infinity.cli.progress import open_progress
from infinity.cli.reference_model import ReferenceModel
from infinity.cli.rerun_command import rerun_command
from infinity.cli.run_data import RunData
from infinity.cli.run_directory import is_whole
from infinity.cli.run_ranks import RunRank, gather_values
from infinity.cli.run_report import RunReport, make_report
from infinity.cli.step_watch import StepCallback
from infinity.cli.stopping import stop_when_asked
from infinity.cli.trainer import FinetuneTrainerMixin
from infinity.cli.trainer_arguments import arguments_of, schedule_of, take_up_rates
from infinity.cli.trainers import TRAINERS
from infinity.config import SwapConfig
from infinity.errors import ConfigError, InfinityError, ModelError
from infinity.integrations import distributed_data_parallel
from infinity.integrations.chunked_loss import use_chunked_loss
from infinity.integrations.patches import Patches
from infinity.optim.offloaded import OffloadedOptimizer
from infinity.quoting import raised
from infinity.runtime.auto_tile_tokens import tile_tokens_of_plan
from infinity.runtime.commit_api import track
from infinity.runtime.offload import synchronize
from infinity.runtime.statistics import statistics


class FinetuneRun:
    """The training of one run.

    Args:
        model: the offloaded model.
        data: data of the run.
        tokenizer: tokenizer of the model.
        options: options of the run.
        config: swap config of the run.
        world: this process among the ranks.
        origin: origin of the run.
        directory: directory for the models of --save-every and --save-best, and for trackers' files.
        reference: reference model of --method dpo. None means that the reference is the model without its adapters.

    Attributes:
        model: the model that is trained.
        options: options of the run.
        origin: origin of the run.
        durable: whether the run keeps generations.
        history: history of all steps, including the steps before the run was resumed.
        model_config: values of the model's config before a trainer changed them. Saved models get these values.
        steps: number of optimizer steps of the whole run.
        done: number of optimizer steps that are done, including the steps before the run was resumed.
    """

    def __init__(
        self,
        model: Any,
        data: RunData,
        tokenizer: Any,
        options: FinetuneOptions,
        config: SwapConfig,
        world: RunRank,
        origin: job.RunOrigin,
        directory: Path,
        reference: ReferenceModel | None = None,
    ) -> None:
        self.model = model
        self.options = options
        self.origin = origin
        self.history = RunHistory()
        self.durable = statistics(model).plan.placement.commit_every > 0
        self._data = data
        self._world = world
        model_limits.require_vocabulary(model.get_input_embeddings().num_embeddings, data.largest_token)
        if options.method == "reward":  # the head reads the last token that is not padding
            model.config.get_text_config().pad_token_id = _padding_of(tokenizer)
        self.model_config = copy.deepcopy(vars(model.config))
        model.config.use_cache = False
        if options.method == "sft":
            use_chunked_loss(model)
        together = options.micro_batches * (options.gradient_accumulation if config.vertical else 1)
        tile_tokens_of_plan(model, options.batch_size * data.tokens_each, together)
        if data.shares_sequences:
            require_separates(model)
        self._prompts = prompts_of(options, model, tokenizer, chat=data.has_chats)
        per_step = options.batch_size * options.micro_batches * options.gradient_accumulation * world.count
        self._step_tokens = per_step * data.tokens_each
        self.steps = options.steps or max(data.trained.sequences * (options.epochs or 1) // per_step, 1)
        balances = getattr(model.config.get_text_config(), "output_router_logits", False)
        arguments = arguments_of(options, self.steps, directory, evaluates=data.held_out is not None, balances=balances)
        self._optimizer = _optimizer_of(options, config, model)
        scheduler = schedule_of(arguments, self._optimizer, self.steps)
        self._scaler = make_scaler(model)
        order = SequenceSampler(data.trained.sequences, self.steps * per_step, options.seed)
        fingerprint = DataFingerprint(data.trained.digest, options.batch_size, options.seed)
        self._trainer = self._made_trainer(arguments, tokenizer, order, fingerprint, scheduler, config, reference)
        self.done = track(
            model=model,
            scheduler=scheduler,
            trainer=self._trainer,
            data=fingerprint,
            history=self.history,
            **({"scaler": self._scaler} if self._scaler.is_enabled() else {}),
            **({"reference": reference} if reference is not None else {}),
            **{job.NAME: job.SavedJob(options, config, world, origin)},
        )
        if self.done > self.steps:
            raise ConfigError(
                f"--epochs {options.epochs} are {self.steps} steps, but the resumed run has done {self.done} steps: "
                "give more epochs"
            )
        self._before = self.done
        take_up_rates(self._optimizer, scheduler)
        if self.done:
            print(f"resumed after step {self.done} of {self.steps}", flush=True)
        self._say_if_never_warm()
        trace = options.trace if world.speaks else None
        self._traced = tracing.TracedSteps(model, trace, options.trace_steps, done=self.done, total=self.steps)
        self._watch: StepCallback | None = None

    def _made_trainer(
        self,
        arguments: Any,
        tokenizer: Any,
        order: SequenceSampler,
        fingerprint: DataFingerprint,
        scheduler: Any,
        config: SwapConfig,
        reference: ReferenceModel | None,
    ) -> FinetuneTrainerMixin:
        """Return the trainer for --method.

        Raises:
            ConfigError: TRL refuses the options.
            ModelError: TRL refuses the model.
        """
        options, data = self.options, self._data
        beside = {"reference": None if reference is None else reference.model} if options.method == "dpo" else {}
        try:
            made: FinetuneTrainerMixin = TRAINERS[options.method](
                self.model,
                arguments,
                trained=data.trained,
                held_out=data.held_out,
                order=order,
                fingerprint=fingerprint,
                save=lambda model, directory: save_model(model, directory, options, self.model_config),
                figures=self._figures,
                scaler=self._scaler,
                swap_config=config,
                processing_class=tokenizer,
                optimizers=(self._optimizer, scheduler),
                **beside,
            )
            return made
        except InfinityError:
            raise
        except (ValueError, TypeError, NotImplementedError, ImportError, RuntimeError) as error:
            if not options.trainer:
                raise ModelError(f"TRL refuses the model: {raised(error)}") from error
            given = " ".join(" ".join((f"--{name}", *values)) for name, values in options.trainer.items())
            raise ConfigError(f"TRL refuses {given} of --method {options.method}: {raised(error)}") from error

    def _say_if_never_warm(self) -> None:
        if self.options.warmup_steps >= self.steps:
            print(
                f"--warmup-steps {self.options.warmup_steps} are as many as the {self.steps} steps of the run, or "
                "more: the learning rate never reaches --lr",
                flush=True,
            )

    def train(self) -> int:
        """Do all steps. Return 0, or another exit code if a signal ended the run early."""
        promise = (
            "the run can then be resumed (Ctrl-C again: stop at once, and resume from the last commit)"
            if self.durable
            else "the model is then saved (Ctrl-C again: stop at once, and save nothing)"
        )
        with ExitStack() as held:
            held.enter_context(self._traced)
            progress = open_progress(self.steps, self.options.log_every)
            held.enter_context(progress)
            stop = held.enter_context(stop_when_asked(progress.say, f"stopping after this step; {promise}"))
            distributed_data_parallel.replace_ddp(held.enter_context(Patches()))
            if self._world.speaks:
                place = Path(self._trainer.args.output_dir)
                for each in held.enter_context(trackers.opened(self.options, self.origin.run, place, self.done)):
                    self._trainer.add_callback(each)
            samples = EvaluationCallback(
                self._prompts,
                self.options.sample_tokens,
                self.history,
                progress,
                self._trainer.log if trackers.take_texts(self.options) else None,
                speaks=self._world.speaks,
            )
            self._trainer.add_callback(samples)
            self._watch = StepCallback(
                self._trainer,
                self._optimizer,
                self._scaler,
                self.history,
                progress,
                self._traced,
                stop,
                self._step_tokens,
                self.options,
            )
            self._trainer.add_callback(self._watch)
            folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
            if self.done:
                unsaved = gather_values(self.model, "whether the step's model is missing", self._is_unsaved())[0]
                self._trainer.go_on(folder, evaluate=self._is_unevaluated(), save=unsaved)
            if self.done < self.steps:
                progress.say(f"the first step begins: about {self._step_tokens:,} tokens")  # it can take minutes
                self._trainer.train(resume_from_checkpoint=str(folder) if self.done else None)
            else:
                self._trainer.end_trackers()
            self.done = self._trainer.state.global_step
            return self._watch.stopped

    def _figures(self) -> dict[str, float]:
        return {} if self._watch is None else self._watch.figures()

    def _is_unevaluated(self) -> bool:
        """Return whether the run was interrupted before the evaluation after its last step."""
        due = self.done == self.steps or (self.options.eval_steps and self.done % self.options.eval_steps == 0)
        there = any(each.step == self.done for each in self.history.evaluations)
        return self._data.held_out is not None and bool(due) and not there

    def _is_unsaved(self) -> bool:
        """Return whether the run was interrupted before it could save the model of its last step."""
        every = self.options.save_every
        due = self.done < self.steps and every is not None and self.done % every == 0
        return due and not is_whole(self._trainer.folder_of(self.done))

    @property
    def failed(self) -> list[str]:
        """Reasons why models of steps could not be saved."""
        return list(self._trainer.failed.values())

    def report(self) -> RunReport:
        """Return the report: losses of all steps, and times and bytes of the steps of this process without the first.

        If this process did only one step, the times are those of this step, and include the step's complete update.
        Otherwise an update may run during the next step, and then counts for the next step.
        """
        assert self._watch is not None
        facts, before, now = self.history.facts, self._watch.first, self._watch.now
        if len(facts) == self._before + 1:
            began = time.perf_counter()
            synchronize(self.model)
            facts = [*facts[:-1], replace(facts[-1], seconds=facts[-1].seconds + time.perf_counter() - began)]
            before, now = self._watch.began, statistics(self.model)
        return make_report(
            facts,
            self._before,
            before,
            now,
            data=self._data.summary,
            notes=self._data.notes,
            evaluations=self.history.evaluations,
            again=rerun_command(self.options, extended=self.origin.extended),
        )


def _padding_of(tokenizer: Any) -> int | None:
    """Return the token that TRL's trainers use for padding."""
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id  # type: ignore[no-any-return]


def _optimizer_of(options: FinetuneOptions, config: SwapConfig, model: Any) -> OffloadedOptimizer:
    return make_optimizer(
        options.optimizer,
        model.parameters(),
        lr=options.lr,
        weight_decay=options.weight_decay,
        **moments_of(options.optimizer, options.beta1, options.beta2, options.eps),
        max_grad_norm=options.max_grad_norm or None,
        seed=options.seed,
        accumulation_steps=1 if config.vertical else options.gradient_accumulation,
    )
