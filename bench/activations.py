"""Peak memory and time of a step by where activations rest: on the device, on NVMe, or recomputed.

A Llama of 222 M parameters in fp32 has its weights and states in RAM, and computes on the CPU. Each configuration runs
in a process of its own; the configurations take turns. The peak is that of the memory of the process that the system
cannot take back, during the steps, minus that of the interpreter with torch and transformers. With --limit (root and
cgroup v1) each process also runs under a memory limit, which counts the interpreter, too. With --states nvme the
weights and states are on NVMe, as under such a limit.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

GIB = 1 << 30
CONFIGS = {
    "keep": {"activations": "keep", "recompute": "none"},
    "nvme": {"activations": "nvme", "recompute": "none"},
    "recompute": {"activations": "keep", "recompute": "blocks"},
    "recompute, nvme": {"activations": "nvme", "recompute": "blocks"},
}


def anonymous() -> int:
    """Return the bytes of this process that the system cannot take back without swapping."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return (int(fields["RssAnon"].split()[0]) + int(fields["RssShmem"].split()[0])) * 1024


def train(arguments: argparse.Namespace) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama import modeling_llama  # noqa: F401  what every user of a Llama has imported

    import infinity
    from infinity.coordinator import registry

    torch.manual_seed(0)
    shape = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=arguments.layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=8192,
        max_position_embeddings=1 << 17,
    )
    baseline = anonymous()
    model = LlamaForCausalLM(shape).train()
    config = {
        "weights": arguments.states,
        "optimizer": arguments.states,
        "gradients": "auto" if arguments.states == "nvme" else "host",
        "memory": {"device": arguments.device, "host": arguments.host},
        "nvme": {"paths": [str(arguments.work / "swap")]},
        "commit_every": 0,
        **CONFIGS[arguments.part],
    }
    model = infinity.offload(model, config)
    optim = infinity.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, 8192, (1, arguments.tokens), generator=torch.Generator().manual_seed(0))
    peak, ends = [0], threading.Event()

    def watch() -> None:
        while not ends.wait(0.01):
            peak[0] = max(peak[0], anonymous() - baseline)

    watcher = threading.Thread(target=watch)
    watcher.start()
    losses, seconds, processor, faults, waited = [], [], [], [], []
    for _ in range(arguments.steps):
        before, began = infinity.statistics(model), time.perf_counter()
        since = resource.getrusage(resource.RUSAGE_SELF)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        del loss
        optim.step()
        optim.zero_grad()
        infinity.synchronize(model)
        seconds.append(time.perf_counter() - began)
        waited.append(infinity.statistics(model).stall_s["activation"] - before.stall_s["activation"])
        until = resource.getrusage(resource.RUSAGE_SELF)
        processor.append(until.ru_utime + until.ru_stime - since.ru_utime - since.ru_stime)
        faults.append(until.ru_minflt - since.ru_minflt)
    ends.set()
    watcher.join()
    tier, plan = registry.coordinator_of(model).resources.activations, registry.coordinator_of(model).plan
    after = infinity.statistics(model)
    result = {
        "losses": losses,
        "seconds": seconds,
        "activation_s": waited,
        "processor_s": processor,
        "page_faults": faults,
        "peak_GiB": peak[0] / GIB,
        "budgets_GiB": (plan.budgets.limits.device + plan.budgets.limits.host) / GIB,
        "moved_GiB": 0 if tier is None else tier.moved_bytes / GIB / arguments.steps,
        "written_GiB": after.written_bytes / GIB / arguments.steps,
        "read_GiB": after.read_bytes / GIB / arguments.steps,
    }
    infinity.close(model)
    print(json.dumps(result))


def limited(limit: int, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command under a cgroup v1 memory limit without swap; 0: without a limit."""
    if not limit:
        return subprocess.run(command, check=False, capture_output=True, text=True)
    group = Path("/sys/fs/cgroup/memory") / f"infinity-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        join = f"echo $$ > {group}/cgroup.procs && exec " + " ".join(f"'{each}'" for each in command)
        return subprocess.run(["bash", "-c", join], check=False, capture_output=True, text=True)
    finally:
        group.rmdir()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("build/bench-activations"))
    parser.add_argument("--configs", nargs="+", default=list(CONFIGS), choices=list(CONFIGS))
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--states", choices=["host", "nvme"], default="host", help="tier of weights and states")
    parser.add_argument("--device", default="512MiB")
    parser.add_argument("--host", default="4GiB")
    parser.add_argument("--limit", type=float, default=0.0, help="memory limit in GiB")
    parser.add_argument("--part", choices=list(CONFIGS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        train(arguments)
        return 0
    found: dict[str, list[Any]] = {name: [] for name in arguments.configs}
    for _ in range(arguments.rounds):
        for name in arguments.configs:
            shutil.rmtree(arguments.work, ignore_errors=True)
            arguments.work.mkdir(parents=True)
            command = [sys.executable, *sys.argv, "--part", name]
            done = limited(int(arguments.limit * GIB), command)
            if done.returncode:
                print(
                    f"{name}: exit code {done.returncode}",
                    done.stderr[-400:] if done.returncode > 0 else "",
                    flush=True,
                )
            else:
                found[name].append(json.loads(done.stdout.splitlines()[-1]))
                print(f"{name}: {json.dumps(found[name][-1])}", flush=True)
    shutil.rmtree(arguments.work, ignore_errors=True)
    for name, runs in found.items():
        if runs:
            median = {
                key: statistics.median(each for run in runs for each in run[key][1:] or run[key])
                for key in ("seconds", "processor_s", "page_faults")
            }
            print(
                f"{name}: median step {median['seconds']:.2f} s with {median['processor_s']:.2f} s of processor time "
                f"and {median['page_faults']:.0f} page faults, peak {max(run['peak_GiB'] for run in runs):.2f} GiB"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
