"""Loops in which things come in any order, killed anywhere, resume exactly or say that they may not.

`make fuzz-test` makes 2,000 cases; INFINITY_ORDERS_SEED is the first of their seeds. A case alone: `python -m
tests.fuzz.orders SEED`.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests import processes, sampling
from tests.fuzz.orders import main

CASES = sampling.number(40, 2000, "INFINITY_ORDERS_CASES")
SEED = int(sampling.seed("INFINITY_ORDERS_SEED"))
WORKERS = min(os.cpu_count() or 1, 8)
PER_PROCESS = 20


def _problems(first: int, cases: int) -> list[str]:
    worker = processes.run(main, first, cases)
    results: list[dict[str, Any]] = [json.loads(line) for line in worker.stdout.splitlines()]
    problems = [each["problem"] for each in results if each["problem"]]
    if len(results) < cases:
        problems.append(f"seed {first + len(results)} ended its process:\n{worker.stderr[-8000:]}")
    return problems


@pytest.mark.long(kept="only here the parts of a loop come in any order")
@pytest.mark.timeout(60 * 60)
def test_a_resumed_loop_is_exact_or_says_that_it_may_not_be(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("orders")))
    shares = [(first, min(PER_PROCESS, SEED + CASES - first)) for first in range(SEED, SEED + CASES, PER_PROCESS)]
    with ThreadPoolExecutor(WORKERS) as pool:
        problems = [each for found in pool.map(lambda share: _problems(*share), shares) for each in found]
    print(f"orders {SEED} to {SEED + CASES - 1}: {CASES - len(problems)} cases resumed as they should")
    assert not problems, "\n\n".join(problems)
