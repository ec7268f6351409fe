"""Shares that activities get of a common resource."""

from __future__ import annotations

import pytest
from simulation.clock import Clock, Future, StuckError, when_all
from simulation.fluid import TRANSFER, Activity, Fluid, share


def run(capacity: dict[str, float], *activities: Activity) -> list[float]:
    """When each of them ends, all begun at once."""
    clock = Clock()
    fluid = Fluid(clock, capacity)
    ends = [0.0] * len(activities)
    futures = [Future(clock) for _ in activities]
    for index, (activity, future) in enumerate(zip(activities, futures, strict=True)):

        def done(index: int = index, future: Future = future) -> None:
            ends[index] = clock.now
            future.complete()

        fluid.start(activity, done)
    for future in futures:
        future.wait()
    return ends


def test_what_runs_alone_takes_its_own_time() -> None:
    assert run({"cores": 2}, Activity(10, 5, {"cores": 0.4})) == [pytest.approx(2.0)]


def test_two_that_want_all_cores_take_twice_as_long() -> None:
    ends = run({"cores": 2}, Activity(1, 1, {"cores": 2}, 2), Activity(1, 1, {"cores": 2}, 2))
    assert ends == [pytest.approx(2.0), pytest.approx(2.0)]


def test_what_one_leaves_when_it_ends_the_other_gets() -> None:
    assert run({"cores": 2}, Activity(1, 1, {"cores": 2}), Activity(2, 1, {"cores": 2})) == [
        pytest.approx(2.0),
        pytest.approx(3.0),
    ]


def test_threads_decide_who_gets_how_much_of_the_cores() -> None:
    one, three = Activity(1, 1, {"cores": 2}, 1), Activity(1, 1, {"cores": 2}, 3)
    share([one, three], {"cores": 2})
    assert (one.rate, three.rate) == (pytest.approx(0.25), pytest.approx(0.75))


def test_who_wants_less_than_its_share_gets_what_it_wants() -> None:
    small, large = Activity(1, 0.1, {"cores": 1}), Activity(1, 1, {"cores": 2}, 2)
    share([small, large], {"cores": 2})
    assert (small.rate, large.rate) == (pytest.approx(0.1), pytest.approx(0.95))


def test_a_transfer_is_not_held_up_by_cores_that_take_all_memory() -> None:
    transfer, update = Activity(1, 20, {"dram": 1}, TRANSFER), Activity(1, 10, {"dram": 14, "cores": 1}, 16)
    share([transfer, update], {"dram": 140, "cores": 16})
    assert transfer.rate == pytest.approx(20)
    assert update.rate == pytest.approx((140 - 20) / 14)


def test_nobody_is_given_more_than_there_is() -> None:
    running = [Activity(1, 3, {"cores": 1, "dram": 5}, weight) for weight in (1, 2, 5)]
    share(running, {"cores": 4, "dram": 10})
    assert sum(each.rate for each in running) == pytest.approx(2.0)


def test_waiting_for_what_never_comes_is_an_error() -> None:
    with pytest.raises(StuckError, match="nothing is under way"):
        Future(Clock()).wait()


def test_an_action_waits_for_all_futures() -> None:
    clock, came = Clock(), []
    futures = [Future(clock), Future(clock)]
    when_all(futures, lambda: came.append("all"))
    futures[1].complete()
    assert came == []
    futures[0].complete()
    assert came == ["all"]
