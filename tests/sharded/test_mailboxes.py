"""Pieces go from rank to rank through shared memory: none is read too early, and no region is written too early."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch

from infinity.errors import PeerError
from infinity.io.arena import PinnedArena
from infinity.ranks.operations import HostCopies
from infinity.sharded.mailboxes import Mailboxes
from tests import sampling
from tests.sharded.sharing import EXCHANGE_BYTES, shared

NBYTES = 4096


def at_once(ranks: Sequence[Mailboxes], act: Callable[[int, Callable[[], None]], None]) -> list[BaseException | None]:
    """Call `act(rank, check)` on a thread for each rank, and return the error of each. `check` raises an error if
    another rank has failed."""
    errors: list[BaseException | None] = [None] * len(ranks)

    def check() -> None:
        if any(errors):
            raise PeerError("another rank failed", ())

    def run(rank: int) -> None:
        try:
            act(rank, check)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    return errors


@pytest.mark.parametrize("count", [2, 3])
def test_every_rank_gets_the_pieces_of_the_same_exchange(count: int) -> None:
    """Each rank waits at random places, and overwrites its region as soon as an exchange has ended."""
    homes = shared(count)
    boxes = [each.mailboxes for each in homes]
    leases = [each.gradients.lease(count * NBYTES, "a box") for each in homes]
    rounds = sampling.number(40, 6)

    def act(rank: int, check: Callable[[], None]) -> None:
        random_numbers = random.Random(sampling.SEED + rank)
        box, lease = boxes[rank], leases[rank]
        for number in range(rounds):
            if random_numbers.random() < 0.3:
                time.sleep(0.02)
            mine = lease.tensor()
            for to in range(count):
                mine[to * NBYTES : (to + 1) * NBYTES] = (16 * rank + 4 * to + number) % 251
            pieces = torch.zeros(count, NBYTES, dtype=torch.uint8)
            places = [each.place(its, rank * NBYTES) for each, its in zip(boxes, leases, strict=True)]
            box.exchange(places, list(pieces.unbind()), HostCopies(), check)
            mine.fill_(255)
            for sender in range(count):
                assert pieces[sender].unique().tolist() == [(16 * sender + 4 * rank + number) % 251]

    assert at_once(boxes, act) == [None] * count
    for each in homes:
        each.close()


def test_a_rank_that_waits_asks_whether_another_has_failed() -> None:
    homes = shared(2)
    box = homes[0].mailboxes

    def failed() -> None:
        raise PeerError("rank 1 died", (1,))

    with pytest.raises(PeerError, match="rank 1 died"):
        box.exchange([0, 0], [torch.empty(0, dtype=torch.uint8)] * 2, HostCopies(), failed)
    for each in homes:
        each.close()


def test_memory_elsewhere_has_no_place() -> None:
    homes = shared(2)
    box = homes[1].mailboxes
    first, second = (each.gradients.lease(NBYTES, "a box") for each in homes)
    assert box.place(second, 8) == homes[0].mailboxes.place(first, 8) + EXCHANGE_BYTES
    assert box.place(PinnedArena(NBYTES).lease(NBYTES, "another"), 8) == -1
    for each in homes:
        each.close()
