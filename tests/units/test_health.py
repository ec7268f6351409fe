"""Whether a model can go on: the first failure counts, and every later call tells it."""

from __future__ import annotations

import pytest

from infinity.errors import InfinityError, PlanError, SwapIOError, SwapTimeoutError
from infinity.ranks.world import SingleProcessWorld
from infinity.units.health import ModelHealth


def test_a_model_goes_on_until_it_fails() -> None:
    health = ModelHealth(SingleProcessWorld())
    health.require_usable()
    first = SwapIOError("read", path="/swap")
    health.fail(first)
    health.fail(PlanError("a later one"))
    assert health.failure is first
    with pytest.raises(InfinityError, match="damaged by an earlier failure: read of swap data failed") as caught:
        health.require_usable()
    assert caught.value.__cause__ is first
    health.require_open()


def test_a_closed_model_says_so_whatever_happened_before() -> None:
    health = ModelHealth(SingleProcessWorld())
    health.fail(PlanError("no room"))
    health.close()
    for require in (health.require_open, health.require_usable):
        with pytest.raises(InfinityError, match="was closed"):
            require()
    health.forget()
    assert health.failure is None
    assert health.closed


def test_only_the_kind_that_was_named_is_a_failure() -> None:
    health = ModelHealth(SingleProcessWorld())
    for error in (PlanError("no room"), KeyboardInterrupt(), SwapIOError("read", path="/swap")):
        with pytest.raises(type(error)), health.failing(SwapTimeoutError):
            raise error
        assert health.failure is None
    given_up = SwapTimeoutError("read", path="/swap")
    with pytest.raises(SwapTimeoutError), health.failing(SwapIOError):  # a kind of it
        raise given_up
    assert health.failure is given_up


def test_nothing_is_a_failure_where_nothing_was_raised() -> None:
    health = ModelHealth(SingleProcessWorld())
    with health.failing(InfinityError):
        pass
    assert health.failure is None
