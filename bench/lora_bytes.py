#!/usr/bin/env python3
"""Bytes that a step of LoRA moves per parameter of its frozen base on NVMe.

    python bench/lora_bytes.py --json build/lora.json
    python bench/lora_bytes.py --frozen nf4 --json build/lora-nf4.json      # the base in 4 bits, or int8
    python bench/lora_bytes.py --layers 12 --hidden 256      # a small model, to try the script itself

The base is read once for the forward and once for the backward, which recomputes. The two reads are 4 bytes per
parameter in bf16, less the weights that stay on the device between forward and backward. The base is never written. The
adapters are read and written, with their optimizer states. The script reports the disk traffic of the last step, as
infinity counts it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import infinity
from infinity.coordinator.registry import coordinator_of

sys.path.insert(0, str(Path(__file__).resolve().parent))

from peers.process import BENCH_DIR
from peers.report import machine_facts, write_result


def measure(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Return the bytes that the last step moved, per parameter of the base."""
    torch.manual_seed(0)
    sizes = {"hidden_size": args.hidden, "intermediate_size": 11 * args.hidden // 4, "num_hidden_layers": args.layers}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=8 * args.hidden, num_attention_heads=args.hidden // 64, **sizes))
    base.bfloat16().save_pretrained(directory / "base")
    nbytes = sum(parameter.nbytes for parameter in base.parameters())
    del base
    config: dict[str, Any] = {
        "frozen": args.frozen,
        "weights": "nvme",
        "optimizer": "nvme",
        "activations": "recompute",
        "memory": {"device": int(nbytes * args.device)},
        "nvme": {"paths": [str(directory / "swap")]},
        "commit_every": 0,
    }
    model: Any = infinity.load_pretrained(directory / "base", config, defer=True)
    model = get_peft_model(model, LoraConfig(r=args.rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    began = time.monotonic()
    infinity.offload(model, config)
    loaded_s = time.monotonic() - began
    optim = infinity.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-4)
    ids = torch.randint(0, 8 * args.hidden, (1, args.tokens))
    counted: list[tuple[int, int]] = []
    for _ in range(args.steps):
        model(input_ids=ids, labels=ids).loss.backward()
        optim.step()
        optim.zero_grad()
        infinity.synchronize(model)
        found = infinity.statistics(model)
        counted.append((found.read_bytes, found.written_bytes))
    layout = coordinator_of(model).plan.layout
    infinity.close(model)
    frozen = layout.numel - layout.trainable_numel
    read, written = (after - before for before, after in zip(counted[-2], counted[-1], strict=True))
    trained = [group for unit in layout.units for group in unit.groups if group.group.trainable]
    encoded = [group for unit in layout.units for group in unit.groups if group.group.codec]
    encoded_numel = sum(spec.numel for group in encoded for spec in group.group.specs)
    of_adapters = sum(state.nbytes for group in trained for state in (group.weight, *group.states.values()))
    return {
        "frozen_parameters": frozen,
        "adapter_parameters": layout.trainable_numel,
        "read_bytes_per_parameter": read / frozen,
        "written_bytes_per_parameter": written / frozen,
        "adapters_and_states_per_parameter": of_adapters / frozen,
        "encoded_parameters": encoded_numel,
        "encoded_bytes_per_parameter": layout.encoded_bytes / encoded_numel if encoded_numel else None,
        "loaded_s": loaded_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--frozen", choices=("bf16", "int8", "nf4"), default="bf16")
    parser.add_argument(
        "--device", type=float, default=0.375, help="memory.device, as a share of the bytes of the base in bf16"
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    parser.add_argument("--swap-dir", type=Path, default=BENCH_DIR.parent / "build" / "bench-swap")
    args = parser.parse_args()
    args.swap_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.swap_dir) as directory:
        result = measure(args, Path(directory))
    print(
        f"{result['frozen_parameters'] / 1e6:.0f} M frozen parameters, {result['adapter_parameters'] / 1e6:.1f} M of "
        f"adapters: {result['read_bytes_per_parameter']:.2f} B read and {result['written_bytes_per_parameter']:.2f} B "
        f"written per frozen parameter and step; the adapters with their states are "
        f"{result['adapters_and_states_per_parameter']:.2f} B of that"
    )
    if result["encoded_parameters"]:
        print(
            f"{result['encoded_parameters'] / 1e6:.0f} M of them rest as {args.frozen}: twice "
            f"{result['encoded_bytes_per_parameter']:.4f} B; encoded and written in {result['loaded_s']:.1f} s"
        )
    if args.json:
        facts = {"machine": machine_facts(args.swap_dir), "options": vars(args) | {"json": None, "swap_dir": None}}
        write_result(args.json, facts | result, {BENCH_DIR.parent: "CHECKOUT"})


if __name__ == "__main__":
    main()
