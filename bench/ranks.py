#!/usr/bin/env python3
"""Bytes that each of N ranks keeps and moves, according to the plan: nothing is measured, and no model is created.

    python bench/ranks.py                            # 13 B on 64 ranks, 1 T on 512
    python bench/ranks.py --model 13B --ranks 1 2 4 64

Each job has a row for ZeRO-3, hpZ and ZeRO-2 (ranks.gather: world, node, none). infinity's bytes are shown beside those
of ZeRO with mixed-precision Adam (arXiv 1910.02054, table 1). In ZeRO-3, ZeRO's bytes are 16 B per parameter, sharded
over the ranks. In ZeRO-2 they are 2 B of weights on each rank and 14 B sharded. infinity has 12 B with split16,
sharded, and the copies of weights that hpZ and ZeRO-2 keep. arXiv 2104.07857 has 20 B with gradients in fp32;
infinity's gradients are in RAM only until the update. hpZ is ZeRO-3 with a copy of 2 B on each machine (ZeRO++, arXiv
2306.10209, §3.2).
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
from infinity.errors import PlanError
from infinity.plan.plan import Plan
from infinity.plan.plan_input import PeerFacts
from infinity.plan.planner import make_plan
from infinity.state.discover import discover
from infinity.state.offload_arguments import OffloadArguments
from infinity.state.shard import RankPartition, slices_of
from infinity.state.unit import Unit

MODELS: dict[str, dict[str, Any]] = {
    "13B": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
    "1T": {"hidden_size": 25600, "intermediate_size": 69120, "num_hidden_layers": 126, "num_attention_heads": 160},
}
VOCABULARY = 32000
ON_MACHINE = 8
DEVICE_GIB = {"13B": 24, "1T": 80}
"""Device memory in GiB.

It is too small for slots for all weights of 13 B, because with such slots no weight would be gathered twice.
"""
STAGES = {"world": "ZeRO-3", "node": "hpZ", "none": "ZeRO-2"}
GIB = 1 << 30
DISK_RATE = 6e9
"""Bytes per second of each rank's disk, half read and half written: the middle of a PCIe 4 drive's data sheet."""
FLOPS = 4.5e14
"""FLOPs per second of dense bf16 products on one device: 0.45 of an H100's peak."""


@dataclass(frozen=True)
class Row:
    """One rank of a job: the rank that has the most bytes.

    Attributes:
        parameters: parameters of the model.
        slice_numel: parameters that the rank keeps, including those that rounding up adds.
        padding: elements of the job's slots beyond the parameters, as a share.
        gather: ranks that weights are gathered from after the first time in a step.
        state_bytes, weight_bytes: bytes that the rank keeps, in any tier.
        copies_bytes: bytes of the weights that the rank keeps in RAM for the ranks of G.
        paper_bytes: bytes that a rank keeps according to the papers.
        far_bytes, near_bytes: bytes of weights that are received from ranks of other machines, or of this machine, in a
            step with one forward and one backward pass.
        moved_bytes: bytes per step, read and written on the rank's disk.
        io_s: seconds for moved_bytes.
        tokens: smallest number of tokens per device and step with which computing takes longer than the disk.
    """

    model: str
    ranks: int
    gather: str
    parameters: int
    slice_numel: int
    padding: float
    weight_bytes: int
    state_bytes: int
    copies_bytes: int
    paper_bytes: float
    far_bytes: float
    near_bytes: float
    moved_bytes: int
    io_s: float
    tokens: float


def units_of(name: str) -> tuple[Unit, ...]:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **MODELS[name]))
    return discover(model.to(torch.bfloat16)).units


def near_of(count: int, gather: str) -> int:
    """Return the number of ranks of the gather group G."""
    return {"world": count, "node": min(count, ON_MACHINE), "none": 1}[gather]


def plan_of(name: str, units: tuple[Unit, ...], count: int, gather: str) -> Plan:
    memory = {"device": DEVICE_GIB[name] * GIB, "host": 96 * GIB * min(count, ON_MACHINE)}
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
    near = near_of(count, gather)
    peers = PeerFacts(
        RankPartition(count, 0),  # rank 0 has the most bytes of all ranks
        min(count, ON_MACHINE),
        sharded=count > 1,
        near=RankPartition(near, 0) if near < count else None,
    )
    return make_plan(
        units, OffloadArguments(config, torch.device("cuda"), accumulation_steps=1), can_recompute=True, peers=peers
    )


def row_of(name: str, units: tuple[Unit, ...], count: int, gather: str) -> Row:
    made = plan_of(name, units, count, gather)
    near, here = near_of(count, gather), min(count, ON_MACHINE)
    numel = sum(unit.numel for unit in units)
    kept = sum(end - begin for unit in units for group in unit.groups for begin, end in slices_of(group.numel, count))
    io_s = made.forecast.step_bytes / DISK_RATE
    weights, once = 2 * numel, 1 if near < count else 2  # number of gathers from all ranks in a step
    return Row(
        model=name,
        ranks=count,
        gather=gather,
        parameters=numel,
        slice_numel=made.layout.numel,
        padding=kept / numel - 1,
        weight_bytes=made.layout.weight_bytes,
        state_bytes=made.layout.state_bytes,
        copies_bytes=made.layout.arena.secondary,
        paper_bytes={"world": 16 / count, "node": 16 / count + 2 / near, "none": 2 + 14 / count}[gather] * numel,
        far_bytes=once * weights * (count - here) / count,
        near_bytes=once * weights * (here - 1) / count + (2 - once) * weights * (near - 1) / near,
        moved_bytes=made.forecast.step_bytes,
        io_s=io_s,
        tokens=io_s * FLOPS / (8 * numel),  # forward, recomputation, and backward twice: 2 FLOPs per parameter each
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help="default: 13B on 64 ranks, 1T on 512")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 64])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    jobs = [(args.model, count) for count in args.ranks] if args.model else [("13B", 64), ("1T", 512)]
    units = {name: units_of(name) for name, _ in jobs}
    rows = []
    print(f"{'':36}per rank, GB: kept{'':19}the papers'  a step: disk and ranks")
    print(
        f"model ranks{'':9}parameters   slice  weights  states  copies    sum   sum     disk     far    near  s  tokens"
    )
    for name, count in jobs:
        for gather, stage in STAGES.items():
            if near_of(count, gather) == count and gather != "world":
                continue  # this row would be the same as the row above
            try:
                row = row_of(name, units[name], count, gather)
            except PlanError as error:
                print(f"{name:>5} {count:5} {stage}: {str(error).split('. ')[0]}")
                continue
            rows.append(row)
            kept = row.weight_bytes + row.state_bytes + row.copies_bytes
            print(
                f"{name:>5} {count:5} {stage:7}{row.parameters / 1e9:9.1f} B {row.slice_numel / 1e9:8.3f} B"
                f"{row.weight_bytes / 1e9:8.2f}{row.state_bytes / 1e9:8.2f}{row.copies_bytes / 1e9:8.2f}"
                f"{kept / 1e9:7.2f}{row.paper_bytes / 1e9:7.2f}{row.moved_bytes / 1e9:8.2f}"
                f"{row.far_bytes / 1e9:8.1f}{row.near_bytes / 1e9:8.1f}{row.io_s:6.2f}{row.tokens:7.0f}"
            )
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
