#!/usr/bin/env python3
"""Cost of infinity's own Python code per step: a model of many small layers, trained with one thread, compared with
plain torch.

    python bench/overhead.py --json build/overhead.json
    python bench/overhead.py --layers 24 --placements ram --rounds 5      # a short run, while you change something
    python bench/overhead.py --layers 24 --clipped --device 6             # no step updates during its backward

A layer has 200,000 fp32 parameters and a step 32 tokens, so there is little to compute and almost nothing to move. The
extra time of a step over plain torch (torch.optim.AdamW with its defaults) is the work of hooks, transitions and
updates. Placements: `ram` has weights and optimizer states in RAM; `states` has the states on NVMe; `nvme` has the
weights on NVMe too, with device memory for five layers, or as --device says. torch computes with one thread. infinity's
updates have one additional thread.

Every contender is a separate process, which is set up once and has one turn per round (bench/peers/protocol.py). Quote
the ratios, which compare times of the same round. The cost per unit should be the same for any number of layers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from peers.process import BENCH_DIR, Worker
from peers.report import format_table, machine_facts, write_result
from peers.turns import rounds_of, started
from peers.workload import Job, Workload

_CHECKOUT = BENCH_DIR.parent
_MODEL = Workload(hidden=128, intermediate=352, heads=4, vocabulary=512, tokens=32, dtype="float32", max_grad_norm=None)
_CLIPS = 1e-3
"""Maximum norm that the gradients of every step exceed."""
_LAYERS_ON_DEVICE = 10  # the plan gives half of memory.device to weights and half to activations

PLACEMENTS: dict[str, dict[str, Any]] = {
    "ram": {"weights": "host", "optimizer": "host"},
    "states": {"weights": "host", "optimizer": "nvme"},
    "nvme": {"weights": "nvme", "optimizer": "nvme"},
}


@dataclass(frozen=True)
class Setting:
    """Settings of a measurement.

    Attributes:
        layers: number of layers of the model.
        clipped: whether the gradients of every step are clipped.
        device: memory.device in bytes; 0: room for five layers if weights are on NVMe, otherwise the
            default.
    """

    layers: int
    clipped: bool = False
    device: int = 0


def job(placement: str, setting: Setting, directory: Path) -> Job:
    """Return a worker's job. Args: placement: a key of PLACEMENTS, or "torch"."""
    layers = setting.layers
    workload = replace(_MODEL, layers=layers, max_grad_norm=_CLIPS if setting.clipped else None)
    if placement == "torch":
        return Job(workload)
    options = {**PLACEMENTS[placement], "update": {"threads": 1}, "overlap": "auto"}
    device = setting.device or (_LAYERS_ON_DEVICE * 4 * workload.numel // layers if placement == "nvme" else 0)
    if device:
        options["memory"] = {"device": device}
    return Job(workload, "" if placement == "ram" else str(directory / f"{placement}-{layers}"), options)


def measure(setting: Setting, placements: Sequence[str], rounds: int, directory: Path) -> dict[str, list[float]]:
    """Return the seconds of a step by contender, one per round; each round begins with another contender."""
    workers = []
    for name in ("torch", *placements):
        kind = "torch" if name == "torch" else "infinity"
        log = _CHECKOUT / "build" / "bench-logs" / f"overhead-{name}.log"
        python = Path(sys.executable)
        workers.append(Worker(name, python, f"peers.worker_{kind}", job(name, setting, directory), log, threads=1))
    with started(workers):
        found = list(rounds_of(workers, rounds))
    return {worker.name: [each[worker.name]["seconds"] for each in found] for worker in workers}


def summarise(seconds: dict[str, list[float]], layers: int) -> dict[str, dict[str, float]]:
    """Return for each contender the seconds of a step, the ratio to torch's seconds, and the extra seconds per layer.

    Ratios and extra seconds compare steps of the same round. Each figure has its median and its 5th and 95th
    percentiles.
    """
    summary = {}
    for name, steps in seconds.items():
        ratios = [mine / plain for mine, plain in zip(steps, seconds["torch"], strict=True)]
        costs = [(mine - plain) / layers for mine, plain in zip(steps, seconds["torch"], strict=True)]
        summary[name] = {
            "median_s": statistics.median(steps),
            "p5_s": _percentile(steps, 5),
            "p95_s": _percentile(steps, 95),
            "ratio": statistics.median(ratios),
            "p5_ratio": _percentile(ratios, 5),
            "p95_ratio": _percentile(ratios, 95),
            "per_layer_s": statistics.median(costs),
        }
    return summary


def _percentile(values: Sequence[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[round((len(ordered) - 1) * percent / 100)]


def table(summaries: dict[int, dict[str, dict[str, float]]]) -> str:
    header = ("contender", "layers", "ms/step", "5–95 %", "/ torch", "5–95 %", "more, ms per layer")
    return format_table(
        header,
        [
            (
                name,
                str(layers),
                f"{1e3 * row['median_s']:.1f}",
                f"{1e3 * row['p5_s']:.1f}–{1e3 * row['p95_s']:.1f}",
                f"{row['ratio']:.2f}",
                f"{row['p5_ratio']:.2f}–{row['p95_ratio']:.2f}",
                "–" if name == "torch" else f"{1e3 * row['per_layer_s']:.2f}",
            )
            for layers, summary in summaries.items()
            for name, row in summary.items()
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--layers", type=int, nargs="+", default=[24, 96])
    add("--placements", nargs="+", choices=PLACEMENTS, default=list(PLACEMENTS))
    add("--rounds", type=int, default=11, help="turns of each contender; a turn measures the mean of three steps")
    add("--clipped", action="store_true", help="clip the gradients of every step")
    add("--device", type=int, default=0, metavar="MIB", help="memory.device in MiB")
    add("--swap-dir", type=Path, default=_CHECKOUT / "build" / "bench-swap", help="a new directory is created in it")
    add("--json", type=Path, help="write all measurements to this file")
    args = parser.parse_args()
    args.swap_dir.mkdir(parents=True, exist_ok=True)
    seconds: dict[int, dict[str, list[float]]] = {}
    summaries: dict[int, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="overhead-", dir=args.swap_dir) as directory:
        for layers in args.layers:
            setting = Setting(layers, args.clipped, args.device << 20)
            seconds[layers] = measure(setting, args.placements, args.rounds, Path(directory))
            summaries[layers] = summarise(seconds[layers], layers)
            print(f"{table({layers: summaries[layers]})}\n", flush=True)
    if args.json:
        result = {
            "machine": machine_facts(args.swap_dir),
            "workload": asdict(_MODEL),
            "clipped": args.clipped,
            "device_bytes": args.device << 20,
            "placements": PLACEMENTS,
            "summary": summaries,
            "seconds": seconds,
        }
        write_result(args.json, result, {_CHECKOUT: "<checkout>"})


if __name__ == "__main__":
    main()
