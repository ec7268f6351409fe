#!/usr/bin/env python3
"""Predictions of `infinity plan` compared with measurements: bytes and seconds of a step, for several models and
placements.

    python bench/plan_vs_measured.py --json build/plan-vs-measured.json
    python bench/plan_vs_measured.py --cases llama-nvme,llama-ram      # some of them

Each case is a process (two ranks: two processes) that offloads a model with random weights. The process makes some
unmeasured steps, and then five steps, each of which is timed. Before and after these five steps the process measures
the rates that the prediction needs. The disk's rate is measured by a replay, which moves a step's bytes without
computing; the CPU's rates are measured as in `infinity plan`. The prediction uses the mean of the two measurements of
each rate. Cases with several ranks use the rates of llama-nvme.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from peers.process import BENCH_DIR
from peers.report import format_table, machine_facts, write_result

_CHECKOUT = BENCH_DIR.parent
_WARMUP, _STEPS = 5, 5
_MIB = 1 << 20

MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 8192,
    },
    "qwen3": {
        "model_type": "qwen3", "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 20,
        "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32000,
        "tie_word_embeddings": True,
    },
    "gpt2": {
        "model_type": "gpt2", "n_embd": 1024, "n_layer": 12, "n_head": 16, "vocab_size": 16384, "n_positions": 1024,
    },
}  # fmt: skip
_NVME = {"weights": "nvme", "optimizer": "nvme"}
_RAM = {"weights": "host", "optimizer": "nvme"}
CASES: dict[str, dict[str, Any]] = {
    f"{model}-{name}": {"model": model, "config": config}
    for model in MODELS
    for name, config in (("nvme", _NVME), ("ram", _RAM))
} | {
    "llama-ranks": {"model": "llama", "config": _NVME, "ranks": 2},
    "llama-lora-nf4": {"model": "llama", "config": {**_NVME, "frozen": "nf4"}, "lora": 8},
    "llama-vertical": {"model": "llama", "config": {**_NVME, "vertical": True}, "micro_batches": 4},
    "llama-clipping": {"model": "llama", "config": _NVME, "clip": 0.01},
}
"""Cases by name: a model, keys of the swap config, and settings of the training that differ from the default."""


def memory_of(case: dict[str, Any], numel: int, blocks: int, ranks: int) -> dict[str, int]:
    """Return budgets.

    Device: three blocks. memory.host: fp32 gradients, half a GiB, and the weights whose home is RAM.
    """
    weights = 2 * numel if case["config"]["weights"] == "host" else 0
    return {"device": (6 * 2 * numel // blocks + 192 * _MIB) * ranks, "host": 4 * numel + weights + ranks * (512 << 20)}


def build(case: dict[str, Any], device: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    given = dict(MODELS[case["model"]])
    config = AutoConfig.for_model(given.pop("model_type"), **given, use_cache=False)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def child(case: dict[str, Any], directory: Path, known: dict[str, float]) -> dict[str, Any]:
    """Train, measure and predict. Args: known: rates that are given; these rates are not measured."""
    import torch

    import infinity
    from infinity.access.step_io_replay import replay_step
    from infinity.cli.planning.model import adapt
    from infinity.cli.planning.scenario import PlanScenario
    from infinity.config import load_config
    from infinity.coordinator.registry import coordinator_of
    from infinity.state.training_step import BatchShape

    ranks, micro_batches = case.get("ranks", 1), case.get("micro_batches", 1)
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    model = build(case, "cpu")
    vocabulary = model.get_input_embeddings().num_embeddings
    plain = build(case, "meta")
    numel, blocks = sum(p.numel() for p in plain.parameters()), plain.config.num_hidden_layers
    if case.get("lora"):
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=case["lora"], target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, lora, autocast_adapter_dtype=False)
        adapt(plain, case["lora"], experts=False)
    config = load_config(
        case["config"]
        | {
            "memory": memory_of(case, numel, blocks, ranks),
            "nvme": {"paths": [str(directory)]},
            "commit_every": 0,
            "activations": "recompute",
        }
    )
    passes = 1 if micro_batches == 1 or config.vertical else micro_batches
    infinity.offload(model, config, accumulation_steps=passes)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optim = infinity.AdamW(trained, lr=1e-5, max_grad_norm=case.get("clip"))
    length = 256
    ids = torch.randint(0, vocabulary, (1, length))

    def step() -> None:
        batches = [ids] * micro_batches
        if micro_batches > 1:
            infinity.backward(
                model,
                lambda each: model(input_ids=each, labels=each).loss / micro_batches,
                batches,
                vertical=config.vertical,
            )
        else:
            model(input_ids=ids, labels=ids).loss.backward()
        optim.step()
        optim.zero_grad()

    for _ in range(_WARMUP):
        step()
    rates = [_rates(config, plain, length, directory)]
    replays = [replay_step(coordinator_of(model))] if ranks == 1 else []  # a replay supports only one process
    step()
    infinity.synchronize(model)
    taken, before = [], infinity.statistics(model)
    for _ in range(_STEPS):
        began = time.perf_counter()
        step()
        taken.append(time.perf_counter() - began)
    infinity.synchronize(model)
    after = infinity.statistics(model)
    replays += [replay_step(coordinator_of(model))] if ranks == 1 else []
    rates.append(_rates(config, plain, length, directory))
    machine = replace(
        rates[0],
        **{name: (getattr(rates[0], name) + getattr(rates[1], name)) / 2 for name in ("dram", "flops", "decode")},
        adam={"fp32": (rates[0].adam["fp32"] + rates[1].adam["fp32"]) / 2},
    )
    if known:  # rates of the complete machine: ranks that measure at the same time would measure only their share
        machine = replace(machine, dram=known["dram"], flops=known["flops"], adam={"fp32": known["adam"]})
    rate = known.get("disk") or statistics.mean(
        (each.read_bytes + each.written_bytes) / each.seconds for each in replays
    )
    machine = replace(machine, disk_read=rate, disk_write=rate, disk_mixed=1.0)
    from infinity.plan.disk import disks_of

    scenario = PlanScenario(
        model=plain,
        config=config,
        machine=machine,
        disks=disks_of(config, ranks),
        device=torch.device("cpu"),
        batch=BatchShape(1, length, micro_batches),
        ranks=ranks,
        clips=case.get("clip") is not None,
    )
    outcome = scenario.outcome()
    infinity.close(model, discard=True)
    moved = outcome.prediction.moved
    return {
        "numel": numel,
        "seconds": {"predicted": outcome.prediction.seconds, "measured": statistics.median(taken), "steps": taken},
        "bytes": {
            "predicted": moved.read_bytes + moved.written_bytes,
            "measured": (after.read_bytes - before.read_bytes + after.written_bytes - before.written_bytes) / _STEPS,
        },
        "busy_s": dict(outcome.prediction.busy),
        "replay_s": [each.seconds for each in replays],
        "rates": {
            "disk": machine.disk_read,
            "adam": machine.adam["fp32"],
            "flops": machine.flops,
            "dram": machine.dram,
        },
    }


def _rates(config: Any, plain: Any, length: int, directory: Path) -> Any:
    import torch

    from infinity.plan.local_rates import local_machine
    from infinity.state.model_shape import widths

    width, inner = widths(plain)
    return local_machine(
        [directory], torch.device("cpu"), dtype=torch.bfloat16, width=width, inner=inner, tokens=length,
        frozen=config.frozen,
    )  # fmt: skip


def run(name: str, scratch: Path, known: dict[str, float]) -> dict[str, Any]:
    """Run the case in a process per rank; return rank 0's result.

    `known` are the rates to use if the case has several ranks.
    """
    ranks = CASES[name].get("ranks", 1)
    with tempfile.TemporaryDirectory(prefix=f"plan-{name}-", dir=scratch) as directory, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
        free.close()
        several = {"OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // ranks, 1))} if ranks > 1 else {}
        children = []
        for rank in range(ranks):
            of_rank = place | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
            children.append(
                subprocess.Popen(
                    [sys.executable, __file__, "--child", name, "--swap-dir", directory, "--known", json.dumps(known)],
                    env={**os.environ, **several, **(of_rank if ranks > 1 else {})},
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        said = [each.communicate()[0] for each in children]
        if any(each.returncode for each in children):
            raise SystemExit(f"{name} failed")
        found: dict[str, Any] = json.loads(said[0].splitlines()[-1])
        return found


def table(found: dict[str, dict[str, Any]]) -> str:
    header = (
        "case",
        "M parameters",
        "B predicted",
        "B measured",
        "ratio",
        "s predicted",
        "s measured",
        "ratio",
        "bound",
    )
    rows = []
    for name, each in found.items():
        nbytes, seconds = each["bytes"], each["seconds"]
        rows.append(
            (
                name,
                f"{each['numel'] / 1e6:.0f}",
                f"{nbytes['predicted'] / each['numel']:.2f}",
                f"{nbytes['measured'] / each['numel']:.2f}",
                f"{nbytes['predicted'] / nbytes['measured']:.3f}",
                f"{seconds['predicted']:.2f}",
                f"{seconds['measured']:.2f}",
                f"{seconds['predicted'] / seconds['measured']:.2f}",
                max(each["busy_s"], key=each["busy_s"].get),
            )
        )
    return format_table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="names, separated by commas; default: all")
    parser.add_argument("--swap-dir", type=Path, default=_CHECKOUT / "build" / "bench-swap")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--known", default="{}", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(CASES[args.child], args.swap_dir, json.loads(args.known))))
        return
    names = args.cases.split(",")
    if unknown := set(names) - set(CASES):
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    args.swap_dir.mkdir(parents=True, exist_ok=True)
    found = {}
    for name in names:
        several = CASES[name].get("ranks", 1) > 1
        if several and "llama-nvme" not in found:
            parser.error(f"{name} takes the machine's rates from llama-nvme: name that before it")
        found[name] = run(name, args.swap_dir, found["llama-nvme"]["rates"] if several else {})
        print(table({name: found[name]}).splitlines()[-1], flush=True)
    print(f"\n{table(found)}")
    if args.json:
        write_result(args.json, {"machine": machine_facts(args.swap_dir), "cases": found}, {_CHECKOUT: "<checkout>"})


if __name__ == "__main__":
    main()
