"""Many short runs with all kinds of failures: no deadlock, no leak, and correct bits whenever a run succeeds.

`make stress-test` makes 1,000 runs; INFINITY_STRESS_SEED is the seed of the first run.
`python -m tests.stress.worker SEED 1 1` runs a single seed.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests import processes, sampling
from tests.stress.worker import main

RUNS = sampling.number(8, 1000, "INFINITY_STRESS_RUNS")
SEED = int(sampling.seed("INFINITY_STRESS_SEED"))
WORKERS = min(os.cpu_count() or 1, 8, RUNS)
TAKEN = ("ended well", "interrupts", "exceptions", "abandoned", "early", "undone", "late", "resumed")
"""Events that every number of runs must contain. Without them the runs prove nothing."""


def _problems(results: list[dict[str, Any]], code: int, errors: str) -> list[str]:
    problems = [f"seed {each['seed']}:\n{each['error']}" for each in results if "error" in each]
    if code:
        problems.append(
            f"seed {results[-1]['seed'] if results else '?'} ended its process with {code}:\n{errors[-8000:]}"
        )
    return problems


@pytest.mark.long(kept="only here interrupts, exceptions, failed transfers and a late device meet in one run")
@pytest.mark.timeout(60 * 60)
def test_whatever_disturbs_a_run_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    counts: Counter[str] = Counter()
    problems = []
    with ThreadPoolExecutor(WORKERS) as pool:
        shares = [(SEED + index, len(range(index, RUNS, WORKERS)), WORKERS) for index in range(WORKERS)]
        for worker in pool.map(lambda share: processes.run(main, *share), shares):
            results = [json.loads(line) for line in worker.stdout.splitlines()]
            for each in results:
                counts.update(each.get("counts", {}))
            problems += _problems(results, worker.returncode, worker.stderr)
    print(f"seeds {SEED} to {SEED + RUNS - 1}: {', '.join(f'{n} {what}' for what, n in sorted(counts.items()))}")
    assert not problems, "\n".join(problems)
    assert counts["runs"] == RUNS
    if RUNS >= 100:  # a small number of runs need not contain all events
        assert [what for what in TAKEN if not counts[what]] == []
