"""A rank that is killed while it shares memory: the others name it, and the run goes on from its last generation."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from infinity.ranks import shared_memory
from infinity.sharded.mailboxes import Mailboxes
from infinity.sharded.shared_homes import Publication
from tests import sampling
from tests.ranks.workers import ended, run
from tests.runtime.over_ranks import TIERS
from tests.runtime.test_rank_generations import PAIR, STEPS, live, on_rank, require_same, steps_of

pytestmark = pytest.mark.cpu_only("several ranks compute on the CPU")

HOST = TIERS[1]
POINTS: dict[str, tuple[Any, str]] = {
    "passing the memory": (shared_memory._Passing, "__exit__"),
    "the copy of new weights": (Publication, "copy"),
    "the publication of new weights": (Publication, "end"),
    "an exchange": (Mailboxes, "exchange"),
    "a wait for the counter of another rank": (Mailboxes, "_wait"),
}


@dataclass(frozen=True)
class Kill:
    """A rank is killed at the `nth` call (from 0) of a method, before or after the call."""

    rank: int
    point: str
    after: bool
    nth: int

    @property
    def axes(self) -> dict[str, Hashable]:
        return {"rank": self.rank, "point": self.point, "after": self.after}

    @contextlib.contextmanager
    def at(self, rank: int) -> Iterator[None]:
        if rank == self.rank:
            owner, name = POINTS[self.point]
            method, seen = getattr(owner, name), 0

            @functools.wraps(method)
            def killed(*given: Any, **named: Any) -> Any:
                nonlocal seen
                seen += 1
                if seen > self.nth and not self.after:
                    os.kill(os.getpid(), signal.SIGKILL)
                result = method(*given, **named)
                if seen > self.nth:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            setattr(owner, name, killed)  # the process of this rank ends
        yield


KILLS = [
    Kill(rank, point, after, nth)
    for rank in (0, 1)
    for point in POINTS
    for after in (False, True)
    for nth in ((0,) if point == "passing the memory" else (0, 7))
]


@pytest.mark.parametrize(
    "kill",
    sampling.drawn(KILLS, [kill.axes for kill in KILLS], strength=1, most=3),
    ids=lambda kill: f"{kill.rank} {'after' if kill.after else 'before'} {kill.point} {kill.nth}",
)
def test_a_rank_that_is_killed_while_it_shares_memory_loses_no_generation(tmp_path: Path, kill: Kill) -> None:
    one, folder = live(str(tmp_path / "one"), HOST, STEPS, PAIR), str(tmp_path / "all")
    first = ended(2, on_rank, folder, HOST, STEPS, 1, {"kill": kill})
    assert first[kill.rank].exitcode == -signal.SIGKILL
    told = first[1 - kill.rank].value
    if isinstance(told, tuple):  # else it had done all of its steps, or it was opening the model
        assert told[0] == (kill.rank,), told
    there = set(steps_of(folder, 0, 2)) & set(steps_of(folder, 1, 2))
    lives = run(2, on_rank, folder, HOST, STEPS, 1, {})
    assert [life.began for life in lives] == [max(there, default=0)] * 2
    require_same(lives, one, 2)
