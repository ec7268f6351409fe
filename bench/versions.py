#!/usr/bin/env python3
"""Step time of this infinity compared with another version, and of the other version compared with itself.

    git worktree add ../before COMMIT && make -C ../before bootstrap
    python bench/versions.py ../before/.venv/bin/python --json build/versions.json
    python bench/versions.py ../before/.venv/bin/python --small --rounds 3   # a tiny model, to try the script itself

The other version runs twice. The difference between the two runs of the other version is the machine's noise. Only a
ratio outside of this noise says something about the versions. Quote the ratios, which compare steps of the same round.
The losses of all three runs must be the same to the last bit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from peers.contenders import setting_of
from peers.process import BENCH_DIR, Worker
from peers.report import machine_facts, write_result
from peers.turns import rounds_of, started
from peers.workload import SMALL, WORKLOADS, Job, Workload

CONTENDERS = "infinity-host,infinity-nvme,infinity-nvme-int8"
NEW, OLD, AGAIN = "new", "old", "old again"

_KEPT = ("seconds", "cpu_seconds", "peak_rss_bytes", "loss")
_RATIOS = {"seconds": "seconds", "processor time": "cpu_seconds", "peak memory": "peak_rss_bytes"}

Steps = dict[str, list[dict[str, Any]]]


def measure(name: str, workload: Workload, pythons: dict[str, Path], rounds: int, directory: Path) -> Steps:
    """Return the measurements of each version's worker, by round. Each round begins with another version."""
    setting = setting_of(name)
    if setting is None or setting.cached:
        raise SystemExit(f"'{name}' is no contender that is compared here; name some like {CONTENDERS}")
    workers = []
    for version, python in pythons.items():
        swap = directory / version.replace(" ", "-")
        log = BENCH_DIR.parent / "build" / "bench-logs" / f"versions-{name}-{version.replace(' ', '-')}.log"
        options = setting.options(workload, None)
        workers.append(Worker(version, python, "peers.worker_infinity", Job(workload, str(swap), options), log))
    steps: Steps = {version: [] for version in pythons}
    with started(workers):
        packages = {worker.name: worker.facts["package"] for worker in workers}
        if packages[NEW] == packages[OLD]:
            raise SystemExit(f"both interpreters import infinity from {packages[NEW]}: there is nothing to compare")
        for number, found in enumerate(rounds_of(workers, rounds)):
            if len({each["loss"] for each in found.values()}) > 1:
                raise SystemExit(
                    f"round {number}: losses differ: { {name: each['loss'] for name, each in found.items()} }"
                )
            for version, each in found.items():
                steps[version].append({key: each[key] for key in _KEPT})
    return steps


def ratios_of(steps: Steps, key: str) -> dict[str, dict[str, float]]:
    """Return ratios within the same rounds: the median, and the 5th and 95th percentiles."""
    return {
        f"{one} / {other}": _spread([a[key] / b[key] for a, b in zip(steps[one], steps[other], strict=True)])
        for one, other in ((NEW, OLD), (AGAIN, OLD))
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=20, method="inclusive") if len(values) > 1 else [values[0]]
    return {"median": statistics.median(values), "low": cuts[0], "high": cuts[-1]}


def report(name: str, found: dict[str, dict[str, dict[str, float]]]) -> None:
    for what, ratios in found.items():
        told = ", ".join(f"{pair} {r['median']:.3f} ({r['low']:.3f} to {r['high']:.3f})" for pair, r in ratios.items())
        print(f"{name}, {what}: {told}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the interpreter that imports the other version")
    parser.add_argument("--contenders", default=CONTENDERS, help="names as in bench/peers/contenders.py")
    parser.add_argument("--workload", choices=WORKLOADS, default="256", help="tokens per step")
    parser.add_argument("--layers", type=int, help="number of layers, if it is not the workload's")
    parser.add_argument("--dtype", default="bfloat16", help="float32 where the processor only emulates bfloat16")
    parser.add_argument("--max-grad-norm", type=float, default=1000.0, help="1 clips every step, 1000 clips no step")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script itself")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    parser.add_argument("--swap-dir", type=Path, default=BENCH_DIR.parent / "build" / "bench-swap")
    args = parser.parse_args()
    chosen = SMALL if args.small else WORKLOADS[args.workload]
    layers = args.layers or chosen.layers
    workload = replace(chosen, layers=layers, max_grad_norm=args.max_grad_norm, dtype=args.dtype)
    args.swap_dir.mkdir(parents=True, exist_ok=True)
    # The path is made absolute, but links are not resolved: a virtual environment's interpreter is a symbolic link, and
    # only works by this link.
    other = Path(os.path.abspath(args.other))
    pythons = {NEW: Path(sys.executable), OLD: other, AGAIN: other}
    result: dict[str, Any] = {"machine": machine_facts(args.swap_dir), "workload": asdict(workload)}
    for name in args.contenders.split(","):
        with tempfile.TemporaryDirectory(dir=args.swap_dir) as directory:
            load = os.getloadavg()[0]
            steps = measure(name, workload, pythons, args.rounds, Path(directory))
        found = {what: ratios_of(steps, key) for what, key in _RATIOS.items()}
        report(name, found)
        loads = {"before": load, "after": os.getloadavg()[0]}
        result[name] = found | {"load": loads, "steps": steps}
    if args.json:
        write_result(args.json, result, {BENCH_DIR.parent: "CHECKOUT"})


if __name__ == "__main__":
    main()
