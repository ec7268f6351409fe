#!/usr/bin/env python3
"""Seconds and peak memory of the loss over a large vocabulary, with and without the complete logits in memory.

    python bench/chunked_loss.py --json build/chunked-loss.json        # 8,192 tokens, 128 k words, hidden 512
    python bench/chunked_loss.py --tokens 2048 --rounds 3              # a short run

| contender | what it is |
|---|---|
| whole | torch: `cross_entropy(linear(hidden, weight).float(), labels)` |
| chunked | infinity.chunked_cross_entropy |

Each measurement is a forward and a backward in a separate process, so that the peak memory is that of one measurement.
`above` is the peak minus the memory that the process had before. For both contenders this difference includes the
gradients of the hidden states and of the head. Quote the ratios.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from peers.report import format_table, machine_facts, write_result

_CHECKOUT = Path(__file__).resolve().parent.parent
CONTENDERS = ("whole", "chunked")


def turn(contender: str, tokens: int, vocabulary: int, hidden: int, dtype: str) -> dict[str, float]:
    """Run one loss, forward and backward. Must be called in a separate process."""
    import torch
    from torch.nn import functional

    from infinity.runtime.cross_entropy import chunked_cross_entropy

    generator = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)
    states = torch.randn(tokens, hidden, generator=generator).to(kind).requires_grad_()
    weight = (torch.randn(vocabulary, hidden, generator=generator) / hidden**0.5).to(kind).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    functional.linear(states[:64], weight[:64]).sum().backward()  # this first run lets torch allocate its workspaces
    states.grad = weight.grad = None
    before, began = _peak_bytes(), time.perf_counter()
    if contender == "whole":
        loss = functional.cross_entropy(functional.linear(states, weight).float(), labels)
    else:
        loss = chunked_cross_entropy(states, weight, labels)
    loss.backward()
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "above_bytes": _peak_bytes() - before, "loss": loss.item()}


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tokens", type=int, default=8192)
    add("--vocabulary", type=int, default=128_000)
    add("--hidden", type=int, default=512)
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    add("--rounds", type=int, default=3)
    add("--json", type=Path, help="write all measurements to this file")
    add("--turn", choices=CONTENDERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    shape = {name: getattr(args, name) for name in ("tokens", "vocabulary", "hidden", "dtype")}
    if args.turn:
        print(json.dumps(turn(args.turn, **shape)))
        return
    options = [part for name, value in shape.items() for part in (f"--{name}", str(value))]
    rounds: list[dict[str, dict[str, Any]]] = []
    for number in range(args.rounds):
        order = CONTENDERS if number % 2 == 0 else CONTENDERS[::-1]
        found = {}
        for contender in order:
            command = [sys.executable, __file__, *options, "--turn", contender]
            found[contender] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        rounds.append(found)
        print("  ".join(f"{name} {each['seconds']:.2f} s" for name, each in found.items()), flush=True)
    summary = {
        name: {key: statistics.median(each[name][key] for each in rounds) for key in ("seconds", "above_bytes", "loss")}
        for name in CONTENDERS
    }
    ratio = statistics.median(each["chunked"]["seconds"] / each["whole"]["seconds"] for each in rounds)
    itemsize = 2 if args.dtype == "bfloat16" else 4
    gradients = itemsize * args.hidden * (args.tokens + args.vocabulary)
    print(
        f"\n{args.tokens} tokens, {args.vocabulary} words, hidden {args.hidden}, {args.dtype}; "
        f"seconds, chunked / whole: {ratio:.2f}"
    )
    print(
        format_table(
            ("contender", "s", "peak above, GB", "of it gradients, GB", "loss"),
            [
                (
                    name,
                    f"{row['seconds']:.2f}",
                    f"{row['above_bytes'] / 1e9:.2f}",
                    f"{gradients / 1e9:.2f}",
                    f"{row['loss']:.6f}",
                )
                for name, row in summary.items()
            ],
        )
    )
    if args.json:
        result = {"machine": machine_facts(_CHECKOUT), **shape, "ratio": ratio, "summary": summary, "rounds": rounds}
        write_result(args.json, result, {_CHECKOUT: "<checkout>"})


if __name__ == "__main__":
    main()
