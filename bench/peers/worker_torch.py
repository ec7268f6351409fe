"""Plain torch, everything in memory: bf16 weights, bf16 gradients, bf16 moments, torch.optim.AdamW(fused=True); no
fp32 master copy."""

from __future__ import annotations

import torch

from peers.protocol import Contender, serve
from peers.workload import Job


def setup(job: Job) -> Contender:
    """Build the model and its optimizer."""
    work = job.workload
    model = work.build_model()
    tokens = work.build_batch()
    optim = torch.optim.AdamW(
        model.parameters(), lr=work.lr, betas=work.betas, eps=work.eps, weight_decay=work.weight_decay, fused=True
    )

    def step() -> float:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), work.max_grad_norm)
        optim.step()
        optim.zero_grad()
        return float(loss.detach())

    facts = {
        "numel": sum(parameter.numel() for parameter in model.parameters()),
        "versions": {"torch": torch.__version__},
        "threads": torch.get_num_threads(),
        "describes": "in memory, AdamW(fused=True), bf16 weights and moments, no fp32 master",
    }
    return Contender(step, facts=facts)


if __name__ == "__main__":
    serve(setup)
