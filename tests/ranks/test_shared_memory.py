"""Memory that ranks share: how it is passed, and what happens if a rank cannot have it."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import infinity
from infinity.base.memfd import make_memfd
from infinity.coordinator import registry
from infinity.errors import InfinityError, NotAvailableError, PeerError
from infinity.io.arena import PinnedArena
from infinity.ranks import collectives, shared_memory
from infinity.ranks.collective_queue import CollectiveQueue
from infinity.ranks.ranks import Ranks
from infinity.ranks.shared_memory import open_shared_memory
from infinity.ranks.world import MultiRankWorld
from infinity.sharded.mailboxes import Mailboxes
from infinity.sharded.shared_homes import SharedHomes
from infinity.sharded.shared_window import SharedWindow
from tests.ranks.traces import names, require_no_names_but, users_of
from tests.ranks.workers import ended, run
from tests.runtime.over_ranks import batch, offloaded, train

HOST = {"weights": "host", "optimizer": "host"}


def world_of_all() -> MultiRankWorld:
    ranks = Ranks.of_world(deadline_s=20.0)
    assert ranks is not None
    return MultiRankWorld(CollectiveQueue(ranks))


def passed() -> tuple[bytes, int, bool, str]:
    world = world_of_all()
    memory, refused = open_shared_memory(world)
    assert memory is not None
    memory.size(1 << 16)
    inherited = os.get_inheritable(memory.fileno())
    arena = PinnedArena(1 << 16, fd=memory.fileno())
    arena.memory.view(world.rank, 1)[:] = bytes([world.rank + 1])
    world.tell("written", None)
    seals = fcntl.fcntl(memory.fileno(), fcntl.F_GET_SEALS)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(memory.fileno(), 1 << 15)
    memory.close()
    memory.close()
    found = bytes(arena.memory.view(0, 4))
    world.close()
    return found, seals & shared_memory._SIZE_SEALS, inherited, refused


def test_all_ranks_map_the_same_memory_whose_size_is_sealed() -> None:
    assert run(3, passed) == [(b"\1\2\3\0", shared_memory._SIZE_SEALS, False, "")] * 3


def without(what: str, config: dict[str, Any]) -> tuple[Any, bool, list[str]]:
    """Train where a rank cannot have the memory. Return the result, whether the weights are shared, and warnings."""
    rank = dist.get_rank()
    if what == "memfd" and rank == 0:

        def denied(*_: Any) -> int:
            raise OSError(errno.EPERM, "Operation not permitted")

        os.memfd_create = denied  # type: ignore[assignment]
    elif what == "user" and rank == 1:
        os.setuid(65534)
    elif what == "network" and rank == 1:
        real = shared_memory._receive
        shared_memory._receive = lambda address: real(f"{address} of another namespace")
    shares, made = [], SharedHomes.__init__

    def init(self: SharedHomes, *given: Any) -> None:
        shares.append(True)
        made(self, *given)

    SharedHomes.__init__ = init  # type: ignore[method-assign]
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("infinity")  # of all modules, so that a second line from elsewhere is seen
    logger.setLevel(logging.WARNING)
    logger.addHandler(handler)
    return train("", config, 1, 2, steps=2), bool(shares), said


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("", ""),
        ("memfd", "rank 0 could not make shared memory (memfd_create: Operation not permitted)"),
        ("network", "rank 1 could not be given the shared memory (it cannot reach rank 0"),
        pytest.param(
            "user",
            "rank 1 could not be given the shared memory (rank 0 belongs to another user",
            marks=pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user"),
        ),
    ],
)
def test_a_rank_without_the_memory_has_the_same_bits_over_gloo_and_one_line(what: str, told: str) -> None:
    losses, norms, weights = train("", HOST, 1, 2, steps=2)
    found = run(2, without, what, HOST)
    assert [result for result, *_ in found] == [(losses[rank::2], norms, weights) for rank in range(2)]
    assert [shares for _, shares, _ in found] == [not what] * 2
    (first, others) = [said for *_, said in found]
    assert others == []
    if not what:
        assert first == []
        return
    (line,) = first
    assert line.startswith(f"ranks.wire: gloo, as {told}")
    assert line.endswith("; results are the same")


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_a_process_of_another_user_is_passed_nothing() -> None:
    memory = os.memfd_create("test")
    with shared_memory._Passing(memory) as passing:
        for user, expected in ((0, 1), (65534, 0)):
            child = os.fork()
            if not child:
                os.setuid(user)
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
                    asking.connect(f"\0{passing.address}")
                    os._exit(len(socket.recv_fds(asking, 1, 1)[1]))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == expected
    os.close(memory)


def test_a_wire_that_the_config_names_is_not_replaced() -> None:
    outcomes = ended(2, without, "memfd", HOST | {"ranks": {"wire": "host"}})
    for outcome in outcomes:
        assert isinstance(outcome.error, NotAvailableError | PeerError)
        assert "ranks.wire: host needs memory that all ranks share, but rank 0 could not make" in str(outcome.error)


def without_room() -> str:
    world = world_of_all()
    memory, _ = open_shared_memory(world)
    assert memory is not None

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    os.ftruncate = full  # type: ignore[assignment]
    try:
        memory.size(1 << 30)
    except InfinityError as error:
        return str(error)
    finally:
        world.close()
    return ""


def test_memory_that_cannot_be_made_is_refused_on_all_ranks() -> None:
    told = "the ranks cannot share 1.00 GiB of memory (No space left on device). Set ranks.wire: gloo."
    assert run(2, without_room) == [told, f"rank 0: {told}"]


def killed(victim: int, steps: int) -> float:
    """Train, and kill one rank in the middle. Return how long the others waited for their error."""
    model = offloaded("", HOST)
    optim = infinity.AdamW(model.parameters(), lr=1e-2)
    for step in range(10):
        if step == steps and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        try:
            model(batch(step, dist.get_rank(), torch.float32)).backward()
            optim.step()
            optim.zero_grad()
        except PeerError as error:
            assert f"rank {victim}" in str(error)
            infinity.close(model)
            return time.monotonic() - began
    raise AssertionError("no error")


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_killed_rank_is_named_in_time_and_leaves_nothing(victim: int, steps: int) -> None:
    before = names()
    outcomes = ended(3, killed, victim, steps)
    assert outcomes[victim].exitcode == -signal.SIGKILL
    waited = [outcome.value for rank, outcome in enumerate(outcomes) if rank != victim]
    assert all(each is not None and each < 5 for each in waited), [outcome.told for outcome in outcomes]
    require_no_names_but(before)


@pytest.mark.parametrize("how", ["open", "mapped"])
def test_a_process_that_has_the_memory_is_found(how: str) -> None:
    memory = make_memfd()
    inode = os.fstat(memory).st_ino
    os.ftruncate(memory, mmap.PAGESIZE)
    mapped = mmap.mmap(memory, mmap.PAGESIZE) if how == "mapped" else None
    if mapped is not None:
        os.close(memory)
    assert str(os.getpid()) in users_of([inode])
    if mapped is None:
        os.close(memory)
    else:
        mapped.close()
    assert users_of([inode]) == []


def freed() -> tuple[int, int]:
    """Return the bytes of shared memory that are resident before and after all ranks have closed the model."""
    model = offloaded("", HOST)
    weights = registry.coordinator_of(model).resources.weights
    assert isinstance(weights, SharedHomes)
    before = _resident(weights)
    infinity.close(model)
    dist.barrier()
    return before, _resident(weights)


def _resident(weights: SharedHomes | SharedWindow, what: str = "Rss:") -> int:
    """Return the bytes of the shared memory that are resident in this process; with "Pss:", divided by the number of
    processes that have them."""
    address = weights.shared.arena.memory.address
    found, mine = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            mine = int(first.split("-")[0], 16) == address
        elif mine and first == what:
            found = int(line.split()[1]) << 10
    return found


def test_the_memory_is_freed_when_all_ranks_have_closed_the_model() -> None:
    for before, after in run(3, freed):
        assert before > 1 << 16
        assert after == 0


def without_sockets(folder: str, tiers: dict[str, str], wide: int) -> tuple[int, int, int, int]:
    """Train without collectives of gloo for weights and gradients.

    Return this rank's part of the resident shared memory, the bytes of all weights, the bytes of gradients and slots
    that the ranks share, and the bytes of the plan for slots and weights that they do not share.
    """

    def refuse(*_: Any) -> Any:
        raise AssertionError("weights or gradients go over sockets")

    model = offloaded(folder, tiers, times=(wide, wide))
    collectives.begin_gather = collectives.begin_all_to_all = refuse
    optim = infinity.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        model(batch(step, dist.get_rank(), torch.float32)).backward()
        optim.step()
        optim.zero_grad()
    dist.barrier()
    coordinator = registry.coordinator_of(model)
    weights, arena = coordinator.resources.weights, coordinator.plan.layout.arena
    assert isinstance(weights, SharedHomes | SharedWindow)
    part = _resident(weights, "Pss:")
    dist.barrier()
    every = sum(unit.full.home_bytes for unit in coordinator.units)
    infinity.close(model)
    return part, every, arena.shared_exchange + arena.shared_transfers, arena.transfers + arena.weights


@pytest.mark.parametrize("count", [2, 4])
def test_all_ranks_together_have_one_copy_of_the_weights_and_nothing_of_it_crosses_sockets(count: int) -> None:
    parts, every, beside, private = zip(*run(count, without_sockets, "", HOST, 64), strict=True)
    assert set(private) == {0}
    assert every[0] <= sum(parts) <= 1.05 * every[0] + sum(beside)


def test_weights_on_nvme_pass_through_shared_slots_and_nothing_of_them_crosses_sockets(tmp_path: Path) -> None:
    tiers = {"weights": "nvme", "optimizer": "nvme"}
    parts, _, beside, private = zip(*run(2, without_sockets, str(tmp_path), tiers, 64), strict=True)
    assert set(private) == {0}
    assert sum(beside) / 2 < sum(parts) <= 1.05 * sum(beside)


def elsewhere(folder: str, config: dict[str, str]) -> Any:
    """Train with no slice of rank 1 in the shared memory, as if views of earlier weights kept all of it."""
    if dist.get_rank() == 1:
        Mailboxes.place = lambda *_: -1  # type: ignore[method-assign]
    return train(folder, config, 2, 2, dtype="bfloat16")


@pytest.mark.parametrize("weights", ["host", "nvme"])
def test_slices_that_are_not_in_the_shared_memory_go_over_sockets_to_the_same_bits(
    tmp_path: Path, weights: str
) -> None:
    config = {"weights": weights, "optimizer": "nvme"}
    losses, norms, values = train(str(tmp_path / "one"), config, 2, 2, dtype="bfloat16")
    for rank, found in enumerate(run(2, elsewhere, str(tmp_path / "all"), config)):
        assert found == (losses[rank::2], norms, values)


def alone_for(seconds: float, acts: bool) -> str:
    """Let rank 0 go on alone for longer than the deadline of the ranks, which is a second."""
    ranks = Ranks.of_world(deadline_s=1.0)
    assert ranks is not None
    world = MultiRankWorld(CollectiveQueue(ranks))
    end = time.monotonic() + seconds
    while world.leads and time.monotonic() < end:
        time.sleep(0.1)
        if acts:
            world.collectives.act()
    try:
        world.tell("the end", None)
    except PeerError as error:
        return str(error)
    finally:
        world.close()
    return ""


def test_ranks_wait_for_a_rank_as_long_as_it_goes_on_alone() -> None:
    assert run(2, alone_for, 3.5, True) == ["", ""]
    assert "rank 0 did not reach" in run(2, alone_for, 3.5, False)[1]


def with_nvme(folder: str, wires: list[str]) -> str:
    config = {"weights": "nvme", "optimizer": "nvme", "ranks": {"wire": wires[dist.get_rank()]}}
    try:
        offloaded(folder, config)
    except InfinityError as error:
        return str(error)
    return ""


def test_a_wire_that_the_other_ranks_do_not_have_is_refused(tmp_path: Path) -> None:
    for told in run(2, with_nvme, str(tmp_path / "two"), ["auto", "gloo"]):
        assert "rank 1 has ranks.wire: gloo, and rank 0 has auto: give all ranks the same config" in told
