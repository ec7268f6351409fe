#!/usr/bin/env python3
"""Step time of N ranks of infinity, DeepSpeed ZeRO-3 and FSDP2 with CPU offload, and the memory of all ranks together.

DeepSpeed has weights and states on NVMe.

    bash bench/peers/setup.sh                                     # once: the peers' own environment
    python bench/ranks_vs_peers.py --json build/ranks.json
    python bench/ranks_vs_peers.py --systems shared,gloo          # weights in RAM: one copy, or over sockets
    python bench/ranks_vs_peers.py --dtype float32 --layers 8     # a processor without AVX-512 takes minutes in bf16

All ranks compute on the CPU, with one thread each. A turn is the same as in bench/step_vs_peers.py (peers/protocol.py).
The time of a system is the time of its slowest rank. The memory of a system is the sum of its ranks' proportional set
sizes after the turn, and the sum of the ranks' peaks. `waits` is the share of a step in which the script's thread of
infinity waits for weights or gradients, as a mean over the ranks. Every round begins with another system. Quote the
ratios; single times on a shared machine mean nothing.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from peers.contenders import setting_of
from peers.process import BENCH_DIR, Worker
from peers.report import machine_facts
from peers.turns import rounds_of, started
from peers.variants import params_on_nvme
from peers.workload import Job, Workload

CHECKOUT = BENCH_DIR.parent
SYSTEMS = ("infinity", "deepspeed", "fsdp2")


_SUMS = ("cpu_seconds", "pss_bytes", "peak_rss_bytes", "read_bytes")


class Ours(NamedTuple):
    weights: str
    wire: str


OURS = {"infinity": Ours("nvme", "auto"), "shared": Ours("host", "host"), "gloo": Ours("host", "gloo")}
"""Infinity's systems: with weights on NVMe, and with weights in RAM that the ranks share, or send over sockets."""


class Ranks:
    """The workers of one system, used as one worker: each order is sent to all of these workers, and their answers are
    merged."""

    def __init__(self, name: str, workers: Sequence[Worker]) -> None:
        self.name = name
        self._workers = workers
        self._threads = ThreadPoolExecutor(len(workers))

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of rank 0."""
        return self._workers[0].facts

    def start(self) -> None:
        for worker in self._workers:
            worker.start()

    def wait_ready(self) -> None:
        list(self._threads.map(Worker.wait_ready, self._workers))

    def step(self) -> dict[str, Any]:
        told = list(self._threads.map(Worker.step, self._workers))
        sums = {name: sum(each[name] for each in told) for name in _SUMS}
        loss = statistics.fmean(each["loss"] for each in told)
        waits = [
            sum(each["counters"].get(name, 0.0) for name in ("fetch_wait_s", "gradient_s")) / each["seconds"]
            for each in told
        ]
        seconds = max(each["seconds"] for each in told)
        return {"seconds": seconds, "loss": loss, "waits": statistics.fmean(waits), **sums}

    def stop(self) -> None:
        list(self._threads.map(Worker.stop, self._workers))
        self._threads.shutdown()


def ranks_of(name: str, count: int, workload: Workload, swap: Path, args: argparse.Namespace) -> Ranks:
    kind, python = "infinity" if name in OURS else name, args.infinity_python
    options: dict[str, Any] = {}
    if name in OURS:
        setting = setting_of(f"infinity-{OURS[name].weights}-lean")
        assert setting is not None
        options = setting.options(workload, None, args.beside << 20) | {"ranks": {"wire": OURS[name].wire}}
        if args.optimizer == "host":
            options["optimizer"], options["memory"]["host"] = "host", 24 * workload.numel + (1 << 30)
        # the swap config has the memory of the machine, which the ranks share
        if "device" in options["memory"]:
            options["memory"]["device"] *= count * (2 if workload.dtype == "float32" else 1)
    elif name == "deepspeed":
        python, options = args.peers_python, params_on_nvme(workload)
    directory = "" if name == "fsdp2" else str(swap / name)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    workers = [
        Worker(
            f"{name}, rank {rank}",
            python,
            f"peers.worker_{kind}",
            Job(workload, directory, options),
            CHECKOUT / "build" / "bench-logs" / f"{name}-{rank}.log",
            threads=1,
            timeout_s=args.time_limit,
            environment={key: str(value) for key, value in (shared | {"RANK": rank, "LOCAL_RANK": rank}).items()},
        )
        for rank in range(count)
    ]
    return Ranks(name, workers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256, help="length of the sequence of each rank")
    parser.add_argument("--optimizer", default="nvme", choices=["nvme", "host"], help="tier of infinity's states")
    parser.add_argument(
        "--beside", type=int, default=400, help="MiB of infinity's memory.host beside gradients and weights in RAM"
    )
    parser.add_argument("--swap", type=Path, help="a directory on the disk that is measured; default: a temporary one")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    parser.add_argument("--time-limit", type=float, default=600.0, help="seconds for one answer")
    parser.add_argument("--infinity-python", type=Path, default=Path(sys.executable))
    parser.add_argument("--peers-python", type=Path, default=CHECKOUT / ".venv-peers" / "bin" / "python")
    args = parser.parse_args()
    workload = replace(Workload(), dtype=args.dtype, layers=args.layers, tokens=args.tokens)
    with tempfile.TemporaryDirectory(dir=args.swap, prefix="ranks-") as swap:
        systems = [
            ranks_of(name, args.ranks, workload, Path(swap).absolute(), args) for name in args.systems.split(",")
        ]
        with started(systems):
            rounds = []
            for each in rounds_of(systems, args.rounds):
                rounds.append(each)
                print("  ".join(f"{name} {told['seconds']:.2f} s" for name, told in each.items()), flush=True)
            facts = {each.name: each.facts for each in systems}
            machine = machine_facts(Path(swap))
    rows = {
        each.name: {
            key: statistics.median(told[each.name][key] for told in rounds)
            for key in ("seconds", "loss", "waits", *_SUMS)
        }
        for each in systems
    }
    first = systems[0].name
    print(f"\n{args.ranks} ranks, {workload.numel / 1e6:.0f} M parameters, {args.dtype}, {args.tokens} tokens each")
    columns = f"{'':12}{'s/step':>8}{'CPU, s':>8}{'waits':>8}{'PSS, GB':>9}{'peak, GB':>10}{'loss':>9}"
    print(f"{columns}   {first} beside it: time, PSS, peak")
    for name, row in rows.items():
        ratios = [rows[first][key] / row[key] for key in ("pss_bytes", "peak_rss_bytes")]
        paired = statistics.median(told[first]["seconds"] / told[name]["seconds"] for told in rounds)
        print(
            f"{name:12}{row['seconds']:8.2f}{row['cpu_seconds']:8.2f}{row['waits']:8.1%}{row['pss_bytes'] / 1e9:9.2f}"
            f"{row['peak_rss_bytes'] / 1e9:10.2f}{row['loss']:9.4f}   {paired:.3f}, {ratios[0]:.3f}, {ratios[1]:.3f}"
        )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        written = {"ranks": args.ranks, "workload": asdict(workload), "machine": machine, "facts": facts}
        args.json.write_text(json.dumps(written | {"medians": rows, "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
