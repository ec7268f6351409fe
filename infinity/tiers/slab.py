"""Device memory: allocated once, and cut by the arena's own allocator.

[Note: who used these bytes before] The host gives a lease back while the device, which is behind, still works in its
bytes. So a lease is given back with the events of its last uses, and the next lease of the same bytes names them in
`after`: whoever writes to it first waits for these events, on the device. The host waits for nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import torch

from infinity.base.accelerator import Accelerator, Event
from infinity.io.arena import Lease, Space


class SlabLease:
    """A borrowed piece of a slab. Life cycle: Slab.try_lease() → Slab.give_back(), once.

    Attributes:
        memory: uint8 [nbytes] on the device.
        after: the uses of these bytes that may not be over: the first write waits for them.
    """

    def __init__(self, lease: Lease, memory: torch.Tensor, after: Sequence[Event]) -> None:
        self.lease = lease
        self.memory = memory
        self.after = tuple(after)

    @property
    def nbytes(self) -> int:
        return self.memory.numel()

    def tensor(self) -> torch.Tensor:
        """uint8 [nbytes], the same memory. Every call makes a new storage, so that its views can be counted."""
        return torch.from_dlpack(torch.utils.dlpack.to_dlpack(self.memory))  # type: ignore[attr-defined]


class Slab:
    """A part of the one allocation of device memory.

    Invariant: leases never overlap. `_left` are the last uses of bytes that are free, or leased since by somebody who
    waits for them.

    Args:
        memory: uint8 [nbytes] on the device.
        after: who had the memory before may use it until these events.
    """

    def __init__(self, accelerator: Accelerator, memory: torch.Tensor, after: Sequence[Event] = ()) -> None:
        self._accelerator = accelerator
        self._memory = memory
        self._space = Space(None, 0, memory.numel())
        self._lock = threading.Lock()
        self._left = [(0, memory.numel(), tuple(after))] if after else []  # (begin, end, events)

    @property
    def nbytes(self) -> int:
        return self._space.nbytes

    @property
    def free_bytes(self) -> int:
        return self._space.free_bytes

    def fits(self, nbytes: int) -> bool:
        """Whether a free piece is long enough."""
        return self._space.fits(nbytes)

    def try_lease(self, nbytes: int, *, from_top: bool = False) -> SlabLease | None:
        """Device memory, or None when no free piece is long enough. Arguments as of `Space.try_lease`."""
        lease = self._space.try_lease(nbytes, from_top=from_top)
        if lease is None:
            return None
        begin, end = lease.offset, lease.offset + lease.nbytes
        with self._lock:
            after = [event for left, right, events in self._left if left < end and begin < right for event in events]
        with torch._C._DisableFuncTorch():  # a transformation that fetches weights has no part in where they lie
            memory = self._memory[begin : begin + nbytes]
        return SlabLease(lease, memory, after)

    def give_back(self, lease: SlabLease, last_uses: Iterable[Event]) -> None:
        """Args: last_uses: behind everything that the lease's holder, or one before it, queued with these bytes."""
        begin, end = lease.lease.offset, lease.lease.offset + lease.lease.nbytes
        with self._lock:
            self._left = [each for each in self._left if not self._is_over(each, begin, end)]
            self._left.append((begin, end, tuple(last_uses)))
        lease.lease.release()

    def give_all_back(self) -> None:
        """Nothing is leased any more, nor will be."""
        self._memory = self._memory[:0].clone()

    def _is_over(self, left: tuple[int, int, tuple[Event, ...]], begin: int, end: int) -> bool:
        return (begin <= left[0] and left[1] <= end) or all(map(self._accelerator.reached, left[2]))


class Uses:
    """Which streams use a piece of device memory, and where each of them last did. A stream that begins to waits for
    what came before."""

    def __init__(self, accelerator: Accelerator, after: Callable[[], Sequence[Event]]) -> None:
        self._accelerator = accelerator
        self._after = after
        self._last: dict[object, Event | None] = {}  # by stream; None: it may use the memory still
        self._further: list[Event] = []

    def begin(self) -> None:
        """This thread's stream is about to use the memory."""
        stream = self._accelerator.current()
        if stream not in self._last:
            for event in self._after():
                self._accelerator.wait(stream, event)
        self._last[stream] = None

    def begin_behind_others(self) -> None:
        """This thread's stream is about to use what other streams may have written."""
        self.begin()
        here = self._accelerator.current()
        for stream, event in self._last.items():
            if stream != here:
                self._accelerator.wait(here, self._accelerator.record(stream) if event is None else event)

    def end(self) -> None:
        """Until `begin` is called again no stream uses the memory."""
        for stream, event in self._last.items():
            if event is None:
                self._last[stream] = self._accelerator.record(stream)

    def so_far(self) -> list[Event]:
        """Behind every use that was queued until now. Uses go on."""
        return [self._accelerator.record(stream) if event is None else event for stream, event in self._last.items()]

    def also(self, event: Event) -> None:
        """The memory is used until this event, too."""
        self._further.append(event)

    def events(self) -> list[Event]:
        """Behind every use."""
        self.end()
        return [*self._further, *(event for event in self._last.values() if event is not None)]
