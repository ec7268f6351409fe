#!/usr/bin/env python3
"""Step time with several micro-batches, in vertical and in ordinary order, compared with torch and DeepSpeed ZeRO-3.

In vertical order, all micro-batches pass through a unit before the next unit. In ordinary order, a micro-batch passes
through all units before the next micro-batch. The disk runs at full speed or is throttled; torch has all states in
memory.

    bash bench/peers/setup.sh                                         # once: DeepSpeed's own environment
    python bench/micro_batches.py --json build/micro-batches.json     # as root: the disk is throttled by a cgroup
    python bench/micro_batches.py --systems vertical,ordinary,processor --layers 4 --rounds 3       # a short run

| system | what it is |
|---|---|
| vertical, ordinary | infinity.backward(..., vertical=True and False); weights and optimizer states on NVMe |
| ...-throttled | the same, but the disk reads 0.5 GB/s and writes 0.5 GB/s at most |
| processor | infinity with everything in RAM and no overlap: a step is only the CPU's work |
| torch | plain torch in memory with the same recomputation; weights and moments in bf16, no fp32 master |
| deepspeed | ZeRO-3, weights and optimizer states on NVMe, as many accumulation steps |

The bound of a system is the longer of two times of the same round: `processor`, and the system's replay, which moves
the bytes of the system's step without computing. Quote the ratios, which compare times of the same round; single times
on a shared machine mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from peers.process import BENCH_DIR, Worker
from peers.report import format_table, machine_facts, write_result
from peers.throttle import throttled
from peers.turns import started, with_replays
from peers.variants import params_on_nvme
from peers.workload import Job, Workload

_CHECKOUT = BENCH_DIR.parent
_BLOCKS_ON_DEVICE = 3
SYSTEMS = ("vertical", "ordinary", "vertical-throttled", "ordinary-throttled", "processor", "torch", "deepspeed")


def job(system: str, workload: Workload, directory: Path) -> Job:
    if system == "torch":
        return Job(workload)
    if system == "deepspeed":
        return Job(workload, str(directory / "deepspeed"), params_on_nvme(workload))
    if system == "processor":
        options: dict[str, Any] = {"weights": "host", "optimizer": "host", "overlap": "off"}
        return Job(workload, "", options | {"vertical": False})
    kept = workload.tokens * workload.hidden * 2 * (workload.layers + 2) * workload.micro_batches
    blocks = _BLOCKS_ON_DEVICE * 2 * workload.numel // workload.layers
    memory = {
        "device": 2 * max(blocks, kept),  # the weights get half of this memory
        "host": workload.numel * 4 + (1 << 29),  # gradients in fp32, and staging for states
    }
    options = {"weights": "nvme", "optimizer": "nvme", "overlap": "auto", "memory": memory}
    return Job(workload, str(directory / system), options | {"vertical": "vertical" in system})


def worker_of(system: str, workload: Workload, directory: Path, args: argparse.Namespace) -> Worker:
    kind = system if system in ("torch", "deepspeed") else "infinity"
    python = args.peers_python if system == "deepspeed" else Path(sys.executable)
    log = _CHECKOUT / "build" / "bench-logs" / f"micro-batches-{system}.log"
    return Worker(system, python, f"peers.worker_{kind}", job(system, workload, directory), log, timeout_s=1800)


def summarise(rounds: list[dict[str, dict[str, Any]]], numel: int) -> dict[str, dict[str, float]]:
    """Return for each system the medians of the seconds, of the bound and of two ratios, and the bytes per parameter.

    The ratios are the seconds divided by the bound, and the seconds divided by the seconds of the ordinary order.
    """
    summary = {}
    for name in rounds[0]:
        bounds = [
            max(each["processor"]["seconds"], each[name].get("replay", {}).get("seconds", 0.0)) for each in rounds
        ]
        seconds = [each[name]["seconds"] for each in rounds]
        beside = name.replace("vertical", "ordinary")
        counters = rounds[-1][name]["counters"]
        summary[name] = {
            "seconds": statistics.median(seconds),
            "bound_s": statistics.median(bounds),
            "of_bound": statistics.median(mine / bound for mine, bound in zip(seconds, bounds, strict=True)),
            "of_ordinary": statistics.median(each[name]["seconds"] / each[beside]["seconds"] for each in rounds)
            if beside in rounds[0]
            else float("nan"),
            "bytes_per_parameter": (counters.get("read_bytes", 0) + counters.get("written_bytes", 0)) / numel,
            "peak_rss_bytes": max(each[name]["peak_rss_bytes"] for each in rounds),
            "loss": rounds[-1][name]["loss"],
        }
    return summary


def table(summary: dict[str, dict[str, float]]) -> str:
    header = ("system", "s/step", "bound, s", "/ bound", "/ ordinary", "B per parameter", "peak RSS, GB", "loss")
    return format_table(
        header,
        [
            (
                name,
                f"{row['seconds']:.2f}",
                f"{row['bound_s']:.2f}",
                f"{row['of_bound']:.2f}",
                f"{row['of_ordinary']:.3f}",
                f"{row['bytes_per_parameter']:.1f}",
                f"{row['peak_rss_bytes'] / 1e9:.2f}",
                f"{row['loss']:.4f}",
            )
            for name, row in summary.items()
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--systems", default=",".join(SYSTEMS), help="names, separated by commas; default: all")
    add("--micro-batches", type=int, default=8)
    add("--tokens", type=int, default=512)
    add("--layers", type=int, default=16)
    add("--max-grad-norm", type=float, help="clip to this norm; 0.01 clips in every step; default: no clipping")
    add("--rounds", type=int, default=5, help="turns of each system; a turn measures the mean of three steps")
    add("--rate", type=float, default=0.5e9, help="bytes per second of the throttled disk, each way")
    add("--swap-dir", type=Path, default=_CHECKOUT / "build" / "bench-swap", help="a new directory is created in it")
    add("--peers-python", type=Path, default=_CHECKOUT / ".venv-peers" / "bin" / "python")
    add("--json", type=Path, help="write all measurements to this file")
    args = parser.parse_args()
    systems = list(dict.fromkeys(args.systems.split(",")))
    if unknown := set(systems) - set(SYSTEMS):
        parser.error(f"unknown systems: {', '.join(sorted(unknown))}; there are {', '.join(SYSTEMS)}")
    workload = Workload(
        layers=args.layers,
        tokens=args.tokens,
        micro_batches=args.micro_batches,
        recompute=True,
        max_grad_norm=args.max_grad_norm,
    )
    args.swap_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="micro-batches-", dir=args.swap_dir) as directory, ExitStack() as stack:
        workers = [worker_of(name, workload, Path(directory), args) for name in systems]
        stack.enter_context(started(workers))
        slow = [worker for worker in workers if "throttled" in worker.name]
        stack.enter_context(throttled(slow, Path(directory), args.rate))
        rounds = []
        for found in with_replays(workers, args.rounds):
            rounds.append(found)
            print("  ".join(f"{name} {told['seconds']:.2f} s" for name, told in found.items()), flush=True)
        facts = {worker.name: worker.facts for worker in workers}
    summary = summarise(rounds, workload.numel)
    print(f"\n{workload.numel / 1e6:.0f} M parameters, {args.micro_batches} × {args.tokens} tokens\n{table(summary)}")
    if args.json:
        result = {
            "machine": machine_facts(args.swap_dir),
            "workload": asdict(workload),
            "rate": args.rate,
            "summary": summary,
            "facts": facts,
            "rounds": rounds,
        }
        write_result(args.json, result, {_CHECKOUT: "<checkout>"})


if __name__ == "__main__":
    main()
