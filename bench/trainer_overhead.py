#!/usr/bin/env python3
"""Cost per step of transformers' Trainer under `infinity run`, compared with infinity's own three lines.

    python bench/trainer_overhead.py --json build/trainer.json
    python bench/trainer_overhead.py --small --rounds 3      # a tiny model, to try the script itself

Both train the same model from the same initial weights, with weights and states on NVMe (or in RAM: --placement ram),
and with gradients clipped by the norm. Trainer clips with torch's clip_grad_norm_, makes its batches with a DataLoader
and logs nothing. Weight decay is 0, because Trainer would not apply it to the norms. Quote the ratios, which compare
steps of the same round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from peers.process import BENCH_DIR, Worker
from peers.report import machine_facts, write_result
from peers.turns import rounds_of, started
from peers.workload import Job, Workload

PLACEMENTS = {"nvme": {"weights": "nvme", "optimizer": "nvme"}, "ram": {"weights": "host", "optimizer": "host"}}
_TOLERANCE = 2e-2
"""Relative tolerance of the losses.

The factor of clip_grad_norm_ is in fp32. A different factor can round some bf16 weights differently, and this changes
the losses.
"""


def measure(workload: Workload, options: dict[str, Any], rounds: int, directory: Path) -> dict[str, list[float]]:
    """Return the seconds of a step by contender, one per round; each round begins with another contender."""
    workers = []
    for name in ("infinity", "trainer"):
        swap = directory / name / "swap"
        swap.mkdir(parents=True)
        log = BENCH_DIR.parent / "build" / "bench-logs" / f"trainer-overhead-{name}.log"
        job = Job(workload, str(swap), {"overlap": "auto"} | options)
        workers.append(Worker(name, Path(sys.executable), f"peers.worker_{name}", job, log))
    seconds: dict[str, list[float]] = {worker.name: [] for worker in workers}
    with started(workers):
        for number, found in enumerate(rounds_of(workers, rounds)):
            losses = {name: each["loss"] for name, each in found.items()}
            if abs(losses["trainer"] - losses["infinity"]) > _TOLERANCE * abs(losses["infinity"]):
                raise SystemExit(f"round {number}: the losses differ: {losses}")
            for name, each in found.items():
                seconds[name].append(each["seconds"])
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--placement", choices=PLACEMENTS, default="nvme")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script itself")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    parser.add_argument("--swap-dir", type=Path, default=BENCH_DIR.parent / "build" / "bench-swap")
    args = parser.parse_args()
    workload = replace(Workload(), tokens=args.tokens, weight_decay=0.0, max_grad_norm=1000.0)
    if args.small:
        workload = replace(workload, layers=2, hidden=128, intermediate=256, heads=4, vocabulary=512)
    args.swap_dir.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()
    with tempfile.TemporaryDirectory(dir=args.swap_dir) as directory:
        seconds = measure(workload, PLACEMENTS[args.placement], args.rounds, Path(directory))
    ratios = sorted(theirs / ours for theirs, ours in zip(seconds["trainer"], seconds["infinity"], strict=True))
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    print(
        f"{workload.numel / 1e6:.0f} M parameters, {args.placement}: Trainer {medians['trainer']:.3f} s, three lines "
        f"{medians['infinity']:.3f} s, ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}), "
        f"load {load[0]:.1f} before and {os.getloadavg()[0]:.1f} after"
    )
    if args.json:
        summary = {"seconds": seconds, "medians": medians, "ratio": statistics.median(ratios), "ratios": ratios}
        facts = {"machine": machine_facts(args.swap_dir), "placement": args.placement, "workload": asdict(workload)}
        write_result(args.json, facts | summary, {BENCH_DIR.parent: "CHECKOUT"})


if __name__ == "__main__":
    main()
