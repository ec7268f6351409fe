"""Ranks that are threads of one process and share memory, as ranks of a machine do."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from infinity.ranks.world import SingleProcessWorld
from infinity.sharded.shared_homes import SharedHomes
from infinity.sizes import PAGE_BYTES
from infinity.state.shard import RankPartition
from infinity.state.unit import Unit
from tests.units.fakes import unit_of

SLICE_NUMEL = PAGE_BYTES // 2
EXCHANGE_BYTES = 1 << 16


@dataclass
class Memory:
    """Counterpart of SharedMemory. Attributes: fd: a memfd that all ranks have."""

    fd: int

    def size(self, nbytes: int) -> None:
        os.ftruncate(self.fd, nbytes)

    def fileno(self) -> int:
        return self.fd

    def close(self) -> None:
        return


class World(SingleProcessWorld):
    """World of a rank whose peers say what it says. Attributes: failures: texts of the failures that it has told."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.failures: list[str] = []

    def tell(self, name: str, told: Any) -> list[Any]:
        return [told] * self._count

    def fail(self, error: BaseException) -> None:
        self.failures.append(str(error))


def shared(count: int, units: list[Unit] | None = None) -> list[SharedHomes]:
    """Return the shared homes of each rank."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    memory: Any = Memory(fd)
    units = units or [unit_of(0, (4,)), unit_of(1, (2, 3))]
    made = [
        SharedHomes(memory, units, RankPartition(count, rank, SLICE_NUMEL), World(count), EXCHANGE_BYTES)
        for rank in range(count)
    ]
    os.close(fd)
    return made
