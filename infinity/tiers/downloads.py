"""Gradients on their way down: through a bounded ring of device memory, in one copy for each group of a unit.

[Note: the way of a gradient from a device]

    autograd ──pack──▶ ring (the group, flat) ──send──▶ pinned host memory ──native thread──▶ landed

A piece of the ring is packed on the stream that computes, as gradients come; `send` queues one copy down, and gives the
piece back with the event behind that copy, so that whoever packs into the same bytes next waits on the device. The host
waits for nothing. A native thread waits for the copy, takes the sums of squares, and adds what is to be added; updates
and writes to the store are chained to it.

Where the ring has no room, what was packed first is sent as far as it has come.

Where more gradients of the same parameters are about to come, a piece holds fp32, and they add up in it: one copy goes
down for all of them. The adds and their order are those of host memory.

What is the first gradient of its parameter, in the dtype it is kept in, is copied to its place. What is to be added to
another in host memory, or converted, is copied to a bounce buffer first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from infinity import _native
from infinity.base.accelerator import Accelerator, Event
from infinity.errors import DeviceError
from infinity.io.arena import Lease, Space
from infinity.state.dtypes import native_name
from infinity.state.unit import Group, ParameterSpec
from infinity.tiers.slab import Slab, SlabLease, Uses


@dataclass(frozen=True)
class Landing:
    """Gradients of a group on their way.

    Attributes:
        names: of the parameters, in the order of the sums.
        event: behind the copy; it must live until that is done.
    """

    future: _native.LandingFuture
    names: tuple[str, ...]
    event: Event

    def done(self) -> bool:
        return self.future.done()

    def wait(self) -> None:
        """Until they have landed, or are lost."""
        self.future.wait()

    def sums(self) -> Mapping[str, Sequence[float]]:
        """Wait until they have landed. By parameter, Σ g² of what is there now, in partials on the group's grid.

        Raises:
            DeviceError: they were lost.
        """
        self.wait()
        failure = self.future.failure()
        if failure is not None:
            raise DeviceError(
                f"gradients of {', '.join(self.names)} were lost on their way to host memory: {failure.cause}"
            )
        return dict(zip(self.names, self.future.sums, strict=True))


@dataclass(eq=False)
class Packed:
    """Gradients of one group in the ring.

    Attributes:
        target: host memory of the whole group, in `dtype`.
        held: the dtype on the device: that in which autograd gives them, or fp32, where they add up.
        added: names of those that are added to what is in the target. None where they add up here.
        landing: once it was sent.
    """

    group: Group
    target: memoryview
    dtype: torch.dtype
    held: torch.dtype
    adds_up: bool
    lease: SlabLease
    uses: Uses
    specs: list[ParameterSpec] = field(default_factory=list)
    added: set[str] = field(default_factory=set)
    landing: Landing | None = None

    def of(self, spec: ParameterSpec) -> torch.Tensor:
        """The gradient of a parameter, on the device."""
        return self.lease.memory.view(self.held)[spec.offset : spec.offset + spec.numel]

    def takes(self, spec: ParameterSpec, *, add: bool) -> bool:
        """Whether a gradient can be packed into this piece, or added there. What adds up here holds all that came of
        its parameter: else the order of the adds would be another one."""
        if self.landing is not None:
            return False
        if spec in self.specs:
            return add and self.adds_up
        return not (add and self.adds_up)


class _Downward:
    """One stream down, and the native thread that takes what comes."""

    def __init__(self, accelerator: Accelerator, gate: _native.DeviceGate, pool: _native.ThreadPool) -> None:
        self._accelerator = accelerator
        self._native = _native.Landings(gate, pool)
        self._stream = accelerator.stream()

    def close(self) -> None:
        """Wait until no copy uses host memory."""
        self._native.close()
        self._rest()

    def _rest(self) -> None:
        """Wait for the copies, also those that the native thread knows nothing of."""
        self._accelerator.synchronize(self._accelerator.record(self._stream))


class GradientQueue(_Downward):
    """Gradients on their way down.

    Invariant: `_open` are the pieces that were not sent, the first packed first; each has a lease of the ring.
    """

    def __init__(
        self, accelerator: Accelerator, gate: _native.DeviceGate, ring: Slab, bounce: Space, pool: _native.ThreadPool
    ) -> None:
        super().__init__(accelerator, gate, pool)
        self._ring = ring
        self._bounce = bounce
        self._open: list[Packed] = []
        self._bounced: deque[tuple[Landing, Lease]] = deque()

    def begin(self, group: Group, target: memoryview, dtype: torch.dtype, *, adds_up: bool = False) -> Packed:
        """A piece of the ring for gradients of a group.

        Args:
            target: host memory of the whole group, where nobody else writes until the piece has landed.
            dtype: of what is in the target.
            adds_up: more gradients of these parameters are about to come, and the target is fp32.
        """
        adds_up = adds_up and group.numel * torch.float32.itemsize <= self._ring.nbytes
        held = torch.float32 if adds_up else group.dtype
        while True:
            lease = self._ring.try_lease(group.numel * held.itemsize)
            if lease is not None:
                break
            if not self._open:
                raise AssertionError(f"a ring of {self._ring.nbytes} bytes has no room for {group.numel} gradients")
            self.send(self._open[0])
        packed = Packed(group, target, dtype, held, adds_up, lease, Uses(self._accelerator, lambda: lease.after))
        self._open.append(packed)
        return packed

    def pack(self, packed: Packed, spec: ParameterSpec, gradient: torch.Tensor, *, add: bool) -> None:
        """Put one gradient into a piece that takes it, behind what this thread's stream computes."""
        if spec in packed.specs:
            packed.uses.begin_behind_others()
            packed.of(spec).add_(gradient.reshape(-1))
            return
        packed.specs.append(spec)
        if add:
            packed.added.add(spec.name)
        packed.uses.begin()
        packed.of(spec).copy_(gradient.reshape(-1))

    def send(self, packed: Packed) -> Landing:
        """Queue the copy down. Nothing is packed into this piece any more. A piece that could not be sent is as before:
        it may be sent again, or dropped."""
        if packed.landing is None:
            direct = not packed.added and packed.dtype == packed.held
            try:
                packed.landing = self._copy_to(packed.target, packed) if direct else self._send_to_bounce(packed)
            except BaseException:
                packed.uses.also(self._accelerator.record(self._stream))  # what was queued before it failed
                raise
            self._open.remove(packed)
            self._ring.give_back(packed.lease, [packed.landing.event])
        return packed.landing

    def drop(self, packed: Packed) -> None:
        """Nobody wants what is in this piece."""
        if packed.landing is None:
            self._open.remove(packed)
            before = () if packed.specs else packed.lease.after  # who packed has waited for that
            self._ring.give_back(packed.lease, [*before, *packed.uses.events()])

    def _send_to_bounce(self, packed: Packed) -> Landing:
        lease = self._make_room(packed.lease.nbytes)
        try:
            landing = self._copy_to(lease.view(0, packed.lease.nbytes), packed)
        except BaseException:
            self._rest()
            lease.release()
            raise
        self._bounced.append((landing, lease))
        return landing

    def _copy_to(self, memory: memoryview, packed: Packed) -> Landing:
        """Args: memory: the target, or a bounce buffer that a native thread takes the gradients from."""
        event, bounces = self._copy(packed, torch.frombuffer(memory, dtype=torch.uint8)), memory is not packed.target
        pieces = [
            _native.LandingPiece(
                _range(packed.target, spec, packed.dtype),
                native_name(packed.dtype),
                source=_range(memory, spec, packed.held) if bounces else None,
                source_dtype=native_name(packed.held) if bounces else None,
                add=spec.name in packed.added,
                first=spec.offset,
            )
            for spec in packed.specs
        ]
        future = self._native.land(self._accelerator.handle(event), pieces)
        return Landing(future, tuple(spec.name for spec in packed.specs), event)

    def _copy(self, packed: Packed, into: torch.Tensor) -> Event:
        """Copy what was packed, in as few copies as there are gaps."""
        after = [] if not packed.specs else packed.uses.events()
        event = None
        itemsize = packed.held.itemsize
        for first, end in _runs(packed.specs, packed.group):
            begin, stop = first * itemsize, end * itemsize
            event = self._accelerator.copy(
                into[begin:stop], packed.lease.memory[begin:stop], on=self._stream, after=after
            )
            after = []
        return self._accelerator.record(self._stream) if event is None else event

    def _make_room(self, nbytes: int) -> Lease:
        while True:
            while self._bounced and self._bounced[0][0].done():
                self._bounced.popleft()[1].release()
            lease = self._bounce.try_lease(nbytes)
            if lease is not None:
                return lease
            self._bounced[0][0].wait()


class GroupDownload:
    """The gradients of one group on their way down.

    Attributes:
        queue: that all groups have.
        packed: what came last, in the ring; None: nothing since the last piece was sent.
    """

    def __init__(self, queue: GradientQueue, group: Group) -> None:
        self.queue = queue
        self._group = group
        self.packed: Packed | None = None
        self._on_way: list[Landing] = []  # what was sent before, in that order

    def begin(self, target: memoryview, dtype: torch.dtype, *, adds_up: bool) -> Packed:
        """Another piece of the ring, once the one before was sent. Args: as GradientQueue.begin."""
        self.packed = self.queue.begin(self._group, target, dtype, adds_up=adds_up)
        return self.packed

    def send(self) -> None:
        """Start the way of what is in the ring."""
        if self.packed is not None:
            self._on_way.append(self.queue.send(self.packed))
            self.packed = None

    def on_their_way(self) -> list[_native.IOFuture]:
        """What has to be waited for by who reads all that came."""
        self.send()
        return [landing.future for landing in self._on_way]

    def sent(self, name: str) -> bool:
        """Whether a gradient of this parameter was sent, and nobody has asked whether it has landed."""
        return any(name in landing.names for landing in self._on_way)

    def land(self) -> Iterator[Mapping[str, Sequence[float]]]:
        """Wait until all have landed, one after the other. Yields and raises as Landing.sums."""
        self.send()
        while self._on_way:
            yield self._on_way[0].sums()
            del self._on_way[0]

    def forget(self) -> None:
        """None of them is needed any more: when this returns nothing is on its way."""
        if self.packed is not None:
            packed, self.packed = self.packed, None
            if packed.landing is None:
                self.queue.drop(packed)
            else:  # it was sent to make room for another
                self._on_way.append(packed.landing)
        while self._on_way:  # what comes next must not be overtaken in the same memory
            self._on_way[0].wait()
            del self._on_way[0]


@dataclass(frozen=True)
class WeightsCopy:
    """Weights of a unit on their way to host memory, or there.

    Attributes:
        lease: the host memory. Whoever has the copy releases it, once nobody reads it any more.
        landed: what reads the memory waits for it.
        event: the device memory is read until then.
    """

    lease: Lease
    landed: _native.LandingFuture
    event: Event

    def release(self) -> None:
        """Waits for the copy, if nobody did."""
        self.landed.wait()
        self.lease.release()


class WeightsQueue(_Downward):
    """Weights on their way down: an update of a unit whose weights are in the store takes them from the slot, where
    they are anyway, and not from the disk again. A stream of its own: they do not wait for gradients."""

    def __init__(
        self, accelerator: Accelerator, gate: _native.DeviceGate, space: Space, pool: _native.ThreadPool
    ) -> None:
        super().__init__(accelerator, gate, pool)
        self._space = space

    def copy(self, weights: torch.Tensor, after: Sequence[Event]) -> WeightsCopy | None:
        """Start copying the weights of a slot. None where there is no memory.

        Args:
            weights: uint8 [weight_bytes] on the device; must stay as it is until the copy's event.
            after: the weights are there, and what a forward wrote to them.
        """
        lease = self._space.try_lease(weights.numel())
        if lease is None:
            return None
        try:
            into = torch.frombuffer(lease.view(0, weights.numel()), dtype=torch.uint8)
            event = self._accelerator.copy(into, weights, on=self._stream, after=after)
            return WeightsCopy(lease, self._native.land(self._accelerator.handle(event), []), event)
        except BaseException:
            self._rest()
            lease.release()
            raise


def _range(memory: memoryview, spec: ParameterSpec, dtype: torch.dtype) -> memoryview:
    return memory[spec.offset * dtype.itemsize : (spec.offset + spec.numel) * dtype.itemsize]


def _runs(specs: Iterable[ParameterSpec], group: Group) -> list[tuple[int, int]]:
    """Elements [first, end) that were packed: one range where every parameter of the group was, as what lies between
    them is nobody's."""
    packed = sorted(specs, key=lambda spec: spec.offset)
    if len(packed) == len(group.specs):
        return [(packed[0].offset, max(spec.offset + spec.numel for spec in packed))]
    runs: list[tuple[int, int]] = []
    for spec in packed:
        if runs and runs[-1][1] == spec.offset:
            runs[-1] = runs[-1][0], spec.offset + spec.numel
        else:
            runs.append((spec.offset, spec.offset + spec.numel))
    return runs
