"""Memory of states that rest on the device and are updated there.

[Note: who uses the memory of a resident unit] Forwards, backwards and updates use it, each on its stream.
Commits copy it to the host on a stream of their own. A write waits for all earlier reads and writes, and a read waits
for the last write. The host does not wait, so an update counts as computed once its kernels are queued: every later use
on the device is ordered behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from infinity.base.accelerator import Accelerator, Event, Stream


class ResidentUses:
    """Uses of memory that is never given back ([Note: who uses the memory of a resident unit])."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._readers: dict[Stream, Event | None] = {}  # None: the stream may still read
        self._copies: list[Event] = []
        self._written: tuple[Stream, Event] | None = None

    def begin_reading(self) -> None:
        """Begin reads by this thread's stream, behind the last write."""
        self._begin_reading(self._accelerator.current())

    def _begin_reading(self, here: Stream) -> None:
        self._wait_for_write(here)
        self._readers[here] = None

    def end_reading(self) -> None:
        """End the reads of all streams. No stream reads until `begin_reading` is called again."""
        for stream, event in self._readers.items():
            if event is None:
                self._readers[stream] = self._accelerator.record(stream)

    @contextmanager
    def reading(self, on: Stream | None = None) -> Iterator[None]:
        """Return a context in which a stream may read. Its reads go on if they began before.

        Args:
            on: the stream; None: this thread's stream.
        """
        here = self._accelerator.current() if on is None else on
        goes_on = here in self._readers and self._readers[here] is None
        self._begin_reading(here)
        try:
            yield
        finally:
            if not goes_on:
                self._readers[here] = self._accelerator.record(here)

    @contextmanager
    def writing(self, on: Stream | None = None) -> Iterator[None]:
        """Return a context in which a stream may read and write, behind all earlier uses.

        Args:
            on: the stream; None: this thread's stream.
        """
        here = self._accelerator.current() if on is None else on
        self._wait_for_write(here)
        for stream, event in self._readers.items():
            if stream != here:
                self._accelerator.wait(here, self._accelerator.record(stream) if event is None else event)
        for event in self._copies:
            self._accelerator.wait(here, event)
        try:
            yield
        finally:
            self._readers = {stream: None for stream, event in self._readers.items() if event is None}
            self._copies.clear()
            self._written = here, self._accelerator.record(here)

    def _wait_for_write(self, here: Stream) -> None:
        if self._written is not None and self._written[0] != here:
            self._accelerator.wait(here, self._written[1])

    @property
    def written(self) -> list[Event]:
        """Event that follows the last write; empty if there was none."""
        return [] if self._written is None else [self._written[1]]

    def copied(self, event: Event) -> None:
        """Add the event of a copy from the memory."""
        self._copies.append(event)


def clear(memory: torch.Tensor) -> None:
    """Fill memory with zeros, as states in the store are zeros before they are written."""
    memory.zero_()


@dataclass(eq=False)
class ResidentMemory:
    """A part of the memory of a resident unit.

    Attributes:
        memory: uint8 [nbytes] on the device.
        uses: uses of this part, and of other parts that are always used together.
    """

    memory: torch.Tensor
    uses: ResidentUses

    @property
    def nbytes(self) -> int:
        return self.memory.numel()

    def give_back(self) -> None:
        """Let go of the memory. Call this when nothing uses the memory any more."""
        self.memory = self.memory[:0].clone()

    def view(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return the first elements, flat."""
        return self.memory[: numel * dtype.itemsize].view(dtype)

    def read(self, begin: int, nbytes: int) -> torch.Tensor:
        """Return a copy in RAM of bytes [begin, begin + nbytes), uint8. The host waits for it."""
        with self.uses.reading():
            return self.memory[begin : begin + nbytes].to("cpu", copy=True)

    def write(self, begin: int, values: torch.Tensor) -> None:
        """Write uint8 values in RAM to the bytes from `begin` on."""
        with self.uses.writing():
            self.memory[begin : begin + values.numel()].copy_(values)
