#!/usr/bin/env python3
"""One training step of infinity, of DeepSpeed ZeRO-3 (optimizer states on NVMe) and of plain torch in memory, in turns.

    bash bench/peers/setup.sh                                 # once: the peers' own environment
    python bench/step_vs_peers.py --json build/step.json      # the comparison
    python bench/step_vs_peers.py --contenders torch,deepspeed --deepspeed-variant pipelined-quarters-small
    python bench/step_vs_peers.py --try-params-nvme           # what DeepSpeed needs for weights on NVMe too

All contenders compute on the CPU, are set up first and then make one step each per round, so that what the machine does
meanwhile hits all alike. Quote the ratios; single times on a shared machine mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peers.disk import mixed_rate
from peers.process import BENCH_DIR, Worker, WorkerError
from peers.report import Run, format_summary, machine_facts, summarise
from peers.variants import (
    VARIANTS,
    Trial,
    describe,
    params_on_nvme,
    params_on_nvme_attempts,
    parse_variant,
    try_variant,
)
from peers.workload import SMALL, Job, Workload

CHECKOUT = BENCH_DIR.parent
SETUP_COMMAND = "bash bench/peers/setup.sh"

# Resident bytes per parameter at the peak, roughly; decides only whether all contenders fit at once.
_CONTENDERS = {
    "torch": 10,
    "deepspeed": 34,
    "deepspeed-nvme": 38,
    "infinity-host": 7,
    "infinity-nvme": 6,
    "infinity-host-int8": 7,
    "infinity-nvme-int8": 6,
}
_DEFAULT_CONTENDERS = "torch,deepspeed,infinity-host,infinity-nvme,infinity-host-int8,infinity-nvme-int8"
_PROCESS_BYTES = 500 << 20


class Bench:
    """The command line resolved: which interpreters and directories, and how a worker for a contender is made."""

    def __init__(self, args: argparse.Namespace, swap_dir: Path) -> None:
        self.args = args
        self.swap_dir = swap_dir
        self.workload = SMALL if args.small else Workload()
        self.logs = CHECKOUT / "build" / "bench-logs"
        self.deepspeed_options: dict[str, Any] = {}
        self.trials: list[Trial] = []

    def deepspeed_worker(self, name: str, options: dict[str, Any]) -> Worker:
        job = Job(self.workload, str(self.swap_dir / name), options)
        return Worker(name, self.args.peers_python, "peers.worker_deepspeed", job, self.logs / f"{name}.log")

    def worker(self, name: str) -> Worker:
        """A worker for a contender, not started yet."""
        if name == "deepspeed":
            return self.deepspeed_worker(name, self.deepspeed_options)
        if name == "deepspeed-nvme":
            return self.deepspeed_worker(name, params_on_nvme(self.workload))
        log = self.logs / f"{name}.log"
        if name == "torch":
            python = self.args.peers_python if self.args.peers_python.exists() else self.args.infinity_python
            return Worker(name, python, "peers.worker_torch", Job(self.workload), log)
        _, weights, *moments = name.split("-")
        config: dict[str, Any] = {"moments": moments[0]} if moments else {}
        options: dict[str, Any] = {"weights": weights, "config": config}
        if weights == "nvme":
            # Room for a few blocks, so that the weights do come from NVMe; without a limit they would all stay.
            block_bytes = 2 * self.workload.numel // self.workload.layers
            config["memory"] = {"device": 10 * block_bytes}
        job = Job(self.workload, str(self.swap_dir / name), options)
        return Worker(name, self.args.infinity_python, "peers.worker_infinity", job, log)

    def choose_deepspeed(self) -> None:
        """Settle DeepSpeed's settings: those asked for, or the fastest of a short probe."""
        if self.args.deepspeed_variant:
            self.deepspeed_options = parse_variant(self.args.deepspeed_variant, self.workload)
            return
        print("probing DeepSpeed's settings (--deepspeed-variant skips this)")
        for variant in VARIANTS:
            trial = try_variant(variant, self.workload, self.deepspeed_worker, self.args.probe_from)
            self.trials.append(trial)
            print(f"  {_describe_trial(trial)}", flush=True)
        best = min(self.trials, key=lambda trial: trial.seconds)
        if best.options is None:
            raise WorkerError("no DeepSpeed variant ran", self.logs)
        self.deepspeed_options = best.options
        print(f"  taking {best.variant}")


def _describe_trial(trial: Trial) -> str:
    failed = "".join(f"; buffer_count {count}: {error}" for count, error in trial.too_small.items())
    if trial.options is None:
        return f"{trial.variant}: does not run{failed}"
    memory = f"{trial.peak_rss_bytes / 1e9:.2f} GB"
    return f"{trial.variant}: {trial.seconds:.2f} s, {memory}, buffer_count {trial.options['buffer_count']}{failed}"


def _start(worker: Worker, run: Run, warmup: int) -> bool:
    """Set a contender up and warm it; a failure takes it out of the run and is reported."""
    try:
        worker.start()
        worker.wait_ready()
        run.facts[worker.name] = worker.facts
        run.warmup.setdefault(worker.name, []).extend(worker.step() for _ in range(warmup))
    except WorkerError as error:
        run.failures[worker.name] = describe(error)
        print(f"  {worker.name} failed: {describe(error)}", flush=True)
        worker.stop()
        return False
    print(f"  {worker.name} ready", flush=True)
    return True


def _in_rounds(workers: list[Worker], run: Run, rounds: int) -> None:
    """One step each per round, each round beginning with another contender; then the disk under each one's files."""
    for index in range(rounds):
        turn = index % len(workers)
        began, used_before = time.monotonic(), {worker.name: worker.cpu_seconds() for worker in workers}
        steps = {worker.name: worker.step() for worker in workers[turn:] + workers[:turn]}
        elapsed = time.monotonic() - began
        for worker in workers:
            step = steps[worker.name]
            idle = worker.cpu_seconds() - used_before[worker.name] - step["cpu_seconds"]
            step["idle_cpu_share"] = idle / max(elapsed - step["seconds"], 1e-9)
            run.steps.setdefault(worker.name, []).append(step)
            if worker.job.swap_dir:
                run.disk.setdefault(worker.name, []).append(mixed_rate(Path(worker.job.swap_dir)))
        print("  " + ", ".join(f"{name} {step['seconds']:.2f} s" for name, step in steps.items()), flush=True)


def measure(bench: Bench, names: list[str]) -> Run:
    """Run the contenders, all at once where memory allows it, else one after the other."""
    needed = sum(_CONTENDERS[name] * bench.workload.numel + _PROCESS_BYTES for name in names)
    together = needed < _available_bytes() and not bench.args.one_at_a_time
    run = Run(interleaved=together)
    for repeat in range(bench.args.repeats):
        turn = repeat % len(names)
        order = names[turn:] + names[:turn]
        for group in [order] if together else [[name] for name in order]:
            with ExitStack() as running:
                workers = [bench.worker(name) for name in group if name not in run.failures]
                for worker in workers:
                    running.callback(worker.stop)
                if ready := [worker for worker in workers if _start(worker, run, bench.args.warmup)]:
                    _in_rounds(ready, run, bench.args.rounds)
    run.steps = {name: run.steps[name] for name in names if name in run.steps}
    return run


def _available_bytes() -> int:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))


def try_params_nvme(bench: Bench) -> list[dict[str, str]]:
    """Try DeepSpeed with its parameters on NVMe too, from its defaults to settings that run; report each outcome."""
    outcomes = []
    for title, options in params_on_nvme_attempts(bench.workload):
        worker = bench.deepspeed_worker("deepspeed-nvme-attempt", options)
        try:
            worker.start()
            worker.wait_ready()
            last = [worker.step() for _ in range(3)][-1]
            per_parameter = (last["read_bytes"] + last["written_bytes"]) / bench.workload.numel
            memory = f"{last['peak_rss_bytes'] / 1e9:.2f} GB"
            outcome = f"runs: {last['seconds']:.2f} s, {memory}, {per_parameter:.1f} B per parameter"
        except WorkerError as error:
            outcome = describe(error)
        finally:
            worker.stop()
        print(f"  {title}: {outcome}", flush=True)
        outcomes.append({"settings": title, "outcome": outcome})
    return outcomes


@contextmanager
def _swap_directory(parent: Path) -> Iterator[Path]:
    """A fresh directory under `parent`, removed whatever happens."""
    parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="step-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--contenders", help=f"of {', '.join(_CONTENDERS)}; default {_DEFAULT_CONTENDERS}")
    add("--rounds", type=int, default=7, help="measured steps of each contender per set-up")
    add("--repeats", type=int, default=1, help="set all up anew this often: swap files then lie elsewhere on the disk")
    add("--warmup", type=int, default=2, help="steps before them")
    add("--json", type=Path, help="write everything measured to this file")
    add("--swap-dir", type=Path, default=CHECKOUT / "build" / "bench-swap", help="a fresh directory is made in it")
    add(
        "--peers-python", type=Path, default=CHECKOUT / ".venv-peers" / "bin" / "python", help="for DeepSpeed and torch"
    )
    add("--infinity-python", type=Path, default=Path(sys.executable), help="for infinity")
    add("--deepspeed-variant", help=f"NAME or NAME:BUFFER_COUNT, no probe; {', '.join(each.name for each in VARIANTS)}")
    add("--probe-from", type=int, help="smallest buffer_count to try; default: the known smallest of each variant")
    add("--try-params-nvme", action="store_true", help="only report what DeepSpeed does with parameters on NVMe too")
    add("--one-at-a-time", action="store_true", help="as if memory did not allow all at once")
    add("--small", action="store_true", help="a tiny model, to try the script itself")
    return parser.parse_args(argv)


def _chosen(args: argparse.Namespace) -> list[str]:
    """The contenders to run; those whose environment is missing are dropped, or refused where they were asked for.

    Raises:
        SystemExit: an unknown contender, or one asked for whose environment is missing.
    """
    names = (args.contenders or _DEFAULT_CONTENDERS).split(",")
    if unknown := [name for name in names if name not in _CONTENDERS]:
        raise SystemExit(f"no contender {', '.join(unknown)}; there are {', '.join(_CONTENDERS)}")
    peers = [name for name in names if name.startswith("deepspeed")]
    if (peers or args.try_params_nvme) and not args.peers_python.exists():
        message = f"{args.peers_python} is missing, which DeepSpeed runs under. Make it with: {SETUP_COMMAND}"
        if args.contenders or args.try_params_nvme:
            raise SystemExit(message)
        print(f"{message}\ngoing on without {', '.join(peers)}", file=sys.stderr)
        names = [name for name in names if name not in peers]
    return names


def main(argv: list[str] | None = None) -> int:
    """Run the comparison; 0 when every contender asked for ran."""
    args = _parse(argv)
    # Absolute, but not resolved: a virtual environment's interpreter is a link that must stay one.
    args.peers_python, args.infinity_python = (
        Path(os.path.abspath(p)) for p in (args.peers_python, args.infinity_python)
    )
    names = _chosen(args)
    with _swap_directory(args.swap_dir.resolve()) as swap_dir:
        bench = Bench(args, swap_dir)
        result: dict[str, Any] = {"machine": machine_facts(swap_dir), "workload": asdict(bench.workload)}
        if args.try_params_nvme:
            print("DeepSpeed with parameters and optimizer on NVMe:")
            result["params_on_nvme"] = try_params_nvme(bench)
            failures: dict[str, str] = {}
        else:
            if "deepspeed" in names:
                bench.choose_deepspeed()
            run = measure(bench, names)
            summary = summarise(run)
            print("\n" + format_summary(run, summary))
            probed = [trial.as_json() for trial in bench.trials]
            chosen = {"options": bench.deepspeed_options, "probe": probed} if "deepspeed" in names else None
            result |= {"deepspeed": chosen, "summary": summary, **asdict(run)}
            failures = run.failures
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.default_int_handler)
    try:
        raise SystemExit(main())
    except WorkerError as failure:
        raise SystemExit(f"stopped: {failure}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
