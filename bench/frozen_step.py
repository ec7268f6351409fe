#!/usr/bin/env python3
"""Step time of LoRA on a frozen base on NVMe in bf16, 8 bits and 4 bits, with the disk at full speed and throttled.

    python bench/frozen_step.py --json build/frozen-step.json                    # as root: a cgroup throttles the disk
    python bench/frozen_step.py --layers 4 --hidden 512 --rounds 2 --systems bf16,nf4,processor       # a short run

| system | what it is |
|---|---|
| bf16, int8, nf4 | the form of the base on NVMe, which is read in forward and in backward |
| ...-throttled | the same, but the disk reads and writes 0.5 GB/s at most |
| processor | the base in RAM in bf16: a step only computes |
| ...-decoding | the base in RAM in that form: a step computes, and decodes at the same time |

The bound of a system is the largest of three times. The first is the time of `processor`. The second is the time in
which the system only reads and decodes. The third time, for a form that is decoded, is the time of decoding
alone: twice the parameters, at the rate that one thread reaches while nothing else runs. The embedding and the head are
in bf16, whatever the form of the base. Quote the ratios, which compare times of the same round; single times on a
shared machine mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from peers.process import BENCH_DIR, Worker
from peers.report import format_table, machine_facts, write_result
from peers.throttle import throttled
from peers.turns import started, with_replays
from peers.workload import Job, Workload

_CHECKOUT = BENCH_DIR.parent
_FORMS = ("bf16", "int8", "nf4")
_BLOCKS_ON_DEVICE = 3
SYSTEMS = (*_FORMS, *(f"{form}-throttled" for form in _FORMS), "processor", "nf4-decoding")


def job(system: str, workload: Workload, directory: Path) -> Job:
    form = system.partition("-")[0] if system != "processor" else "bf16"
    in_ram = system == "processor" or system.endswith("-decoding")
    blocks = _BLOCKS_ON_DEVICE * 2 * workload.numel // workload.layers
    options: dict[str, Any] = {
        "frozen": form,
        "weights": "host" if in_ram else "nvme",
        "optimizer": "host" if in_ram else "nvme",
        "overlap": "off" if in_ram else "auto",
        "memory": {"device": 2 * blocks, "host": (2 * workload.numel if in_ram else 0) + (1 << 30)},
    }
    return Job(workload, "" if in_ram else str(directory / system), options)


def decode_seconds(form: str, numel: int, threads: int) -> float:
    """Return the seconds of decoding `numel` elements to bf16 while nothing else runs: the median of five."""
    import torch

    from infinity import _native
    from infinity.state.codec import encode, encoded_bytes

    rows, columns = 256, 65536
    shape = torch.Size([rows, columns])
    values = torch.randn(shape, dtype=torch.bfloat16).reshape(-1)
    data = torch.zeros(encoded_bytes(form, shape), dtype=torch.uint8)  # type: ignore[arg-type]
    pool = _native.ThreadPool(threads)
    encode("", values, form, memoryview(data.numpy()), pool)  # type: ignore[arg-type]
    into = memoryview(torch.empty(values.numel(), dtype=torch.int16).numpy())
    taken = []
    for _ in range(6):
        began = time.perf_counter()
        _native.decode_weights(memoryview(data.numpy()), form, shape.numel(), columns, into, "bf16", pool)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:]) / shape.numel() * numel


def summarise(rounds: list[dict[str, dict[str, Any]]], numel: int, decoding: dict[str, float]) -> dict[str, Any]:
    """Return for each system the median seconds, the bound, and the ratios of the seconds to the bound and to the
    seconds in bf16."""
    summary = {}
    for name in rounds[0]:
        form, _, kind = name.partition("-")
        beside = f"bf16-{kind}" if kind else "bf16"
        seconds = [each[name]["seconds"] for each in rounds]
        bounds = [
            max(
                each["processor"]["seconds"],
                each[name].get("replay", {}).get("seconds", 0.0),
                decoding.get(form, 0.0),
            )
            for each in rounds
        ]
        counters = rounds[-1][name]["counters"]
        summary[name] = {
            "seconds": statistics.median(seconds),
            "replay_s": statistics.median(each[name].get("replay", {}).get("seconds", 0.0) for each in rounds),
            "decoding_s": decoding.get(form, 0.0),
            "bound_s": statistics.median(bounds),
            "of_bound": statistics.median(mine / bound for mine, bound in zip(seconds, bounds, strict=True)),
            "of_bf16": statistics.median(each[name]["seconds"] / each[beside]["seconds"] for each in rounds)
            if beside in rounds[0]
            else float("nan"),
            "read_bytes_per_parameter": counters.get("read_bytes", 0) / numel,
            "written_bytes_per_parameter": counters.get("written_bytes", 0) / numel,
            "peak_rss_bytes": max(each[name]["peak_rss_bytes"] for each in rounds),
            "loss": rounds[-1][name]["loss"],
        }
    return summary


def table(summary: dict[str, Any]) -> str:
    header = ("system", "s/step", "replay, s", "bound, s", "/ bound", "/ bf16", "read B", "written B", "peak RSS, GB")
    return format_table(
        header,
        [
            (
                name,
                f"{row['seconds']:.2f}",
                f"{row['replay_s']:.2f}",
                f"{row['bound_s']:.2f}",
                f"{row['of_bound']:.2f}",
                f"{row['of_bf16']:.3f}",
                f"{row['read_bytes_per_parameter']:.2f}",
                f"{row['written_bytes_per_parameter']:.2f}",
                f"{row['peak_rss_bytes'] / 1e9:.2f}",
            )
            for name, row in summary.items()
        ],
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--systems", default=",".join(SYSTEMS), help="names, separated by commas; default: all")
    add("--layers", type=int, default=16)
    add("--hidden", type=int, default=2048)
    add("--vocabulary", type=int, default=8192)
    add("--tokens", type=int, default=32)
    add("--rank", type=int, default=8)
    add("--rounds", type=int, default=5, help="turns of each system; a turn measures the mean of three steps")
    add("--rate", type=float, default=0.5e9, help="bytes per second of the throttled disk, each way")
    add("--swap-dir", type=Path, default=_CHECKOUT / "build" / "bench-swap", help="a new directory is created in it")
    add("--json", type=Path, help="write all measurements to this file")
    args = parser.parse_args()
    args.systems = list(dict.fromkeys(args.systems.split(",")))
    if unknown := set(args.systems) - set(SYSTEMS):
        parser.error(f"unknown systems: {', '.join(sorted(unknown))}; there are {', '.join(SYSTEMS)}")
    if "processor" not in args.systems:
        parser.error("--systems needs processor: it is a part of every bound")
    return args


def main() -> None:
    args = parse()
    workload = Workload(
        layers=args.layers,
        hidden=args.hidden,
        intermediate=11 * args.hidden // 4,
        vocabulary=args.vocabulary,
        tokens=args.tokens,
        lora=args.rank,
        recompute=True,
        max_grad_norm=None,
    )
    args.swap_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="frozen-step-", dir=args.swap_dir) as directory, ExitStack() as stack:
        logs = _CHECKOUT / "build" / "bench-logs"
        workers = [
            Worker(
                name,
                Path(sys.executable),
                "peers.worker_infinity",
                job(name, workload, Path(directory)),
                logs / f"frozen-step-{name}.log",
                timeout_s=1800,
            )
            for name in args.systems
        ]
        stack.enter_context(started(workers))
        slow = [worker for worker in workers if worker.name.endswith("-throttled")]
        stack.enter_context(throttled(slow, Path(directory), args.rate))
        rounds = []
        for found in with_replays(workers, args.rounds):
            rounds.append(found)
            print("  ".join(f"{name} {told['seconds']:.2f} s" for name, told in found.items()), flush=True)
        facts = {worker.name: worker.facts for worker in workers}
    forms = {name.partition("-")[0] for name in args.systems} & {"int8", "nf4"}
    blocks = workload.numel - 2 * workload.vocabulary * workload.hidden
    decoding = {form: decode_seconds(form, 2 * blocks, 1) for form in sorted(forms)}
    summary = summarise(rounds, workload.numel, decoding)
    print(f"\n{workload.numel / 1e6:.0f} M parameters, {args.tokens} tokens, LoRA {args.rank}\n{table(summary)}")
    if args.json:
        result = {
            "machine": machine_facts(args.swap_dir),
            "workload": asdict(workload),
            "rate": args.rate,
            "summary": summary,
            "facts": facts,
            "rounds": rounds,
        }
        write_result(args.json, result, {_CHECKOUT: "<checkout>"})


if __name__ == "__main__":
    main()
