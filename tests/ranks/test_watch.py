"""A failure on any rank reaches all of them as a PeerError that names it and says why: whether the rank could say so,
was killed, hangs, or never came. Each process ends within the limit of tests/ranks/workers.py."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import signal
import socket
import threading
import time
from collections import deque
from typing import Any

import pytest
import torch.distributed as dist

from infinity.errors import PeerError
from infinity.ranks.watch import PeerWatch
from tests import sampling
from tests.ranks.tasks import KINDS, Lines, done, kill, opened, operation, received, told_by
from tests.ranks.workers import Outcome, ended, run
from tests.sampling import SEED, number

N = 3
BIG = 3 << 20


def killed(kind: str, victim: int, when: str, apart: bool) -> Any:
    """One rank is killed before it begins an operation, or when all ranks have agreed on it; what the others raise."""
    collectives = opened(apart=apart)
    assert done(collectives, operation(kind, 0))
    if dist.get_rank() == victim and when == "before":
        kill()
    after = [kill] if dist.get_rank() == victim else []
    return told_by(collectives, operation(kind, 1, BIG, after=after), operation(kind, 2))


def survivors(outcomes: list[Outcome], victim: int) -> list[tuple[tuple[int, ...], str]]:
    assert outcomes[victim].exitcode == -signal.SIGKILL
    others = [each for rank, each in enumerate(outcomes) if rank != victim]
    assert [(each.exitcode, each.error) for each in others] == [(0, None)] * len(others), [e.told for e in others]
    return [each.value for each in others]


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("victim", range(N))
@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize("apart", [False, True])
def test_survivors_of_a_kill_name_the_dead_rank(kind: str, victim: int, when: str, apart: bool) -> None:
    for ranks, told in survivors(ended(N, killed, kind, victim, when, apart), victim):
        assert ranks == (victim,), told
        assert f"rank {victim} died" in told or (victim == 0 and "process of rank 0 hosts" in told), told


def killed_at_any_instant(victim: int, apart: bool, instant_s: float) -> Any:
    """One rank is killed while all of them move bytes without a pause, three operations ahead."""
    collectives = opened(apart=apart)
    if dist.get_rank() == victim:
        threading.Timer(instant_s, kill).start()
    waiting: deque[Any] = deque()
    try:
        for index in itertools.count():
            moved = operation(KINDS[index % 3], index, 1 << (index % 20))
            waiting.append((moved, collectives.submit(moved)))
            if len(waiting) == 3:
                moved, ticket = waiting.popleft()
                nbytes = 1 << (moved.subject % 20)
                assert received(moved, ticket.result()) == b"".join(bytes([r + 1]) * nbytes for r in range(N))
    except PeerError as error:
        collectives.close()
        return error.ranks, str(error)


@pytest.mark.parametrize("case", range(number(2, 40)))
def test_survivors_of_a_kill_at_any_instant_name_the_dead_rank(case: int) -> None:
    chance = random.Random(repr((SEED, case)))
    victim, apart = chance.randrange(N), bool(case % 2)
    for ranks, told in survivors(ended(N, killed_at_any_instant, victim, apart, chance.random() / 2), victim):
        assert ranks == (victim,), told


def orphaning() -> Any:
    """Kill rank 1 after it forked a process that lives on with all of the rank's connections."""
    collectives = opened()
    assert done(collectives, operation("gather", 0))
    if dist.get_rank() == 1 and os.fork():
        kill()
    if dist.get_rank() == 1:
        for name in os.listdir("/proc/self/fd"):
            if not is_of_gloo(int(name)):
                with contextlib.suppress(OSError):
                    os.close(int(name))
        signal.alarm(20)  # its end, at the latest
        signal.pause()
    return told_by(collectives, operation("gather", 1, BIG), operation("gather", 2))


def is_of_gloo(descriptor: int) -> bool:
    """Whether it is a connection of this rank's, to another or to the store."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as opened:
            return opened.family in (socket.AF_INET, socket.AF_INET6)
    except OSError:
        return False


def test_a_dead_rank_is_named_while_a_process_that_it_forked_holds_its_connections() -> None:
    for ranks, told in survivors(ended(N, orphaning), 1):
        assert ranks == (1,)
        assert told.startswith("rank 1 died while rank ")


class EndingStore:
    """A store whose calls wait until its host has ended, and then raise."""

    def __init__(self) -> None:
        self.called, self.ended = threading.Event(), threading.Event()

    def add(self, _: str, __: int) -> int:
        self.called.set()
        self.ended.wait()
        raise ConnectionError("the host of the store has ended")


@pytest.mark.parametrize(("store_rank", "named"), [(0, (0,)), (None, (0, 1))])
def test_a_rank_that_ended_after_the_host_of_the_store_is_not_named(
    store_rank: int | None, named: tuple[int, ...]
) -> None:
    store, dead = EndingStore(), [sleeping(), sleeping()]
    watch = PeerWatch(store, 2, 3, "the host", store_rank)  # type: ignore[arg-type]
    store.called.wait()
    watch.look_at(dict(enumerate(dead)))
    for process in dead:
        end(process)
    store.ended.set()
    assert verdict_of(watch) == named
    watch.close()
    for process in dead:
        os.waitpid(process, 0)


def sleeping() -> int:
    """Return the id of a process that sleeps."""
    process = os.fork()
    if not process:
        signal.pause()
    return process


def end(process: int) -> None:
    """Kill a child process. Its process descriptor tells that it has ended, although its id remains."""
    os.kill(process, signal.SIGKILL)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)


def verdict_of(watch: PeerWatch) -> tuple[int, ...]:
    with watch._changed:
        watch._changed.wait_for(lambda: watch.verdict is not None)
    assert watch.verdict is not None
    return watch.verdict.ranks


def test_a_rank_that_ended_because_it_noticed_a_dead_rank_is_not_named() -> None:
    store, (first, second) = dist.HashStore(), (sleeping(), sleeping())
    noticing = PeerWatch(store, 2, 3, "the host", 0)
    noticing.look_at({1: first})
    end(first)
    assert verdict_of(noticing) == (1,)
    end(second)  # the process of rank 2
    late = PeerWatch(store, 0, 3, "the host", 0)
    late.look_at({1: first, 2: second})
    assert verdict_of(late) == (1,)
    late.close()
    noticing.close()
    for process in (first, second):
        os.waitpid(process, 0)


def says_why(victim: int) -> Any:
    collectives = opened()
    assert done(collectives, operation("gather", 0))
    if dist.get_rank() == victim:
        collectives.fail(OSError(28, "No space left on device"))
        collectives.fail(ValueError("a second one"))
    return told_by(collectives, operation("gather", 1), operation("gather", 2))


@pytest.mark.covering(most=2)
@pytest.mark.parametrize("victim", range(N))
def test_a_rank_that_fails_tells_all_others_why(victim: int) -> None:
    for rank, (ranks, told) in enumerate(run(N, says_why, victim)):
        assert ranks == (victim,)
        assert "No space left on device" in told
        assert "second" not in told
        assert rank == victim or told.startswith(f"rank {victim} failed: OSError: [Errno 28]")


def never_comes(deadline_s: float) -> Any:
    collectives, lines = opened(deadline_s=deadline_s), Lines()
    logger = logging.getLogger("infinity.ranks")
    logger.addHandler(lines)
    logger.setLevel(logging.WARNING)
    assert done(collectives, operation("gather", 0))
    if dist.get_rank() == 1:  # until it hears that the others have given up
        while True:
            try:
                collectives.raise_if_broken()
                time.sleep(0.01)
            except PeerError as error:
                collectives.close()
                return error.ranks, str(error), lines.messages
    return *told_by(collectives, operation("exchange", 1)), lines.messages


def test_a_rank_that_never_comes_is_named_after_the_deadline() -> None:
    for rank, (ranks, told, logged) in enumerate(run(N, never_comes, 1.0)):
        assert ranks == (1,)
        waits = [line for line in logged if "for the other ranks at the exchange of unit 'layers.1'" in line]
        assert len(waits) == (rank != 1), logged
        assert all("After 1 s (ranks.deadline_s) this is an error" in line for line in waits)
        assert "raise ranks.deadline_s" in told
        assert told.startswith("rank 1 did not reach the exchange of unit 'layers.1' within 1 s"), told
        assert "rank 1 is at its own work after the gather of unit 'layers.0'" in told


def stopped(victim: int, apart: bool) -> Any:
    """Stop the process of a rank, whose connections stay open. The other ranks kill it at the end."""
    collectives = opened(deadline_s=1.0, apart=apart)
    pids = collectives.all_gather(0, "pids", str(os.getpid()).encode())
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        return told_by(collectives, operation("gather", 1))
    finally:
        with contextlib.suppress(ProcessLookupError):  # the other survivor was first
            os.kill(int(pids[victim]), signal.SIGKILL)


def test_a_rank_whose_process_hangs_is_named() -> None:
    for ranks, told in survivors(ended(N, stopped, 2, False), 2):
        assert ranks == (2,)
        assert "rank 2 did not answer while rank" in told or "rank 2 died" in told, told


@pytest.mark.skipif(not sampling.SHARE, reason="waits out every bound: make test-all")
def test_a_store_that_hangs_is_named_and_nobody_hangs_on_it() -> None:
    for ranks, told in survivors(ended(2, stopped, 0, False), 0):
        assert ranks == (0,)
        assert "which the process of rank 0 hosts, does not answer" in told


def is_missed(name: str) -> Any:
    collectives = opened()
    ranks = collectives._ranks
    ranks.assemble("offload")
    if name == "late" and dist.get_rank() == 1:
        dist.distributed_c10d._get_default_store().wait(["told"])
        collectives.close()
        return (1,), ""
    if name == "killed" and dist.get_rank() == 1:
        kill()
    try:
        ranks.assemble("resume" if name == "other" and dist.get_rank() == 1 else "step 1", timeout_s=1.0)
    except PeerError as error:
        if name == "late":
            dist.distributed_c10d._get_default_store().set("told", "")
        collectives.close()
        return error.ranks, str(error)
    raise AssertionError("all ranks came")


def test_assemble_names_who_is_missing() -> None:
    values = run(N, is_missed, "late")
    for ranks, told in (values[0], values[2]):
        assert ranks == (1,)
        assert told.startswith("rank 1 did not reach 'step 1' within 1 s (rank 1 was last seen at 'offload')")


def test_assemble_names_who_is_elsewhere() -> None:
    for rank, (ranks, told) in enumerate(run(2, is_missed, "other")):
        assert ranks == (1 - rank,)
        assert "'resume'" in told
        assert "'step 1'" in told


def test_assemble_names_who_died() -> None:
    for ranks, _ in survivors(ended(N, is_missed, "killed"), 1):
        assert ranks == (1,)
