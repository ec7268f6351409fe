"""Cost of durability and checksums per step: `python bench/commits.py`.

The contenders are commit_every 0 and 1, with and without checksums. They run alternately, one step each, on the model
of bench/peers/workload.py.

A disk may be faster in one region than in another. All stores are therefore created again several times, in an order
that rotates, and each ratio compares steps of the same round. The report has medians of the seconds of a step
(including its complete update and its commit) and of the ratios. The report also has the bytes written per step,
counted by the engine, and the times of the parts of a commit.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from peers.workload import SMALL, Workload

import infinity
from infinity.coordinator import registry

PLACEMENTS = {"weights in RAM": ("host", "nvme"), "all on NVMe": ("nvme", "nvme"), "all in RAM": ("host", "host")}
CONTENDERS: dict[str, dict[str, Any]] = {
    "commit_every 0": {"commit_every": 0},
    "commit_every 1": {"commit_every": 1},
    "commit_every 0, no checksums": {"commit_every": 0, "checksums": False},
    "commit_every 1, no checksums": {"commit_every": 1, "checksums": False},
}
COMPARED = [
    ("commit_every 1", "commit_every 0"),
    ("commit_every 0", "commit_every 0, no checksums"),
    ("commit_every 1", "commit_every 1, no checksums"),
]
_WARM_UP = 2


@dataclass
class Contender:
    """A contender: one model, its store, and the measurements of its steps."""

    model: Any
    optim: Any
    seconds: list[float] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    commit_s: list[float] = field(default_factory=list)

    def step(self, tokens: torch.Tensor) -> None:
        before = infinity.statistics(self.model).written_bytes
        began = time.perf_counter()
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self.optim.step()
        self.optim.zero_grad()
        infinity.synchronize(self.model)  # otherwise the end of the update would run in another contender's turn
        updated = time.perf_counter()
        registry.coordinator_of(self.model).finish_commit()
        ended = time.perf_counter()
        self.seconds.append(ended - began)
        self.commit_s.append(ended - updated)
        self.written.append(infinity.statistics(self.model).written_bytes - before)


def open_contender(work: Workload, placement: tuple[str, str], options: dict[str, Any], path: Path) -> Contender:
    weights, optimizer = placement
    config = {
        "weights": weights,
        "optimizer": optimizer,
        "activations": "keep",
        "memory": {"device": "512MiB", "host": "5GiB"},
        "nvme": {"paths": [str(path)], "checksums": options.get("checksums", True)},
        "commit_every": options["commit_every"],
    }
    model = infinity.offload(work.build_model(), config)
    optim = infinity.AdamW(model.parameters(), lr=work.lr, max_grad_norm=work.max_grad_norm)
    return Contender(model, optim)


def measure(name: str, work: Workload, directory: Path, rounds: int, repeats: int) -> dict[str, Any]:
    """Return the medians over all rounds of all repeats."""
    names = [each for each in CONTENDERS if name != "all in RAM" or "no checksums" not in each]
    seconds: dict[str, list[float]] = {each: [] for each in names}
    facts: dict[str, dict[str, Any]] = {each: {} for each in names}
    for repeat in range(repeats):
        order = names[repeat % len(names) :] + names[: repeat % len(names)]
        with tempfile.TemporaryDirectory(prefix="commits-", dir=directory) as scratch:
            opened = {
                each: open_contender(work, PLACEMENTS[name], CONTENDERS[each], Path(scratch) / str(index))
                for index, each in enumerate(order)
            }
            tokens = work.build_batch()
            for number in range(rounds + _WARM_UP):
                for each in order if number % 2 == 0 else reversed(order):
                    opened[each].step(tokens)
            for each, contender in opened.items():
                seconds[each] += contender.seconds[_WARM_UP:]
                facts[each] = {
                    "written_bytes": int(statistics.median(contender.written[_WARM_UP:])),
                    "commit_s": statistics.median(contender.commit_s[_WARM_UP:]),
                    "manifest_bytes": _manifest_bytes(Path(scratch) / str(order.index(each))),
                }
                infinity.close(contender.model)
            opened.clear()
            gc.collect()  # modules and their hooks form reference cycles
    ratios = {
        f"{one} / {other}": statistics.median(
            mine / others for mine, others in zip(seconds[one], seconds[other], strict=True)
        )
        for one, other in COMPARED
        if one in seconds and other in seconds
    }
    medians = {each: {"step_s": statistics.median(seconds[each]), **facts[each]} for each in names}
    return {"placement": name, "rounds": rounds * repeats, "contenders": medians, "median_ratios": ratios}


def _manifest_bytes(path: Path) -> int:
    return sum(entry.stat().st_size for entry in path.glob("generation-*.infinity"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--path", type=Path, default=Path("build"), help="a directory on the disk to use")
    parser.add_argument("--placement", nargs="+", choices=PLACEMENTS, default=list(PLACEMENTS))
    parser.add_argument("--rounds", type=int, help="default: 9, or 2 with --small")
    parser.add_argument("--repeats", type=int, help="how often all stores are created (default: 4, or 1 with --small)")
    parser.add_argument("--small", action="store_true", help="a small model, to try the script")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    work = SMALL if options.small else Workload()
    rounds, repeats = options.rounds or (2 if options.small else 9), options.repeats or (1 if options.small else 4)
    options.path.mkdir(exist_ok=True)
    results = []
    for name in options.placement:
        found = measure(name, work, options.path, rounds, repeats)
        results.append(found)
        print(f"{name}, {found['rounds']} rounds", flush=True)
        for each, values in found["contenders"].items():
            print(
                f"  {each:<30} {values['step_s']:.3f} s, written {values['written_bytes'] / 1e6:8.1f} MB, after the "
                f"update {values['commit_s'] * 1e3:6.1f} ms, manifest {values['manifest_bytes'] / 1e3:.0f} kB"
            )
        for each, ratio in found["median_ratios"].items():
            print(f"  {each}: {ratio:.3f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
