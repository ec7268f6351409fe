"""Random models, loops and swap configs end in the same bits as plain torch, without an error.

`make fuzz-test` runs 2,000 cases; INFINITY_FUZZ_SEED is the seed of the first case. `python -m tests.fuzz SEED` runs a
single case. A bug that a seed found also has its own test elsewhere, because a changed generator makes other cases
from the same seeds.
"""

from __future__ import annotations

from itertools import count, islice

import pytest

from tests import sampling
from tests.fuzz.__main__ import main
from tests.fuzz.compare import judge, make
from tests.fuzz.shares import problems_of

CASES = sampling.number(8, 2000, "INFINITY_FUZZ_CASES")
SEED = int(sampling.seed("INFINITY_FUZZ_SEED"))

FOUND = {
    1: "a dict in a list, recomputed: losses were NaN without an error",
    17: "the same, with a weight that another block reads",
    1160: "an expert without tokens in several steps had the weights of another expert",
}


@pytest.mark.long(kept="only here models, loops and configs are of every kind at once")
@pytest.mark.timeout(60 * 60)
def test_whatever_is_trained_ends_in_the_bits_of_plain_torch(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("fuzz")))
    problems = problems_of(main, SEED, CASES)
    print(f"seeds {SEED} to {SEED + CASES - 1}: {CASES - len(problems)} cases as plain torch")
    assert not problems, "\n\n".join(problems)


@pytest.mark.parametrize("seed", FOUND, ids=str)
def test_what_was_found_once_is_not_found_again(seed: int) -> None:
    assert judge(make(seed)).problems == []


def test_a_learning_rate_that_is_5_percent_off_in_one_group_is_found_in_every_fp32_case() -> None:
    """Shows that the comparison finds errors. Cases that skip every step, or have no rate above 0, train nothing."""
    cases = (case for case in map(make, count(SEED)) if case.is_fp32)
    verdicts = (judge(case, distortion=1.05) for case in cases)
    trained = list(islice((verdict for verdict in verdicts if verdict.moved), sampling.number(2, 200)))
    assert [verdict.seed for verdict in trained if not verdict.problems] == []
