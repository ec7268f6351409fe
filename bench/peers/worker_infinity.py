"""Worker with infinity, with states in the tiers that the job names; AdamW over an fp32 master, stored as bf16 weight
and residual.

The optimizer is exact unless the config asks for other moments.
"""

from __future__ import annotations

import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

import infinity
from infinity.coordinator import registry
from peers.protocol import Contender, serve
from peers.workload import Job


def setup(job: Job) -> Contender:
    """Build the model, offload it and make its optimizer. Options: keys of the swap config."""
    work, vertical = job.workload, job.options.pop("vertical", False)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        torch.distributed.init_process_group("gloo")
    config: dict[str, Any] = {
        "gradients": "host",
        "activations": "recompute" if work.recompute else "keep",
        "nvme": {"paths": [job.swap_dir] if job.swap_dir else []},
        "commit_every": 0,
        "vertical": vertical,
        **job.options,
    }
    passes = 1 if vertical else work.micro_batches
    model = infinity.offload(work.build_model(), config, accumulation_steps=passes if work.micro_batches > 1 else None)
    batches = work.build_batches()
    optim = infinity.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=work.lr,
        betas=work.betas,
        eps=work.eps,
        weight_decay=work.weight_decay,
        max_grad_norm=work.max_grad_norm,
    )
    plan = infinity.statistics(model).plan
    placement = plan.placement

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        return loss / len(batches)

    def step() -> float:
        if len(batches) == 1:
            losses = [loss_of(batches[0])]
            losses[0].backward()
        else:
            losses = infinity.backward(model, loss_of, batches, vertical=vertical)
        optim.step()
        optim.zero_grad()
        return sum(float(loss.detach()) for loss in losses)

    def settle() -> None:
        infinity.synchronize(model)

    def replay() -> dict[str, Any]:
        # imported at its use only, because it may be elsewhere in other versions
        from infinity.access.step_io_replay import replay_step

        return asdict(replay_step(registry.coordinator_of(model), passes))

    facts = {
        "package": str(Path(infinity.__file__).parent),
        "numel": plan.layout.numel,
        "host_bytes": plan.host_bytes,
        "state_bytes": infinity.statistics(model).state_bytes,
        "arena_bytes": infinity.statistics(model).arena_bytes,
        "engine": infinity.statistics(model).engine,
        "versions": {"torch": torch.__version__, "infinity": infinity.__version__},
        "threads": torch.get_num_threads(),
        "plan": plan.describe(),
        "describes": f"weights {placement.weights.tier}, optimizer {placement.optimizer.tier}, fp32 master (split16), "
        f"{placement.form.moments} moments, overlap {job.options['overlap']}",
    }
    return Contender(
        step,
        settle,
        replay if plan.layout.swap.nbytes else None,
        facts,
        lambda: _counters(infinity.statistics(model)),
        lambda: infinity.close(model),
    )


def _counters(statistics: Any) -> dict[str, float]:
    """Return every number of the statistics; numbers that are divided by cause are named `field_cause_s`."""
    counters: dict[str, float] = {
        name: getattr(statistics, name) for name in ("fetch_wait_s", "gradient_s", "update_s")
    }
    for field in fields(statistics):
        value = getattr(statistics, field.name)
        if isinstance(value, dict):
            counters |= {f"{field.name}_{cause}_s": seconds for cause, seconds in value.items()}
        elif isinstance(value, int | float):
            counters[field.name] = value
    return counters


if __name__ == "__main__":
    serve(setup)
