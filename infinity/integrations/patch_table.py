"""The table of all library functions that `infinity run` replaces.

It also has all private methods of a Trainer that `infinity finetune` uses. Each row gives the reason.

`Patches` (patches.py) refuses to replace a function that has no row in this table. When a library gets an official
extension point that suffices, the row is removed. Code that uses official extension points is in plug_points.py,
infinity_config.py and lightning.py.
"""

from __future__ import annotations

from dataclasses import dataclass

TESTED = {
    "accelerate": "1.15.0",
    "lightning": "2.6.6",
    "peft": "0.21.2",
    "pytorch_lightning": "2.6.6",
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "trl": "1.16.0",
}
"""Versions of libraries in constraints.txt.

If an installed library lacks a function of the table, the error recommends this version.
"""


RUN, FINETUNE = "infinity run", "infinity finetune"


@dataclass(frozen=True)
class PatchRow:
    """A library function that infinity replaces, or a private library function that infinity calls or overrides.

    Attributes:
        where: dotted names of the function. There are several names if the function exists in several places.
        does: effect of the function under infinity.
        why: reason why no official extension point suffices.
        breaks: first symptom if the library moves or removes the function.
        takes: names of the first parameters of the function, without `self`, on which infinity relies.
        who: the command that depends on the function. `infinity run` (RUN) replaces it; `infinity finetune` (FINETUNE)
            calls it, or overrides it in a subclass.
    """

    where: tuple[str, ...]
    does: str
    why: str
    breaks: str
    takes: tuple[str, ...] = ()
    who: str = RUN


_TRAINER = "transformers.trainer.Trainer"
_UNCHANGED = "an unchanged script calls the function itself, and passes nothing of infinity to it"

POINTS = (
    PatchRow(
        ("transformers.modeling_utils.PreTrainedModel.from_pretrained",),
        "loads a model without its weights",
        f"{_UNCHANGED}: a quantization_config is an argument of the script",
        "the whole model is in RAM",
        ("pretrained_model_name_or_path",),
    ),
    PatchRow(
        ("peft.peft_model.PeftModel.__init__",),
        "registers the wrapper as the model that the script calls from then on",
        "PEFT has no hook for wrapping a model",
        "adapters are trained in memory, around a model that is offloaded without them",
        ("model",),
    ),
    PatchRow(
        (
            "peft.prepare_model_for_kbit_training",
            "peft.utils.prepare_model_for_kbit_training",
            "peft.utils.other.prepare_model_for_kbit_training",
        ),
        "freezes the weights and keeps their dtype",
        f"{_UNCHANGED}; the function casts all weights to fp32",
        "all weights are read into RAM, in fp32",
        ("model", "use_gradient_checkpointing", "gradient_checkpointing_kwargs"),
    ),
    PatchRow(
        (
            "torch.optim.adamw.AdamW.__init__",
            "torch.optim.adam.Adam.__init__",
            "torch.optim.sgd.SGD.__init__",
            "torch.optim.adagrad.Adagrad.__init__",
        ),
        "offloads the model of the parameters, and becomes infinity's optimizer",
        _UNCHANGED,
        "the first step ends in ReleasedParameterError",
        ("params",),
    ),
    PatchRow(
        ("torch.optim.optimizer.Optimizer.__init__",),
        "refuses other optimizers of an offloaded model",
        "torch has hooks for steps, but no hook for making an optimizer",
        "the refusal comes at the first step, as ReleasedParameterError",
        ("params",),
    ),
    PatchRow(
        ("infinity.optim.groups.GroupedOptimizer.__init__",),
        "offloads the model of the parameters",
        "infinity's own optimizers do not know about scripts, which are a higher layer",
        "infinity.AdamW in a script fails: the model is not offloaded",
        ("params",),
    ),
    PatchRow(
        ("infinity.optim.handles.StateHandle.__reduce__",),
        "warns that the file contains only the names of states",
        "infinity's own optimizers do not know about scripts, which are a higher layer",
        "the warning",
    ),
    PatchRow(
        (
            "torch.nn.parallel.DistributedDataParallel",
            "torch.nn.parallel.distributed.DistributedDataParallel",
        ),
        "leaves an offloaded model unwrapped: its ranks average gradients themselves",
        f"{_UNCHANGED}; communication hooks come after gradients are kept in buckets",
        "ranks hold all gradients in memory, or DDP refuses placeholders",
    ),
    PatchRow(
        ("transformers.generation.utils.GenerationMixin.generate",),
        "synchronizes ranks that generate sequences of different lengths",
        "scripts do not pass the argument synced_gpus",
        "generate hangs with several ranks",
        ("inputs", "generation_config"),
    ),
    PatchRow(
        (f"{_TRAINER}.__init__",),
        "reads the arguments of the training",
        "on_init_end is for callbacks, and a script passes none",
        "checkpoint folders have no room for pins, and gradients take more space than they need",
        ("model", "args"),
    ),
    PatchRow(
        (f"{_TRAINER}.create_accelerator_and_postprocess",),
        "keeps values of the arguments that the Trainer's Accelerator would change",
        "no callback runs before the Accelerator is made",
        "the number of pins in the store is not the number that the arguments say",
        (),
    ),
    PatchRow(
        (f"{_TRAINER}.create_optimizer",),
        "offloads the model",
        "optimizer_cls_and_kwargs is an argument of the script, and trainers of TRL do not have it",
        "the optimizer offloads the model later; missing pins show only after hours of training",
        ("model",),
    ),
    PatchRow(
        (f"{_TRAINER}.get_optimizer_cls_and_kwargs",),
        "uses infinity's optimizers instead of those of bitsandbytes",
        "optim= accepts a fixed list of names",
        "optim='paged_adamw_8bit' asks for bitsandbytes",
        ("args", "model"),
    ),
    PatchRow(
        (f"{_TRAINER}.training_step",),
        "runs the micro-batches of a step unit by unit if the config has vertical: true",
        "callbacks do not get the inputs",
        "vertical: true does nothing",
        ("model", "inputs"),
    ),
    PatchRow(
        ("torch.Tensor.backward",),
        "delays the backward pass of a micro-batch until all micro-batches of the step exist",
        "training_step calls it itself",
        "vertical: true runs each backward pass twice",
        ("gradient",),
    ),
    PatchRow(
        (f"{_TRAINER}.train",),
        "resumes from the given checkpoint folder",
        f"{_UNCHANGED}: resume_from_checkpoint is an argument",
        "--resume is refused, because no model resumes from it",
        ("resume_from_checkpoint",),
    ),
    PatchRow(
        (f"{_TRAINER}._load_from_checkpoint",),
        "lets the model resume from the folder's generation",
        "callbacks are called after the weights of a resumed run were loaded",
        "a resumed run starts with weights and without states, and warns about it",
        ("resume_from_checkpoint", "model"),
    ),
    PatchRow(
        (f"{_TRAINER}._save_checkpoint", "transformers.trainer.rotate_checkpoints"),
        "pins the generation before older folders are removed",
        "on_save is called after older folders were removed: a kill between the two would leave no folder to resume "
        "from",
        "checkpoint folders pin nothing",
    ),
    PatchRow(
        (f"{_TRAINER}._save",),
        "lets ranks that write nothing take part in gathering the weights that rank 0 writes",
        "a Trainer saves on rank 0 alone",
        "saving hangs with several ranks",
        ("output_dir", "state_dict"),
    ),
    PatchRow(
        ("transformers.training_args.TrainingArguments.__post_init__",),
        "refuses DeepSpeed and FSDP by name",
        "transformers imports DeepSpeed while it parses the argument",
        "DeepSpeed must be installed, or DeepSpeed shards the model",
    ),
    PatchRow(
        (
            "accelerate.utils.dataclasses.DeepSpeedPlugin.__post_init__",
            "accelerate.utils.dataclasses.FullyShardedDataParallelPlugin.__post_init__",
        ),
        "refuses DeepSpeed and FSDP by name",
        "accelerate reads the environment of its launcher",
        "DeepSpeed must be installed, or FSDP shards the model",
    ),
    PatchRow(
        ("accelerate.accelerator.Accelerator.__init__",),
        "reads its precision, its gradient accumulation and the number of its folders",
        "accelerate has no callbacks",
        "folders of save_state have no room for pins",
    ),
    PatchRow(
        ("accelerate.accelerator.Accelerator.prepare_model",),
        "recognizes a model that is prepared for evaluation",
        "accelerate has no callbacks",
        "a reference model takes room for optimizer states",
        ("model", "device_placement", "evaluation_mode"),
    ),
    PatchRow(
        ("accelerate.accelerator.Accelerator.save_state", "accelerate.accelerator.Accelerator.get_state_dict"),
        "pins the generation when the folder is complete, and streams weights that do not fit in RAM",
        "the pre-hook of save_state runs after all weights were gathered, and there is no later hook",
        "folders of save_state pin nothing",
    ),
    PatchRow(
        ("accelerate.accelerator.Accelerator.load_state",),
        "checks that the model has the folder's generation",
        "the pre-hook of load_state gets no folder if accelerate chooses the folder itself",
        "load_state writes weights over those of another step",
        ("input_dir",),
    ),
    PatchRow(
        (
            "lightning.pytorch.trainer.connectors.accelerator_connector._AcceleratorConnector._choose_strategy",
            "lightning.pytorch.trainer.connectors.accelerator_connector._AcceleratorConnector._init_strategy",
            "pytorch_lightning.trainer.connectors.accelerator_connector._AcceleratorConnector._choose_strategy",
            "pytorch_lightning.trainer.connectors.accelerator_connector._AcceleratorConnector._init_strategy",
        ),
        "uses infinity's strategy if a Trainer names none, and refuses others",
        "strategy= is an argument of the script",
        "a LightningModule is trained in memory",
    ),
    PatchRow(
        ("infinity.integrations.strategy.OffloadingStrategyMixin.launched",),
        "gives infinity's strategy the swap config of the launcher",
        "Lightning makes the strategy without arguments",
        "the strategy asks for a swap config",
    ),
    PatchRow(
        ("lightning.fabric.fabric.Fabric.__init__", "lightning_fabric.fabric.Fabric.__init__"),
        "reads its precision",
        "a Fabric's callbacks are arguments of the script",
        "fp32 weights stay fp32 under bf16-mixed",
    ),
    PatchRow(
        ("shutil.rmtree",),
        "unpins the generation of a folder before the folder is removed",
        f"{_UNCHANGED}, and a Trainer does, too",
        "generations of removed folders stay pinned, and take space",
        ("path",),
    ),
    PatchRow(
        ("atexit.register", "atexit.unregister"),
        "runs a script's functions while its models are open",
        "Python runs these functions after the launcher has closed the models",
        "a script that saves at its end fails",
    ),
    PatchRow(
        (f"{_TRAINER}._load_from_checkpoint",),
        "reads no weights: the model was offloaded from its generation",
        "resume_from_checkpoint is the one way to begin after step 0",
        "a resumed run looks for weights in a folder that has none",
        ("resume_from_checkpoint", "model"),
        FINETUNE,
    ),
    PatchRow(
        (f"{_TRAINER}._save_rng_state",),
        "writes the random numbers where train() reads them",
        "resume_from_checkpoint is the one way to begin after step 0",
        "a resumed run has another dropout",
        ("output_dir",),
        FINETUNE,
    ),
    PatchRow(
        (f"{_TRAINER}._maybe_log_save_evaluate",),
        "evaluates and saves what an interruption has prevented",
        "evaluate() and save_model() do not inform schedules and callbacks as train() does",
        "a resumed run lacks the evaluation and the model of the step before",
        ("tr_loss", "grad_norm", "model", "trial", "epoch", "ignore_keys_for_eval", "start_time"),
        FINETUNE,
    ),
    PatchRow(
        (f"{_TRAINER}._save_checkpoint",),
        "warns if a model cannot be saved",
        "callbacks are called only after a model is saved",
        "a full disk ends the run",
        ("model", "trial"),
        FINETUNE,
    ),
    PatchRow(
        (f"{_TRAINER}._get_grad_norm",),
        "reads no gradients, because the optimizer's update computes their norm",
        "max_grad_norm=0 does not switch the method off",
        "each step reads all gradients once more",
        ("model", "grad_norm"),
        FINETUNE,
    ),
    PatchRow(
        (f"{_TRAINER}._prepare_inputs",),
        "copies a batch to the device in an evaluation",
        "prediction_step() gets batches in host memory",
        "tensors on the host are combined with weights on the device",
        ("inputs",),
        FINETUNE,
    ),
    PatchRow(
        (
            "trl.trainer.dpo_trainer.DPOTrainer._prepare_dataset",
            "trl.trainer.reward_trainer.RewardTrainer._prepare_dataset",
        ),
        "leaves the dataset unchanged, because the tokens are already made",
        "skip_prepare_dataset is an argument of SFTTrainer alone",
        "numbers of rows are read as text",
        ("dataset",),
        FINETUNE,
    ),
)

TABLE = {where: point for point in POINTS if point.who == RUN for where in point.where}
"""Functions that may be replaced, by their dotted names."""


@dataclass(frozen=True)
class PrivateAttribute:
    """A private attribute of a library's object that infinity reads or sets.

    Attributes:
        breaks: first symptom if the library renames or removes the attribute.
        who: the commands that use the attribute.
    """

    breaks: str
    who: tuple[str, ...]


ATTRIBUTES = {
    (_TRAINER, "_train_batch_size"): PrivateAttribute(
        "a run's batches have another size than its options say", (FINETUNE,)
    ),
    ("transformers.training_args.TrainingArguments", "_n_gpu"): PrivateAttribute(
        "with several GPUs, a Trainer wraps the model in DataParallel, and TRL's trainers refuse to start",
        (RUN, FINETUNE),
    ),
    ("accelerate.accelerator.Accelerator", "_models"): PrivateAttribute("load_state fails", (RUN,)),
}
"""Private attributes that infinity uses, by the dotted name of their class and their own name."""
