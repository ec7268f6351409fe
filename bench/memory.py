"""Peak memory of loading, training and saving a model whose states do not fit the budgets.

A first process makes the checkpoint. A second process loads the model, trains and saves. The second process reports its
peak RSS minus the memory of the interpreter with torch and transformers. With --cgroup (root, cgroup v1) the second
process also runs under a memory limit equal to the allowed memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

GIB = 1 << 30


def make(directory: Path, layers: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1536,
        intermediate_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=24,
        num_key_value_heads=24,
        vocab_size=8192,
        max_position_embeddings=1024,
    )
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(config).save_pretrained(directory)


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def train(arguments: argparse.Namespace) -> None:
    import torch
    import transformers
    from transformers.models.llama import modeling_llama  # noqa: F401  what every user of a Llama has imported

    import infinity

    transformers.logging.set_verbosity_error()
    baseline = rss()
    config = {
        "weights": "nvme",
        "optimizer": "nvme",
        "activations": "recompute",
        "memory": {"device": arguments.device_budget, "host": arguments.host_budget},
        "nvme": {"paths": [str(arguments.work / "swap")]},
        "commit_every": 0,
    }
    model = infinity.load_pretrained(arguments.work / "checkpoint", config)
    after_load = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    optim = infinity.AdamW(model.parameters(), lr=1e-4, max_grad_norm=1.0)
    ids = torch.randint(0, 8192, (1, arguments.tokens), generator=torch.Generator().manual_seed(0))
    losses, peaks, seconds = [], [], []
    for _ in range(arguments.steps):
        began = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - baseline)
    statistics = infinity.statistics(model)
    infinity.save_pretrained(model, arguments.work / "saved", max_shard_size="1GB")
    infinity.close(model)
    budgets = statistics.plan.budgets.limits.device + statistics.plan.budgets.limits.host
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - baseline
    result = {
        "parameters": statistics.numel,
        "state_GiB": statistics.state_bytes / GIB,
        "budgets_GiB": budgets / GIB,
        "interpreter_GiB": baseline / GIB,
        "peak_GiB": peak / GIB,
        "peak_over_budgets": peak / budgets,
        "peak_after_load_GiB": (after_load - baseline) / GIB,
        "peak_after_each_step_GiB": [round(value / GIB, 3) for value in peaks],
        "seconds": [round(value, 2) for value in seconds],
        "losses": [round(value, 4) for value in losses],
        "bytes_per_parameter_and_step": (statistics.read_bytes + statistics.written_bytes)
        / statistics.steps
        / statistics.trainable_numel,
    }
    print(json.dumps(result, indent=2))


def in_cgroup(limit_bytes: int, command: list[str]) -> int:
    """Run a command under a cgroup v1 memory limit."""
    group = Path("/sys/fs/cgroup/memory") / f"infinity-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        join = f"echo $$ > {group}/cgroup.procs && exec " + " ".join(command)
        code = subprocess.run(["bash", "-c", join], check=False).returncode
        peak = int((group / "memory.max_usage_in_bytes").read_text())
        print(f"limit {limit_bytes / GIB:.2f} GiB, exit code {code}")
        print(f"the group's peak, page cache included: {peak / GIB:.2f} GiB")
        return code
    finally:
        group.rmdir()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("build/bench-memory"))
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--device-budget", default="640MB")
    parser.add_argument("--host-budget", default="1360MB")
    parser.add_argument("--cgroup", type=float, help="also run under this many GiB (cgroup v1, root)")
    parser.add_argument("--part", choices=("make", "train"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part == "make":
        make(arguments.work / "checkpoint", arguments.layers)
        return 0
    if arguments.part == "train":
        train(arguments)
        return 0
    shutil.rmtree(arguments.work, ignore_errors=True)
    arguments.work.mkdir(parents=True)
    command = [sys.executable, *sys.argv]
    try:
        subprocess.run([*command, "--part", "make"], check=True)
        if arguments.cgroup:
            return in_cgroup(int(arguments.cgroup * GIB), [*command, "--part", "train"])
        return subprocess.run([*command, "--part", "train"], check=False).returncode
    finally:
        shutil.rmtree(arguments.work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
