#!/usr/bin/env python3
"""Loading, training and saving of a model under a memory limit.

The weights of the model alone would nearly fill the limit.

    python bench/large_model.py --json build/large-model.json        # 2 B parameters, 6 GB
    python bench/large_model.py --parameters 0.2e9 --limit 1.5GB     # a smaller one, to try the script

    python bench/large_model.py --parameters 3e9 --experts 64 --lora 16 --frozen nf4     # a mixture of experts

A Llama, or a mixture of experts, with random weights is written shard by shard, outside the limit. After that,
`infinity finetune` loads, trains and saves the model in a separate control group. The limit applies to all RAM of the
group, including the page cache, and there is no swap. The script needs root, and about 20 B of disk per parameter under
--scratch.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from large_models.command_line import add_options, run_main, training_of, write
from large_models.in_memory import seconds_in_memory
from large_models.training import train


def describe(result: dict[str, Any]) -> str:
    memory, report, steps = result["memory"], result["report"], result["steps"]
    losses = [step["loss"] for step in steps]
    seconds = statistics.median(step["seconds"] for step in steps[1:] or steps)
    rows = [
        *((None, line) for line in result["plan"]),
        ("limit", f"{memory['limit_bytes'] / 1e9:.2f} GB"),
        ("peak", f"{memory['peak_bytes'] / 1e9:.2f} GB, page cache included; {memory['oom_kills']} kills"),
        ("not reclaimable", f"{memory['peak_anonymous_bytes'] / 1e9:.2f} GB"),
        ("steps", f"{len(steps)}, {seconds:.2f} s each after the first, {steps[0]['seconds']:.2f} s"),
        ("of a step", f"{report['compute_s']:.2f} s without waiting; its I/O alone {report['io_bound_s']:.2f} s"),
        ("loss", f"{losses[0]:.4f} → {losses[-1]:.4f}"),
        ("moved", f"{report['bytes_per_parameter']:.2f} B per parameter and step"),
        ("load, train, save", f"{result['wall_s']:.0f} s"),
        ("saved", f"{result['saved_bytes'] / 1e9:.2f} GB of {result['input_bytes'] / 1e9:.2f} GB loaded"),
    ]
    return "\n".join(text if name is None else f"{name:<20}{text}" for name, text in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=2e9, help="smallest number of parameters (default 2e9)")
    add_options(parser)
    parser.add_argument(
        "--torch", action="store_true", help="then time the same step with plain torch in memory, without a limit"
    )
    options = parser.parse_args()
    training = training_of(options, options.parameters, options.limit)
    scratch = options.scratch.resolve()
    result = train(training, scratch, keep=options.keep)
    print(describe(result), flush=True)
    if options.torch:
        result["torch_step_s"] = seconds_in_memory(training, scratch / "torch.log")
        print(f"{'plain torch':<20}{result['torch_step_s']:.2f} s each, in memory")
    write(result, options)


if __name__ == "__main__":
    run_main(main)
