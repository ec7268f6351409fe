"""Stage 4: the tests with the marker gpu. A failed test is run a second time, alone and with CUDA_LAUNCH_BLOCKING=1.

The second run shows whether the test fails without the other tests, and whether the failure depends on asynchronous
order.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.record import Options, Record, run
from gpu.runner import ROOT

_AGAIN_S = 15.0
"""Seconds that a single test needs, including the imports."""
_ONE_TEST_S = 60
_PROCESSES_MAX = 8


@dataclass(frozen=True)
class Results:
    """Results by test: outcome, seconds, a failed test's message.

    `rc` is pytest's exit code; None: pytest was stopped by the time limit.
    """

    tests: dict[str, dict[str, Any]]
    rc: int | None
    tail: str

    def named(self, outcome: str) -> list[str]:
        return [test for test, line in self.tests.items() if line["outcome"] == outcome]


def stage(record: Record, options: Options) -> None:
    """Run the stage.

    Settings: `arguments` of pytest; `root`, its working directory; `again_s`, seconds that a single test needs.
    """
    options.work.mkdir(parents=True, exist_ok=True)
    tests = ["-m", "gpu", "tests/gpu", "--ignore", "tests/gpu/test_ranks.py"]
    arguments = options.settings.get("arguments", [*tests, *_together()])
    root = Path(options.settings.get("root", ROOT))
    found = measured_tests(record, "tests", arguments, root, options.work)
    record.note("slowest", dict(sorted(((t, r["seconds"]) for t, r in found.tests.items()), key=lambda e: -e[1])[:5]))
    again_s = float(options.settings.get("again_s", _AGAIN_S))
    for test in found.named("failed"):
        expected = "passes, in one process with the others and by itself with CUDA_LAUNCH_BLOCKING=1"
        if record.left_s < again_s:
            record.measure(test, expected, lambda test=test: _both(found, test, None), good=lambda _: False)
            continue
        alone = run_tests([test], root, options.work, record.left_s - 1, CUDA_LAUNCH_BLOCKING="1")
        record.measure(test, expected, lambda test=test, alone=alone: _both(found, test, alone), good=lambda _: False)


def measured_tests(record: Record, name: str, arguments: Sequence[str], root: Path, work: Path) -> Results:
    """Run pytest, and record whether all tests passed. `name` is the name of the measurement."""
    found = run_tests(arguments, root, work, record.left_s - 2)
    counts = {outcome: len(found.named(outcome)) for outcome in ("passed", "failed", "skipped")}
    record.measure(
        name,
        "all pass, none is skipped, and pytest ends by itself",
        lambda: counts | {"rc": found.rc, "tail": "" if found.rc == 0 else found.tail[-1500:]},
        good=lambda _: found.rc == 0 and counts["passed"] > 0 and not counts["skipped"],
    )
    return found


def _together() -> list[str]:
    """Return pytest's arguments for several processes if pytest-xdist is installed: a test waits for its compiler, for
    the device and for the disk most of the time."""
    return ["-n", str(min(os.cpu_count() or 1, _PROCESSES_MAX))] if importlib.util.find_spec("xdist") else []


def run_tests(arguments: Sequence[str], root: Path, work: Path, limit_s: float, **environment: str) -> Results:
    """Run pytest in a separate process for at most `limit_s` seconds."""
    lines = work / f"tests-{time.monotonic_ns()}.jsonl"
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "gpu.pytest_lines", "-p", "no:cacheprovider"]
    command += [f"--timeout={_ONE_TEST_S}", f"--basetemp={work / 'pytest'}", *arguments]
    rc: int | None
    output = lines.with_suffix(".log")  # a process that a test left running could keep a pipe open
    with output.open("wb") as file:
        try:
            rc = subprocess.run(
                command,
                cwd=root,
                env={**os.environ, "INFINITY_TEST_LINES": str(lines), **environment},
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=max(limit_s, 1),
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            rc = None
    said = output.read_text(errors="replace")
    print(said, file=sys.stderr)
    tests = {}
    if lines.exists():
        for line in map(json.loads, lines.read_text().splitlines()):
            tests[line.pop("test")] = line
    return Results(tests, rc, said)


def _both(together: Results, test: str, alone: Results | None) -> dict[str, Any]:
    """Return the test's outcome in the run with all tests, and in the run alone."""
    found: dict[str, Any] = {"with the others": together.tests[test]}
    if alone is None:
        found["by itself"] = "no time left"
    else:
        found["by itself"] = alone.tests.get(test, {"outcome": "no result", "said": alone.tail[-1500:]})
    return found


if __name__ == "__main__":
    run(stage)
