"""The samples that stand for the whole."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import pytest

from tests import sampling

AXES: dict[str, tuple[Any, ...]] = {"a": (0, 1, 2, 3), "b": "xyz", "c": (True, False), "d": (None, 1, 2)}
EVERY = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]


def meetings(cases: list[dict[str, Any]], strength: int) -> set[Any]:
    return {meeting for case in cases for meeting in itertools.combinations(case.items(), strength)}


@pytest.mark.parametrize(("strength", "most"), [(1, 6), (2, 18), (3, 50)])
def test_all_values_of_so_many_axes_meet_in_a_few_cases(strength: int, most: int) -> None:
    chosen = [EVERY[index] for index in sampling.covering(EVERY, strength)]
    assert meetings(chosen, strength) == meetings(EVERY, strength)
    assert len(chosen) <= most < len(EVERY)


def test_what_never_meets_is_not_waited_for() -> None:
    cases = [case for case in EVERY if case["a"] != 2 or case["b"] == "x"]
    chosen = [cases[index] for index in sampling.covering(cases)]
    assert meetings(chosen, 2) == meetings(cases, 2)


def test_a_case_alone_is_its_own_sample() -> None:
    assert sampling.covering(EVERY[:1]) == [0]
    assert sampling.covering([]) == []
    assert sampling.covering([{"a": 0}, {"a": 1}]) == [0, 1]


def test_a_share_has_the_sample_in_it_and_others_with_each_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "SHARE", Fraction(0))
    sample = sampling.drawn(range(len(EVERY)), EVERY)
    monkeypatch.setattr(sampling, "SHARE", Fraction(1, 4))
    shares = []
    for seed in range(3):
        monkeypatch.setattr(sampling, "SEED", seed)
        shares.append(sampling.drawn(range(len(EVERY)), EVERY))
        assert shares[-1] == sampling.drawn(range(len(EVERY)), EVERY) == sorted(shares[-1])
        assert set(sample) < set(shares[-1])
        assert len(shares[-1]) - len(sample) == round((len(EVERY) - len(sample)) / 4)
    assert len({tuple(share) for share in shares}) == 3
    monkeypatch.setattr(sampling, "SAMPLE_IS_DONE", True)
    assert sampling.drawn(range(len(EVERY)), EVERY) == sorted(set(shares[-1]) - set(sample))
    monkeypatch.setattr(sampling, "SHARE", Fraction(1))
    assert sampling.drawn(range(len(EVERY)), EVERY) == list(range(len(EVERY)))


def test_numbers_grow_with_the_share_and_are_what_a_variable_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for share, expected in ((Fraction(0), 20), (Fraction(1, 100), 20), (Fraction(1, 10), 50), (Fraction(1), 500)):
        monkeypatch.setattr(sampling, "SHARE", share)
        assert sampling.number(20, 500, "KILLS") == expected
    monkeypatch.setenv("KILLS", "7")
    assert sampling.number(20, 500, "KILLS") == 7


def test_a_share_that_is_none_is_refused() -> None:
    assert sampling._share("") == 0
    assert sampling._share("0.25") == Fraction(1, 4)
    with pytest.raises(ValueError, match="between 0 and 1, or all"):
        sampling._share("2")


def test_a_marked_test_runs_with_some_of_its_parameters_and_an_unmarked_one_with_all(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # none of them is needed, and each run loads them anew

    def outcomes(*arguments: str) -> dict[str, int]:
        done = pytester.runpytest_inprocess("-q", "-p", "no:cacheprovider", "-p", "tests.sampling", *arguments)
        return done.parseoutcomes()

    pytester.makepyfile(
        """
        import pytest

        @pytest.fixture(params=[False, True])
        def made(request): ...

        @pytest.mark.covering
        @pytest.mark.parametrize("a", [{}, {"x": 1}, {"x": 2}])
        @pytest.mark.parametrize("b", ["first", "second", "third"])
        def test_marked(a, b, made): ...

        @pytest.mark.parametrize("a", range(7))
        def test_unmarked(a): ...
        """
    )
    for share, least, most in (("", 9, 11), ("0.5", 13, 15), ("all", 18, 18)):
        monkeypatch.setattr(sampling, "SHARE", sampling._share(share))
        counts = outcomes()
        assert least <= counts["passed"] - 7 <= most
        assert counts["passed"] + counts.get("deselected", 0) == 25
    for name in ("a1 and first and True", "a2 and second and False", "a0 and third and True"):
        monkeypatch.setattr(sampling, "SHARE", sampling._share(""))
        assert outcomes("-k", f"test_marked and {name}")["passed"] == 1


def test_a_long_test_runs_in_its_share_and_a_kept_one_always(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.long
        @pytest.mark.parametrize("a", range(8))
        def test_long(a): ...

        @pytest.mark.long(kept="why")
        def test_kept(): ...

        @pytest.mark.parametrize("a", [1, pytest.param(2, marks=pytest.mark.long)])
        def test_case(a): ...
        """
    )
    for share, is_done, passed in (("", False, 2), ("0.3", False, 5), ("0.3", True, 5), ("all", True, 11)):
        monkeypatch.setattr(sampling, "SHARE", sampling._share(share))
        monkeypatch.setattr(sampling, "SAMPLE_IS_DONE", is_done)
        done = pytester.runpytest_inprocess("-q", "-p", "no:cacheprovider", "-p", "tests.sampling")
        assert done.parseoutcomes()["passed"] == passed


def test_at_most_so_many_cases_are_those_that_cover_most() -> None:
    chosen = sampling.covering(EVERY, 1, most=2)
    assert len(chosen) == 2
    assert len(meetings([EVERY[index] for index in chosen], 1)) == 2 * len(AXES)
