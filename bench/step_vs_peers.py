#!/usr/bin/env python3
"""Step time of infinity, of DeepSpeed ZeRO-3 (optimizer states on NVMe) and of plain torch in memory.

    bash bench/peers/setup.sh                                 # once: the peers' own environment
    python bench/step_vs_peers.py --json build/step.json      # the comparison
    python bench/step_vs_peers.py --contenders torch,deepspeed --deepspeed-variant pipelined-quarters-small
    python bench/step_vs_peers.py --workload 2048             # 4 × 512 tokens, activations recomputed by all
    python bench/step_vs_peers.py --contenders deepspeed,processor,infinity-host,infinity-host-cached
    python bench/step_vs_peers.py --try-params-nvme           # what DeepSpeed needs for weights on NVMe too

Contenders are named in peers/contenders.py. All contenders compute on the CPU. All contenders are set up first. After
that, each contender has one turn per round, so that other load of the machine affects all contenders equally. Each turn
of infinity also includes a replay, which moves the step's bytes without computing. If memory is too small for all
contenders at once, they run in groups; each group includes the peers and the bounds. Quote the ratios; single times on
a shared machine mean nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from peers.bounds import host_budget
from peers.contenders import DEFAULT, Setting, groups_that_fit, setting_of
from peers.disk import mixed_rate
from peers.process import BENCH_DIR, Worker, WorkerError
from peers.report import Run, format_summary, machine_facts, summarise, write_result
from peers.variants import (
    VARIANTS,
    Trial,
    describe,
    params_on_nvme,
    params_on_nvme_attempts,
    parse_variant,
    try_variant,
)
from peers.workload import SMALL, WORKLOADS, Job

from infinity.sizes import parse_bytes

CHECKOUT = BENCH_DIR.parent
SETUP_COMMAND = "bash bench/peers/setup.sh"


class Bench:
    """The resolved command line: interpreters, directories, and the creation of a worker for a contender."""

    def __init__(self, args: argparse.Namespace, swap_dir: Path) -> None:
        self.args = args
        self.swap_dir = swap_dir
        self.workload = replace(WORKLOADS[args.workload], max_grad_norm=args.max_grad_norm)
        if args.small:
            self.workload = replace(SMALL, batch=self.workload.batch, recompute=self.workload.recompute)
        self.budgets: dict[str, int] = {}
        self.logs = CHECKOUT / "build" / "bench-logs"
        self.deepspeed_options: dict[str, Any] = {}
        self.trials: list[Trial] = []

    def deepspeed_worker(self, name: str, options: dict[str, Any]) -> Worker:
        job = Job(self.workload, str(self.swap_dir / name), options)
        return self._worker(name, self.args.peers_python, "deepspeed", job)

    def _worker(self, name: str, python: Path, kind: str, job: Job) -> Worker:
        log = self.logs / f"{name}.log"
        return Worker(name, python, f"peers.worker_{kind}", job, log, timeout_s=self.args.time_limit)

    def worker(self, name: str, run: Run) -> Worker:
        """Return a worker for a contender, not started yet.

        Raises:
            WorkerError: the contender caches states, but the measurements on which its budget depends are missing.
        """
        if name == "deepspeed":
            return self.deepspeed_worker(name, self.deepspeed_options)
        if name == "deepspeed-nvme":
            return self.deepspeed_worker(name, params_on_nvme(self.workload))
        setting = setting_of(name)
        if setting is None:
            python = self.args.peers_python if self.args.peers_python.exists() else self.args.infinity_python
            return self._worker(name, python, "torch", Job(self.workload, options={"fused": True}))
        if setting.cached and name not in self.budgets:
            self.budgets[name] = self._cache_budget(setting, run)
        directory = "" if setting.in_memory else str(self.swap_dir / name)
        job = Job(self.workload, directory, setting.options(self.workload, self.budgets.get(name)))
        return self._worker(name, self.args.infinity_python, "infinity", job)

    def _cache_budget(self, setting: Setting, run: Run) -> int:
        """Return the memory.host with which a caching contender takes the requested memory, according to the
        measurements so far."""
        name, twin = setting.name, setting.uncached.name
        for needed in (twin, *(["deepspeed"] if self.args.cached_like == "deepspeed" else [])):
            if not run.warmup.get(needed):
                raise WorkerError(f"{name} needs {needed} in the same run, before it", self.logs)
        target = self.args.cached_like
        if target == "deepspeed":
            target = _peak_rss(run, "deepspeed")
        try:
            budget = host_budget(target, _peak_rss(run, twin), run.facts[twin]["host_bytes"])
        except ValueError as error:
            raise WorkerError(f"{name}: {error}", self.logs) from None
        print(f"  {name}: memory.host {budget / 1e9:.2f} GB for a peak of {target / 1e9:.2f} GB", flush=True)
        return budget

    def choose_deepspeed(self) -> None:
        """Choose DeepSpeed's settings: the requested settings, or the fastest settings of a short probe."""
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


def _peak_rss(run: Run, name: str) -> int:
    """Return the peak RSS of a warm step."""
    return int(run.warmup[name][-1]["peak_rss_bytes"])


def _describe_trial(trial: Trial) -> str:
    failed = "".join(f"; buffer_count {count}: {error}" for count, error in trial.too_small.items())
    if trial.options is None:
        return f"{trial.variant}: does not run{failed}"
    memory = f"{trial.peak_rss_bytes / 1e9:.2f} GB"
    return f"{trial.variant}: {trial.seconds:.2f} s, {memory}, buffer_count {trial.options['buffer_count']}{failed}"


def _start(bench: Bench, name: str, run: Run) -> Worker | None:
    """Set a contender up and warm it up; report a failure and remove the contender from the run."""
    worker = None
    try:
        worker = bench.worker(name, run)
        worker.start()
        worker.wait_ready()
        run.facts[name] = worker.facts
        run.warmup.setdefault(name, []).extend(worker.step() for _ in range(bench.args.warmup))
    except WorkerError as error:
        _take_out(name, worker, error, run)
        return None
    print(f"  {name} ready", flush=True)
    return worker


def _take_out(name: str, worker: Worker | None, error: WorkerError, run: Run) -> None:
    run.failures[name] = describe(error)
    print(f"  {name} failed: {describe(error)}", flush=True)
    if worker is not None:
        worker.stop()


def _in_rounds(workers: list[Worker], run: Run, rounds: range) -> None:
    """Run the rounds; each worker has a turn per round, and each round begins with another worker.

    After each round, the rate of the disk is measured in each contender's files.
    """
    for number in rounds:
        turn = number % max(len(workers), 1)
        began, used_before = time.monotonic(), {worker.name: worker.cpu_seconds() for worker in workers}
        turns: dict[str, dict[str, Any]] = {}
        for worker in workers[turn:] + workers[:turn]:
            try:
                turns[worker.name] = _turn(worker) | {"round": number}
            except WorkerError as error:
                _take_out(worker.name, worker, error, run)
                workers = [other for other in workers if other is not worker]
        elapsed = time.monotonic() - began
        for worker in workers:
            step = turns[worker.name]
            idle = worker.cpu_seconds() - used_before[worker.name] - step.pop("turn_cpu_seconds")
            step["idle_cpu_share"] = idle / max(elapsed - step.pop("turn_seconds"), 1e-9)
            run.steps.setdefault(worker.name, []).append(step)
            if worker.facts["replays"] or worker.name.startswith("deepspeed"):  # the worker has files
                run.disk.setdefault(worker.name, []).append(mixed_rate(Path(worker.job.swap_dir)))
        print("  " + ", ".join(f"{name} {step['seconds']:.2f} s" for name, step in turns.items()), flush=True)


def _turn(worker: Worker) -> dict[str, Any]:
    """Run a step and, if the contender supports it, a replay; return the measurements of both and of the complete
    turn."""
    began, used_before = time.monotonic(), worker.cpu_seconds()
    step = worker.step()
    if worker.facts["replays"]:
        step["replay"] = worker.replay()
    return step | {
        "turn_seconds": time.monotonic() - began,
        "turn_cpu_seconds": worker.cpu_seconds() - used_before,
    }


def measure(bench: Bench, names: list[str]) -> Run:
    """Run all contenders in the same rounds if memory allows it, else in groups, else one after the other."""
    groups = None if bench.args.one_at_a_time else groups_that_fit(names, bench.workload, _available_bytes())
    run = Run(interleaved=groups is not None)
    for repeat in range(bench.args.repeats):
        for index, group in enumerate(groups or [[name] for name in names]):
            if run.interleaved:
                print(f"taking turns: {', '.join(group)}", flush=True)
            # Contenders that do not take turns are compared step by step: the first step of one with the first step of
            # the other, and so on.
            first = (repeat * len(groups) + index if groups else repeat) * bench.args.rounds
            with ExitStack() as running:
                workers = []
                for name in _in_turn(group, repeat):
                    if name not in run.failures and (worker := _start(bench, name, run)):
                        running.callback(worker.stop)
                        workers.append(worker)
                _in_rounds(workers, run, range(first, first + bench.args.rounds))
    run.steps = {name: run.steps[name] for name in names if name in run.steps}
    return run


def _in_turn(group: list[str], repeat: int) -> list[str]:
    """Return the order of set-up, which rotates.

    A contender that caches states comes after the contenders on which its budget depends.
    """
    turn = repeat % len(group)
    return sorted(group[turn:] + group[:turn], key=lambda name: "-cached" in name)


def _available_bytes() -> int:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))


def try_params_nvme(bench: Bench) -> list[dict[str, str]]:
    """Try DeepSpeed with its parameters on NVMe, too, from DeepSpeed's defaults to settings that run; report each
    outcome."""
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
    """Create a directory under `parent`, and remove it afterwards in any case."""
    parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="step-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--contenders", help=f"names as in bench/peers/contenders.py; default {DEFAULT}")
    add("--workload", choices=WORKLOADS, default="256", help="tokens per step: 1 × 256, or 4 × 512 with recomputation")
    add(
        "--max-grad-norm",
        type=float,
        default=1.0,
        help="1 clips every step of this workload, 1000 clips no step (default 1)",
    )
    add("--rounds", type=int, default=7, help="measured steps of each contender per set-up")
    add(
        "--repeats",
        type=int,
        default=1,
        help="how often all contenders are set up; each time, swap files are at other places of the disk",
    )
    add("--warmup", type=int, default=1, help="unmeasured turns of four steps, before the measured turns")
    add(
        "--time-limit",
        type=float,
        default=600.0,
        help="seconds for one answer; a contender that takes longer is removed from the run",
    )
    add(
        "--cached-like",
        type=lambda text: text if text == "deepspeed" else parse_bytes(text),
        default="deepspeed",
        help="peak memory of the contenders that cache states: a size, or `deepspeed` for DeepSpeed's peak in this run",
    )
    add("--json", type=Path, help="write all measurements to this file")
    add("--swap-dir", type=Path, default=CHECKOUT / "build" / "bench-swap", help="a new directory is created in it")
    add(
        "--peers-python",
        type=Path,
        default=CHECKOUT / ".venv-peers" / "bin" / "python",
        help="interpreter for DeepSpeed and torch",
    )
    add("--infinity-python", type=Path, default=Path(sys.executable), help="interpreter for infinity")
    add(
        "--deepspeed-variant",
        help=f"NAME or NAME:BUFFER_COUNT, without a probe; {', '.join(each.name for each in VARIANTS)}",
    )
    add("--probe-from", type=int, help="smallest buffer_count to try; default: the known smallest of each variant")
    add(
        "--try-params-nvme", action="store_true", help="only report whether DeepSpeed runs with parameters on NVMe, too"
    )
    add(
        "--one-at-a-time",
        action="store_true",
        help="run the contenders one after the other, as if memory were too small for several",
    )
    add("--small", action="store_true", help="a tiny model, to try the script itself")
    return parser.parse_args(argv)


def _chosen(args: argparse.Namespace) -> list[str]:
    """Return the contenders to run. A contender that was not requested explicitly is dropped if its environment is
    missing.

    Raises:
        SystemExit: a contender is unknown, or the environment of a requested contender is missing.
    """
    names = (args.contenders or DEFAULT).split(",")
    try:
        for name in names:
            setting_of(name)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    peers = [name for name in names if name.startswith("deepspeed")]
    if (peers or args.try_params_nvme) and not args.peers_python.exists():
        message = f"{args.peers_python} is missing, which DeepSpeed runs under. Make it with: {SETUP_COMMAND}"
        if args.contenders or args.try_params_nvme:
            raise SystemExit(message)
        print(f"{message}\ngoing on without {', '.join(peers)}", file=sys.stderr)
        names = [name for name in names if name not in peers]
    return names


def main(argv: list[str] | None = None) -> int:
    """Run the comparison; return 0 if every requested contender ran."""
    args = _parse(argv)
    # The path is made absolute, but links are not resolved: a virtual environment's interpreter is a symbolic link, and
    # only works by this link.
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
            result |= {"cache_budgets": bench.budgets, "deepspeed": chosen, "summary": summary} | asdict(run)
            failures = run.failures
    if args.json:
        write_result(args.json, result, {swap_dir: "swap", CHECKOUT: "."})
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
