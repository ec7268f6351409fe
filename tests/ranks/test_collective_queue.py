"""All ranks get the bytes of all, in one order, however late one of them is; where they differ, each says who and
how."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from infinity.errors import ForkError, NotAvailableError, PeerError
from infinity.ranks.operations import AllGather, AllToAll, CollectiveOperation, ControlMessage
from tests.ranks.tasks import KINDS, done, opened, operation
from tests.ranks.workers import ended, run
from tests.sampling import SEED, number


def every_kind() -> Any:
    collectives = opened()
    arrived = [done(collectives, operation(kind, index)) for index, kind in enumerate(KINDS)]
    quiet = collectives.close()
    threads = [each.name for each in threading.enumerate() if each.name.startswith("infinity")]
    return arrived, quiet, collectives.close(), threads, len(dist.distributed_c10d._world.pg_map)


@pytest.mark.covering(most=2)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_kind_brings_the_bytes_of_all_ranks_and_closing_leaves_nothing(n: int) -> None:
    expected = b"".join(bytes([rank + 1]) * 64 for rank in range(n))
    for value in run(n, every_kind):
        assert value == ([expected] * 3, True, True, [], 1)


def speaking() -> list[list[int]]:
    """Return the values that were received before the first operation, and after each."""
    collectives, heard = opened(), []
    for index, kind in enumerate(KINDS):
        heard.append(list(collectives.heard))
        collectives.say(10 * index + dist.get_rank())
        done(collectives, operation(kind, index))
    heard.append(list(collectives.heard))
    collectives.close()
    return heard


@pytest.mark.parametrize("n", [1, 3])
def test_what_ranks_say_by_the_way_is_heard_by_all(n: int) -> None:
    expected = [[0] * n, *([10 * index + rank for rank in range(n)] for index in range(len(KINDS)))]
    assert run(n, speaking) == [expected] * n


def telling() -> Any:
    """All ranks tell something of paths of their own, then rank 1 is at something else."""
    collectives, rank = opened(), dist.get_rank()
    told = collectives.tell(f"saving to /tmp/{rank}", rank)
    try:
        collectives.tell("comparing the pins" if rank else "looking for a free pin for /tmp", [])
    except PeerError as error:
        return told, error.ranks, error.cause
    finally:
        collectives.close()


def test_ranks_that_are_at_different_things_do_not_take_in_what_the_others_tell() -> None:
    cause = "rank 1 is at comparing the pins while rank 0 is at looking for a free pin for /tmp"
    assert run(2, telling) == [([0, 1], (1,), cause)] * 2


# Random sequences


def _bytes(nbytes: int, *key: int) -> torch.Tensor:
    data = random.Random(repr(key)).randbytes(nbytes)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).clone() if data else torch.empty(0, dtype=torch.uint8)


def _drawn(seed: int, index: int, late: random.Random) -> tuple[CollectiveOperation, Any]:
    """Return the operation of that number in a sequence, and the values that must arrive."""
    rank, n = dist.get_rank(), dist.get_world_size()
    chance = random.Random(repr((seed, index)))
    sizes = [[chance.choice((0, 1, 7, 64, 1000, 70000)) for _ in range(n)] for _ in range(n)]
    after = [partial(time.sleep, late.random() * 0.003) for _ in range(late.randrange(2))]
    kind = chance.choice(KINDS)
    if kind == "gather":
        pieces = [_bytes(size, seed, index, r) for r, size in enumerate(sizes[0])]
        buffer = torch.cat([piece if r == rank else torch.zeros_like(piece) for r, piece in enumerate(pieces)])
        return CollectiveOperation(AllGather(buffer, sizes[0]), index, "g", after), torch.cat(pieces)
    if kind == "exchange":
        pieces = [[_bytes(size, seed, index, r, to) for to, size in enumerate(row)] for r, row in enumerate(sizes)]
        expected = torch.cat([row[rank] for row in pieces])
        received = [row[rank] for row in sizes]
        moved = AllToAll(torch.cat(pieces[rank]), sizes[rank], torch.zeros_like(expected), received)
        return CollectiveOperation(moved, index, "x", after), expected
    payloads = [_bytes(sizes[0][r], seed, index, r).numpy().tobytes() for r in range(n)]
    return CollectiveOperation(ControlMessage(payloads[rank]), index, "c", after), payloads


def random_sequences(seeds: list[int]) -> int:
    """Operations done, all with the right bytes. Submitted early and late, and awaited in any order."""
    collectives, count = opened(), 0
    for seed in seeds:
        late = random.Random(repr((seed, dist.get_rank())))
        waiting: list[Any] = []
        for index in range(random.Random(seed).randrange(2, 8)):
            if late.random() < 0.2:
                time.sleep(late.random() * 0.003)
            drawn, expected = _drawn(seed, index, late)
            waiting.append((drawn.collective, collectives.submit(drawn), expected))
        late.shuffle(waiting)
        for moved, ticket, expected in waiting:
            told, count = ticket.result(), count + 1
            if isinstance(moved, ControlMessage):
                assert told == expected, (seed, moved)
            else:
                assert torch.equal(moved.buffer if isinstance(moved, AllGather) else moved.receive, expected), seed
    collectives.close()
    return count


@pytest.mark.covering(most=1)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_random_sequences_bring_equal_bytes_however_late_a_rank_is(n: int) -> None:
    seeds = [SEED * 1000 + n * 100_000 + each for each in range(number(10, 170))]
    counts = run(n, random_sequences, seeds)
    assert len(set(counts)) == 1
    assert counts[0] >= 2 * len(seeds)


# Ranks that differ


def differing(ways: Sequence[str]) -> list[Any]:
    return [differing_in(how) for how in ways]


def differing_in(how: str) -> Any:
    collectives, rank = opened(), dist.get_rank()
    odd = rank == 1
    n = dist.get_world_size()
    done(collectives, operation("gather", 0))
    mine = operation("gather", 1)
    if how == "kind" and odd:
        mine = CollectiveOperation(ControlMessage(b"norm"), 1, "step 7")
    elif how == "subject" and odd:
        mine = operation("gather", 2)
    elif how == "slices":
        mine = operation("gather", 1, nbytes=65 if odd else 64)
    elif how == "pieces":
        send = torch.zeros(8 * n, dtype=torch.uint8)
        sizes = [8] * n
        if odd:
            sizes[0], sizes[-1] = 9, 7
        mine = CollectiveOperation(
            AllToAll(send, sizes, torch.zeros(8 * n, dtype=torch.uint8), [8] * n), 1, "unit 'layers.1'"
        )
    with pytest.raises(PeerError) as caught:
        collectives.submit(mine).result()
    with pytest.raises(PeerError) as again:
        collectives.submit(operation("gather", 5))
    assert str(again.value) == str(caught.value)
    assert collectives.close()
    return caught.value.ranks, caught.value.cause


DIFFERENCES = {
    "kind": ((1,), "rank 1 is at step 7 while rank 0 gathers unit 'layers.1'"),
    "subject": ((1,), "rank 1 gathers unit 'layers.2' while rank 0 gathers unit 'layers.1'"),
    "slices": ((1,), "rank 1 gathers unit 'layers.1' as slices of [65, 65"),
    "pieces": ((0, 1), "rank 1 sends 9 bytes of unit 'layers.1' to rank 0, which expects 8"),
}


@pytest.mark.parametrize("n", [2, 3])
def test_all_ranks_name_the_one_that_differs(n: int) -> None:
    first, *others = run(n, differing, list(DIFFERENCES))
    assert others == [first] * (n - 1)
    for (ranks, cause), (expected, says) in zip(first, DIFFERENCES.values(), strict=True):
        assert ranks == expected
        assert says in cause


def wrong_buffers() -> None:
    collectives = opened()
    flat = torch.zeros(8, dtype=torch.uint8)
    for bad in (
        AllGather(flat, [8]),
        AllGather(flat, [4, 5]),
        AllGather(flat, [-1, 9]),
        AllGather(flat.view(2, 4), [4, 4]),
        AllGather(torch.zeros(8), [4, 4]),
        AllGather(torch.zeros(16, dtype=torch.uint8)[::2], [4, 4]),
        AllToAll(flat, [4, 4], flat, [4, 5]),
    ):
        with pytest.raises(ValueError, match="of the gradients"):
            collectives.submit(CollectiveOperation(bad, 0, "the gradients"))
    with pytest.raises(NotAvailableError, match="host memory only"):
        collectives.submit(
            CollectiveOperation(AllGather(torch.zeros(8, dtype=torch.uint8, device="meta"), [4, 4]), 0, "the weights")
        )
    assert done(collectives, operation("gather", 0))  # nothing was submitted, so nothing broke
    collectives.close()


def test_buffers_that_do_not_fit_are_refused_before_anything_is_moved() -> None:
    run(2, wrong_buffers)


# The end


def closed_while_waiting() -> Any:
    collectives, store = opened(), dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        tickets = [collectives.submit(operation(kind, index)) for index, kind in enumerate(KINDS)]
        assert not tickets[0].wait(0.2)
        collectives.close()
        assert all(ticket.done() for ticket in tickets)
        for ticket in tickets:
            with pytest.raises(PeerError, match="this rank has closed"):
                ticket.result()
        groups = len(dist.distributed_c10d._world.pg_map)
        store.set("closed", "")
        store.wait(["seen"])
        return groups
    store.wait(["closed"])
    try:
        collectives.submit(operation("gather", 0)).result()
        return done(collectives, operation("exchange", 1))
    except PeerError as error:
        store.set("seen", "")
        collectives.close()
        return error.ranks, error.cause


def test_closing_ends_operations_that_wait_and_the_others_say_who_left() -> None:
    mine, (ranks, cause) = run(2, closed_while_waiting)
    assert mine == 1
    assert ranks == (0,)
    assert "rank 0 closed the model, or its script ended, while rank 1 was at the gather of unit 'layers.0'" in cause


def closed_beside_one_that_stays(kind: str) -> Any:
    """Rank 1 fails when it has sent its header, and keeps its connections open until the others have closed."""
    collectives, store = opened(), dist.distributed_c10d._get_default_store()
    ticket = collectives.submit(operation(kind, 0, after=[fails] if dist.get_rank() == 1 else []))
    with pytest.raises((PeerError, OSError)) as caught:
        ticket.result()
    if dist.get_rank() == 1:
        store.wait(["closed"])
    quiet, groups = collectives.close(), len(dist.distributed_c10d._world.pg_map)
    store.set("closed", "")
    return type(caught.value).__name__, quiet, groups


def fails() -> None:
    """Something to wait for that fails."""
    raise OSError(5, "the disk failed")


@pytest.mark.parametrize("kind", KINDS)
def test_closing_does_not_wait_for_a_collective_that_cannot_end(kind: str) -> None:
    (error, quiet, groups), other = run(2, closed_beside_one_that_stays, kind)
    assert (error, groups) == ("PeerError", 1)
    assert quiet or kind != "control"  # what moves payloads has memory of its own
    assert other == ("OSError", True, 1)


class Hangs:
    """Something to wait for that never ends."""

    def __init__(self) -> None:
        self.began = threading.Event()

    def wait(self) -> None:
        self.began.set()
        threading.Event().wait()


def closed_behind_a_disk_that_hangs() -> Any:
    collectives, read = opened(), Hangs()
    tickets = [collectives.submit(operation("gather", index, after=[read.wait])) for index in range(2)]
    read.began.wait()
    assert not collectives.close()
    assert not collectives.close()
    for ticket in tickets:
        with pytest.raises(PeerError, match="this rank has closed"):
            ticket.result()


def test_closing_is_bounded_where_a_read_hangs() -> None:
    run(2, closed_behind_a_disk_that_hangs)


def interrupted() -> Any:
    collectives = opened()
    done(collectives, operation("gather", 0))
    if dist.get_rank() == 1:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            while True:  # the others come to the gather, and not to what comes after
                collectives.submit(operation("gather", 1)).result()
        except KeyboardInterrupt:
            collectives.close()
            return "interrupted"
    try:
        while True:
            collectives.submit(operation("gather", 1)).result()
            threading.Event().wait(0.01)
    except PeerError as error:
        collectives.close()
        return error.ranks, error.cause


def test_ctrl_c_gets_through_a_wait_and_the_others_say_who_left() -> None:
    values = run(3, interrupted)
    assert values[1] == "interrupted"
    for value in (values[0], values[2]):
        assert value[0] == (1,)
        assert value[1].startswith("rank 1 closed the model, or its script ended, while rank ")


def forked() -> int:
    collectives = opened()
    done(collectives, operation("gather", 0))
    child = os.fork()
    if child == 0:
        try:
            collectives.submit(operation("gather", 1))
        except ForkError:
            collectives.fail(ValueError("in the child"))
            os._exit(17 if collectives.close() and threading.active_count() == 1 else 18)
        os._exit(19)
    _, status = os.waitpid(child, 0)
    done(collectives, operation("gather", 1))
    collectives.close()
    return os.waitstatus_to_exitcode(status)


def test_a_forked_child_can_use_nothing_and_ends_nothing_of_its_parent() -> None:
    assert run(2, forked) == [17, 17]


def left_open() -> None:
    collectives = opened()
    done(collectives, operation("gather", 0))


def test_a_process_that_closed_nothing_ends() -> None:
    assert [each.exitcode for each in ended(2, left_open)] == [0, 0]


def chained(failing: str) -> Any:
    """Return the errors of a rank in two operations, of which rank 1's own read, or its arrival, fails in the first."""
    collectives = opened()

    def read() -> None:
        if dist.get_rank() == 1 and failing == "after":
            raise OSError(5, "the disk failed")

    def arrived() -> None:
        if dist.get_rank() == 1 and failing == "arrived":
            raise OSError(5, "the disk failed")

    raised = []
    for each in (operation("gather", 4, after=[read], arrived=arrived), operation("gather", 5)):
        try:
            collectives.submit(each).result()
        except (PeerError, OSError) as error:
            raised.append((type(error).__name__, str(error)))
    collectives.close()
    return raised


@pytest.mark.parametrize("failing", ["after", "arrived"])
def test_what_a_rank_waits_for_fails_and_all_ranks_say_so(failing: str) -> None:
    other, own = run(2, chained, failing)
    assert own[0] == ("OSError", "[Errno 5] the disk failed")
    assert own[1][0] == "PeerError"
    assert "the disk failed" in own[1][1]
    assert other[-1][0] == "PeerError"
    assert "rank 1 failed: OSError: [Errno 5] the disk failed" in other[-1][1]


def long_result() -> bytes:
    return bytes([dist.get_rank()]) * (1 << 20)


def test_a_result_may_be_longer_than_a_pipe_holds() -> None:
    assert run(2, long_result) == [bytes(1 << 20), bytes([1]) * (1 << 20)]
