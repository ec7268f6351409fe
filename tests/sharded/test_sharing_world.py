"""Work of rank 0 for which the other ranks may wait: with the same path or another, after an error, and alone."""

from __future__ import annotations

import time

import pytest

from infinity.errors import InfinityError, PeerError, PlanError
from infinity.sharded.sharing_world import SharingWorld
from tests.ranks.test_shared_memory import world_of_all
from tests.ranks.workers import run

WORKS_S = 0.7


def sharing() -> SharingWorld:
    return SharingWorld(world_of_all().collectives)


def done_by(case: str) -> tuple[float, str]:
    """Return how long the last call took on this rank, and the error that it raised."""
    world = sharing()

    def work(seconds: float = WORKS_S) -> None:
        time.sleep(seconds)
        if case == "fails":
            raise PlanError("no room in /somewhere")

    if world.leads and case in ("after one alone", "after one alone elsewhere"):
        path = "/out" if case == "after one alone" else "/best"
        world.lead(f"saving to {path}", 3, lambda: work(0.1), lambda: None)
    if case == "after one alone elsewhere":
        world.tell("both", None)
    path = f"/out/{world.rank}" if case == "other paths" else "/out"
    at = 4 if case == "after one alone" else 3
    began, error = time.monotonic(), ""
    try:
        world.lead(f"saving to {path}", at, work, lambda: None)
    except InfinityError as raised:
        error = f"{type(raised).__name__}: {raised}"
    took = time.monotonic() - began
    world.tell("the end", None)
    world.close()
    return took, error


@pytest.mark.parametrize("case", ["the same path", "other paths", "after one alone", "after one alone elsewhere"])
def test_a_rank_waits_for_the_work_of_rank_0(case: str) -> None:
    (_, first), (took, error) = run(2, done_by, case)
    assert first == error == ""
    assert took > WORKS_S / 2


def test_an_error_of_rank_0_is_the_error_of_all() -> None:
    (_, first), (_, second) = run(2, done_by, "fails")
    assert first == "PlanError: no room in /somewhere"
    assert second == "PlanError: rank 0: no room in /somewhere"


def left_alone() -> str:
    world = sharing()
    if world.leads:
        world.close()
        time.sleep(5)  # its process hosts the store
        return ""
    try:
        world.lead("saving to /out", 1, lambda: None, lambda: None)
    except PeerError as error:
        return str(error)
    return "no error"


def test_a_rank_does_not_wait_for_a_rank_that_has_left() -> None:
    assert "rank 0 closed the model, or its script ended, while rank 1 was at" in run(2, left_alone)[1]
