"""A training step on a GPU with its states in each tier, beside plain torch, taking turns; JSON lines and a table.

python bench/gpu_step.py --layers 16 --hidden 2048 --tokens 2048 --swap build/bench-swap
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import infinity


def build(arguments: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    config = transformers.LlamaConfig(
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 11 // 4 // 64 * 64,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=arguments.hidden // 64,
        vocab_size=8192,
    )
    model = transformers.LlamaForCausalLM(config).train()
    torch.set_default_dtype(torch.float32)
    return model


def contender(name: str, arguments: argparse.Namespace) -> tuple[Any, Any]:
    """(model, optimizer) of 'torch', or of infinity with weights-optimizer tiers such as 'host-nvme'."""
    model = build(arguments)
    if name == "torch":
        model.cuda().gradient_checkpointing_enable()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    weights, optimizer = name.split("-")
    config = {
        "weights": weights,
        "optimizer": optimizer,
        "activations": "recompute",
        "nvme": {"paths": [str(arguments.swap / name)]},
    }
    model = infinity.offload(model, config)
    return model, infinity.AdamW(model.parameters(), lr=1e-4, max_grad_norm=1.0)


def step(model: Any, optim: Any, ids: torch.Tensor) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    model(input_ids=ids, labels=ids).loss.backward()
    if isinstance(optim, torch.optim.AdamW):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optim.step()
    optim.zero_grad()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--swap", type=Path, default=Path("build/bench-swap"))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure", file=sys.stderr)
        return 1
    names = ["torch", "device-host", "host-host", "host-nvme", "nvme-nvme"]
    arguments.swap.mkdir(parents=True, exist_ok=True)
    contenders = {name: contender(name, arguments) for name in names}
    ids = torch.randint(0, 8192, (1, arguments.tokens), device="cuda")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_index in range(arguments.rounds + 2):
        for name, (model, optim) in contenders.items():
            took = step(model, optim, ids)
            if round_index >= 2:
                seconds[name].append(took)
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name, (model, _) in contenders.items():
        row: dict[str, Any] = {"contender": name, "median_s": statistics.median(seconds[name]), "all_s": seconds[name]}
        if name != "torch":
            counted = infinity.statistics(model)
            row["bytes_per_parameter"] = (counted.read_bytes + counted.written_bytes) / counted.steps / counted.numel
            row["fetch_wait_s"] = counted.fetch_wait_s / counted.steps
            row["update_s"] = counted.update_s / counted.steps
            infinity.close(model)
        print(json.dumps(row | machine))
    return 0


if __name__ == "__main__":
    sys.exit(main())
