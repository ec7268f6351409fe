"""Stage 6: a training step in each placement; the disk's rate (stage 5) limits the size of the model."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

from gpu.record import Options, Record, run
from gpu.sizes import LAYERS, choose
from gpu.steps import CONTENDERS, LLAMA, Plan, run_contenders
from infinity.plan.machine_resources import available_host_bytes

_EXPECTED = {
    "torch": "compute 8.1e13 FLOP: 0.16-0.2 s",
    "host-host": "0.3-0.45 s with overlap (Adam 35 GB: 0.25-0.45 s; each 2.5 GB over PCIe 48 ms)",
    "host-host-tight": "as host-host, with memory.device: 3GiB, and no more reserved than that beside activations",
    "host-nvme": "20-22 B per parameter: 25-27 GB ÷ the disk's rate",
    "nvme-nvme": "26-28 B per parameter: 32-35 GB ÷ the disk's rate",
}


def stage(record: Record, options: Options) -> None:
    """Run the stage. Settings: `shape`, fields of the Workload; `device`."""
    options.work.mkdir(parents=True, exist_ok=True)
    sizes = _sizes(options, record.left_s - 5)
    record.note("sizes", sizes, expected=f"{LAYERS} layers, 2 + 4 steps; fewer where disk, memory or time are short")
    shape = {"layers": sizes["layers"]} | options.settings.get("shape", {})
    plan = Plan(
        replace(LLAMA, **shape),
        options.settings.get("device", "cuda"),
        sizes["warmups"],
        sizes["steps"],
        options.work.resolve(),
        options.out.resolve(),
        record.left_s - 3,
        left_out=sizes["left_out"],
    )
    rows = run_contenders(plan)
    for name in CONTENDERS:
        row = record.measure(name, _EXPECTED[name], lambda: _next(rows))
        if row is not None and "skipped" in row:
            record.skip(name, row["skipped"], expected=_EXPECTED[name])  # this replaces the previous line of this name


def _sizes(options: Options, seconds: float) -> dict[str, Any]:
    """Return the sizes that the measured disk rate (if stage 5 measured it) and the free disk and memory allow."""
    disk = options.found.get("host", {}).get("disk")
    if disk is None:
        return {"layers": LAYERS, "warmups": 2, "steps": 4, "left_out": {}}
    free = shutil.disk_usage(options.work).free
    return choose(disk["mixed_gb_per_s"] * 1e9, free, available_host_bytes(), seconds)


def _next(rows: Any) -> dict[str, Any]:
    row = next(rows)
    if "error" in row:
        raise RuntimeError(f"{row['error']}\n{row.get('cause', '')}")
    return row


if __name__ == "__main__":
    run(stage)
