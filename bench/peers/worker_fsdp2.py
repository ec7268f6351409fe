"""Worker with torch's FSDP2 and its shards in host memory (CPUOffloadPolicy); one of the ranks that the driver
starts."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from peers.protocol import Contender, serve
from peers.worker_torch import trained
from peers.workload import Job


def setup(job: Job) -> Contender:
    """Build the model, shard its layers and the remainder, and make the optimizer. Options: see worker_torch."""
    torch.distributed.init_process_group("gloo")
    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = job.workload.build_model()
    numel = sum(parameter.numel() for parameter in model.parameters())
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return trained(job, model, numel, "FSDP2, shards in host memory")


if __name__ == "__main__":
    serve(setup)
