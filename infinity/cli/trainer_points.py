"""A table of a Trainer's private names that `infinity finetune` uses. The functions that `infinity run` replaces are in
infinity/integrations/points.py."""

from __future__ import annotations

import importlib

from infinity.integrations.patches import require_there
from infinity.integrations.points import Point

_TRAINER = "transformers.trainer.Trainer"

POINTS = (
    Point(
        (f"{_TRAINER}._load_from_checkpoint",),
        "reads no weights: the model was offloaded from its generation",
        "resume_from_checkpoint is the one way to begin after step 0",
        "a run that goes on looks for weights in a folder that has none",
        ("resume_from_checkpoint", "model"),
    ),
    Point(
        (f"{_TRAINER}._save_rng_state",),
        "writes the random numbers where train() reads them",
        "resume_from_checkpoint is the one way to begin after step 0",
        "a run that goes on has another dropout",
        ("output_dir",),
    ),
    Point(
        (f"{_TRAINER}._maybe_log_save_evaluate",),
        "evaluates and saves what an interruption has prevented",
        "evaluate() and save_model() tell neither schedules nor callbacks what train() tells them",
        "a run that goes on lacks the evaluation and the model of the step before",
        ("tr_loss", "grad_norm", "model", "trial", "epoch", "ignore_keys_for_eval", "start_time"),
    ),
    Point(
        (f"{_TRAINER}._save_checkpoint",),
        "warns of a model that cannot be saved",
        "callbacks hear of a model once it is saved",
        "a full disk ends the run",
        ("model", "trial"),
    ),
    Point(
        (f"{_TRAINER}._get_grad_norm",),
        "reads no gradients: the optimizer's update finds their norm",
        "max_grad_norm=0 does not switch it off",
        "each step reads all gradients once more",
        ("model", "grad_norm"),
    ),
    Point(
        (f"{_TRAINER}._prepare_inputs",),
        "brings a batch to the device in an evaluation",
        "prediction_step() is given batches in host memory",
        "the host's tensors meet the device's weights",
        ("inputs",),
    ),
    Point(
        (
            "trl.trainer.dpo_trainer.DPOTrainer._prepare_dataset",
            "trl.trainer.reward_trainer.RewardTrainer._prepare_dataset",
        ),
        "leaves the dataset as it is: the tokens are made already",
        "skip_prepare_dataset is an argument of SFTTrainer alone",
        "numbers of rows are read as text",
        ("dataset",),
    ),
)
"""Private methods that are called, or replaced in a subclass."""

ATTRIBUTES = {
    (_TRAINER, "_train_batch_size"): "a run's batches have another size than its options say",
    ("transformers.training_args.TrainingArguments", "_n_gpu"): "TRL refuses a machine with several GPUs",
}
"""Private attributes that are used, with the first thing that breaks if the attribute is gone."""


def require_points() -> None:
    """Check that the library has all methods of the table.

    Raises:
        NotAvailableError: a method is missing; names it.
    """
    for point in POINTS:
        for place in point.where:
            module, kind, name = place.rsplit(".", 2)
            require_there(getattr(importlib.import_module(module), kind), name, place, point)
