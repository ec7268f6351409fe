"""infinity: optimizer states on NVMe, weights in RAM or on NVMe; AdamW over an fp32 master (stored as bf16 weight +
residual), exact unless the config asks for other moments."""

from __future__ import annotations

from typing import Any

import torch

import infinity
from peers.protocol import Contender, serve
from peers.workload import Job


def setup(job: Job) -> Contender:
    """Build the model, offload it and make its optimizer. Options: `weights`, and `config` to override keys of the
    swap config."""
    work = job.workload
    config: dict[str, Any] = {
        "weights": job.options["weights"],
        "optimizer": "nvme",
        "gradients": "host",
        "activations": "keep",
        "nvme": {"paths": [job.swap_dir]},
        "commit_every": 0,
        **job.options.get("config", {}),
    }
    model = infinity.offload(work.build_model(), config)
    tokens = work.build_batch()
    optim = infinity.AdamW(
        model.parameters(),
        lr=work.lr,
        betas=work.betas,
        eps=work.eps,
        weight_decay=work.weight_decay,
        max_grad_norm=work.max_grad_norm,
    )
    latest = infinity.statistics(model)

    def step() -> float:
        nonlocal latest
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optim.step()
        optim.zero_grad()
        # Also the place where a step that is still writing would be waited for.
        latest = infinity.statistics(model)
        return float(loss.detach())

    def counters() -> dict[str, Any]:
        names = (
            "read_bytes",
            "written_bytes",
            "cached_bytes",
            "io_busy_s",
            "fetch_wait_s",
            "gradient_s",
            "update_s",
            "adam_s",
        )
        return {name: getattr(latest, name) for name in names if hasattr(latest, name)}

    facts = {
        "numel": latest.numel,
        "state_bytes": latest.state_bytes,
        "arena_bytes": getattr(latest, "arena_bytes", None),
        "engine": getattr(latest, "engine", None),
        "versions": {"torch": torch.__version__, "infinity": infinity.__version__},
        "threads": torch.get_num_threads(),
        "describes": f"weights {job.options['weights']}, optimizer nvme, fp32 master (split16), "
        f"{latest.plan.moments} moments",
    }
    return Contender(step, facts, counters, lambda: infinity.close(model))


if __name__ == "__main__":
    serve(setup)
