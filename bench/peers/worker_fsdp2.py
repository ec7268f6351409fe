"""torch's FSDP2 with its shards in host memory (CPUOffloadPolicy), one of the ranks that the driver starts."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from peers.protocol import Contender, serve
from peers.workload import Job


def setup(job: Job) -> Contender:
    """Build the model, shard its layers and what is left, and make the optimizer. No options."""
    torch.distributed.init_process_group("gloo")
    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    work = job.workload
    model = work.build_model()
    numel = sum(parameter.numel() for parameter in model.parameters())
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    tokens = work.build_batch()
    optim = torch.optim.AdamW(
        model.parameters(), lr=work.lr, betas=work.betas, eps=work.eps, weight_decay=work.weight_decay
    )

    def step() -> float:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if work.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), work.max_grad_norm)
        optim.step()
        optim.zero_grad()
        return float(loss.detach())

    facts = {
        "numel": numel,
        "versions": {"torch": torch.__version__},
        "threads": torch.get_num_threads(),
        "describes": f"FSDP2, shards and AdamW's moments in memory, {work.dtype}, no fp32 master",
    }
    return Contender(step, facts=facts)


if __name__ == "__main__":
    serve(setup)
