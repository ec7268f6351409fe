"""Time of a training step with states in each placement, compared with torch with an fp32 master: JSON lines and a
table.

    bench/gpu_step.py                                           1.24 B Llama shapes, 4 × 2048 tokens, on a GPU
    bench/gpu_step.py --device cpu --layers 2 --hidden 64 --intermediate 128 --heads 4 --kv-heads 2 --vocabulary 256 \\
      --batch 1 --tokens 32                                     the same code on the CPU; the times mean nothing

Every contender is a separate process. The contenders run one after the other: at the same time they would compete for
the GPU's memory and slow down each other's asynchronous updates. Each contender makes warm-up steps and then measured
steps, whose time includes the wait for the last update.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu.steps import CONTENDERS, LLAMA, Plan, run_contenders, table


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    for name in ("layers", "hidden", "intermediate", "heads", "kv_heads", "vocabulary", "batch", "tokens"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(LLAMA, name))
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--work", type=Path, default=Path("build/gpu-work"), help="for swap files and logs")
    parser.add_argument("--traces", type=Path, help="folder for a torch.profiler trace of one step of each contender")
    parser.add_argument("--seconds", type=float, default=1800.0, help="time for all contenders")
    return parser


def main() -> int:
    options = build_parser().parse_args()
    import torch

    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no CUDA device; --device cpu runs the same code", file=sys.stderr)
        return 2
    shape = {name: getattr(options, name) for name in vars(LLAMA) if hasattr(options, name)}
    options.work.mkdir(parents=True, exist_ok=True)
    if options.traces:
        options.traces.mkdir(parents=True, exist_ok=True)
    plan = Plan(
        replace(LLAMA, **shape),
        device,
        options.warmups,
        options.steps,
        options.work.resolve(),
        options.traces.resolve() if options.traces else None,
        options.seconds,
        options.contenders,
    )
    rows = []
    for row in run_contenders(plan):
        rows.append(row)
        print(json.dumps(row), flush=True)
    print(table(rows), file=sys.stderr)
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
