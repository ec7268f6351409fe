#!/usr/bin/env python3
"""What each of N ranks keeps and moves, by the plan alone: nothing is measured, and no model is made.

    python bench/ranks.py                            # 13 B on 64 ranks, 1 T on 512
    python bench/ranks.py --model 13B --ranks 1 2 4 64

Beside our bytes stand those of ZeRO (arXiv 1910.02054, table 1): 16 B per parameter of mixed-precision Adam, cut by the
stage. Ours are 12 B with split16 (arXiv 2104.07857 has 20 B with gradients in fp32, which here wait in RAM for the
update only).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from infinity.config import load_config
from infinity.plan.plan import Plan
from infinity.plan.planner import make_plan
from infinity.plan.problem import Peers
from infinity.state.discover import discover
from infinity.state.shard import Cut, slices_of
from infinity.state.unit import Unit

MODELS: dict[str, dict[str, Any]] = {
    "13B": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
    "1T": {"hidden_size": 25600, "intermediate_size": 69120, "num_hidden_layers": 126, "num_attention_heads": 160},
}
VOCABULARY = 32000
ON_MACHINE = 8
GIB = 1 << 30
DISK_RATE = 6e9
"""Bytes per second of each rank's disk, half read and half written: the middle of a PCIe 4 drive's data sheet."""
FLOPS = 4.5e14
"""Per second and device, of dense bf16: 0.45 of an H100's peak."""


@dataclass(frozen=True)
class Row:
    """One rank of a job: the one with the most.

    Attributes:
        parameters: of the model.
        slice_numel: parameters that the rank keeps, with what rounding up gives it.
        padding: of the whole job, elements that slots have beyond the parameters, as a share.
        state_bytes, weight_bytes: that the rank keeps, wherever they rest.
        paper_bytes: what ZeRO-3 keeps per rank by its paper, 16 B per parameter.
        moved_bytes: of a step, read and written on the rank's disk.
        io_s: seconds of it.
        tokens: per device and step, from which on computing takes longer than the disk.
    """

    model: str
    ranks: int
    parameters: int
    slice_numel: int
    padding: float
    weight_bytes: int
    state_bytes: int
    paper_bytes: float
    moved_bytes: int
    io_s: float
    tokens: float


def units_of(name: str) -> tuple[Unit, ...]:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **MODELS[name]))
    return discover(model.to(torch.bfloat16)).units


def plan_of(units: tuple[Unit, ...], count: int, index: int) -> Plan:
    memory = {"device": 64 * GIB, "host": 96 * GIB * min(count, ON_MACHINE)}
    config = load_config(
        {
            "weights": "nvme",
            "optimizer": "nvme",
            "gradients": "host",
            "overlap": "off",
            "commit_every": 0,
            "memory": memory,
            "nvme": {"paths": ["/tmp/never-made"]},
        }
    )
    peers = Peers(Cut(count, index), min(count, ON_MACHINE), together=count > 1)
    return make_plan(units, config, torch.device("cuda"), can_recompute=True, accumulation_steps=1, peers=peers)


def row_of(name: str, units: tuple[Unit, ...], count: int) -> Row:
    made = plan_of(units, count, 0)  # rank 0 never has less than another
    numel = sum(unit.numel for unit in units)
    kept = sum(end - begin for unit in units for group in unit.groups for begin, end in slices_of(group.numel, count))
    io_s = made.forecast.step_bytes / DISK_RATE
    return Row(
        model=name,
        ranks=count,
        parameters=numel,
        slice_numel=made.layout.numel,
        padding=kept / numel - 1,
        weight_bytes=made.layout.weight_bytes,
        state_bytes=made.layout.state_bytes,
        paper_bytes=16 * numel / count,
        moved_bytes=made.forecast.step_bytes,
        io_s=io_s,
        tokens=io_s * FLOPS / (8 * numel),  # forward, recomputation, and backward twice: 2 FLOP per parameter each
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help="default: 13B on 64 ranks, 1T on 512")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 64])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    jobs = [(args.model, count) for count in args.ranks] if args.model else [("13B", 64), ("1T", 512)]
    units = {name: units_of(name) for name, _ in jobs}
    rows = [row_of(name, units[name], count) for name, count in jobs]
    print("model ranks  parameters   per rank: slice   weights    states  ZeRO-3's 16 B  I/O per step  seconds  tokens")
    for row in rows:
        print(
            f"{row.model:>5} {row.ranks:5} {row.parameters / 1e9:9.1f} B {row.slice_numel / 1e9:13.3f} B"
            f" {row.weight_bytes / 1e9:7.2f} GB {row.state_bytes / 1e9:7.2f} GB {row.paper_bytes / 1e9:11.2f} GB"
            f" {row.moved_bytes / 1e9:10.2f} GB {row.io_s:8.2f} {row.tokens:7.0f}"
        )
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
