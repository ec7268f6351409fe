"""Loops with their operations in any order, killed anywhere, resume exactly or warn that they may not be exact.

`make fuzz-test` runs 2,000 cases; INFINITY_ORDERS_SEED is the seed of the first case.
`python -m tests.fuzz.orders SEED` runs a single case.
"""

from __future__ import annotations

import pytest

from tests import sampling
from tests.fuzz.orders import main
from tests.fuzz.shares import problems_of

CASES = sampling.number(15, 2000, "INFINITY_ORDERS_CASES")  # the first 15 have every kind of loop
SEED = int(sampling.seed("INFINITY_ORDERS_SEED"))


@pytest.mark.long(kept="only here the parts of a loop come in any order")
@pytest.mark.timeout(60 * 60)
def test_a_resumed_loop_is_exact_or_says_that_it_may_not_be(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("orders")))
    problems = problems_of(main, SEED, CASES)
    print(f"orders {SEED} to {SEED + CASES - 1}: {CASES - len(problems)} cases resumed as they should")
    assert not problems, "\n\n".join(problems)
