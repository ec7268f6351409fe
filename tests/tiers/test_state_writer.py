"""States that go from the device to the store through a ring: all bytes arrive, and the ring bounds the host memory."""

from __future__ import annotations

import errno
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity import _native
from infinity.base.interrupt import interruptible, uninterruptible
from infinity.errors import SwapIOError, SwapTimeoutError
from infinity.io.arena import ArenaRegion, Lease
from infinity.io.store import Extent
from infinity.sizes import PAGE_BYTES
from infinity.tiers.home import ResidentHome, StateHome
from infinity.tiers.resident import ResidentMemory, ResidentUses
from tests.sim.queues import EAGER, LAZY, Policy, random_policy
from tests.tiers.rig import Rig

STATE_PAGES = 6
RING_PAGES = 2
POLICIES = [LAZY, EAGER, random_policy(0)]


def resident(rig: Rig) -> StateHome:
    """Return a state on the device with random bytes, and two copies in the store."""
    lease = rig.slab.try_lease(STATE_PAGES * PAGE_BYTES)
    assert lease is not None
    uses = ResidentUses(rig.sim)
    extent = Extent("unit", 0, "exp_avg", (0, STATE_PAGES * PAGE_BYTES), STATE_PAGES * PAGE_BYTES)
    home = ResidentHome(None, 0, extent.nbytes, extent, memory=ResidentMemory(lease.memory, uses))
    fill(home, 1)
    return home


def fill(home: StateHome, seed: int) -> torch.Tensor:
    values = torch.randint(0, 256, (home.nbytes,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    home.write(0, values)
    return values


def stored(rig: Rig, home: StateHome, copy: int) -> torch.Tensor:
    assert rig.store is not None
    memory = _native.Arena(home.nbytes, huge_pages=False).view(0, home.nbytes)
    read = rig.store.engine.read(rig.store.file, home.stored().offsets[copy], memory)
    assert read.wait(60)
    assert read.failure() is None
    return torch.frombuffer(memory, dtype=torch.uint8)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_all_bytes_arrive_in_the_copy_though_the_state_changes_afterwards(
    policy: Policy, rig: Callable[..., Rig], tmp_path: Path
) -> None:
    made = rig(policy)
    made.open_store(tmp_path)
    home, writer = resident(made), made.states(RING_PAGES)
    values = fill(home, 2)
    write = writer.write(home, 1)
    write.result()
    fill(home, 3)  # behind the copies
    assert torch.equal(stored(made, home, 1), values)


def test_the_next_update_waits_for_the_copies_and_not_the_host(rig: Callable[..., Rig], tmp_path: Path) -> None:
    made = rig()
    made.open_store(tmp_path)
    home, writer = resident(made), made.states(STATE_PAGES)
    values = fill(home, 2)
    write = writer.write(home, 0)
    assert write.begun_bytes == home.nbytes
    fill(home, 3)
    writer.wait(write)
    assert torch.equal(stored(made, home, 0), values)


def test_the_ring_bounds_what_is_in_flight(rig: Callable[..., Rig], tmp_path: Path) -> None:
    made = rig()
    made.open_store(tmp_path)
    home, writer = resident(made), made.states(RING_PAGES)
    write = writer.write(home, 0)
    assert write.begun_bytes == RING_PAGES * PAGE_BYTES  # no event of the lazy device was reached yet
    assert not write.done()
    other = writer.write(home, 1)
    assert other.begun_bytes == 0
    writer.wait(other)
    assert write.done()
    assert torch.equal(stored(made, home, 0), stored(made, home, 1))


def test_a_failed_piece_fails_the_write_and_gives_its_memory_back(rig: Callable[..., Rig], tmp_path: Path) -> None:
    made = rig()
    made.open_store(tmp_path, [_native.Fault(1, "error", errno.EIO, 9, operation="write")])
    home, writer = resident(made), made.states(RING_PAGES)
    write = writer.write(home, 0)
    writer.wait(write)
    with pytest.raises(SwapIOError):
        write.result()
    assert writer._ring.free_bytes == RING_PAGES * PAGE_BYTES
    assert write.begun_bytes < home.nbytes


def test_a_piece_that_never_ends_fails_all_writes(rig: Callable[..., Rig], tmp_path: Path) -> None:
    """The disk may still read the memory of the piece. So the ring may have no room for other pieces any more."""
    made = rig()
    made.open_store(tmp_path, [_native.Fault(0, "lose", repeat=100, operation="write")], deadline_s=0.1)
    home, writer = resident(made), made.states(RING_PAGES)
    writes = [writer.write(home, copy) for copy in (0, 1)]
    for write in reversed(writes):
        with pytest.raises(SwapTimeoutError):
            write.result()
    assert writer._ring.free_bytes == 0


def test_an_interrupt_comes_only_while_a_piece_is_written(
    rig: Callable[..., Rig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes whenever a piece gets memory or gives it back; the write ends nevertheless, and loses no memory."""
    made = rig()
    made.open_store(tmp_path)
    home, writer = resident(made), made.states(RING_PAGES)
    values = fill(home, 2)
    write = writer.write(home, 1)
    try_lease, interrupted = ArenaRegion.try_lease, 0

    def interrupted_lease(space: ArenaRegion, nbytes: int, **options: Any) -> Lease | None:
        lease = try_lease(space, nbytes, **options)
        if lease is not None:
            signal.raise_signal(signal.SIGINT)
        return lease

    monkeypatch.setattr(ArenaRegion, "try_lease", interrupted_lease)

    @uninterruptible
    def wait() -> None:
        with interruptible():  # as OffloadedUnit waits for an update
            writer.wait(write)

    while not write.ended:
        try:
            wait()
        except KeyboardInterrupt:
            interrupted += 1
    assert interrupted
    assert torch.equal(stored(made, home, 1), values)
    assert writer._ring.free_bytes == RING_PAGES * PAGE_BYTES
