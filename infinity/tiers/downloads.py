"""Download of gradients to host memory, through a ring of device memory, with one copy for each group of a unit.

[Note: the way of a gradient from a device]

    autograd ──pack──▶ ring (the group, flat) ──send──▶ pinned host memory ──native thread──▶ landed

As gradients arrive, they are packed into a piece of the ring on the compute stream. `send` queues one copy to the host,
and gives the piece back to the ring with an event that follows the copy. The stream that uses the same bytes next waits
for this event; the host does not wait. A native thread waits for the copy and computes the sums of squares. If host
memory has earlier gradients of the same parameters, the thread adds the new gradients to them. Updates and writes to
the store begin after the native thread has finished.

When the ring is full, the oldest packed piece is sent, even if the piece is incomplete.

When more gradients of the same parameters will follow soon, the piece is fp32. The gradients are added in the piece,
and one copy sends their sum. The additions and their order are the same as in host memory.

If the first gradient of a parameter has the dtype of the host buffer, it is copied directly to its place in the buffer.
A gradient that must be converted, or added to an earlier gradient in host memory, is copied to a bounce buffer first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from infinity import _native
from infinity.base.accelerator import Accelerator, Event
from infinity.errors import DeviceError
from infinity.io.arena import ArenaRegion, Lease
from infinity.state.dtypes import native_name
from infinity.state.unit import FlatParameterGroup, ParameterSpec
from infinity.tiers.slab import Slab, SlabLease, StreamUses


@dataclass(frozen=True)
class GradientLanding:
    """Gradients of a group, in flight to host memory.

    Attributes:
        future: future that is done when the gradients have landed.
        names: names of the parameters, in the order of the sums.
        event: event that follows the copy; the event must be kept alive until the copy is done.
    """

    future: _native.LandingFuture
    names: tuple[str, ...]
    event: Event

    def done(self) -> bool:
        return self.future.done()

    def wait(self) -> None:
        """Wait until the gradients have landed or the transfer has failed."""
        self.future.wait()

    def sums(self) -> Mapping[str, Sequence[float]]:
        """Wait until the gradients have landed, and return the Σ g² of the values now in host memory.

        Returns:
            The partial sums on the group's grid, by parameter name.

        Raises:
            DeviceError: the gradients were lost.
        """
        self.require_landed()
        return dict(zip(self.names, self.future.sums, strict=True))

    def require_landed(self) -> None:
        """Wait until the gradients have landed.

        Raises:
            DeviceError: the gradients were lost.
        """
        self.wait()
        failure = self.future.failure()
        if failure is not None:
            raise DeviceError(
                f"gradients of {', '.join(self.names)} were lost on their way to host memory: {failure.cause}"
            )


@dataclass(eq=False)
class GradientBatch:
    """A piece of the ring, with gradients of one group.

    Attributes:
        group: the group.
        summed: whether the native thread computes the sums of squares.
        target: host memory of the full group, in `dtype`.
        dtype: dtype of the gradients in host memory.
        held: dtype of the gradients in this piece: the dtype from autograd, or fp32 when gradients are added in the
            piece.
        adds_up: whether several gradients of a parameter are added in this piece.
        lease: memory in the ring.
        uses: streams that use the memory.
        specs: parameters whose gradients are packed.
        added: names of the parameters whose gradients will be added to the gradients in the target.
        landing: landing of the piece; None before the piece is sent.
    """

    group: FlatParameterGroup
    target: memoryview
    dtype: torch.dtype
    held: torch.dtype
    adds_up: bool
    summed: bool
    lease: SlabLease
    uses: StreamUses
    specs: list[ParameterSpec] = field(default_factory=list)
    added: set[str] = field(default_factory=set)
    landing: GradientLanding | None = None

    def of(self, spec: ParameterSpec) -> torch.Tensor:
        """Return the gradient of a parameter as a tensor on the device."""
        return self.lease.memory.view(self.held)[spec.offset : spec.offset + spec.numel]

    def takes(self, spec: ParameterSpec, *, add: bool) -> bool:
        """Return whether the piece accepts a gradient. It accepts the first gradient of a parameter, and a gradient
        that is added to a gradient in the piece.

        A piece that adds gradients must have all gradients of a parameter from the first one on, because otherwise the
        order of the additions would change.
        """
        if self.landing is not None:
            return False
        if spec in self.specs:
            return add and self.adds_up
        return not (add and self.adds_up)


class D2HStream:
    """A stream from the device to the host, and the native thread that processes the copies."""

    def __init__(self, accelerator: Accelerator, gate: _native.DeviceGate, pool: _native.ThreadPool) -> None:
        self._accelerator = accelerator
        self._native = _native.Landings(gate, pool)
        self._stream = accelerator.stream()

    def future_of(self, event: Event) -> _native.IOFuture:
        """Return a future that is done when the event has happened. A native thread waits for the event."""
        return self._native.land(self._accelerator.handle(event), [])

    def close(self) -> None:
        """Wait until no copy uses host memory."""
        self._native.close()
        self._rest()

    def _rest(self) -> None:
        """Wait for all copies, including copies that were not handed to the native thread."""
        self._accelerator.synchronize(self._accelerator.record(self._stream))


class GradientQueue(D2HStream):
    """Queue of gradients from the device to the host.

    Invariant: `_open` has the pieces that are not sent yet, the oldest first. Each of these pieces has a lease of the
    ring.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        gate: _native.DeviceGate,
        ring: Slab,
        bounce: ArenaRegion,
        pool: _native.ThreadPool,
    ) -> None:
        super().__init__(accelerator, gate, pool)
        self._ring = ring
        self._bounce = bounce
        self._open: list[GradientBatch] = []
        self._bounced: deque[tuple[GradientLanding, Lease]] = deque()

    def begin(
        self,
        group: FlatParameterGroup,
        target: memoryview,
        dtype: torch.dtype,
        *,
        adds_up: bool = False,
        summed: bool = True,
    ) -> GradientBatch:
        """Lease a piece of the ring for gradients of a group. If the ring is full, send older pieces.

        Args:
            group: the group.
            target: host memory of the full group; nothing else may write to it until the piece has landed.
            dtype: dtype of the target.
            adds_up: whether gradients are added in the piece, because more gradients of these parameters will follow
                soon; the target must be fp32.
            summed: whether the native thread computes the sums of squares. Gradients that other ranks will add to
                theirs need no sums.
        """
        adds_up = adds_up and group.numel * torch.float32.itemsize <= self._ring.nbytes
        held = torch.float32 if adds_up else group.dtype
        while True:
            lease = self._ring.try_lease(group.numel * held.itemsize, onward=True)
            if lease is not None:
                break
            if not self._open:
                raise AssertionError(f"a ring of {self._ring.nbytes} bytes has no room for {group.numel} gradients")
            self.send(self._open[0])
        packed = GradientBatch(
            group, target, dtype, held, adds_up, summed, lease, StreamUses(self._accelerator, lambda: lease.after)
        )
        self._open.append(packed)
        return packed

    def pack(self, packed: GradientBatch, spec: ParameterSpec, gradient: torch.Tensor, *, add: bool) -> None:
        """Put one gradient into a piece that accepts this gradient (GradientBatch.takes), on this thread's stream."""
        if spec in packed.specs:
            packed.uses.begin_behind_others()
            packed.of(spec).add_(gradient.reshape(-1))
            return
        packed.specs.append(spec)
        if add:
            packed.added.add(spec.name)
        packed.uses.begin()
        packed.of(spec).copy_(gradient.reshape(-1))

    def send(self, packed: GradientBatch) -> GradientLanding:
        """Queue the copy of a piece to the host. After this call the piece accepts no further gradients.

        After an error the piece is unchanged, and may be sent again or dropped.
        """
        if packed.landing is None:
            direct = not packed.added and packed.dtype == packed.held
            try:
                packed.landing = self._copy_to(packed.target, packed) if direct else self._send_to_bounce(packed)
            except BaseException:
                packed.uses.also(self._accelerator.record(self._stream))  # copies that were queued before the failure
                raise
            self._open.remove(packed)
            self._ring.give_back(packed.lease, [packed.landing.event])
        return packed.landing

    def drop(self, packed: GradientBatch) -> None:
        """Drop a piece whose gradients are no longer needed."""
        if packed.landing is None:
            self._open.remove(packed)
            before = () if packed.specs else packed.lease.after  # pack has waited for these events
            self._ring.give_back(packed.lease, [*before, *packed.uses.events()])

    def _send_to_bounce(self, packed: GradientBatch) -> GradientLanding:
        lease = self._make_room(packed.lease.nbytes)
        try:
            landing = self._copy_to(lease.view(0, packed.lease.nbytes), packed)
        except BaseException:
            self._rest()
            lease.release()
            raise
        self._bounced.append((landing, lease))
        return landing

    def _copy_to(self, memory: memoryview, packed: GradientBatch) -> GradientLanding:
        """Copy a piece to host memory, and start its landing.

        Args:
            memory: the target, or a bounce buffer from which a native thread moves the gradients to the target.
            packed: piece of the ring.
        """
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
            if packed.summed or bounces
        ]
        future = self._native.land(self._accelerator.handle(event), pieces)
        return GradientLanding(future, tuple(spec.name for spec in packed.specs), event)

    def _copy(self, packed: GradientBatch, into: torch.Tensor) -> Event:
        """Copy the packed gradients. Gradients without a gap between them are copied together."""
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


class GroupGradientDownload:
    """Download of the gradients of one group.

    Attributes:
        queue: queue of all groups.
        packed: piece that receives gradients now; None if no gradient was packed since the last send.
    """

    def __init__(self, queue: GradientQueue, group: FlatParameterGroup) -> None:
        self.queue = queue
        self._group = group
        self.packed: GradientBatch | None = None
        self._on_way: list[GradientLanding] = []  # landings of the pieces that were sent before, in order

    def begin(
        self, target: memoryview, dtype: torch.dtype, *, adds_up: bool = False, summed: bool = True
    ) -> GradientBatch:
        """Lease another piece of the ring, after the previous piece was sent.

        The arguments are the same as for GradientQueue.begin.
        """
        self.packed = self.queue.begin(self._group, target, dtype, adds_up=adds_up, summed=summed)
        return self.packed

    def send(self) -> None:
        """Send the packed gradients, if there are any."""
        if self.packed is not None:
            self._on_way.append(self.queue.send(self.packed))
            self.packed = None

    def landings(self) -> list[GradientLanding]:
        """Send the packed gradients, and return all landings in flight, in order."""
        self.send()
        return list(self._on_way)

    def landing_futures(self) -> list[_native.IOFuture]:
        """Send the packed gradients, and return the futures of all landings in flight."""
        return [landing.future for landing in self.landings()]

    def sent(self, name: str) -> bool:
        """Return whether a gradient of this parameter was sent and its landing has not been collected yet
        (`wait_landed`)."""
        return any(name in landing.names for landing in self._on_way)

    def wait_landed(self) -> Iterator[Mapping[str, Sequence[float]]]:
        """Wait until all gradients have landed, one landing after the other. Yields the result of GradientLanding.sums
        for each landing, and raises its errors."""
        self.send()
        while self._on_way:
            yield self._on_way[0].sums()
            del self._on_way[0]

    def forget(self) -> None:
        """Drop all gradients. When this method returns, no gradient is in flight."""
        if self.packed is not None:
            packed, self.packed = self.packed, None
            if packed.landing is None:
                self.queue.drop(packed)
            else:  # the piece was sent to make room for another piece
                self._on_way.append(packed.landing)
        while self._on_way:  # a late landing must not overwrite newer gradients
            self._on_way[0].wait()
            del self._on_way[0]


@dataclass(frozen=True)
class WeightsCopy:
    """Copy of a unit's weights in host memory, complete or in flight.

    Attributes:
        lease: the host memory. The owner of the copy must release the memory once no reader needs it any more.
        landed: future for which readers of the memory must wait.
        event: event after which the device memory is no longer read.
    """

    lease: Lease
    landed: _native.LandingFuture
    event: Event

    def release(self) -> None:
        """Wait for the copy, then release the memory."""
        self.landed.wait()
        self.lease.release()


class WeightsDownloads(D2HStream):
    """Queue of weights from the device to the host.

    If a unit's weights are kept in the store, its update uses a copy of the slot's current weights in place of reading
    the weights from the disk again. The queue has a separate stream, so that weights do not wait for gradients.
    """

    def __init__(
        self, accelerator: Accelerator, gate: _native.DeviceGate, space: ArenaRegion, pool: _native.ThreadPool
    ) -> None:
        super().__init__(accelerator, gate, pool)
        self._space = space

    def copy(self, weights: torch.Tensor, after: Sequence[Event]) -> WeightsCopy | None:
        """Start to copy the weights of a slot.

        Args:
            weights: uint8 [weight_bytes] on the device; the tensor must not change until the event of the copy is
                reached.
            after: events after which the weights are complete, including all writes by the forward.

        Returns:
            The copy; None when there is no host memory for it.
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


def _runs(specs: Iterable[ParameterSpec], group: FlatParameterGroup) -> list[tuple[int, int]]:
    """Return the ranges of elements [first, end) to copy.

    If every parameter of the group is packed, the result is one range, because the gaps between the parameters are
    unused. Otherwise the result has one range for each sequence of adjacent parameters.
    """
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
