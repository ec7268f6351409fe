#!/usr/bin/env python3
"""Rate of importing a frozen base from a bf16 checkpoint into the store in 4 or 8 bits, compared with the rate of
reading alone.

    python bench/frozen_ingest.py --json build/frozen-ingest.json
    python bench/frozen_ingest.py --layers 4 --hidden 512 --rounds 1        # a short run

`read` opens each shard and copies every tensor once. `ahead` reads in the same way, with the read-ahead advice that
infinity gives to the kernel. `bf16`, `int8` and `nf4` are `infinity.offload` of a model that was loaded with defer=True
and frozen except for its norms: every weight is read, encoded, and written to the store. Before each turn the
checkpoint is evicted from the page cache. Rates are bytes of the checkpoint per second. The model without values is
created before the clock starts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

import infinity
from infinity.base.page_advice import preload_pages

sys.path.insert(0, str(Path(__file__).resolve().parent))

from peers.process import BENCH_DIR
from peers.report import format_table, machine_facts, write_result

FORMS = ("bf16", "int8", "nf4")


def make_checkpoint(args: argparse.Namespace, directory: Path) -> int:
    """Write a Llama with random weights and return its size in bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=11 * args.hidden // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 64,
        vocab_size=4096,
    )
    model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory, max_shard_size="1GB")
    return sum(parameter.nbytes for parameter in model.parameters())


def forget(directory: Path) -> None:
    """Evict the files of a directory from the page cache."""
    for path in directory.iterdir():
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def read(directory: Path, *, ahead: bool) -> float:
    began = time.perf_counter()
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (a shard is no mapping)
                value = shard.get_tensor(name)
                if ahead:
                    preload_pages(value)
                value.clone()
    return time.perf_counter() - began


def ingest(directory: Path, swap: Path, form: str) -> float:
    config: dict[str, Any] = {
        "frozen": form,
        "weights": "nvme",
        "optimizer": "nvme",
        "commit_every": 0,
        "activations": "recompute",
        "memory": {"device": "512MiB", "host": "256MiB"},
        "nvme": {"paths": [str(swap)]},
    }
    model: Any = infinity.load_pretrained(directory, config, defer=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    began = time.perf_counter()
    infinity.offload(model, config)
    taken = time.perf_counter() - began
    infinity.close(model, discard=True)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    parser.add_argument("--swap-dir", type=Path, default=BENCH_DIR.parent / "build" / "bench-swap")
    args = parser.parse_args()
    args.swap_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.swap_dir) as scratch:
        directory = Path(scratch) / "checkpoint"
        nbytes = make_checkpoint(args, directory)
        taken: dict[str, list[float]] = {name: [] for name in ("read", "ahead", *FORMS)}
        for number in range(args.rounds):
            for form in ("read", "ahead", *(FORMS[(number + at) % len(FORMS)] for at in range(len(FORMS)))):
                forget(directory)
                alone = form in ("read", "ahead")
                seconds = (
                    read(directory, ahead=form == "ahead") if alone else ingest(directory, Path(scratch) / "swap", form)
                )
                taken[form].append(seconds)
            print("  ".join(f"{name} {each[-1]:.2f} s" for name, each in taken.items()), flush=True)
    ratios = {
        name: {
            by: statistics.median(alone / mine for alone, mine in zip(taken[by], each, strict=True))
            for by in ("read", "ahead")
        }
        for name, each in taken.items()
    }
    rows = [
        (
            name,
            f"{statistics.median(each):.2f}",
            f"{nbytes / statistics.median(each) / 1e9:.2f}",
            *(f"{ratio:.2f}" for ratio in ratios[name].values()),
        )
        for name, each in taken.items()
    ]
    print(f"\n{nbytes / 2e6:.0f} M parameters\n" + format_table(("what", "s", "GB/s", "of read", "of ahead"), rows))
    if args.json:
        facts = {"machine": machine_facts(args.swap_dir), "options": vars(args) | {"json": None, "swap_dir": None}}
        write_result(args.json, facts | {"bytes": nbytes, "seconds": taken, "of_reading": ratios}, {})


if __name__ == "__main__":
    main()
