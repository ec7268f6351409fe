"""Comparison of infinity's I/O engine with DeepSpeed's async_io: `python bench/io_vs_peers.py [--path DIR]`.

The script needs DeepSpeed in .venv-peers (bench/peers/setup.sh). Every row's files are preallocated and written once
before the timing. Each round runs both contenders, in an order that alternates (A B, B A, …); each ratio compares two
rates of the same round. DeepSpeed runs with the fastest of several settings, which a probe finds for each row. The exit
code is 1 if data that is read back differs from the written data.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from peers.io_protocol import IoWorker, Row

ROOT = Path(__file__).resolve().parent.parent
ROWS = (
    Row("1 tensor of 1 GiB", "read", 1, 1 << 30),
    Row("1 tensor of 1 GiB", "write", 1, 1 << 30),
    Row("10,000 of 256 KiB, a file each", "read", 10_000, 256 << 10),
    Row("10,000 of 256 KiB, a file each", "write", 10_000, 256 << 10),
    Row("10,000 of 256 KiB, one file", "read", 10_000, 256 << 10, one_file=True),
    Row("10,000 of 256 KiB, one file", "write", 10_000, 256 << 10, one_file=True),
    Row("512 MiB and 512 MiB at once", "mixed", 2, 512 << 20),
)
_INFINITY: dict[str, Any] = {}  # the engine's defaults
_DEFAULT = {"block_size": 1 << 20, "queue_depth": 8, "intra_op_parallelism": 1}
"""Defaults of the "aio" section of DeepSpeed's config."""
_PROBES = 2


def deepspeed_settings(row: Row) -> list[dict[str, int]]:
    """Return the settings to try.

    DeepSpeed cuts a request into equal slices, one for each of its threads.
    """
    blocks = sorted({min(1 << 20, row.tensor_bytes), 256 << 10})
    return [
        {"block_size": block, "queue_depth": depth, "intra_op_parallelism": threads}
        for block, depth, threads in itertools.product(blocks, (8, 32, 128), (1, 2, 4))
    ]


@dataclass(frozen=True)
class Versus:
    """Comparison of infinity with one setting of DeepSpeed: medians, and quantiles of the ratios of rates of the same
    round."""

    settings: dict[str, int]
    rate: float
    cpu_s_per_gb: float
    ratio: float
    ratio_low: float
    ratio_high: float
    cpu_ratio: float

    def text(self) -> str:
        return (
            f"{self.rate / 1e9:6.2f}  {self.ratio:5.2f}× ({self.ratio_low:.2f}–{self.ratio_high:.2f})  "
            f"{self.cpu_s_per_gb:6.3f}  {self.cpu_ratio:5.2f}×"
        )


@dataclass(frozen=True)
class Result:
    """Result of one row. Rates are in bytes per second.

    `best` is the fastest of the probed settings of DeepSpeed; `default` is DeepSpeed's default setting.
    """

    row: Row
    rounds: int
    rate: float
    cpu_s_per_gb: float
    best: Versus
    default: Versus
    right: bool

    def text(self) -> str:
        chosen = ", ".join(f"{key} {value}" for key, value in self.best.settings.items())
        return (
            f"{self.row.name}, {self.row.direction}: {self.rate / 1e9:.2f} GB/s, {self.cpu_s_per_gb:.4f} CPU s/GB"
            f"{'' if self.right else '  WRONG DATA'}\n"
            f"    best      {self.best.text()}   ({chosen})\n    default   {self.default.text()}"
        )


def measure(row: Row, ours: IoWorker, theirs: IoWorker, directory: Path, rounds: int) -> Result:
    ours.prepare(row, directory, _INFINITY)
    theirs.prepare(row, directory, _DEFAULT)
    settings = _fastest(row, theirs)
    right = ours.verify() and theirs.verify()
    samples: dict[str, list[dict[str, float]]] = {"ours": [], "best": [], "default": []}
    for number in range(rounds):
        for name in list(samples) if number % 2 == 0 else list(samples)[::-1]:
            if name == "ours":
                samples[name].append(ours.run())
            else:
                theirs.configure(settings if name == "best" else _DEFAULT)
                samples[name].append(theirs.run())
    right = right and ours.verify() and theirs.verify()
    return Result(
        row=row,
        rounds=rounds,
        rate=row.nbytes / statistics.median(sample["seconds"] for sample in samples["ours"]),
        cpu_s_per_gb=statistics.median(sample["cpu_s"] for sample in samples["ours"]) / (row.nbytes / 1e9),
        best=_versus(row, settings, samples["ours"], samples["best"]),
        default=_versus(row, _DEFAULT, samples["ours"], samples["default"]),
        right=right,
    )


def _versus(row: Row, settings: dict[str, int], mine: list[dict[str, float]], its: list[dict[str, float]]) -> Versus:
    ratios = [b["seconds"] / a["seconds"] for a, b in zip(mine, its, strict=True)]
    low, high = np.quantile(ratios, [0.05, 0.95])
    return Versus(
        settings=settings,
        rate=row.nbytes / statistics.median(sample["seconds"] for sample in its),
        cpu_s_per_gb=statistics.median(sample["cpu_s"] for sample in its) / (row.nbytes / 1e9),
        ratio=statistics.median(ratios),
        ratio_low=float(low),
        ratio_high=float(high),
        cpu_ratio=statistics.median(a["cpu_s"] / max(b["cpu_s"], 1e-6) for a, b in zip(mine, its, strict=True)),
    )


def _fastest(row: Row, worker: IoWorker) -> dict[str, int]:
    """Return DeepSpeed's fastest settings for this row."""
    times = []
    for settings in deepspeed_settings(row):
        worker.configure(settings)
        times.append((min(worker.run()["seconds"] for _ in range(_PROBES)), settings))
    return min(times, key=lambda entry: entry[0])[1]


def run(rows: Sequence[Row], parent: Path, rounds: int) -> list[Result]:
    needed = 2 * max(row.nbytes for row in rows)
    free = shutil.disk_usage(parent).free
    if free < needed + (1 << 30):
        raise SystemExit(f"{parent} has {free >> 20} MiB free; {needed >> 20} MiB are needed")
    peers = ROOT / ".venv-peers/bin/python"
    if not peers.exists():
        raise SystemExit("DeepSpeed is not set up: run bench/peers/setup.sh")
    directory = Path(tempfile.mkdtemp(prefix="io-vs-peers-", dir=parent))
    workers: list[IoWorker] = []
    try:
        ours = IoWorker("infinity", Path(sys.executable), "peers.io_infinity", directory / "infinity.log")
        workers.append(ours)
        theirs = IoWorker("DeepSpeed", peers, "peers.io_deepspeed", directory / "deepspeed.log")
        workers.append(theirs)
        results = []
        for row in rows:
            results.append(measure(row, ours, theirs, directory, rounds))
            print(results[-1].text(), flush=True)
        return results
    finally:
        for worker in workers:
            worker.stop()
        shutil.rmtree(directory)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--path", type=Path, default=ROOT / "build", help="where the files are made (default build/)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", help="rows whose name or direction contains this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    rows = [row for row in ROWS if not options.only or options.only in f"{row.name} {row.direction}"]
    print("each row: infinity; below, DeepSpeed's GB/s, infinity's ratio (5–95 %), DeepSpeed's CPU s/GB, CPU ratio")
    results = run(rows, options.path, options.rounds)
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    return 0 if all(result.right for result in results) else 1


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
