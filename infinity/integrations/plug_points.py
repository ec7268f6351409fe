"""An optimizer factory and a callback for checkpoint folders, which a script passes to a Trainer as arguments.

trainer = Trainer(
    model=model,  # of from_pretrained(path, quantization_config=infinity.InfinityConfig("swap.yaml"))
    args=args,
    train_dataset=rows,
    optimizer_cls_and_kwargs=(infinity.hf.optimizer_factory, {"lr": 1e-5}),
    callbacks=[infinity.hf.Checkpoints()],
)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from infinity.checkpoint.save_adapters import is_peft_model
from infinity.coordinator import registry
from infinity.errors import ConfigError
from infinity.integrations.checkpoint_folders import CheckpointFolderSave, folders_of, require_pins
from infinity.integrations.infinity_config import run_of
from infinity.integrations.optimizers import optimizer_for
from infinity.integrations.script_run import ScriptRun
from infinity.integrations.transformers import saves_states, tell
from infinity.io.generation_pins import folder_path
from infinity.optim.adamw import AdamW
from infinity.optim.groups import GroupedOptimizer
from infinity.runtime.pins import unpin


def optimizer_factory(
    model: nn.Module | None = None,
    *,
    lr: float | None = None,
    optimizer: type[GroupedOptimizer] = AdamW,
    weight_decay: float = 0.0,
    args: TrainingArguments | None = None,
    **options: Any,
) -> Any:
    """Make one of infinity's optimizers for a model. If the model is not offloaded yet, offload the model first.

    Give the factory to a Trainer as `optimizer_cls_and_kwargs=(infinity.hf.optimizer_factory, {"lr": 1e-5})`. Give
    Trainers without this argument, such as TRL's for DPO and GRPO, the optimizer itself:
    `optimizers=(infinity.hf.optimizer_factory(model, lr=1e-5, args=args), None)`. If the model gets adapters, add them
    before you call the factory. In your own training loop, call `infinity.hf.optimizer_factory(model, lr=1e-5)`.

    Args:
        model: a model that from_pretrained loaded with an InfinityConfig, or an offloaded model. Libraries may have
            wrapped the model. transformers first calls the factory without a model.
        lr: the learning rate, which is required.
        optimizer: infinity.AdamW, or another of infinity's optimizer classes.
        weight_decay: weight decay of all parameters except biases and the parameters of norms, which a Trainer does not
            decay either.
        args: the Trainer's arguments, if the optimizer is made before the Trainer. They say in which precision the
            model computes, how many backward passes come before a step, and how many checkpoint folders exist.
        options: other options of the optimizer.

    Raises:
        ConfigError: the learning rate is missing.
        ModelError: the model was neither loaded with an InfinityConfig nor offloaded.
        others: as for infinity.offload.
    """
    if model is None:
        return optimizer_factory
    if lr is None:
        raise ConfigError(
            "infinity.hf.optimizer_factory: there is no learning rate, and the Trainer's learning rate is not used. "
            "Give one: optimizer_cls_and_kwargs=(infinity.hf.optimizer_factory, {'lr': 1e-5}), or lr=1e-5 beside the "
            "model"
        )
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": weight_decay},
        {"params": [], "weight_decay": 0.0},
    ]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[name not in decayed]["params"].append(parameter)
    run = _run_around(model)
    if run is not None and args is not None:
        tell(args, run, _precision(args))
    return optimizer_for(run, optimizer, [each for each in groups if each["params"]], lr=lr, **options)


class Checkpoints(TrainerCallback):  # type: ignore[misc]
    """A callback of a Trainer. For each checkpoint folder, it pins the generation with the optimizer's states.

    To continue from a folder bit for bit, a later process loads the model with `InfinityConfig("swap.yaml",
    resume=folder)`, and calls `trainer.train(resume_from_checkpoint=folder)`.

    A Trainer removes old folders before it calls callbacks for a new folder. If the process is killed in between, the
    newest folder pins no generation, but the older folders do. Therefore keep two or more folders (save_total_limit),
    so that training can be resumed from an older folder.

    Raises (when the Trainer is made):
        ConfigError: several GPUs are visible to one process; the model was not loaded with an InfinityConfig; or an
            optimizer was made earlier, for another precision.
        PlanError: the model was offloaded earlier, and its store has no room for pinned generations.
    """

    def on_init_end(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **others: Any
    ) -> None:
        if args.n_gpu > 1:
            raise ConfigError(
                f"{args.n_gpu} GPUs are visible, and a Trainer would copy the model to each: set CUDA_VISIBLE_DEVICES=0"
            )
        run = _run_around(model)
        if run is None:
            raise ConfigError(
                f"Checkpoints: the Trainer's {type(model).__name__} was not loaded with "
                "quantization_config=infinity.InfinityConfig(...), and its folders would pin nothing"
            )
        tell(args, run, _precision(args))
        if registry.is_offloaded(model) and not run.is_evaluated(model):  # the optimizer was made before the Trainer
            _require_precision(model, _precision(args))
            if saves_states(args):
                require_pins(model)
        if isinstance(optimizer, GroupedOptimizer) and optimizer.accumulation_steps is None:
            optimizer.accumulation_steps = run.facts.accumulation_steps

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        if saves_states(args) and not registry.is_offloaded(model):
            raise ConfigError(
                f"Checkpoints: the Trainer's {type(model).__name__} is not offloaded, because its optimizer is not "
                "infinity's, and its folders would pin nothing: give the Trainer "
                "optimizer_cls_and_kwargs=(infinity.hf.optimizer_factory, {'lr': 1e-5})"
            )

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        if args.save_only_model:
            return
        _unpin_removed(model, Path(args.output_dir))
        with CheckpointFolderSave(
            model, folder_path(Path(args.output_dir, f"checkpoint-{state.global_step}"))
        ) as saving:
            saving.finish()

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Unpin removed folders, because a Trainer also removes folders after the last save."""
        if saves_states(args):
            _unpin_removed(model, Path(args.output_dir))


def _run_around(model: nn.Module) -> ScriptRun | None:
    """Return the run of a loaded model, in which the wrappers around the model (such as PEFT's) are registered."""
    run = run_of(list(model.parameters()))
    if run is not None:
        for inner in run.models_in(model) if is_peft_model(model) else ():
            if inner is not model:
                run.wrapped(inner, model)
    return run


def _unpin_removed(model: nn.Module, output: Path) -> None:
    """Unpin checkpoint folders in `output` that do not exist any more."""
    for folder in folders_of(model):
        if folder.parent == folder_path(output) and not folder.exists():
            unpin(model, folder)


def _require_precision(model: nn.Module, precision: str) -> None:
    """Raise ConfigError if weights were offloaded in fp32 but the Trainer computes in 16 bits."""
    adapters = is_peft_model(model)  # PEFT keeps adapters in fp32
    wide = [
        place.spec.name
        for _, place in registry.coordinator_of(model).places()
        if place.group.dtype == torch.float32 and not (adapters and place.group.trainable)
    ]
    if precision != "no" and wide:
        raise ConfigError(
            f"Checkpoints: the Trainer computes in {precision}, but its optimizer was made before that was known: "
            f"'{wide[0]}' was offloaded in fp32, and takes twice the memory. Give the factory the arguments of the "
            "Trainer: optimizers=(infinity.hf.optimizer_factory(model, lr=1e-5, args=args), None)"
        )


def _precision(args: Any) -> str:
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
