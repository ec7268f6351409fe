"""Worker with plain torch and everything in memory: weights, gradients and moments in one dtype, without an fp32
master."""

from __future__ import annotations

from typing import Any

import torch

from peers.protocol import Contender, serve
from peers.workload import Job


def trained(job: Job, model: Any, numel: int, describes: str) -> Contender:
    """Train a model with torch's AdamW. Args: describes: words for the system, for the report."""
    work = job.workload
    batches = work.build_batches()
    optim = torch.optim.AdamW(
        model.parameters(),
        lr=work.lr,
        betas=work.betas,
        eps=work.eps,
        weight_decay=work.weight_decay,
        **job.options,
    )

    def step() -> float:
        total = 0.0
        for tokens in batches:
            loss = model(input_ids=tokens, labels=tokens).loss / len(batches)
            loss.backward()
            total += float(loss.detach())
        if work.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), work.max_grad_norm)
        optim.step()
        optim.zero_grad()
        return total

    facts = {
        "numel": numel,
        "versions": {"torch": torch.__version__},
        "threads": torch.get_num_threads(),
        "describes": f"{describes}, AdamW({job.options}), {work.dtype} weights and moments, no fp32 master",
    }
    return Contender(step, facts=facts)


def setup(job: Job) -> Contender:
    """Build the model and its optimizer. Options: arguments of torch.optim.AdamW that choose its implementation."""
    model = job.workload.build_model()
    return trained(job, model, sum(parameter.numel() for parameter in model.parameters()), "in memory")


if __name__ == "__main__":
    serve(setup)
