"""Many cases, distributed over several processes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests import processes

_WORKERS = min(os.cpu_count() or 1, 8)
_PER_PROCESS = 20


def problems_of(main: Callable[[int, int], int], seed: int, cases: int) -> list[str]:
    """Run `cases` cases, whose seeds begin with `seed`, and return their problems.

    Args:
        main: runs cases (first seed, count), and prints a line of JSON for each.
        seed: the first seed.
        cases: number of cases.
    """
    firsts = range(seed, seed + cases, _PER_PROCESS)
    with ThreadPoolExecutor(_WORKERS) as pool:
        found = pool.map(lambda first: _problems(main, first, min(_PER_PROCESS, seed + cases - first)), firsts)
        return [each for share in found for each in share]


def _problems(main: Callable[[int, int], int], first: int, cases: int) -> list[str]:
    worker = processes.run(main, first, cases)
    results: list[dict[str, Any]] = [json.loads(line) for line in worker.stdout.splitlines()]
    problems = [each["problem"] for each in results if each["problem"]]
    if len(results) < cases:
        problems.append(f"seed {first + len(results)} ended its process:\n{worker.stderr[-8000:]}")
    return problems
