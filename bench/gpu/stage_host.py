"""Stage 5: limits of the update: Adam in memory, and the disk. The disk's rate determines the model's size in the step
stage."""

from __future__ import annotations

import datetime
import shutil
import time
from collections.abc import Callable
from typing import Any

import torch
from adam_forms import FORMATS, run_adam

from gpu.adam_beside import rates
from gpu.record import Options, Record, run
from infinity import _native
from infinity.cli.bench.scratch import ScratchFile
from infinity.cli.bench.workload import Kind, Workload, WorkloadRunner
from infinity.io.disk_profile import DiskProfile, save_profile
from infinity.plan.machine_resources import usable_cores

_MIB, _GIB = 1 << 20, 1 << 30
_BLOCK_BYTES, _DEPTH = 1 * _MIB, 32
_DISK_S = 15.0
_KINDS: tuple[Kind, ...] = ("read", "overwrite", "mixed")


def stage(record: Record, options: Options) -> None:
    """Run the stage. Settings: `numel` for Adam, `disk_bytes` of the scratch file, `disk_s`."""
    options.work.mkdir(parents=True, exist_ok=True)
    cores = usable_cores()
    numel = int(options.settings.get("numel", (64 if cores >= 8 else 16) * _MIB))
    # Formats of the states: the two formats that later stages train with, and the cheapest format.
    every = list(FORMATS)
    formats = (every[0], every[1], every[4])
    record.measure(
        "adam",
        "on 16 cores 80-200 GB/s, and 3-7 Gparam/s with bf16 weights, split16, fp32 moments",
        lambda: _adam(numel, cores, formats),
        good=lambda found: found["rows"][every[1]]["gparam_per_s"] >= 3 * cores / 16,
        speed=True,
        least_s=4,
    )
    record.measure(
        "adam beside others",
        "noted: Gparam/s, and GB/s of a pass with almost no arithmetic",
        lambda: rates(numel, cores, _copier()),
        least_s=8,
    )
    nbytes = int(options.settings.get("disk_bytes", _file_bytes(options)))
    seconds = min(float(options.settings.get("disk_s", _DISK_S)), record.left_s - 3)
    record.measure(
        "disk", "noted: 1 MiB blocks, 32 in flight, as infinity-bench measures", lambda: _disk(options, nbytes, seconds)
    )


def _adam(numel: int, cores: int, formats: Any) -> dict[str, Any]:
    report = run_adam(numel, [cores], [_native.select_isa()], 3, formats)
    rows = {
        row.format: {
            "gb_per_s": round(row.bytes_per_s / 1e9, 1),
            "gparam_per_s": round(row.parameters_per_s / 1e9, 2),
            "of_bound": round(row.of_bound, 2),
        }
        for row in report.results
    }
    bound = {name: round(rate / 1e9, 1) for name, rate in report.bound.items()}
    return {"numel": numel, "threads": cores, "bound_gb_per_s": bound, "rows": rows}


def _copier() -> Callable[[], Any] | None:
    """Return a function that copies in both directions for a moment; None without a device."""
    if not torch.cuda.is_available():
        return None
    from gpu.stage_copies import Copies  # needs a device

    large = 128 * _MIB
    pinned = torch.ones(2 * large, dtype=torch.uint8).pin_memory()
    copies = Copies(pinned[:large], pinned[large:])
    return lambda: copies.rate(large, up=True, down=True)


def _file_bytes(options: Options) -> int:
    free = shutil.disk_usage(options.work).free
    return int(min(2 * _GIB, free // 4)) // (256 * _MIB) * (256 * _MIB)


def _disk(options: Options, nbytes: int, seconds: float) -> dict[str, Any]:
    """Return the rates of a step's mix of reads and writes, of its parts and of the engine.

    The rates are stored, because the step stage chooses its sizes by them.
    """
    memory = min(256 * _MIB, nbytes)
    began = time.perf_counter()
    rates: dict[Kind, float] = {}
    with ScratchFile(options.work, nbytes) as scratch:
        rig = WorkloadRunner(scratch, memory)
        rig.fill()
        filled_s = time.perf_counter() - began
        probe = rig.run(Workload("overwrite", _BLOCK_BYTES, _DEPTH, memory)).rate
        each_s = max((seconds - (time.perf_counter() - began)) / len(_KINDS) / 2, 0.2)
        moved = max(int(min(probe * each_s, 4 * nbytes)) // memory * memory, memory)
        for kind in _KINDS:
            rates[kind] = rig.run(Workload(kind, _BLOCK_BYTES, _DEPTH, moved)).rate
        direct = scratch.file.direct
    engine = _native.IOEngine("auto").name
    profile = DiskProfile(
        read_rate=rates["read"],
        overwrite_rate=rates["overwrite"],
        mixed_rate=rates["mixed"],
        block_bytes=_BLOCK_BYTES,
        in_flight_bytes=_BLOCK_BYTES * _DEPTH,
        engine=engine,
        path=str(options.work),
        measured=datetime.date.today().isoformat(),
    )
    save_profile(options.work, profile)
    found = {f"{kind}_gb_per_s": round(rate / 1e9, 2) for kind, rate in rates.items()}
    first = {"first_write_gb_per_s": round(nbytes / 1e9 / filled_s, 2)}
    return found | first | {"engine": engine, "direct": direct, "file_gib": nbytes / _GIB, "sample_mib": moved // _MIB}


if __name__ == "__main__":
    run(stage)
