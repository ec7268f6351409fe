#!/usr/bin/env python3
"""Cost of the class of released parameters per training step, for two versions of infinity.

    python bench/released_cost.py --before DIR

DIR is a checkout of another version that has the packages which bench/peers/worker_infinity.py imports, built in an
environment of its own:

    git worktree add --detach DIR COMMIT && make -C DIR bootstrap

Both versions train the model of bench/peers/workload.py on the CPU. All versions are set up first. After that, each
version has one turn of four steps per round, in an order that rotates. The report has medians of the seconds and of the
CPU seconds of a step, and of the ratios of steps of the same round. The default contender moves nothing, so its step is
the shortest and has no noise from the disk. infinity-nvme fetches and releases every weight.

Without --before, the report has only the calls of __torch_function__ per step, by function, and the calling thread's
CPU time in these calls and in class changes. This CPU time is a bound that does not depend on other load of the
machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
# as in the workers: threads must not spin on a busy machine
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from peers.contenders import setting_of
from peers.process import BENCH_DIR, Worker
from peers.turns import rounds_of, started
from peers.workload import SMALL, Job, Workload

_LOGS = BENCH_DIR.parent / "build" / "bench-logs"
_COUNTED = 3


def measure(python: dict[str, Path], job: Callable[[str], Job], rounds: int) -> dict[str, Any]:
    """Return the turns of each version by name: `seconds` and `cpu_seconds` of a step, one per round."""
    steps: dict[str, list[dict[str, float]]] = {name: [] for name in python}
    workers = [
        Worker(name, interpreter, "peers.worker_infinity", job(name), _LOGS / f"released-{name}.log")
        for name, interpreter in python.items()
    ]
    with started(workers):
        packages = {worker.name: worker.facts["package"] for worker in workers}
        if len(set(packages.values())) != len(packages):
            raise SystemExit(f"--before runs the same infinity: {packages}")
        for found in rounds_of(workers, rounds):
            for name, step in found.items():
                steps[name].append({key: step[key] for key in ("seconds", "cpu_seconds", "loss")})
            print("  " + ", ".join(f"{name} {each[-1]['seconds']:.3f} s" for name, each in steps.items()), flush=True)
    return steps


def summarise(steps: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return medians by version, and medians of the ratios after / before within a round."""
    if [each["loss"] for each in steps["before"]] != [each["loss"] for each in steps["after"]]:
        raise SystemExit("the two versions do not end in the same losses: they do not make the same steps")
    summary: dict[str, Any] = {}
    for key in ("seconds", "cpu_seconds"):
        series = {name: [each[key] for each in found] for name, found in steps.items()}
        ratios = sorted(after / before for before, after in zip(series["before"], series["after"], strict=True))
        summary[key] = {
            **{name: statistics.median(found) for name, found in series.items()},
            "ratio": statistics.median(ratios),
            "ratios": ratios,
        }
    return summary


class Meter:
    """Counter of calls and of the calling thread's CPU time in the outermost calls."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self._depth = 0

    @contextmanager
    def of(self, kind: str) -> Iterator[None]:
        self.calls[kind] += 1
        self._depth += 1
        began = time.thread_time()
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.seconds[kind.partition(" ")[0]] += time.thread_time() - began


def count(workload: Workload, job: Job) -> dict[str, Any]:
    """Return a step's calls of __torch_function__ and class changes, their CPU seconds, and the step's CPU seconds."""
    import torch
    from peers import worker_infinity

    from infinity.units.parameters import ParameterViews
    from infinity.units.released_parameters import ReleasedParameter, _name

    contender, meter = worker_infinity.setup(job), Meter()
    original, opening, closing = (
        ReleasedParameter.__torch_function__.__func__,
        ParameterViews.open_up,
        ParameterViews.close,
    )

    def seen(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with meter.of(f"__torch_function__ {_name(func)}"):
            return original(cls, func, types, args, kwargs)

    def opened(self: ParameterViews) -> None:
        with meter.of("classes"):
            opening(self)

    def closed(self: ParameterViews) -> None:
        with meter.of("classes"):
            closing(self)

    try:
        contender.step()
        contender.settle()
        ReleasedParameter.__torch_function__ = classmethod(seen)  # type: ignore[assignment]
        ParameterViews.open_up, ParameterViews.close = opened, closed  # type: ignore[method-assign]
        began, used = time.perf_counter(), time.process_time()
        for _ in range(_COUNTED):
            contender.step()
        contender.settle()
        step_s, step_cpu_s = time.perf_counter() - began, time.process_time() - used
    finally:
        ReleasedParameter.__torch_function__ = classmethod(original)  # type: ignore[assignment]
        ParameterViews.open_up, ParameterViews.close = opening, closing  # type: ignore[method-assign]
        contender.close()
    calls = Counter({name.partition(" ")[2]: n for name, n in meter.calls.items() if name != "classes"})
    return {
        "torch": torch.__version__,
        "torch_function_calls": calls.total() / _COUNTED,
        "torch_function_calls_by_name": {name: n / _COUNTED for name, n in calls.most_common()},
        "torch_function_cpu_seconds": meter.seconds["__torch_function__"] / _COUNTED,
        "class_changes": meter.calls["classes"] / _COUNTED,
        "class_changes_cpu_seconds": meter.seconds["classes"] / _COUNTED,
        "step_seconds": step_s / _COUNTED,
        "step_cpu_seconds": step_cpu_s / _COUNTED,
    }


def _print(found: dict[str, Any]) -> None:
    print(
        f"a step makes {found['torch_function_calls']:.0f} calls of __torch_function__, "
        f"{found['torch_function_cpu_seconds'] * 1e3:.2f} ms, and opens or closes units {found['class_changes']:.0f} "
        f"times, {found['class_changes_cpu_seconds'] * 1e3:.2f} ms (CPU time with the meter's own), of "
        f"{found['step_cpu_seconds']:.2f} s of CPU time and {found['step_seconds']:.2f} s"
    )
    for name, calls in found["torch_function_calls_by_name"].items():
        print(f"  {name}: {calls:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout of another version, built in its .venv")
    parser.add_argument("--contender", default="processor", help="of bench/peers/contenders.py (default: processor)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script itself")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    parser.add_argument("--swap-dir", type=Path, default=BENCH_DIR.parent / "build" / "bench-swap")
    args = parser.parse_args()
    setting = setting_of(args.contender)
    if setting is None or setting.cached:
        parser.error(f"--contender {args.contender}: one of infinity's, and none that caches")
    workload = SMALL if args.small else Workload()
    args.swap_dir.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"contender": args.contender, "numel": workload.numel, "load_before": os.getloadavg()}
    with tempfile.TemporaryDirectory(dir=args.swap_dir) as swap:

        def job(name: str) -> Job:
            directory = Path(swap) / name
            directory.mkdir()
            return Job(workload, "" if setting.in_memory else str(directory), setting.options(workload, None))

        result["counted"] = count(workload, job("counted"))
        _print(result["counted"])
        if args.before is not None:
            python = {"before": args.before.resolve() / ".venv" / "bin" / "python", "after": Path(sys.executable)}
            steps = measure(python, job, args.rounds)
            result |= {"steps": steps, "summary": summarise(steps), "load_after": os.getloadavg()}
            for key, found in result["summary"].items():
                print(
                    f"{key} of a step: before {found['before']:.3f}, after {found['after']:.3f}, ratio "
                    f"{found['ratio']:.4f} ({found['ratios'][0]:.3f} to {found['ratios'][-1]:.3f})"
                )
            print(
                f"load average of a minute: {result['load_before'][0]:.1f} before, {result['load_after'][0]:.1f} after"
            )
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
