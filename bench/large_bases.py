"""Predicted steps of LoRA on two large mixtures in the forms in which they are published, as a table. Nothing is
measured.

The configs are those of the published models. The machine is `consumer` of `infinity plan`, with one to four of its
drives, each large enough.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from infinity.cli.planning.machines import MACHINES
from infinity.cli.planning.main import on_machine
from infinity.cli.planning.model import adapt, build
from infinity.cli.planning.plan_report import duration
from infinity.cli.planning.scenario import PlanScenario
from infinity.config import load_config
from infinity.plan.disk import DiskLimits
from infinity.runtime.experts import cut_banks
from infinity.state.training_step import BatchShape

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MODELS: dict[str, dict[str, Any]] = {
    "DeepSeek-V3, FP8": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129280,
        "quantization_config": FP8,
    },
    "gpt-oss-120b, MXFP4": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
        "quantization_config": {"quant_method": "mxfp4"},
    },
}
DRIVES = (1, 2, 4)
BATCHES = ((1, 4096, 1), (1, 4096, 8))
"""Sequences of a micro-batch, their tokens, and vertical micro-batches."""


def cells(name: str, batch: tuple[int, int, int], *, experts: bool) -> list[str]:
    """Return the parameters, RAM, bytes on drives, and the time of a step by number of drives."""
    sequences, tokens, micro_batches = batch
    found: list[str] = []
    for drives in DRIVES:
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps(MODELS[name]))
            model = build(directory, torch.bfloat16)
        adapt(model, 16, experts=experts)
        one = MACHINES["consumer"]
        machine = replace(
            one,
            disks=drives,
            disk_read=drives * one.disk_read,
            disk_write=drives * one.disk_write,
            disk_bytes=2 * 10**12,
        )
        given = {"weights": "auto", "optimizer": "auto", "commit_every": 0}
        given |= {"vertical": True} if micro_batches > 1 else {}
        swap = on_machine(machine, load_config(given))
        cut_banks(model, swap.experts)
        outcome = PlanScenario(
            model=model,
            config=swap,
            machine=machine,
            disks=DiskLimits(machine.disk_bytes),
            device=torch.device("cuda", 0),
            batch=BatchShape(sequences, tokens, micro_batches),
        ).outcome()
        if not found:
            plan = outcome.plan
            fits = "" if outcome.activations_fit else " (activations do not fit)"
            found += [
                f"{sum(each.numel() for each in model.parameters()) / 1e9:,.0f} B",
                f"{plan.host_bytes / 2**30:.1f} GiB",
                f"{plan.layout.swap.nbytes / 1e9:,.0f} GB{fits}",
            ]
        found.append(f"{duration(outcome.prediction.seconds)}, {outcome.prediction.bound}")
    return found


def main() -> None:
    drives = " | ".join(f"a step with {each} drive{'s' * (each > 1)}" for each in DRIVES)
    print(f"| base, adapters | tokens per step | parameters | RAM | on drives | {drives} |")
    print("|---" * (5 + len(DRIVES)) + "|")
    for name in sys.argv[1:] or MODELS:
        for batch in BATCHES:
            for experts in (False, True):
                adapters = "attention and experts" if experts else "attention"
                row = [
                    f"{name}, {adapters}",
                    f"{batch[0] * batch[1] * batch[2]:,}",
                    *cells(name, batch, experts=experts),
                ]
                print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
