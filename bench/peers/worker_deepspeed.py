"""Worker with DeepSpeed ZeRO-3: optimizer states on NVMe (async_io), DeepSpeedCPUAdam in AdamW mode, the CPU as
accelerator.

The worker is a single process, or one of the ranks that the driver starts; no launcher is used.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

from peers.protocol import Contender, serve
from peers.workload import Job


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _prepare_environment() -> None:
    """Set the variables that a launcher would set. Must be called before deepspeed is imported."""
    if "RANK" not in os.environ:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(alone, MASTER_PORT=str(_free_port()))
    os.environ.update(DS_ACCELERATOR="cpu", DEEPSPEED_LOG_LEVEL="warning")
    environment = Path(sys.prefix)
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(environment / "torch_extensions"))
    os.environ["PATH"] = f"{environment / 'bin'}:{os.environ['PATH']}"  # lets the build of the operators find ninja


def _config(job: Job) -> dict[str, Any]:
    work, options = job.workload, job.options
    offload_param = {"device": options["offload_param"], "pin_memory": True}
    if options["offload_param"] == "nvme":
        offload_param |= {"nvme_path": job.swap_dir, "max_in_cpu": 0, **options.get("param_buffers", {})}
    zero: dict[str, Any] = {
        "stage": 3,
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": job.swap_dir,
            "buffer_count": options["buffer_count"],
            "pipeline_read": options["pipeline_read"],
            "pipeline_write": options["pipeline_write"],
            "pin_memory": True,
        },
        "offload_param": offload_param,
        **options.get("zero", {}),
    }
    adamw = {"lr": work.lr, "betas": work.betas, "eps": work.eps, "weight_decay": work.weight_decay}
    return {
        "train_micro_batch_size_per_gpu": work.batch,
        "gradient_accumulation_steps": work.micro_batches,
        "bf16": {"enabled": work.dtype == "bfloat16"},
        "gradient_clipping": work.max_grad_norm or 0.0,
        "optimizer": {"type": "AdamW", "params": adamw},
        "zero_optimization": zero,
        "aio": options.get("aio", {}),
        "steps_per_print": 1_000_000_000,
    }


def setup(job: Job) -> Contender:
    """Build the model under zero.Init and start the engine. Options: see peers.variants.Variant."""
    _prepare_environment()
    import deepspeed
    import torch

    deepspeed.init_distributed(dist_backend="gloo")
    config = _config(job)
    model = job.workload.build_model()
    if job.options["offload_param"] == "nvme":
        # Built inside zero.Init's context, the model would have torch's initial values, because transformers' initial
        # values would be written to parameters that are already empty. No dtype is given: 0.19.8 would use bf16 for any
        # dtype on the CPU.
        deepspeed.zero.Init(module=model, config_dict_or_path=config)
    numel = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())
    batches = job.workload.build_batches()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step() -> float:
        total = 0.0
        for tokens in batches:
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            total += float(loss.detach()) / len(batches)
        return total

    facts = {
        "numel": numel,
        "versions": {"torch": torch.__version__, "deepspeed": deepspeed.__version__},
        "threads": torch.get_num_threads(),
        "sub_groups": len(getattr(engine.optimizer, "fp16_groups", [])),
        "optimizer": type(engine.optimizer.optimizer).__name__,
        "describes": "ZeRO-3, optimizer nvme, fp32 master and moments; weights and a gradient buffer in memory",
    }
    return Contender(step, facts=facts, close=lambda: engine.destroy())


if __name__ == "__main__":
    serve(setup)
