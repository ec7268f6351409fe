"""Device memory: one allocation, divided by the allocator of the arena.

[Note: who used these bytes before] The host queues work that the device does later, so when the host gives a lease
back, the device may still use the bytes. A lease is therefore given back together with the events of its last uses. The
next lease of the same bytes has these events in `after`, and the first stream that writes to the bytes waits for these
events. The host does not wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import torch

from infinity.base.accelerator import Accelerator, Event
from infinity.io.arena import ArenaRegion, Lease


def separate_storage(memory: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a tensor with a new storage, whose references can be counted."""
    return torch.from_dlpack(torch.utils.dlpack.to_dlpack(memory))  # type: ignore[attr-defined]


class SlabLease:
    """A borrowed piece of a slab. Life cycle: Slab.try_lease() → Slab.give_back(), once.

    Attributes:
        lease: range of the slab.
        memory: uint8 [nbytes] on the device.
        after: events of earlier uses of these bytes that may still be in progress; the first write must wait for these
            events.
    """

    def __init__(self, lease: Lease, memory: torch.Tensor, after: Sequence[Event]) -> None:
        self.lease = lease
        self.memory = memory
        self.after = tuple(after)

    @property
    def nbytes(self) -> int:
        return self.memory.numel()

    def tensor(self) -> torch.Tensor:
        """Return the same memory as a uint8 [nbytes] tensor.

        Every call makes a tensor with a new storage, so that the views of the tensor can be counted.
        """
        return separate_storage(self.memory)


class Slab:
    """A part of the one allocation of device memory, from which pieces are leased.

    Invariant: leases never overlap. `_left` has the last uses of byte ranges that are free, or whose present lease
    waits for these uses.

    Args:
        accelerator: device of the memory.
        memory: uint8 [nbytes] on the device.
        after: events after which no earlier owner uses the memory.
    """

    def __init__(self, accelerator: Accelerator, memory: torch.Tensor, after: Sequence[Event] = ()) -> None:
        self._accelerator = accelerator
        self._memory = memory
        self._space = ArenaRegion(None, 0, memory.numel())
        self._lock = threading.Lock()
        self._left = [(0, memory.numel(), tuple(after))] if after else []  # (begin, end, events)
        self._onward = 0  # end of the last lease that was taken with `onward`

    @property
    def nbytes(self) -> int:
        return self._space.nbytes

    @property
    def free_bytes(self) -> int:
        return self._space.free_bytes

    def fits(self, nbytes: int) -> bool:
        """Return whether a free piece is long enough."""
        return self._space.fits(nbytes)

    def try_lease(self, nbytes: int, *, from_top: bool = False, onward: bool = False) -> SlabLease | None:
        """Lease device memory, in the same way as ArenaRegion.try_lease.

        Args:
            nbytes: size of the lease.
            from_top: whether to take the memory from the high end of the slab.
            onward: whether to take the memory behind the last lease with `onward`, and at the end of the slab, to begin
                again at its start. Such a lease waits for the oldest of the earlier uses, which ends first.

        Returns:
            The lease; None when no free piece is long enough.
        """
        lease = self._space.try_lease(nbytes, from_top=from_top, behind=self._onward if onward else 0)
        if lease is None:
            return None
        begin, end = lease.offset, lease.offset + lease.nbytes
        if onward:
            self._onward = end
        with self._lock:
            after = [event for left, right, events in self._left if left < end and begin < right for event in events]
        with torch._C._DisableFuncTorch():  # a torch.func transform that fetches weights must not wrap the memory
            memory = self._memory[begin : begin + nbytes]
        return SlabLease(lease, memory, after)

    def give_back(self, lease: SlabLease, last_uses: Iterable[Event]) -> None:
        """Give a lease back.

        Args:
            lease: lease of this slab.
            last_uses: events that follow all work on these bytes, by the owner of this lease and by earlier owners.
        """
        begin, end = lease.lease.offset, lease.lease.offset + lease.lease.nbytes
        with self._lock:
            self._left = [each for each in self._left if not self._is_over(each, begin, end)]
            self._left.append((begin, end, tuple(last_uses)))
        lease.lease.release()

    def give_all_back(self) -> None:
        """Free the memory. Call this only when no lease exists and no lease will be requested any more."""
        self._memory = self._memory[:0].clone()

    def _is_over(self, left: tuple[int, int, tuple[Event, ...]], begin: int, end: int) -> bool:
        return (begin <= left[0] and left[1] <= end) or all(map(self._accelerator.reached, left[2]))


class StreamUses:
    """Streams that use a piece of device memory, with the last use of each stream.

    A stream waits for the events of `after` before its first use of the memory.

    Args:
        accelerator: device of the memory.
        after: function that returns events; the first use on each stream waits for these events.
    """

    def __init__(self, accelerator: Accelerator, after: Callable[[], Sequence[Event]]) -> None:
        self._accelerator = accelerator
        self._after = after
        self._last: dict[object, Event | None] = {}  # by stream; None: the stream may still use the memory
        self._further: list[Event] = []

    def begin(self) -> None:
        """Begin a use of the memory by this thread's stream."""
        stream = self._accelerator.current()
        if stream not in self._last:
            for event in self._after():
                self._accelerator.wait(stream, event)
        self._last[stream] = None

    def begin_behind_others(self) -> None:
        """Begin a use of the memory by this thread's stream, which waits for all work on the memory that other streams
        have queued."""
        self.begin()
        here = self._accelerator.current()
        for stream, event in self._last.items():
            if stream != here:
                self._accelerator.wait(here, self._accelerator.record(stream) if event is None else event)

    def end(self) -> None:
        """End the uses of all streams. No stream uses the memory until `begin` is called again."""
        for stream, event in self._last.items():
            if event is None:
                self._last[stream] = self._accelerator.record(stream)

    def so_far(self) -> list[Event]:
        """Return events that follow every use queued so far. The uses do not end."""
        return [self._accelerator.record(stream) if event is None else event for stream, event in self._last.items()]

    def also(self, event: Event) -> None:
        """Add an event of another use: the memory is used until this event."""
        self._further.append(event)

    def events(self) -> list[Event]:
        """End the uses of all streams, and return events that follow every use."""
        self.end()
        return [*self._further, *(event for event in self._last.values() if event is not None)]
