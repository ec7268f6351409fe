"""Selection of tests by INFINITY_TESTS: a sample of the tests, a share of the tests, or all tests.

| INFINITY_TESTS | cases with the mark `covering`   | tests with the mark `long`     | runs, examples (`number`)      |
|----------------|----------------------------------|--------------------------------|--------------------------------|
| not set        | a few                            | the tests that are `kept`      | a few                          |
| 0.1            | the few, and a tenth of the rest | these, and a tenth of the rest | a tenth of all, at least a few |
| all            | all                              | all                            | all                            |

With `covering(strength=2)`, the default, any two values of two parameters occur together in one of the few cases. With
strength=1, each value occurs in one of the few cases. `most` limits the number of cases; with such a limit, some values
may be left out.

`long` is for tests of more than 2 s of CPU time (tests/costs.py). `long(kept="why")` is for a long test that `make
test` runs too, because no faster test finds the same fault.

Random selections use INFINITY_SEED, which `make test-all` and .ci/run print. With INFINITY_SAMPLE=done, a share of the
cases excludes the few cases that run without INFINITY_TESTS, because .ci/run has already run these few cases.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Hashable, Mapping, Sequence
from fractions import Fraction
from typing import TypeVar

import pytest

Case = Mapping[str, Hashable]
Item = TypeVar("Item")
_CANDIDATES = 200


def _share(text: str) -> Fraction:
    share = Fraction(1) if text == "all" else Fraction(text or 0)
    if not 0 <= share <= 1:
        raise ValueError(f"INFINITY_TESTS is {text}: it is a share between 0 and 1, or all")
    return share


SHARE = _share(os.environ.get("INFINITY_TESTS", ""))
SAMPLE_IS_DONE = os.environ.get("INFINITY_SAMPLE", "") == "done"
STRENGTH = 2 if SHARE and not SAMPLE_IS_DONE else 1
"""Strength for `drawn` in tests in which every case takes long: `make test` covers each value, and the long forms cover
any two values.
"""
SEED = int(os.environ.get("INFINITY_SEED") or 0)


def number(few: int, whole: int, variable: str | None = None) -> int:
    """Return the number of runs or examples to make. The environment variable `variable` overrides the number."""
    given = os.environ.get(variable) if variable else None
    return int(given) if given else max(few, round(SHARE * whole))


def seed(variable: str) -> str:
    """Return INFINITY_SEED, unless `variable` has a seed for this kind of test alone."""
    return os.environ.get(variable) or str(SEED)


def drawn(cases: Sequence[Item], axes: Sequence[Case], strength: int = 2, most: int | None = None) -> list[Item]:
    """Return the selected cases in their order: the covering cases, unless they have run already, and a share of the
    other cases.

    Args:
        cases: all cases.
        axes: values of each case, by axis.
        strength: see `covering`.
        most: see `covering`.
    """
    if SHARE == 1:
        return list(cases)
    sample = set(covering(axes, strength, most))
    chosen = set(some([index for index in range(len(cases)) if index not in sample]))
    if not SAMPLE_IS_DONE:
        chosen |= sample
    return [case for index, case in enumerate(cases) if index in chosen]


def some(others: Sequence[Item]) -> list[Item]:
    """From cases outside the sample, return the share that INFINITY_TESTS asks for, in any order."""
    return random.Random(SEED).sample(others, round(SHARE * len(others)))


def covering(cases: Sequence[Case], strength: int = 2, most: int | None = None) -> list[int]:
    """Return the indices of a few cases that cover all combinations of `strength` values that occur in some case.

    The result is always the same. The choice is greedy: the next case is the one of up to 200 candidates that has the
    most uncovered combinations.

    Args:
        cases: all cases.
        strength: number of axes in a combination.
        most: maximum number of cases; so many cases cover as many combinations as they can.
    """
    values = [sorted(case.items(), key=_axis) for case in cases]
    meetings = [set(itertools.combinations(each, min(strength, len(each)))) for each in values]
    missing = set().union(*meetings)
    chance, indices, chosen = random.Random(0), list(range(len(cases))), list[int]()
    while missing and (most is None or len(chosen) < most):
        chance.shuffle(indices)
        best = max(indices[:_CANDIDATES], key=lambda index: len(missing & meetings[index]))
        if missing & meetings[best]:
            chosen.append(best)
            missing -= meetings[best]
    return sorted(chosen)


def _axis(pair: tuple[str, Hashable]) -> str:
    return pair[0]


@pytest.hookimpl(trylast=True)  # runs after -k and -m have selected items
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the items that run.

    A test with the mark `covering(strength=2, most=None)` runs with some of its parameters. A share of the tests and
    parameters with the mark `long` runs. Every other test runs with all its parameters.
    """
    functions: dict[tuple[str, str], list[pytest.Item]] = {}
    marked = [
        item
        for item in items
        if isinstance(item, pytest.Function)
        and item.get_closest_marker("covering")
        and not item.get_closest_marker("simulated")  # selected by tests/devices.py
        and (is_kept(item) or not item.get_closest_marker("long"))
    ]
    for item in marked:
        functions.setdefault((str(item.path), item.originalname), []).append(item)
    left_out = _long_left_out(items)
    for cases in functions.values():
        mark = cases[0].get_closest_marker("covering")
        values = [{axis: repr(value) for axis, value in case.callspec.params.items()} for case in cases]
        chosen = drawn(cases, values, *mark.args, **mark.kwargs)
        left_out |= set(cases) - set(chosen)
    leave_out(config, items, left_out)


def _long_left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the tests with the mark `long` that do not run."""
    if SHARE == 1:
        return set()
    long = [item for item in items if item.get_closest_marker("long") and not item.get_closest_marker("simulated")]
    kept = {item for item in long if is_kept(item)}
    chosen = set(some([item for item in long if item not in kept]))
    return set(long) - chosen - kept  # kept tests run; with a larger share they may select more cases


def is_kept(item: pytest.Item) -> bool:
    """Return whether `make test` runs a test with the mark `long`."""
    return any("kept" in mark.kwargs for mark in item.iter_markers("long"))


def leave_out(config: pytest.Config, items: list[pytest.Item], left_out: set[pytest.Item]) -> None:
    """Remove items from the collected items, and report them to pytest as deselected."""
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
