"""Parts of a device tier over a simulated device, with pinned host memory and a swap file."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from infinity import _native
from infinity.base.accelerator import Event, Stream
from infinity.io.arena import PinnedArena
from infinity.io.engine import Transfer
from infinity.io.store import Extent
from infinity.sizes import PAGE_BYTES
from infinity.tiers.downloads import GradientQueue, WeightsDownloads
from infinity.tiers.slab import Slab
from infinity.tiers.state_writer import StateWriter
from infinity.tiers.uploads import UploadQueue
from tests.sim.accelerator import SimAccelerator
from tests.sim.queues import LAZY, Policy
from tests.tiers.fakes import transfer

FILE_PAGES = 32
PIECES = 2


def aligned(nbytes: int) -> torch.Tensor:
    """Return uint8 [nbytes] in memory from which a swap file can be written."""
    return torch.frombuffer(_native.Arena(nbytes, huge_pages=False).view(0, nbytes), dtype=torch.uint8)


class FileStore:
    """A store of one file of random bytes, in which each extent begins at its first copy's offset."""

    def __init__(self, path: Path, faults: Sequence[_native.Fault] = (), deadline_s: float = 60.0) -> None:
        generator = torch.Generator().manual_seed(0)
        self.bytes = aligned(FILE_PAGES * PAGE_BYTES).random_(0, 255, generator=generator)
        self.file = _native.File(str(path), create=True)
        self.file.preallocate(self.bytes.numel())
        self.file.keep_checksums(self.bytes.numel())
        writer = _native.IOEngine("auto")
        written = writer.write(self.file, 0, self.bytes.numpy())
        assert written.wait(60)
        assert written.failure() is None
        writer.close()
        self.engine = _native.IOEngine("auto", faults=list(faults), deadline_s=deadline_s)

    def place(self, extent: Extent, copy: int | None) -> tuple[_native.File, int]:
        return self.file, extent.offset if copy is None else extent.offsets[copy]

    def transfer(self, future: Any, extent: Extent) -> Transfer:
        return transfer(future, extent.unit, extent.state)

    def write(
        self, extent: Extent, data: Any, *, at: int, io_class: Any, copy_index: int, after: Any = None
    ) -> Transfer:
        offset = extent.offsets[copy_index] + at
        return self.transfer(self.engine.write(self.file, offset, data, io_class, after=after), extent)

    def close(self) -> None:
        self.engine.close()
        self.file.close()


class Rig:
    """A simulated device with a slab and pinned memory, and the queues in both directions that a test opens.

    Attributes:
        waits: stream and event of each wait that Python enqueued on a stream.
        store: the store, once a test has opened it.
        downloads: queues of gradients that were opened.
    """

    def __init__(self, policy: Policy = LAZY, *, slab_pages: int = 8, host_pages: int = 64, **options: Any) -> None:
        self.sim = SimAccelerator(policy, **options)
        self.arena = PinnedArena(host_pages * PAGE_BYTES)
        self.arena.pin(self.sim)
        self.gate = self._open_gate()
        self.slab = Slab(self.sim, self.sim.slab(slab_pages * PAGE_BYTES))
        self.pool = _native.ThreadPool(1)
        self.store: FileStore | None = None
        self.waits: list[tuple[Stream, Event]] = []
        self.downloads: list[GradientQueue] = []
        self._uploads: list[UploadQueue] = []
        self._weights: list[WeightsDownloads] = []
        self._states: list[StateWriter] = []
        self._note_waits()

    def _note_waits(self) -> None:
        wait = self.sim.wait

        def noted(on: Stream, event: Event) -> None:
            self.waits.append((on, event))
            wait(on, event)

        self.sim.wait = noted  # type: ignore[method-assign]

    def _open_gate(self, refuse: Any = None) -> _native.DeviceGate:
        table = self.sim.gate()
        synchronize = table.synchronize if refuse is None else ctypes.cast(refuse, ctypes.c_void_p).value or 0
        return _native.DeviceGate(
            0,
            copy=table.copy,
            record=table.record,
            wait=table.wait,
            synchronize=synchronize,
            keep=(table, refuse),
        )

    def refuse_to_wait(self, error: int) -> None:
        """For queues that are opened from now on, give native threads an error when they wait for an event."""
        self.gate = self._open_gate(ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda event: error))

    def open_store(self, folder: Path, faults: Sequence[_native.Fault] = (), deadline_s: float = 60.0) -> Any:
        self.store = FileStore(folder / "swap", faults, deadline_s)
        return self.store

    def uploads(self) -> UploadQueue:
        engine: Any = None if self.store is None else self.store.engine
        made = UploadQueue(self.sim, self.gate, engine, self.arena, PIECES * PAGE_BYTES, PAGE_BYTES)
        self._uploads.append(made)
        return made

    def gradients(self, *, ring_pages: int | None = None, bounce_pages: int = 2) -> GradientQueue:
        """Return a queue of gradients through the slab, or through a ring of `ring_pages` pages."""
        ring = self.slab if ring_pages is None else Slab(self.sim, self.sim.slab(ring_pages * PAGE_BYTES))
        bounce = self.arena.lease(bounce_pages * PAGE_BYTES, "gradients").space()
        made = GradientQueue(self.sim, self.gate, ring, bounce, self.pool)
        self.downloads.append(made)
        return made

    def weights(self, pages: int = 8) -> WeightsDownloads:
        """Return a queue of weights to the host, through `pages` pages of host memory."""
        space = self.arena.lease(pages * PAGE_BYTES, "weights from the device").space()
        made = WeightsDownloads(self.sim, self.gate, space, self.pool)
        self._weights.append(made)
        return made

    def states(self, pages: int) -> StateWriter:
        """Return a queue of states to the store, through a ring of `pages` pages of host memory."""
        ring = self.arena.lease(pages * PAGE_BYTES, "states from the device").space()
        store: Any = self.store
        made = StateWriter(self.sim, self.gate, ring, self.pool, store)
        self._states.append(made)
        return made

    def close(self) -> None:
        for queue in (*self._uploads, *self.downloads, *self._weights, *self._states):
            queue.close()
        if self.store is not None:
            self.store.close()
