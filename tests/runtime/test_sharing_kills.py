"""A rank that is killed while it shares memory: the others name it in time, nothing of the memory is left, and the run
goes on from its last generation."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from infinity.errors import PeerError
from infinity.ranks import shared_memory
from infinity.ranks.shared_memory import SharedMemory
from infinity.sharded.mailboxes import Mailboxes
from infinity.sharded.shared_homes import Publication
from tests import sampling
from tests.ranks.traces import names, require_no_names_but, users_of
from tests.ranks.workers import ended, run
from tests.runtime.over_ranks import TIERS
from tests.runtime.test_rank_generations import STEPS, live, on_rank, require_same, steps_of

pytestmark = pytest.mark.cpu_only("several ranks compute on the CPU")

HOST = TIERS[1]
COUNT = 3
NAMED_WITHIN_S = 5.0
"""Seconds from the kill to the error of each other rank. Rank 0, which hosts the store, may need 2 of them
(watch._ANSWER_S): it stays until the other ranks have read of the failure."""
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
    def at(self, rank: int, notes: Path) -> Iterator[None]:
        if rank == self.rank:
            owner, name = POINTS[self.point]
            method, seen = getattr(owner, name), 0

            @functools.wraps(method)
            def killed(*given: Any, **named: Any) -> Any:
                nonlocal seen
                seen += 1
                if seen > self.nth and not self.after:
                    _die(notes)
                result = method(*given, **named)
                if seen > self.nth:
                    _die(notes)
                return result

            setattr(owner, name, killed)  # the process of this rank ends
        yield


def _die(notes: Path) -> None:
    (notes / "killed at").write_text(str(time.monotonic()))  # the same clock in all processes
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Witness:
    """The error of a rank that was not killed: the ranks that it names, its text, and the time."""

    named: tuple[int, ...]
    text: str
    at: float


def on_watched_rank(folder: str, kill: Kill, notes: Path) -> Any:
    """Return a Life, or a Witness. Note the process id of this rank, and the inodes of the memory that it shares."""
    rank, made = dist.get_rank(), SharedMemory.__init__
    (notes / f"process {os.getpid()}").touch()

    def init(memory: SharedMemory, fd: int, *given: Any) -> None:
        (notes / f"memory {os.fstat(fd).st_ino}").touch()
        made(memory, fd, *given)

    SharedMemory.__init__ = init  # type: ignore[method-assign]
    try:
        with kill.at(rank, notes):
            return live(folder, HOST, STEPS, 1)
    except PeerError as error:
        return Witness(error.ranks, str(error), time.monotonic())


def noted(notes: Path, kind: str) -> list[int]:
    return [int(path.name.removeprefix(f"{kind} ")) for path in notes.glob(f"{kind} *")]


KILLS = [
    Kill(rank, point, after, nth)
    for rank in (0, 1)
    for point in POINTS
    for after in (False, True)
    for nth in ((0,) if point == "passing the memory" else (0, 7))
]


@pytest.mark.parametrize(
    "kill",
    sampling.drawn(KILLS, [kill.axes for kill in KILLS], strength=1, most=2),
    ids=lambda kill: f"{kill.rank} {'after' if kill.after else 'before'} {kill.point} {kill.nth}",
)
def test_a_rank_that_is_killed_while_it_shares_memory_is_named_and_loses_no_generation(
    tmp_path: Path, kill: Kill
) -> None:
    one, folder, notes = live(str(tmp_path / "one"), HOST, STEPS, COUNT), str(tmp_path / "all"), tmp_path / "notes"
    notes.mkdir()
    before = names()
    first = ended(COUNT, on_watched_rank, folder, kill, notes)
    assert first[kill.rank].exitcode == -signal.SIGKILL
    killed_at = float((notes / "killed at").read_text())
    for rank, outcome in enumerate(first):
        if rank != kill.rank:
            assert isinstance(outcome.value, Witness), outcome
            assert outcome.value.named == (kill.rank,), outcome.value.text
            waited_s = outcome.value.at - killed_at
            print(f"rank {rank} had its error {waited_s:.2f} s after the kill")
            assert waited_s < NAMED_WITHIN_S
    require_nothing_left(notes, before)
    there = set.intersection(*(set(steps_of(folder, rank, COUNT)) for rank in range(COUNT)))
    lives = run(COUNT, on_rank, folder, HOST, STEPS, 1, {})
    assert [life.began for life in lives] == [max(there, default=0)] * COUNT
    require_same(lives, one, COUNT)


def require_nothing_left(notes: Path, before: set[str]) -> None:
    """Require that the ranks, which have ended, have left no socket, no file in /dev/shm, and no memory."""
    processes, memory = noted(notes, "process"), noted(notes, "memory")
    assert len(processes) == COUNT
    assert memory
    assert [name for name in names() if any(f"infinity-{process}-" in name for process in processes)] == []
    assert users_of(memory) == []
    require_no_names_but(before)
