"""Replays of a step's I/O compared with real training steps: `python bench/replay_vs_steps.py`.

Replays and steps use the same extents of one swap file, because a disk may be faster in one region than in another. A
replay writes back the bytes that it read, so it does not affect the training. The report has, for weights on NVMe and
for weights in RAM, the seconds with at least one transfer in flight (as the engine counts them) of replays and of
steps, and the ratio of the two.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from peers.workload import Workload

import infinity
from infinity.access.step_io_replay import replay_step
from infinity.coordinator import registry


def io_seconds(model: Any) -> float:
    return infinity.statistics(model).io_busy_s


def measure(weights: str, directory: Path, rounds: int, work: Workload) -> dict[str, Any]:
    """Return the medians over `rounds` rounds of one real step and one replay, in alternating order."""
    config = {
        "weights": weights,
        "optimizer": "nvme",
        "activations": "keep",
        "memory": {"device": "512MiB", "host": "4GiB"},
        "nvme": {"paths": [str(directory / weights)]},
        "commit_every": 0,
    }
    model = infinity.offload(work.build_model().train(), config)
    try:
        optim = infinity.AdamW(model.parameters(), lr=work.lr, max_grad_norm=work.max_grad_norm)
        tokens = work.build_batch()
        coordinator = registry.coordinator_of(model)
        real: list[float] = []
        replayed: list[float] = []

        def train() -> None:
            before = io_seconds(model)
            model(input_ids=tokens, labels=tokens).loss.backward()
            optim.step()
            optim.zero_grad()
            real.append(io_seconds(model) - before)

        def replay() -> None:
            replayed.append(replay_step(coordinator).io_s)

        for number in range(rounds + 2):
            for act in (train, replay) if number % 2 == 0 else (replay, train):
                act()
        # the first steps write to the file for the first time, and learn the order of units
        real, replayed = real[2:], replayed[2:]
        ratios = [ours / its for ours, its in zip(replayed, real, strict=True)]
        return {
            "weights": weights,
            "rounds": rounds,
            "real_io_s": statistics.median(real),
            "replayed_io_s": statistics.median(replayed),
            "ratio_of_medians": statistics.median(replayed) / statistics.median(real),
            "median_ratio": statistics.median(ratios),
            "real": real,
            "replayed": replayed,
        }
    finally:
        infinity.close(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--path", type=Path, default=Path("build"))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    results = []
    with tempfile.TemporaryDirectory(prefix="replay-", dir=options.path) as directory:
        for weights in ("nvme", "host"):
            found = measure(weights, Path(directory), options.rounds, Workload())
            results.append(found)
            print(
                f"weights {weights}: I/O of a real step {found['real_io_s']:.3f} s, replayed "
                f"{found['replayed_io_s']:.3f} s = {found['ratio_of_medians']:.2f}×",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
