"""What becomes of every key of a DeepSpeed config: one table, of which the conversion, its report and docs/deepspeed.md
are made. The names are those of DeepSpeed 0.19's sources (runtime/config.py, runtime/zero/config.py and the modules
that they read), with the deprecated ones that published configs still have."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


class Fate(Enum):
    """What becomes of a key. A key of a config has exactly one of these, or is unknown."""

    MAPPED = "a key of the swap config"
    NOT_NEEDED = "not needed"
    SCRIPT = "belongs to the training script, or to an option of `infinity finetune`"
    NONE = "no counterpart"
    UNKNOWN = "unknown key"


class Effect(Enum):
    """What is lost with a key that has no counterpart, the worst first."""

    TRAINING = "the training is another one"
    COST = "costs time or memory"
    WATCHING = "only something to look at"


@dataclass(frozen=True)
class Key:
    """A key of a DeepSpeed config.

    Attributes:
        name: with the sections that it is in. A section that is a key here is taken as a whole, its keys with it.
        fate: what becomes of it.
        to: the keys of the swap config that it becomes, or the options of `infinity finetune`.
        says: a sentence for the user, without its full stop: why it is not needed, or what to do.
        trainer: the argument of transformers' TrainingArguments that says the same.
        effect: of a key without counterpart.
        off: values with which it does nothing in DeepSpeed.
        switch: a key of a section that is taken as a whole: where it is not true, the section does nothing.
    """

    name: str
    fate: Fate
    to: str = ""
    says: str = ""
    trainer: str = ""
    effect: Effect = Effect.COST
    off: tuple[object, ...] = ()
    switch: str = ""


def _mapped(name: str, to: str, says: str, *, off: tuple[object, ...] = ()) -> Key:
    return Key(name, Fate.MAPPED, to, says, off=off)


def _not_needed(says: str, *names: str) -> list[Key]:
    return [Key(name, Fate.NOT_NEEDED, says=says) for name in names]


def _script(
    name: str, to: str, trainer: str = "", says: str = "", *, off: tuple[object, ...] = (), switch: str = ""
) -> Key:
    return Key(name, Fate.SCRIPT, to, says, trainer, off=off, switch=switch)


def _none(effect: Effect, name: str, says: str, *, off: tuple[object, ...] = (False,), switch: str = "") -> Key:
    return Key(name, Fate.NONE, says=says, effect=effect, off=off, switch=switch)


_ZERO, _PARAM, _STATES = "zero_optimization", "zero_optimization.offload_param", "zero_optimization.offload_optimizer"

_PLACES = [
    _mapped(f"{_ZERO}.stage", "weights, optimizer", "where weights and states rest that are not offloaded"),
    _mapped(f"{_PARAM}.device", "weights", "cpu: host, nvme: nvme, none: auto", off=("none",)),
    _mapped(f"{_PARAM}.nvme_path", "nvme.paths", "one of the directories for swap files"),
    _mapped(f"{_STATES}.device", "optimizer", "cpu: host, nvme: nvme, none: auto", off=("none",)),
    _mapped(f"{_STATES}.nvme_path", "nvme.paths", "one of the directories for swap files"),
    _mapped(f"{_ZERO}.cpu_offload", "optimizer", "true: host (the old name of offload_optimizer)", off=(False,)),
    _mapped(f"{_ZERO}.cpu_offload_param", "weights", "true: host (the old name of offload_param)", off=(False,)),
    _mapped(f"{_ZERO}.cpu_offload_params", "weights", "true: host (an older name of offload_param)", off=(False,)),
    _mapped(f"{_ZERO}.zero_hpz_partition_size", "ranks.gather", "more than 1: node", off=(0, 1)),
    _mapped(f"{_ZERO}.zero_quantized_nontrainable_weights", "frozen", "true: int8", off=(False,)),
    _mapped("aio.block_size", "nvme.block", "as it is, where it is not DeepSpeed's default of 1 MiB"),
    _mapped(
        "aio.queue_depth",
        "nvme.queue_depth",
        "times intra_op_parallelism, where it is not DeepSpeed's default of 8: DeepSpeed counts blocks per thread, "
        "infinity per disk",
    ),
    _mapped("aio.intra_op_parallelism", "nvme.queue_depth", "a factor of the queue depth"),
    _mapped("aio.thread_count", "nvme.queue_depth", "the old name of intra_op_parallelism"),
    _mapped(
        "activation_checkpointing.partition_activations",
        "activations",
        "true: auto, which recomputes where the model can",
        off=(False,),
    ),
    _mapped(
        "activation_checkpointing.cpu_checkpointing",
        "activations",
        "true: auto, which recomputes where the model can; what is recomputed from stays on the device",
        off=(False,),
    ),
    _mapped(
        "activation_checkpointing.number_checkpoints",
        "activations",
        "a number: auto, which recomputes where the model can, layer by layer",
        off=(False, 0),
    ),
    _mapped("bf16.bf16_master_weights_and_grads", "master", "true: none, with stochastic rounding", off=(False,)),
    _mapped("bf16.bf16_optimizer_states", "moments", "true: bf16, with stochastic rounding", off=(False,)),
]

_SIZED = "infinity sizes its buffers from the model and the budgets"
_FETCHED = "weights are fetched ahead in the order of use, as far as memory.device has room"
_BETWEEN_RANKS = "how the ranks exchange weights and gradients is not configured"
_BY_ITSELF = [
    *_not_needed(
        _SIZED,
        f"{_PARAM}.buffer_count",
        f"{_PARAM}.buffer_size",
        f"{_STATES}.buffer_count",
        f"{_STATES}.buffer_size",
        f"{_ZERO}.reduce_bucket_size",
        f"{_ZERO}.allgather_bucket_size",
        "allgather_size",
    ),
    *_not_needed(
        "memory is pinned where the system allows it, and a line says where it does not",
        f"{_PARAM}.pin_memory",
        f"{_STATES}.pin_memory",
        f"{_ZERO}.cpu_offload_use_pin_memory",
    ),
    *_not_needed(
        "states are always read and written in tiles beside Adam",
        f"{_STATES}.pipeline",
        f"{_STATES}.pipeline_read",
        f"{_STATES}.pipeline_write",
        f"{_STATES}.fast_init",
    ),
    *_not_needed(
        "the update is cut into tiles that the processor's caches hold (`update.tile`)", f"{_ZERO}.sub_group_size"
    ),
    *_not_needed("updates begin during the backward pass by themselves (`overlap: auto`)", f"{_STATES}.super_offload"),
    *_not_needed("the update uses all cores that torch uses (`update.threads`)", f"{_STATES}.cpuadam_cores_perc"),
    *_not_needed(
        _FETCHED,
        *(
            f"{_ZERO}.{prefix}{name}"
            for name in (
                "max_live_parameters",
                "max_reuse_distance",
                "prefetch_bucket_size",
                "param_persistence_threshold",
                "model_persistence_threshold",
                "module_granularity_threshold",
            )
            for prefix in ("stage3_", "")
        ),
        f"{_ZERO}.leaf_module",
        f"{_ZERO}.overlap_comm",
        f"{_ZERO}.log_trace_cache_warnings",
    ),
    *_not_needed(
        "models are always saved whole, unit by unit",
        f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
        f"{_ZERO}.gather_16bit_weights_on_model_save",
        f"{_ZERO}.stage3_gather_fp16_weights_on_model_save",
    ),
    *_not_needed(
        _BETWEEN_RANKS,
        f"{_ZERO}.contiguous_gradients",
        f"{_ZERO}.reduce_scatter",
        f"{_ZERO}.allgather_partitions",
        f"{_ZERO}.use_multi_rank_bucket_allreduce",
        f"{_ZERO}.round_robin_gradients",
        f"{_ZERO}.use_all_reduce_for_fetch_params",
        f"{_ZERO}.stage3_use_all_reduce_for_fetch_params",
        f"{_ZERO}.allgather_sequential",
        f"{_ZERO}.stage3_allgather_sequential",
        f"{_ZERO}.legacy_stage1",
        "disable_allgather",
        "optimizer.params.cuda_aware",
        "optimizer.params.comm_backend_name",
        "prescale_gradients",
        "gradient_predivide_factor",
        "sparse_gradients",
    ),
    *_not_needed(
        "gradients are added in fp32, also those of several ranks",
        "communication_data_type",
        "fp32_allreduce",
        "data_types.grad_accum_dtype",
        "bf16.immediate_grad_update",
    ),
    *_not_needed("a parameter without a gradient is left as it is, as in torch", f"{_ZERO}.ignore_unused_parameters"),
    *_not_needed(
        "weights are streamed from their files tensor by tensor, in the dtype that is asked for",
        f"{_ZERO}.pipeline_loading_checkpoint",
        f"{_ZERO}.load_from_fp32_weights",
        f"{_ZERO}.override_module_apply",
    ),
    *_not_needed("torch's own linear layers are used", f"{_ZERO}.memory_efficient_linear"),
    *_not_needed(
        "checksums and the result of every transfer are always checked",
        f"{_ZERO}.enable_sanity_checks",
        "checkpoint.tag_validation",
    ),
    *_not_needed(
        "a step with a NaN or infinite gradient is always skipped, and counted",
        "bf16.check_grad_overflow",
        "bf16.check_overflow",
    ),
    *_not_needed("blocks are submitted together, and completions are taken as they come", "aio.single_submit"),
    *_not_needed("blocks are submitted while others are in flight", "aio.overlap_events"),
    *_not_needed(
        "infinity says which optimizers it has",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "optimizer.legacy_fusion",
        "optimizer.params.torch_adam",
        "optimizer.params.fp32_optimizer_states",
    ),
    *_not_needed(
        "generations are written by the run itself (`commit_every`), one for each rank",
        "checkpoint.use_node_local_storage",
        "checkpoint.parallel_write",
        "datastates_ckpt",
    ),
    *_not_needed(
        "the backward pass is told how many micro-batches a step has by the script", "managed_gradient_accumulation"
    ),
    *_not_needed("a run that is resumed goes on in its schedule", "scheduler.params.last_batch_iteration"),
    *_not_needed("it was a check of the vocabulary's size", "vocabulary_size"),
    *_not_needed("infinity-bench measures the disks, and the plan chooses", "autotuning"),
]

_IN_THE_SCRIPT = [
    _script("bf16.enabled", "--dtype bf16", "bf16", "the weights are bf16, with an fp32 master", off=(False,)),
    _script("bfloat16.enabled", "--dtype bf16", "bf16", "the weights are bf16, with an fp32 master", off=(False,)),
    _script("fp16.enabled", "--dtype fp16", "fp16", "the weights are fp16, with an fp32 master", off=(False,)),
    *(
        _script(f"fp16.{name}", "--dtype fp16", "", "torch.amp.GradScaler scales the loss, with arguments of its own")
        for name in (
            "loss_scale",
            "initial_scale_power",
            "loss_scale_window",
            "hysteresis",
            "consecutive_hysteresis",
            "min_loss_scale",
        )
    ),
    _script("fp16.auto_cast", "--dtype fp16", "", "inputs are given in the dtype of the weights", off=(False,)),
    _script("train_micro_batch_size_per_gpu", "--batch-size", "per_device_train_batch_size"),
    _script(
        "gradient_accumulation_steps",
        "--gradient-accumulation",
        "gradient_accumulation_steps",
        "one process in place of N GPUs takes N times as many for the same step",
    ),
    _script(
        "train_batch_size",
        "--batch-size, --gradient-accumulation",
        "",
        "it is micro-batch size × accumulation × processes; one process reaches it with more accumulation",
    ),
    _script(
        "gradient_clipping", "--max-grad-norm", "max_grad_norm", "or max_grad_norm= of infinity.AdamW, which is exact"
    ),
    _script("optimizer.type", "--optimizer", "optim", "DeepSpeed's Adam is AdamW unless adam_w_mode is false"),
    _script("optimizer.params.adam_w_mode", "--optimizer", "optim", "false: adam, else adamw"),
    _script("optimizer.params.lr", "--lr", "learning_rate"),
    _script("optimizer.params.betas", "--beta1, --beta2", "adam_beta1, adam_beta2"),
    _script("optimizer.params.eps", "--eps", "adam_epsilon"),
    _script("optimizer.params.weight_decay", "--weight-decay", "weight_decay"),
    _script("optimizer.params.momentum", "--optimizer", "", "momentum= of infinity.SGD"),
    _script("optimizer.params.max_grad_norm", "--max-grad-norm", "max_grad_norm"),
    _script(
        "scheduler.type",
        "--schedule",
        "lr_scheduler_type",
        "the warm-up is linear; DeepSpeed's is logarithmic unless warmup_type is linear",
    ),
    _script("scheduler.params.warmup_max_lr", "--lr", "learning_rate"),
    _script("scheduler.params.warmup_num_steps", "--warmup-steps", "warmup_steps"),
    _script("scheduler.params.total_num_steps", "--steps", "max_steps"),
    _script("scheduler.params.cos_min_ratio", "--min-lr", "lr_scheduler_kwargs", "--min-lr is a rate, not a ratio"),
    _script("steps_per_print", "--log-every", "logging_steps"),
    _script("dataloader_drop_last", "", "dataloader_drop_last", off=(False,)),
    _script("tensorboard", "--logger tensorboard", "report_to", switch="enabled"),
    _script("wandb", "--logger wandb", "report_to", switch="enabled"),
    _script("csv_monitor", "--logger csv", "", switch="enabled"),
    _script("comet", "", "report_to", switch="enabled"),
    _script(
        "torch_autocast", "--dtype", "bf16, fp16", "the weights have that dtype, with an fp32 master", switch="enabled"
    ),
    _script("amp", "--dtype", "bf16, fp16", "the weights have that dtype, with an fp32 master", switch="enabled"),
    _script("data_types.param_dtype", "--dtype", "bf16, fp16"),
    _script("log_level", "--verbose", "log_level"),
    _script("dump_state", "--verbose", "", "`infinity run --verbose` prints the plan", off=(False,)),
    _script("memory_breakdown", "--verbose", "", "the plan says what memory is used for", off=(False,)),
    _script(
        "wall_clock_breakdown", "--trace", "", "the report says where the time went; --trace draws it", off=(False,)
    ),
    _script("timers", "--trace", "", "the report says where the time went; --trace draws it"),
]

_T, _C, _W = Effect.TRAINING, Effect.COST, Effect.WATCHING
_LOST = [
    _none(_T, f"{_ZERO}.zenflow", "every update takes all gradients of its step, on the CPU, beside the backward pass"),
    _none(_T, "compression_training", "nothing is quantized, pruned or distilled while it trains", off=(False,)),
    _none(_T, "quantize_training", "weights are not quantized while they train", switch="enabled"),
    _none(_T, "progressive_layer_drop", "no layer is dropped", switch="enabled"),
    _none(_T, "curriculum_learning", "data comes as the script gives it", switch="enabled"),
    _none(_T, "data_efficiency", "data comes as the script gives it, and no token is dropped", switch="enabled"),
    _none(_T, "sparse_attention", "attention is that of the model"),
    _none(_T, "eigenvalue", "nothing is quantized by eigenvalues", switch="enabled"),
    _none(_T, "optimizer.params.amsgrad", "infinity's optimizers have no amsgrad"),
    _none(_T, "optimizer.params.bias_correction", "Adam's moments are always corrected", off=(True,)),
    *(
        _none(
            _T,
            f"optimizer.params.{name}",
            "no gradient is compressed and no step is local: AdamW has no such phase",
            off=(),
        )
        for name in ("freeze_step", "var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")
    ),
    *(
        _none(_T, f"optimizer.params.{name}", "infinity has no LAMB: AdamW has one rate for all layers", off=())
        for name in ("max_coeff", "min_coeff", "coeff_beta", "factor_max", "factor_min", "factor_threshold")
    ),
    _none(_T, "scheduler.params.warmup_type", "the warm-up is linear", off=("linear",)),
    _none(_T, "scheduler.params.warmup_min_lr", "the warm-up begins at 0", off=(0,)),
    _none(_T, "scheduler.params.warmup_min_ratio", "the warm-up begins at 0", off=(0,)),
    _none(
        _T, "checkpoint.load_universal", "of a DeepSpeed checkpoint only a plain model can be taken (zero_to_fp32.py)"
    ),
    _none(_T, "gradient_allreduce_op", "several ranks take the mean of their gradients", off=("mean",)),
    _none(_T, "use_data_before_expert_parallelism", "experts are weights of their block, on every rank"),
    _none(_C, "fp16.fp16_master_weights_and_grads", "fp16 weights have an fp32 master"),
    _none(_C, "tensor_parallel", "layers are not split over GPUs; a large linear layer runs in tiles", off=(False,)),
    _none(_C, "pipeline", "all layers run in each process, one after the other", off=(False,)),
    _none(_C, "expert_parallel", "experts are weights of their block, on every rank", switch="enabled"),
    _none(_C, "sequence_parallel_size", "a sequence is not split over GPUs", off=(0, 1)),
    _none(_C, "seq_parallel_communication_data_type", "a sequence is not split over GPUs", off=()),
    _none(_C, f"{_PARAM}.max_in_cpu", "`weights: auto` holds in RAM what memory.host has room for", off=(0,)),
    _none(_C, f"{_STATES}.ratio", "all states are updated on the CPU", off=(1,)),
    _none(_C, f"{_ZERO}.zero_quantized_weights", "weights go between ranks in their own dtype"),
    _none(_C, f"{_ZERO}.zero_quantized_gradients", "gradients go between ranks unquantized"),
    _none(_C, f"{_ZERO}.zeropp_loco_param", "gradients go between ranks unquantized", off=()),
    _none(_C, f"{_ZERO}.mics_shard_size", "`ranks: {gather: node}` is the nearest", off=(-1, 0, 1)),
    _none(_C, f"{_ZERO}.mics_hierarchical_params_gather", "`ranks: {gather: node}` is the nearest"),
    _none(_C, f"{_ZERO}.save_muon_momentum_buffer_in_memory", "infinity has no Muon"),
    _none(_C, f"{_ZERO}.elastic_checkpoint", "a run is resumed with any number of ranks from its own generations"),
    _none(_C, "activation_checkpointing.contiguous_memory_optimization", "recomputation takes what torch kept"),
    _none(_C, "activation_checkpointing.synchronize_checkpoint_boundary", "recomputation has no barriers"),
    _none(_C, "aio.use_gds", "transfers go through pinned RAM"),
    _none(_C, "elasticity", "a run has the number of ranks that torchrun gives it", switch="enabled"),
    _none(_C, "hybrid_engine", "generation uses the weights as training does", switch="enabled"),
    _none(_C, "compile", "hooks bring the weights; torch.compile of an offloaded model was not tried", off=(False,)),
    _none(_C, "graph_harvesting", "there are no CUDA graphs"),
    _none(_C, "weight_quantization", "`frozen: nf4` or `int8` does that to weights that are not trained", off=()),
    _none(_C, "nebula", "generations are written to nvme.paths", switch="enabled"),
    _none(_C, "msamp", "there is no FP8", switch="enabled"),
    _none(_C, "data_types.buffer_dtype", "buffers keep the dtype that the script gave them", off=()),
    _none(_W, "activation_checkpointing.profile", "recomputation is not timed apart from the backward pass"),
    _none(_W, "flops_profiler", "operations are not counted; `--trace` shows the time", switch="enabled"),
    _none(_W, "comms_logger", "what the ranks exchange is not logged", switch="enabled"),
]

KEYS = MappingProxyType({key.name: key for key in (*_PLACES, *_BY_ITSELF, *_IN_THE_SCRIPT, *_LOST)})
"""All keys, by name."""

SECTIONS = frozenset(
    {name.rpartition(".")[0] for name in KEYS if "." in name} | {name.split(".")[0] for name in KEYS if "." in name}
)
"""Sections whose keys are keys of the table."""

OPTIMIZERS = MappingProxyType({"adamw": "adamw", "adam": "adamw", "lion": "lion", "adagrad": "adagrad", "sgd": "sgd"})
"""DeepSpeed's optimizers, in lower case, and what `--optimizer` calls them. Adam without adam_w_mode is adam."""

COMPRESSING = ("onebitadam", "zerooneadam")
"""Those whose gradients are compressed between GPUs."""

SCHEDULES = MappingProxyType({"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"})

ACCELERATE_NAMES = MappingProxyType(
    {
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "gradient_clipping": "gradient_clipping",
        "zero_stage": f"{_ZERO}.stage",
        "offload_optimizer_device": f"{_STATES}.device",
        "offload_optimizer_nvme_path": f"{_STATES}.nvme_path",
        "offload_param_device": f"{_PARAM}.device",
        "offload_param_nvme_path": f"{_PARAM}.nvme_path",
        "zero3_save_16bit_model": f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
    }
)
"""Keys of `deepspeed_config` in a config file of Accelerate, and DeepSpeed's names for them."""

_LAUNCHED = "`infinity run` starts one process, torchrun several"
ACCELERATE_KEYS = MappingProxyType(
    {
        key.name: key
        for key in (
            *_not_needed(
                "weights are always built without memory and streamed from their files",
                "deepspeed_config.zero3_init_flag",
            ),
            *_not_needed("DeepSpeed is not used", "distributed_type", "deepspeed_config.deepspeed_config_file"),
            *_not_needed(
                _LAUNCHED,
                "deepspeed_config.deepspeed_multinode_launcher",
                "deepspeed_config.deepspeed_hostfile",
                "deepspeed_config.deepspeed_inclusion_filter",
                "deepspeed_config.deepspeed_exclusion_filter",
                "compute_environment",
                "machine_rank",
                "main_process_ip",
                "main_process_port",
                "main_training_function",
                "rdzv_backend",
                "same_network",
                "gpu_ids",
                "enable_cpu_affinity",
                "use_cpu",
                "debug",
                "downcast_bf16",
                "tpu_env",
                "tpu_name",
                "tpu_zone",
                "tpu_use_cluster",
                "tpu_use_sudo",
                "tpu_vm",
                "command_file",
                "commands",
                "fsdp_config",
                "megatron_lm_config",
                "mpirun_config",
                "dynamo_backend",
            ),
            *_not_needed("a block is one unit, with its experts", "deepspeed_config.transformer_moe_cls_names"),
            _none(_C, "deepspeed_config.enable_msamp", "there is no FP8"),
            _none(_C, "deepspeed_config.msamp_opt_level", "there is no FP8", off=()),
            _none(_C, "fp8_config", "there is no FP8", off=()),
            _none(_C, "dynamo_config", "torch.compile of an offloaded model was not tried", off=()),
            _none(_C, "parallelism_config", "a layer or a sequence is not split over GPUs", off=()),
            _script("mixed_precision", "--dtype", "bf16, fp16", off=("no",)),
            _script(
                "num_processes",
                "",
                "",
                "one process has as many times fewer samples in a step: raise the accumulation by that (torchrun "
                "starts several, today on the CPU)",
                off=(1,),
            ),
            _script("num_machines", "", "", "one machine; several were not tried", off=(1,)),
        )
    }
)
"""The other keys of a config file of Accelerate."""

FSDP_KEYS = MappingProxyType(
    {
        f"fsdp.{key.name}": key
        for key in (
            *(
                _mapped(name, "weights, optimizer", "true: host, else auto")
                for name in ("offload_params", "cpu_offload")
            ),
            _mapped("activation_checkpointing", "activations", "true: auto, which recomputes where the model can"),
            *_not_needed(
                "a block is one unit, and its weights come and go together",
                *(
                    "auto_wrap_policy",
                    "transformer_layer_cls_to_wrap",
                    "transformer_cls_names_to_wrap",
                    "min_num_params",
                ),
            ),
            *_not_needed(
                _FETCHED, "backward_prefetch", "forward_prefetch", "limit_all_gathers", "reshard_after_forward"
            ),
            *_not_needed("weights are streamed from their files", "cpu_ram_efficient_loading", "sync_module_states"),
            *_not_needed("each rank has a slice of every unit", "sharding_strategy", "use_orig_params", "version"),
            *_not_needed("models are always saved whole, unit by unit", "state_dict_type"),
            *(
                _none(_C, name, "there is no XLA", off=(False, {}))
                for name in ("xla", "xla_fsdp_v2", "xla_fsdp_settings", "xla_fsdp_grad_ckpt")
            ),
        )
    }
)
"""Keys of FSDP, without their `fsdp_`: of `fsdp_config` in a file of Accelerate, or of the file of --fsdp_config."""
