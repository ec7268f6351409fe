"""Check of the demo, with five lines of results: memory, learning, bytes, speed, and that nothing was lost."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open

from infinity import load_config
from infinity.checkpoint.generation import newest_stored_generation, open_stores
from infinity.sizes import format_bytes

CONFIG = "examples/demo.yaml"


def equal_tensors(output: Path, swap: Path, step: int) -> int:
    """Return how many tensors of the saved model equal, bit for bit, the tensors of a step's generation.

    Every byte of the generation is read and compared with its checksums. Raises ValueError for a tensor that differs.
    """
    with open_stores([swap]) as stores, safe_open(output / "model.safetensors", framework="pt") as saved:
        generation = newest_stored_generation(stores, step)
        names = set(saved.keys())
        count = len(names)
        for name in [name for of_unit in generation.shapes() for name in of_unit]:
            weight = generation.weight(name)
            if not torch.equal(weight.view(torch.uint8), saved.get_tensor(name).view(torch.uint8)):
                raise ValueError(f"{name} of the saved model has other values than {name} of step {step} in {swap}")
            names.remove(name)
    if names:
        raise ValueError(f"the generation of step {step} has no {', '.join(sorted(names))}")
    return count


def main() -> int:
    output, swap = Path(sys.argv[1]), Path(sys.argv[2])
    report = json.loads((output / "report.json").read_text())
    steps, first, last = report["steps"], report["first_loss"], report["last_loss"]
    memory = load_config(CONFIG).memory
    if not last < 0.8 * first:
        print(f"error: the loss did not fall clearly: {first:.2f} → {last:.2f}", file=sys.stderr)
        return 1
    try:
        tensors = equal_tensors(output, swap, steps)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    budgets = f"{format_bytes(memory.device)} on the device + {format_bytes(memory.host)} of RAM"
    moved, planned = report["bytes_per_parameter"], report["planned_bytes_per_parameter"]
    last_lines = (
        ("memory", f"{format_bytes(report['state_bytes'])} of model states were trained within budgets of {budgets}"),
        ("loss", f"{first:.2f} → {last:.2f} in {steps} steps"),
        ("bytes", f"{moved:.1f} were moved per parameter and step; the plan predicted at most {planned:.1f}"),
        (
            "speed",
            f"{report['step_s']:.2f} s per step: {report['efficiency']:.0%} of the speed that the "
            "slower of disk and processor "
            "allows",
        ),
        (
            "nothing lost",
            f"all {tensors} tensors of the saved model have the same bits as step {steps} in the store; "
            "plain transformers computes the same "
            "logits with the saved model as the trained model",  # make ran `--verify-output` before
        ),
    )
    print()
    for name, text in last_lines:
        print(f"{name:<14}{text}")
    print("\nTry next:")
    print(
        f"  .venv/bin/infinity generate --model {output} --config {CONFIG} --raw --prompt 'def main(' --temperature 0.8"
    )
    print(f"  .venv/bin/infinity finetune --resume {swap} --steps {steps + 20} --output {output.parent}/longer")
    return 0


if __name__ == "__main__":
    sys.exit(main())
