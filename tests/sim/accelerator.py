"""Accelerator (infinity/base/accelerator.py) on the CPU's memory, which checks order and lifetimes.

queues.py decides when queued operations run.

[Note: the host] All Python threads together are one actor, the host: Python's own locks order them. Operations that
Python threads queue on a stream happen after all earlier uses of the host. The host is ordered behind a stream by
`synchronize`, and by `reached` if `reached` returns true. The host is ordered behind a native request when it waits for
the request (host.py).
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from infinity.base.accelerator import DeviceFunctionTable
from tests.sim.clocks import NATIVE, Access, Actor, Order, Snapshot, Unordered, place
from tests.sim.queues import LAZY, Copy, Policy, Queues, Recording, SimEvent, SimStream, Wait
from tests.sim.slab import POISON, Slab

PATIENCE = 32
"""Number of times that `reached` may return false for a recording, so that a caller that polls ends."""


class Misuse(AssertionError):  # noqa: N818
    """A use that a device does not support, or whose effect differs from its appearance."""


class SimAccelerator:
    """A device with separate memory, simulated on the CPU (queues.py).

    Args:
        refuse: reason why memory cannot be pinned. If there is a reason, copies of memory that is not pinned are
            allowed, and run immediately.
        out_of_memory_at: number of the slab or copy that gets no memory, counted from 0 over both.
        shut: whether slabs are protected from undeclared uses (slab.py).

    Attributes:
        errors: all errors that were found. `check` raises the first error. Each error was also raised where it was
            found, except on a native thread.
        counts: numbers by name: "synchronize", "synchronize that waited", "copies up", "bytes up", and the same for
            "down" and "within".
    """

    pins_resident = False
    nice = 0
    numa_node = -1

    def __init__(
        self, policy: Policy = LAZY, *, refuse: str = "", out_of_memory_at: int | None = None, shut: bool = False
    ) -> None:
        self.device = torch.device("cpu")
        self.policy = policy
        self.order = Order()
        self.host = self.order.actor("the host")
        self.errors: list[BaseException] = []
        self.counts: Counter[str] = Counter()
        self.out_of_memory_at = out_of_memory_at
        self.lock = threading.RLock()
        self.request_of: Callable[[int], Actor | None] | None = None
        self._refuse = refuse
        self._shut = shut
        self._slabs: list[Slab] = []
        self._pinned: dict[int, int] = {}  # address → end
        self._queues = Queues(policy, self.lock, self._move)
        self._allocations = itertools.count()
        self._handles = itertools.count(0x10000, 0x10)
        self._events: weakref.WeakValueDictionary[int, SimEvent] = weakref.WeakValueDictionary()
        self._default = self.stream("the compute stream")
        self._default.computes = True
        self._thread = threading.local()
        self._gate: DeviceFunctionTable | None = None

    # -- the protocol --------------------------------------------------------------------------------------------------

    def stream(self, name: str = "") -> SimStream:
        with self.lock:
            name = name or f"stream {len(self._queues.streams)}"
            stream = SimStream(name, next(self._handles), self.order.actor(name))
            self._queues.streams.append(stream)
            return stream

    def current(self) -> SimStream:
        return getattr(self._thread, "stream", self._default)

    def record(self, on: SimStream, *, timed: bool = False) -> SimEvent:
        with self._called():
            event = self._event(timed=timed)
            self.queue_record(event, on, self.host)
            return event

    def wait(self, on: SimStream, event: SimEvent) -> None:
        with self._called():
            self.queue_wait(on, event, self.host)

    def reached(self, event: SimEvent) -> bool:
        with self._called():
            recording = self.recording_of(event, "whether it was reached is asked")
            if not self.order.knows(self.host, recording.snapshot):
                recording.asked += 1
                if not self._says_yes(recording):
                    return False
                self._queues.force(recording)
                self.order.join(self.host, recording.snapshot)
            return True

    def _says_yes(self, recording: Recording) -> bool:
        if recording.asked > PATIENCE:
            return True
        if self.policy.when == "random":
            return recording.done and self._queues.random.random() < 0.5
        return self.policy.when == "eager"

    def synchronize(self, event: SimEvent) -> None:
        with self._called():
            recording = self.recording_of(event, "the host waits for it")
            self.counts["synchronize"] += 1
            self.counts["synchronize that waited"] += not recording.done
            self._queues.force(recording)
            self.order.join(self.host, recording.snapshot)

    def synchronize_all(self) -> None:
        with self._called():
            for stream in self._queues.streams:
                self._queues.drain(stream)
                self.order.join(self.host, self.order.snapshot(stream.actor))

    def seconds(self, began: SimEvent, ended: SimEvent) -> float:
        with self._called():
            first, last = (self.recording_of(event, "its time is asked") for event in (began, ended))
            for event, recording in ((began, first), (ended, last)):
                if not event.timed:
                    self.found(Misuse("the time of an event that was not made for it"))
                if not self.order.knows(self.host, recording.snapshot):
                    self.found(Misuse("the time of an event that is not known to be reached"))
            return (last.at - first.at) * 1e-6

    def slab(self, nbytes: int) -> torch.Tensor:
        with self._called():
            self._allocate("slab")
            slab = Slab(nbytes, shut=self._shut)
            self._slabs.append(slab)
            return slab.tensor

    def copy(
        self, into: torch.Tensor, source: torch.Tensor, *, on: SimStream, after: Sequence[SimEvent] = ()
    ) -> SimEvent:
        with self._called():
            self._allocate("copy")
            if into.dtype != source.dtype or into.numel() != source.numel():
                self.found(Misuse(f"a copy of {source.numel()} {source.dtype} into {into.numel()} {into.dtype}"))
            if not (into.is_contiguous() and source.is_contiguous()):
                self.found(Misuse("a copy of what is not contiguous"))
            for event in after:
                self.queue_wait(on, event, self.host)
            nbytes = into.numel() * into.element_size()
            of_torch = [each for each in (into, source) if not self.knows(each.data_ptr())] if nbytes else []
            if of_torch and not self._refuse and not any(self.slab_at(each.data_ptr()) for each in (into, source)):
                self._copy_for_torch(into, source, nbytes, on)
            elif nbytes:
                self.queue_copy(into.data_ptr(), source.data_ptr(), nbytes, on, self.host)
            event = self._event()
            self.queue_record(event, on, self.host)
            return event

    def _copy_for_torch(self, into: torch.Tensor, source: torch.Tensor, nbytes: int, on: SimStream) -> None:
        """Queue a copy between pinned memory and a tensor of the model, whose memory torch allocates for kernels.

        The copy must be ordered behind all kernels of the thread's stream so far. The memory may be freed only when
        this stream or the host is ordered behind the copy, because torch then gives the memory to other kernels of this
        stream. Memory that is copied to has no values before.
        """
        up = self.is_pinned(source.data_ptr(), source.data_ptr() + nbytes)
        tensor, compute = (into if up else source), self.current().actor
        if on.actor.clock.get(compute.index, 0) < compute.now - 1:
            self.found(Misuse("a copy of a tensor is not ordered behind the kernels"))
        if up:
            into.fill_(POISON)
        self.queue_copy(into.data_ptr(), source.data_ptr(), nbytes, on, self.host, of_torch="into" if up else "source")
        snapshot = self.order.snapshot(on.actor)
        begin = tensor.data_ptr()
        weakref.finalize(tensor.untyped_storage(), self._freed_by_torch, begin, begin + nbytes, snapshot, on, compute)

    def _freed_by_torch(self, begin: int, end: int, snapshot: Snapshot, on: SimStream, compute: Actor) -> None:
        """Forget the uses of the memory: a device's allocator gives it only to kernels of the same stream."""
        with self.lock:
            self.order.memory.forget(begin, end)
            if not any(self.order.knows(actor, snapshot) for actor in (compute, self.host)):
                self.errors.append(Misuse("a tensor was freed while a copy may use its memory"))
                self._queues.drain(on)

    def lend(self, tensor: torch.Tensor) -> None:
        """Do nothing: torch frees the memory of the simulation when no tensor uses it, and knows no streams."""

    def pin(self, address: int, nbytes: int) -> str:
        with self._called():
            if self._refuse:
                return self._refuse
            if any(address < end and begin < address + nbytes for begin, end in self._pinned.copy().items()):
                self.found(Misuse(f"{address:#x} is pinned already"))
            self._pinned[address] = address + nbytes
            self.order.memory.forget(address, address + nbytes)
            return ""

    def unpin(self, address: int) -> None:
        with self._called():
            end = self._pinned.pop(address, None)
            if end is None:
                self.found(Misuse(f"{address:#x} is unpinned and was not pinned"))
                return
            if self._pending(address, end):
                self.found(Misuse(f"{address:#x} is unpinned while a copy of it is under way"))
            self.order.memory.forget(address, end)

    def event(self) -> SimEvent:
        with self._called():
            return self._event()

    def handle(self, of: SimStream | SimEvent) -> int:
        return of.handle

    def gate(self) -> DeviceFunctionTable:
        from tests.sim.gate import open_gate

        if self._gate is None:
            self._gate = open_gate(self)
        return self._gate

    # -- for tests -----------------------------------------------------------------------------------------------------

    def requests_are_known(self, request_of: Callable[[int], Actor | None]) -> None:
        """Provide the function that returns the request of a native thread for the address to which the thread copies
        (host.py). Without this function, each call of the gate orders a native thread behind everything that the host
        did before.
        """
        self.request_of = request_of

    def kernel_runs(self) -> None:
        """Record that a kernel runs on the thread's stream. Only copies that are ordered behind the kernel may use its
        results (_copy_for_torch).
        """
        actor = self.current().actor
        actor.clock[actor.index] += 1

    @contextmanager
    def on(self, stream: SimStream) -> Iterator[None]:
        """Queue the thread's kernels on this stream within the context."""
        before = self.current()
        with self.lock:
            stream.computes = True
            self._queues.drain(stream)
        self._thread.stream = stream
        try:
            yield
        finally:
            self._thread.stream = before

    def poison(self, address: int, nbytes: int, text: str = "given back") -> None:
        """Mark memory as given back: its contents must not be used any more.

        Queued operations may still use device memory that was given back, and the next user of the memory is ordered
        behind these operations. Therefore device memory is overwritten only if no copy of it is pending. Host memory
        may have any next user, so all its uses must be ordered before the host.
        """
        with self._called():
            end, slab = address + nbytes, self.slab_at(address)
            if slab is not None:
                self.require_told(address, end)
                if not self._pending(address, end):
                    slab.poison(address, end)
            elif self.is_pinned(address, end):
                self.use(self.host, address, end, write=True, text=text)
                ctypes.memset(address, POISON, nbytes)

    def uses(self, address: int, nbytes: int, *, write: bool, text: str, actor: Actor | None = None) -> None:
        """Declare that `actor` uses memory that the simulation knows. Without an actor, the host uses host memory, and
        a kernel on the thread's stream uses device memory.
        """
        with self.lock:
            end = address + nbytes
            if actor is None:
                actor = self.host
                if self.slab_at(address) is not None:
                    actor = self.current().actor
                    self.order.join(actor, self.order.snapshot(self.host))
            elif self.slab_at(address) is None and not self.is_pinned(address, end):
                return
            self.use(actor, address, end, write=write, text=text)

    @contextmanager
    def used(self, memory: Sequence[tuple[int, int, bool]], text: str) -> Iterator[None]:
        """Declare uses of memory within the context. Each use is a tuple: address, number of bytes, and whether the
        bytes are written. See `uses`.
        """
        with ExitStack() as opened:
            for address, nbytes, write in memory:
                self.uses(address, nbytes, write=write, text=text)
                slab = self.slab_at(address)
                if slab is not None:
                    opened.enter_context(slab.opened())
            yield
            for address, nbytes, write in memory:
                slab = self.slab_at(address)
                if write and slab is not None:
                    slab.told(address, address + nbytes)

    def knows(self, address: int) -> bool:
        """Return whether an address is in device memory or in pinned memory."""
        return any(slab.begin <= address < slab.end for slab in self._slabs) or any(
            begin <= address < end for begin, end in self._pinned.copy().items()
        )

    def pending_copies(self) -> list[str]:
        with self.lock:
            return [f"{copy.text} on {stream.name}" for stream, copy in self._queues.copies()]

    @property
    def events_alive(self) -> int:
        return len(self._events)

    def check(self) -> None:
        """Check the final state. Raises the first error that was found, or an error for copies without a wait."""
        self.check_but_for()

    def check_but_for(self, *expected: type[BaseException]) -> None:
        """Do the same as `check`, but ignore errors of the classes in `expected`, which the test has provoked."""
        with self.lock:
            for slab in self._slabs:
                self.require_told(slab.begin, slab.end, tell=False)
                slab.reopen()
            errors = [error for error in self.errors if not isinstance(error, expected)]
            if errors:
                raise errors[0]
            pending = self.pending_copies()
            if pending:
                raise Misuse(f"nobody waited for {len(pending)} copies: {', '.join(pending[:4])}")

    # -- what is queued ------------------------------------------------------------------------------------------------

    def queue_record(self, event: SimEvent, on: SimStream, by: Actor) -> None:
        self._launch(on, by)
        event.last = Recording(on, self.order.snapshot(on.actor))
        on.queue.append(event.last)
        self._queues.queued(on)

    def queue_wait(self, on: SimStream, event: SimEvent, by: Actor) -> None:
        recording = self.recording_of(event, f"{on.name} waits for it")
        self._launch(on, by)
        self.order.join(on.actor, recording.snapshot)
        on.queue.append(Wait(recording))
        self._queues.queued(on)

    def queue_copy(self, into: int, source: int, nbytes: int, on: SimStream, by: Actor, *, of_torch: str = "") -> None:
        up = of_torch == "into" or self.slab_at(into) is not None
        down = of_torch == "source" or self.slab_at(source) is not None
        direction = "within" if up and down else "up" if up else "down"
        if not (up or down):
            self.found(Misuse("a copy from host to host"))
        host, end = (source, source + nbytes) if up else (into, into + nbytes)
        unpinned = not (up and down) and not self.is_pinned(host, end)
        if unpinned and not self._refuse:
            self.found(Misuse(f"a copy {direction} of host memory that is not pinned: a device would keep the host"))
        self.counts[f"copies {direction}"] += 1
        self.counts[f"bytes {direction}"] += nbytes
        text = f"copy {direction} of {nbytes} bytes"
        self.require_told(into, into + nbytes)
        self._launch(on, by)
        on.queue.append(Copy(into, source, nbytes, text))
        if not unpinned or down:
            self.use(on.actor, source, source + nbytes, write=False, text=text, caused_by=by)
        if not unpinned or up:
            self.use(on.actor, into, into + nbytes, write=True, text=text, caused_by=by)
        if unpinned:
            self._queues.drain(on)
            self.order.join(by, self.order.snapshot(on.actor))
        else:
            self._queues.queued(on)

    def _launch(self, on: SimStream, by: Actor) -> None:
        self.order.join(on.actor, self.order.snapshot(by))

    # -- what runs -----------------------------------------------------------------------------------------------------

    def force(self, recording: Recording) -> None:
        self._queues.force(recording)

    def park(self, recording: Recording, seconds: float) -> None:
        self._queues.park(recording, seconds)

    def _move(self, copy: Copy) -> None:
        with ExitStack() as used:
            slabs = {slab for slab in map(self.slab_at, (copy.into, copy.source)) if slab is not None}
            for slab in slabs:
                used.enter_context(slab.opened())
            ctypes.memmove(copy.into, copy.source, copy.nbytes)
            into = self.slab_at(copy.into)
            if into is not None:
                into.told(copy.into, copy.into + copy.nbytes)

    @contextmanager
    def _called(self) -> Iterator[None]:
        """Run a random number of queued operations at each call of the accelerator."""
        with self.lock:
            if self.policy.when == "random":
                self.run_some()
            yield

    def run_some(self) -> None:
        self._queues.run_some()

    # -- what is known -------------------------------------------------------------------------------------------------

    def use(
        self, actor: Actor, begin: int, end: int, *, write: bool, text: str, caused_by: Actor | None = None
    ) -> None:
        where = place()
        if where is NATIVE:
            where = (caused_by or actor).place or NATIVE
        try:
            self.order.use(actor, begin, end, write=write, text=text, place=where)
        except Unordered as error:
            self.found(Unordered(f"{error}. {self._who_knows(error.other, caused_by)}", error.other))

    def _who_knows(self, other: Access, caused_by: Actor | None) -> str:
        """Return the actors whose clocks may order a use, with these clocks."""
        asked = [each for each in (caused_by, self.host) if each is not None]
        known = ", ".join(f"{each.name} {each.clock.get(other.index, 0)}" for each in asked)
        return f"{other.actor} did it at its {other.at}. Of {other.actor} know: {known}"

    def found(self, error: AssertionError) -> None:
        """Keep an error for `check`, and raise it: the caller may swallow the exception."""
        self.errors.append(error)
        raise error

    def recording_of(self, event: SimEvent, why: str) -> Recording:
        if event.last is None:
            self.found(Misuse(f"an event that nobody recorded: {why}. A device goes on at once"))
        assert event.last is not None
        return event.last

    def event_at(self, handle: int) -> SimEvent | None:
        return self._events.get(handle)

    def stream_at(self, handle: int) -> SimStream | None:
        return next((stream for stream in self._queues.streams if stream.handle == handle), None)

    def slab_at(self, address: int) -> Slab | None:
        return next((slab for slab in self._slabs if slab.begin <= address < slab.end), None)

    def is_pinned(self, begin: int, end: int) -> bool:
        return any(first <= begin and end <= last for first, last in self._pinned.copy().items())

    def require_told(self, begin: int, end: int, *, tell: bool = True) -> None:
        """Require that no undeclared write changed the device's memory."""
        slab = self.slab_at(begin)
        at = None if slab is None else slab.changed_untold(begin, end)
        if slab is not None and at is not None:
            slab.told(begin, end)
            error = Misuse(
                f"device memory at {at:#x} ({at - slab.begin} bytes into its slab) was changed by something that no "
                f"stream knows of, after {self.order.memory.last_write(at)}"
            )
            if tell:
                self.found(error)
            self.errors.append(error)

    def _pending(self, begin: int, end: int) -> bool:
        return any(
            first < end and begin < first + copy.nbytes
            for _, copy in self._queues.copies()
            for first in (copy.into, copy.source)
        )

    def _event(self, *, timed: bool = False) -> SimEvent:
        event = SimEvent(next(self._handles), timed)
        self._events[event.handle] = event
        return event

    def _allocate(self, what: str) -> None:
        if self.exhausted():
            raise torch.OutOfMemoryError(f"no memory for a {what}, as the test wanted")

    def exhausted(self) -> bool:
        return next(self._allocations) == self.out_of_memory_at
