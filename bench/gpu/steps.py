"""Contenders of bench/gpu_step.py, run one process after the other, and the figures derived from their measurements."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.process import Worker, WorkerError
from peers.workload import Job, Workload

_GIB = 1 << 30

LLAMA = Workload(
    layers=16,
    hidden=2048,
    intermediate=8192,
    heads=32,
    kv_heads=8,
    vocabulary=128 * 1024,
    tied=True,
    batch=4,
    tokens=2048,
    recompute=True,
)
"""Llama shape of 1.24 B parameters, with 8,192 tokens per step."""

CONTENDERS = ("torch", "host-host", "host-host-tight", "host-nvme", "nvme-nvme")
"""Names of the contenders.

torch: all states on the device, with an fp32 master. The other contenders: infinity, with the tiers of weights and
optimizer states in the name. All weights fit the device, except with `tight`, where memory.device is 3GiB at full size.
"""

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "GH200": 989e12}
"""Peak rate of dense bf16 from the data sheet, by a part of the GPU's name."""


def config_of(name: str, work: Workload) -> dict[str, Any] | None:
    """Return a contender's swap config; None for torch.

    memory.host is the memory that the placement needs, plus 4 bytes per parameter for gradients and room for staging.
    """
    if name == "torch":
        return None
    weights, optimizer, *tight = name.split("-")
    numel = work.numel
    spare = min(4 * _GIB, max(numel * 4, _GIB // 2))
    return {
        "weights": weights,
        "optimizer": optimizer,
        "activations": "recompute" if work.recompute else "keep",
        "memory": {
            "device": int(numel * 2.6) if tight else max(min(64 * _GIB, numel * 52), 64 << 20),
            "host": numel * (20 if optimizer == "host" else 8) + spare,
        },
        "commit_every": 0,
    }


@dataclass(frozen=True)
class Plan:
    """Contenders to run, and their time budget.

    Attributes:
        work_dir: directory for swap files and logs.
        traces: folder for the traces; None: no step is traced.
        seconds: time for all contenders; a contender that does not answer in the remaining time is killed.
    """

    work: Workload
    device: str
    warmups: int
    steps: int
    work_dir: Path
    traces: Path | None
    seconds: float
    names: Sequence[str] = CONTENDERS
    left_out: dict[str, str] = field(default_factory=dict)


def run_contenders(plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield a row for each contender when the contender is done.

    The row has `error` if the contender failed, and `skipped` if it was not started.
    """
    ends = time.monotonic() + plan.seconds
    for name in plan.names:
        if name in plan.left_out:
            yield {"contender": name, "skipped": plan.left_out[name]}
            continue
        left = ends - time.monotonic()
        if left < 5:
            yield {"contender": name, "skipped": "no time left"}
            continue
        yield {"contender": name} | _measure(name, plan, left)


def _measure(name: str, plan: Plan, seconds: float) -> dict[str, Any]:
    options: dict[str, Any] = {
        "device": plan.device,
        "config": config_of(name, plan.work),
        "warmups": plan.warmups,
        "steps": plan.steps,
        "trace": str(plan.traces / f"step-{name}.json.gz") if plan.traces else "",
    }
    swap = str(plan.work_dir / f"swap-{name}") if "nvme" in name else ""
    worker = Worker(
        name,
        Path(sys.executable),
        "gpu.step_worker",
        Job(plan.work, swap, options),
        plan.work_dir / f"step-{name}.log",
        timeout_s=seconds,
        own_session=False,
    )
    began = time.monotonic()
    try:
        worker.start()
        worker.wait_ready()
        ready_s = time.monotonic() - began
        worker.timeout_s = max(seconds - ready_s, 1)
        measured = worker.step()
    except WorkerError as error:
        worker.stop_s = 2.0  # the worker hangs or has died
        return {"error": str(error), "cause": error.cause[-3000:]}
    finally:
        worker.stop()
    return {"ready_s": round(ready_s, 1)} | figures(plan.work, worker.facts, measured)


def figures(work: Workload, facts: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """Return the measurements and the figures derived from them: FLOP/s, share of the peak, bytes per parameter."""
    seconds, numel = measured["seconds"], facts["numel"]
    flops = model_flops(work, numel)
    row: dict[str, Any] = {
        "seconds": round(seconds, 4),
        "tokens_per_s": round(work.batch * work.tokens / seconds),
        "model_tflops": round(flops / seconds / 1e12, 3),
        **{key: value for key, value in measured.items() if key not in ("seconds", "counters")},
        "device": facts["device"],
        "numel": numel,
        "slot_waits": facts["slot_waits"],
    }
    peak = next((rate for name, rate in PEAK_FLOPS.items() if name in facts["device"]), None)
    if peak is not None:
        row["mfu"] = round(flops / seconds / peak, 4)
        # with recomputation the forward runs twice
        row["compute_bound_s"] = round(flops * (4 / 3 if work.recompute else 1) / peak, 4)
    counters = measured["counters"]
    if counters:
        row["read_bytes_per_parameter"] = round(counters["read_bytes_moved"] / numel, 2)
        row["written_bytes_per_parameter"] = round(counters["written_bytes_moved"] / numel, 2)
        row |= {key: round(value, 4) for key, value in counters.items() if key.endswith("_s")}
        row |= {key: facts[key] for key in ("engine", "slot_bytes", "arena_bytes") if key in facts}
    return row


def model_flops(work: Workload, numel: int) -> float:
    """Return the FLOPs of a forward and a backward without recomputation.

    The number is the sum of 6 per token and multiplying parameter, and of 12 · layers · hidden · tokens per token for
    attention, halved by the causal mask.
    """
    tokens = work.batch * work.tokens
    embedding = 0 if work.tied else work.vocabulary * work.hidden
    return 6.0 * (numel - embedding) * tokens + 6.0 * work.layers * work.hidden * work.tokens * tokens


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table for people, with a line per contender."""
    lines = [f"{'contender':<18}{'s/step':>9}{'tokens/s':>10}{'TFLOP/s':>9}{'B/param':>9}{'reserved':>10}  on"]
    for row in rows:
        without = row.get("error") or row.get("skipped")
        if without:
            lines.append(f"{row['contender']:<18}{without.splitlines()[0][:100]}")
            continue
        moved = row.get("read_bytes_per_parameter", 0) + row.get("written_bytes_per_parameter", 0)
        reserved = f"{row['max_memory_reserved'] / _GIB:.1f}GiB" if "max_memory_reserved" in row else "-"
        lines.append(
            f"{row['contender']:<18}{row['seconds']:>9.3f}{row['tokens_per_s']:>10}{row['model_tflops']:>9.2f}"
            f"{moved:>9.1f}{reserved:>10}  {row['device']}"
        )
    return "\n".join(lines)
