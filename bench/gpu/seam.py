"""The parts of the device tier that stage 3 tests at their limits: a small slab, and queues in both directions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gpu.cuda import accelerator, pinned_arena
from infinity import _native
from infinity.io.arena import ArenaRegion, Lease
from infinity.io.engine import Transfer
from infinity.io.store import Extent
from infinity.state.unit import FlatParameterGroup, ParameterSpec
from infinity.tiers.device import open_gate
from infinity.tiers.downloads import GradientQueue, WeightsDownloads
from infinity.tiers.home import StateHome, WeightsHome
from infinity.tiers.slab import Slab, SlabLease
from infinity.tiers.slots import SlabSlot
from infinity.tiers.uploads import UploadQueue

MIB = 1 << 20
POISON = 0xEE


class FileStore:
    """A store of one file, in which every extent begins at offset 0."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.nbytes = nbytes
        self.engine = _native.IOEngine("auto")
        self.file = _native.File(str(folder / "weights"), create=True)
        self.file.preallocate(nbytes)
        self.file.keep_checksums(nbytes)
        self.bytes = torch.frombuffer(_native.Arena(nbytes).view(0, nbytes), dtype=torch.uint8)
        self.bytes.random_(0, POISON, generator=torch.Generator().manual_seed(0))
        written = self.engine.write(self.file, 0, self.bytes.numpy())
        written.wait()
        if written.failure() is not None:
            raise RuntimeError(f"writing the weights failed: {written.failure()}")

    def place(self, extent: Extent, copy: int | None) -> tuple[_native.File, int]:
        return self.file, 0

    def transfer(self, future: _native.IOFuture, extent: Extent) -> Transfer:
        return Transfer(future, extent.unit, extent.state, 1)

    def close(self) -> None:
        self.engine.close()
        self.file.close()


class Seam:
    """A slab, an upload queue and a gradient queue on the GPU.

    Args:
        slots: bytes of device memory for weights.
        ring: bytes of device memory for gradients.
        host: bytes of pinned memory for `home`s, targets and the queues' own memory.
        piece: bytes per read from the store; four reads are in flight.
        store: the store from which weights are uploaded.
    """

    def __init__(
        self, *, slots: int, ring: int = MIB, host: int = 16 * MIB, piece: int = MIB, store: FileStore | None = None
    ) -> None:
        self.accelerator = accelerator()
        self.arena = pinned_arena(host + 8 * piece)
        memory = self.accelerator.slab(slots + ring)
        memory.fill_(POISON)
        torch.cuda.synchronize()
        self.slots = Slab(self.accelerator, memory[:slots])
        self.ring = Slab(self.accelerator, memory[slots:])
        self.store = store
        engine: Any = None if store is None else store.engine
        gate, self.pool = open_gate(self.accelerator), _native.ThreadPool(2)
        self.uploads = UploadQueue(self.accelerator, gate, engine, self.arena, 4 * piece, piece)
        bounce = self.arena.lease(4 * piece, "gradients").space()
        self.gradients = GradientQueue(self.accelerator, gate, self.ring, bounce, self.pool)
        self.weights = WeightsDownloads(self.accelerator, gate, ArenaRegion(self.arena.memory, 0, 0), self.pool)

    @property
    def up(self) -> torch.cuda.Stream:
        stream: torch.cuda.Stream = self.uploads._stream
        return stream

    @property
    def down(self) -> torch.cuda.Stream:
        stream: torch.cuda.Stream = self.gradients._stream
        return stream

    def home(self, value: int, nbytes: int) -> Lease:
        """Return weights in RAM, in which each byte is `value`."""
        made = self.arena.lease(nbytes, "weights")
        made.tensor().fill_(value)
        return made

    def lease(self, nbytes: int) -> SlabLease:
        made = self.slots.try_lease(nbytes)
        if made is None:
            raise AssertionError(f"no room for {nbytes} bytes in a slab of {self.slots.nbytes}")
        return made

    def upload(self, home: Lease) -> SlabSlot:
        lease = self.lease(home.nbytes)
        return SlabSlot(self.slots, lease, self.uploads.from_ram(lease, home), self.accelerator, self.weights)

    def upload_stored(self, nbytes: int) -> tuple[Transfer, SlabSlot]:
        """Return a transfer and its slot.

        The weights are in the slot when the transfer is done and the wait for the slot has ended.
        """
        if self.store is None:
            raise AssertionError("no store")
        store: Any = self.store
        lease = self.lease(nbytes)
        home = WeightsHome((StateHome(None, 0, nbytes, Extent("weights", 0, "weight", (0,), nbytes)),), nbytes)
        transfer, ready = self.uploads.from_store(lease, home, {}, store)
        return transfer, SlabSlot(self.slots, lease, ready, self.accelerator, self.weights)

    def close(self) -> None:
        self.uploads.close()
        self.gradients.close()
        self.weights.close()
        torch.cuda.synchronize()


def group_of(name: str, numel: int, parts: int = 1) -> FlatParameterGroup:
    """Return a group of `numel` elements, filled with bf16 parameters."""
    each = numel // parts
    specs = tuple(ParameterSpec(f"{name}.{part}", torch.Size([each]), each, each * part, 0) for part in range(parts))
    return FlatParameterGroup(torch.bfloat16, True, "fp32", specs, each * parts, 0, each * parts * 2)
