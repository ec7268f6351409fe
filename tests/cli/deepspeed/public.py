"""Settings of DeepSpeed configs that public projects ship. The settings are restated, not copied. Each entry names the
project and the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

AUTO = "auto"
NVME = "/local_nvme"
"""Placeholder for the directory that the public config names."""

Values = dict[str, Any]


@dataclass(frozen=True)
class Public:
    """A public config and its expected conversion.

    Attributes:
        source: repository and path.
        values: the settings, including those of Accelerate's YAML.
        weights, optimizer: expected values in the swap config.
        lost: keys without a counterpart, as the report lists them.
        unknown: keys that the report names as unknown.
        also: other expected lines of the swap config.
    """

    source: str
    values: Values
    weights: str
    optimizer: str
    lost: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    also: tuple[tuple[str, object], ...] = ()


def _scaler(power: int = 16, **more: object) -> Values:
    shared = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": power, "hysteresis": 2}
    return shared | {"min_loss_scale": 1} | more


def _adamw(**params: object) -> Values:
    return {"type": "AdamW", "params": dict.fromkeys(("lr", "weight_decay"), AUTO) | params}


def _warmup(kind: str, *more: str) -> Values:
    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", *more)
    return {"type": kind, "params": dict.fromkeys(names, AUTO)}


_CPU = {"device": "cpu", "pin_memory": True}
_SIZES = {"train_batch_size": AUTO, "train_micro_batch_size_per_gpu": AUTO, "gradient_clipping": AUTO}
_OPEN = _SIZES | {"gradient_accumulation_steps": AUTO}
_FP16_OR_BF16 = {"fp16": _scaler(enabled=AUTO), "bf16": {"enabled": AUTO}}
_PARTITIONS = {"allgather_partitions": True, "reduce_scatter": True, "contiguous_gradients": True}
_BUCKETS = {"allgather_bucket_size": 2e8, "reduce_bucket_size": AUTO, "overlap_comm": True}
_STAGE3 = {
    "stage": 3,
    "contiguous_gradients": True,
    "reduce_bucket_size": AUTO,
    "stage3_prefetch_bucket_size": AUTO,
    "stage3_param_persistence_threshold": AUTO,
}
_LIVE = {"sub_group_size": 1e9, "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9}
_AXOLOTL_LIVE = {"sub_group_size": 0, "max_live_parameters": 0, "max_reuse_distance": 0}
_GATHER = {"stage3_gather_16bit_weights_on_model_save": True}
_LLAMA_FACTORY = _OPEN | _FP16_OR_BF16 | {"zero_allow_untested_optimizer": True}
_LLAMA_FACTORY_2 = _PARTITIONS | {"round_robin_gradients": True, "overlap_comm": False, "stage": 2}
_LLAMA_FACTORY_2 |= {"allgather_bucket_size": 5e8, "reduce_bucket_size": 5e8}
_AXOLOTL = _OPEN | {"wall_clock_breakdown": False}
_AXOLOTL_2 = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "contiguous_gradients": True, "overlap_comm": True}

PUBLIC = (
    Public(
        "huggingface/transformers tests/deepspeed/ds_config_zero2.json",
        _OPEN
        | _FP16_OR_BF16
        | {
            "optimizer": _adamw(betas=AUTO, eps=AUTO),
            "scheduler": _warmup("WarmupLR"),
            "zero_optimization": _PARTITIONS
            | _BUCKETS
            | {"stage": 2, "offload_optimizer": _CPU, "reduce_bucket_size": 2e8},
            "steps_per_print": 2000,
            "wall_clock_breakdown": False,
        },
        "auto",
        "host",
    ),
    Public(
        "huggingface/transformers tests/deepspeed/ds_config_zero3.json",
        _OPEN
        | {
            "fp16": _scaler(enabled=AUTO),
            "optimizer": _adamw(betas=AUTO, eps=AUTO),
            "scheduler": _warmup("WarmupLR"),
            "zero_optimization": _STAGE3
            | _LIVE
            | {
                "offload_optimizer": _CPU,
                "offload_param": _CPU,
                "overlap_comm": True,
                "sub_group_size": 1e14,
                "stage3_gather_fp16_weights_on_model_save": True,
            },
            "steps_per_print": 2000,
            "wall_clock_breakdown": False,
        },
        "host",
        "host",
    ),
    Public(
        "hiyouga/LLaMA-Factory examples/deepspeed/ds_z2_config.json",
        _LLAMA_FACTORY | {"zero_optimization": _LLAMA_FACTORY_2},
        "auto",
        "auto",
    ),
    Public(
        "hiyouga/LLaMA-Factory examples/deepspeed/ds_z2_autotp_config.json",
        _LLAMA_FACTORY
        | {
            "_comment": "supported models",
            "zero_optimization": _LLAMA_FACTORY_2,
            "tensor_parallel": {"autotp_size": 2},
        },
        "auto",
        "auto",
        lost=("tensor_parallel",),
    ),
    Public(
        "hiyouga/LLaMA-Factory examples/deepspeed/ds_z3_offload_config.json",
        _LLAMA_FACTORY
        | {
            "zero_optimization": _STAGE3
            | _LIVE
            | _GATHER
            | {"offload_optimizer": _CPU, "offload_param": _CPU, "overlap_comm": False},
        },
        "host",
        "host",
    ),
    Public(
        "hiyouga/LLaMA-Factory examples/deepspeed/ds_z3_fp8_config.json",
        {
            "train_micro_batch_size_per_gpu": AUTO,
            "gradient_clipping": AUTO,
            "gradient_accumulation_steps": AUTO,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": True,
            "fp16": _scaler(enabled=False),
            "bf16": {"enabled": AUTO},
            "zero_optimization": _STAGE3
            | _LIVE
            | _GATHER
            | {
                "offload_optimizer": {"device": "cpu", "pin_memory": False},
                "overlap_comm": False,
                "reduce_bucket_size": 12845056,
                "stage3_prefetch_bucket_size": 11560550,
                "stage3_param_persistence_threshold": 35840,
            },
            "steps_per_print": 10000000,
            "comms_config": {"verbose": False},
            "monitor_config": {"enabled": True, "tag": "DeepSpeedMonitor", "csv_monitor": {"enabled": False}},
        },
        "auto",
        "host",
        unknown=("comms_config", "monitor_config"),
    ),
    Public(
        "axolotl-ai-cloud/axolotl deepspeed_configs/zero2_torch_compile.json",
        _AXOLOTL
        | {
            "compile": {"disable": False, "backend": "inductor"},
            "zero_optimization": _AXOLOTL_2,
            "bf16": {"enabled": AUTO},
            "fp16": _scaler(32, enabled=AUTO, auto_cast=False),
        },
        "auto",
        "host",
        lost=("compile",),
    ),
    Public(
        "axolotl-ai-cloud/axolotl deepspeed_configs/zero3_bf16_cpuoffload_params.json",
        _AXOLOTL
        | {
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": True},
            "zero_optimization": _STAGE3
            | _AXOLOTL_LIVE
            | {"offload_param": _CPU, "overlap_comm": True, "gather_16bit_weights_on_model_save": True},
        },
        "host",
        "auto",
    ),
    Public(
        "huggingface/accelerate examples/deepspeed_config_templates/zero_stage3_offload_config.json",
        _SIZES
        | {
            "fp16": _scaler(enabled=True),
            "optimizer": _adamw(),
            "scheduler": _warmup("WarmupDecayLR", "total_num_steps"),
            "gradient_accumulation_steps": 1,
            "zero_optimization": _STAGE3
            | _LIVE
            | {
                "offload_optimizer": _CPU,
                "offload_param": _CPU,
                "overlap_comm": True,
                "stage3_gather_16bit_weights_on_model_save": AUTO,
            },
            "steps_per_print": 2000,
            "wall_clock_breakdown": False,
        },
        "host",
        "host",
    ),
    Public(
        "huggingface/trl examples/accelerate_configs/deepspeed_zero3.yaml",
        {
            "compute_environment": "LOCAL_MACHINE",
            "debug": False,
            "deepspeed_config": {
                "deepspeed_multinode_launcher": "standard",
                "gradient_accumulation_steps": 1,
                "offload_optimizer_device": "none",
                "offload_param_device": "none",
                "zero3_init_flag": True,
                "zero3_save_16bit_model": True,
                "zero_stage": 3,
            },
            "distributed_type": "DEEPSPEED",
            "downcast_bf16": "no",
            "machine_rank": 0,
            "main_training_function": "main",
            "mixed_precision": "fp16",
            "num_machines": 1,
            "num_processes": 8,
            "rdzv_backend": "static",
            "same_network": True,
            "tpu_env": [],
            "tpu_use_cluster": False,
            "tpu_use_sudo": False,
            "use_cpu": False,
        },
        "auto",
        "auto",
    ),
    Public(
        "microsoft/DeepSpeedExamples Megatron-LM-v1.1.5-ZeRO3/examples/ds_zero_stage_infinity_config.json",
        {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 1,
            "steps_per_print": 1,
            "zero_optimization": {
                "stage": 3,
                "stage3_max_live_parameters": 1e9,
                "stage3_max_reuse_distance": 1e8,
                "stage3_param_persitance_threshold": 1e5,
                "stage3_prefetch_bucket_size": 5e7,
                "contiguous_gradients": True,
                "overlap_comm": True,
                "reduce_bucket_size": 90000000,
                "sub_group_size": 1e8,
                "offload_optimizer": {
                    "device": "nvme",
                    "nvme_path": NVME,
                    "buffer_count": 4,
                    "pipeline_read": False,
                    "pipeline_write": False,
                    "pin_memory": True,
                },
                "offload_param": {"device": "nvme", "nvme_path": NVME, "max_in_cpu": 1, "pin_memory": True},
            },
            "gradient_clipping": 1.0,
            "fp16": {
                "enabled": True,
                "loss_scale": 1024,
                "loss_scale_window": 1000,
                "hysteresis": 2,
                "min_loss_scale": 1,
            },
            "wall_clock_breakdown": True,
            "zero_allow_untested_optimizer": False,
            "aio": {
                "block_size": 1048576,
                "queue_depth": 16,
                "single_submit": False,
                "overlap_events": True,
                "thread_count": 2,
            },
        },
        "nvme",
        "nvme",
        lost=(
            "fp16.loss_scale",
            "zero_optimization.offload_param.max_in_cpu",
        ),
        unknown=("zero_optimization.stage3_param_persitance_threshold",),
        also=(("nvme.queue_depth", 32),),
    ),
    Public(
        "deepspeedai/DeepSpeedExamples claude_tutorials/annotated_configs/zero3_nvme_offload_annotated.json",
        {
            "zero_optimization": {
                "stage": 3,
                "stage3_prefetch_bucket_size": AUTO,
                "stage3_param_persistence_threshold": AUTO,
                "stage3_max_live_parameters": AUTO,
                "offload_param": {
                    "device": "nvme",
                    "nvme_path": NVME,
                    "pin_memory": True,
                    "buffer_size": AUTO,
                    "buffer_count": 5,
                },
            },
            "aio": {
                "block_size": 8388608,
                "queue_depth": 32,
                "intra_op_parallelism": 8,
                "single_submit": False,
                "overlap_events": True,
                "use_gds": False,
            },
            "train_batch_size": 1,
        },
        "nvme",
        "auto",
        also=(("nvme.block", "8MiB"), ("nvme.queue_depth", 256)),
    ),
    Public(
        "deepspeedai/DeepSpeedExamples training/DeepSpeed-ZenFlow/finetuning/zf_config.json",
        {
            "train_batch_size": 32,
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": _CPU,
                "zenflow": {"topk_ratio": 0.1, "update_interval": 4, "full_warm_up_rounds": 0, "overlap_step": True},
            },
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 2e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
            },
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,
            "zero_allow_untested_optimizer": True,
        },
        "auto",
        "host",
        lost=("zero_optimization.zenflow",),
    ),
    Public(
        "IDEA-Research/hana config/deepspeed.py",
        {
            "zero_allow_untested_optimizer": True,
            "scheduler": {
                "type": "WarmupLR",
                "params": {
                    "last_batch_iteration": -1,
                    "warmup_min_lr": 0,
                    "warmup_max_lr": 1e-4,
                    "warmup_num_steps": 10000,
                },
            },
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": _CPU,
                "contiguous_gradients": True,
                "overlap_comm": True,
                "allgather_bucket_size": 2e8,
                "reduce_bucket_size": 2e8,
            },
            "fp16": _scaler(enabled=True),
            "steps_per_print": 100,
            "train_micro_batch_size_per_gpu": 8,
            "activation_checkpointing": dict.fromkeys(
                (
                    "partition_activations",
                    "cpu_checkpointing",
                    "contiguous_memory_optimization",
                    "number_checkpoints",
                    "synchronize_checkpoint_boundary",
                    "profile",
                ),
                False,
            ),
        },
        "auto",
        "host",
    ),
)
