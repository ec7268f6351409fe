#!/usr/bin/env python3
"""Cost per parameter at three model sizes: seconds per parameter and token, and bytes moved per parameter.

    python bench/cost_per_parameter.py --json build/cost.json --plot build/cost.png
    python bench/cost_per_parameter.py --sizes 0.02e9 0.04e9 --limit 1.5GB --steps 3     # to try the script

Each size is a run of bench/large_model.py: a model is loaded, trained and saved under a memory limit, with the same
number of tokens per step for all sizes. --limit is the limit of the largest model. The limit of a smaller model, less
the interpreter's memory, is in proportion to the model's parameters. If all models had the same limit, a small model
would keep its gradients and states in memory and move fewer bytes, and equal costs would say nothing about offloading.
A few blocks and the activations need a minimum of memory, so the limit of the smallest models is a little larger.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from large_models.command_line import add_options, run_main, training_of, write
from large_models.training import limit_in_proportion, train
from peers.report import format_table


def cost(result: dict[str, Any]) -> dict[str, float]:
    """Return the cost of one size. The seconds do not include the first step, which learns the order of units."""
    parameters = result["input_bytes"] // 2
    seconds = statistics.median(step["seconds"] for step in result["steps"][1:] or result["steps"])
    tokens = result["training"]["batch"] * result["training"]["tokens"]
    return {
        "parameters": parameters,
        "tokens": tokens,
        "step_s": seconds,
        "ns_per_parameter_and_token": 1e9 * seconds / parameters / tokens,
        "ns_per_parameter": 1e9 * seconds / parameters,
        "bytes_per_parameter": result["report"]["bytes_per_parameter"],
        "limit_bytes": result["memory"]["limit_bytes"],
        "peak_anonymous_bytes": result["memory"]["peak_anonymous_bytes"],
    }


def table(costs: Sequence[dict[str, float]]) -> str:
    """Return a table with a row per size. The last column of the table is the cost relative to the smallest size."""
    header = ("parameters", "limit", "not reclaimable", "s/step", "ns/(param·token)", "B/param", "cost / smallest's")
    first = costs[0]["ns_per_parameter_and_token"]
    return format_table(
        header,
        [
            (
                f"{row['parameters'] / 1e9:.3f} B",
                f"{row['limit_bytes'] / 1e9:.2f} GB",
                f"{row['peak_anonymous_bytes'] / 1e9:.2f} GB",
                f"{row['step_s']:.2f}",
                f"{row['ns_per_parameter_and_token']:.4f}",
                f"{row['bytes_per_parameter']:.2f}",
                f"{row['ns_per_parameter_and_token'] / first:.2f}",
            )
            for row in costs
        ],
    )


def plot(costs: Sequence[dict[str, float]], path: Path) -> None:
    """Write a PNG that shows both costs by size. Raises OSError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    sizes = [row["parameters"] / 1e9 for row in costs]
    for axes, key, label in (
        (left, "ns_per_parameter_and_token", "ns per parameter and token"),
        (right, "bytes_per_parameter", "bytes moved per parameter and step"),
    ):
        axes.plot(sizes, [row[key] for row in costs], marker="o")
        axes.set_xscale("log")
        axes.set_xticks(sizes, [f"{size:.2g}" for size in sizes])
        axes.minorticks_off()
        axes.set_xlabel("parameters, 10⁹")
        axes.set_ylabel(label)
        axes.set_ylim(0, 1.1 * max(row[key] for row in costs))
        axes.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", type=float, nargs="+", default=[0.2e9, 0.7e9, 2e9], help="smallest numbers of parameters"
    )
    parser.add_argument("--plot", type=Path, help="write a PNG to this file")
    add_options(parser)
    options = parser.parse_args()
    sizes = sorted(options.sizes)
    numel = {size: training_of(options, size, options.limit).workload.numel for size in sizes}
    results = []
    for size in sizes:
        limit = limit_in_proportion(options.limit, numel[size], numel[sizes[-1]])
        results.append(train(training_of(options, size, limit), options.scratch.resolve(), keep=options.keep))
        print(table([cost(results[-1])]), flush=True)
    costs = [cost(result) for result in results]
    print(f"\n{table(costs)}")
    write({"costs": costs, "runs": results}, options)
    if options.plot:
        plot(costs, options.plot)


if __name__ == "__main__":
    run_main(main)
