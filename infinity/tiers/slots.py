"""Memory for fetched weights: one interface, wherever they come from and go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch

from infinity.base.accelerator import Accelerator, Event
from infinity.errors import SwapTimeoutError
from infinity.io.arena import Lease
from infinity.io.engine import Transfer
from infinity.io.store import SwapStore, wait_all
from infinity.plan.policy import long_from_top, unusual_from_top
from infinity.tiers.decoding import Decoding, decode_on_device
from infinity.tiers.destination import Destination, Written
from infinity.tiers.device import DeviceTier
from infinity.tiers.downloads import WeightsCopy, WeightsQueue
from infinity.tiers.home import WeightsHome
from infinity.tiers.resources import Resources
from infinity.tiers.slab import Slab, SlabLease, Uses


def _references(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


class Slot(ABC):
    """A piece of memory that a unit's weights occupy where they are computed with. torch counts the references to it.

    Args:
        tensor: uint8 [weight_bytes], on the device; its storage is the slot's own.
        lease: the host memory it is, where an update may work in it; None: the home of the weights in RAM, or memory of
            a device.

    Attributes:
        at_home: what is computed with is what the update works on, or beside.
    """

    at_home = True

    def __init__(self, tensor: torch.Tensor, lease: Lease | None) -> None:
        self.tensor = tensor
        self.lease = lease
        self._own = self._expected = _references(tensor)

    @abstractmethod
    def wait(self) -> None:
        """What this thread computes from now on finds the weights there."""

    def rest(self) -> bool:
        """Nobody computes with the weights until `wait` is called again: nothing but parameters refers to them, and the
        parameters may not be read. False where that makes no difference: then they may be read."""
        return False

    def copy_down(self) -> WeightsCopy | None:
        """Start copying the weights to host memory, where an update finds them. None where it finds them without, or
        where there is no memory for them."""
        return None

    def outstanding(self) -> bool:
        """Whether anything but the slot and the parameter views that are expected refers to the memory."""
        return _references(self.tensor) > self._expected

    def expect(self, views: int) -> None:
        """So many references count for nothing: the parameters' own views."""
        self._expected = self._own + views

    @abstractmethod
    def free(self) -> None: ...


class HostSlot(Slot):
    """Weights that are used where they lie. `lease` None: their home in RAM, never given back."""

    def wait(self) -> None:
        return

    def free(self) -> None:
        if self.lease is not None:
            self.lease.release()


class CopiedSlot(Slot):
    """Weights in host memory that rest elsewhere in RAM: in another form, or in the slices of several ranks. They are
    old once the unit is updated."""

    at_home = False

    def __init__(self, lease: Lease) -> None:
        super().__init__(lease.tensor(), None)
        self._memory = lease

    def wait(self) -> None:
        return

    def free(self) -> None:
        self._memory.release()


class SlabSlot(Slot):
    """Weights copied to a device.

    Args:
        ready: the copy is complete.
        trained_bytes: of the weights, the first ones, what updates read.
    """

    at_home = False

    def __init__(
        self,
        slab: Slab,
        lease: SlabLease,
        ready: Event,
        accelerator: Accelerator,
        down: WeightsQueue,
        trained_bytes: int | None = None,
    ) -> None:
        super().__init__(lease.tensor(), None)
        self._trained_bytes = lease.nbytes if trained_bytes is None else trained_bytes
        self._down = down
        self._slab = slab
        self._leased = lease
        self._ready = ready
        self._uses = Uses(accelerator, lambda: [ready])

    def wait(self) -> None:
        self._uses.begin()

    def rest(self) -> bool:
        self._uses.end()
        return True

    def copy_down(self) -> WeightsCopy | None:
        weights = self._leased.memory[: self._trained_bytes]
        copy = self._down.copy(weights, [self._ready, *self._uses.so_far()])
        if copy is not None:
            self._uses.also(copy.event)
        return copy

    def free(self) -> None:
        self._slab.give_back(self._leased, self._uses.events())  # the next upload is behind this slot's, on one stream


class Fetch(ABC):
    """Weights on their way into a slot. Life cycle: SlotPool.start() → finish(), once, which waits."""

    def __init__(self, transfers: Sequence[Transfer] = ()) -> None:
        self._transfers = transfers

    def wait(self) -> None:
        """Until finish() would wait no more. May be interrupted."""
        for transfer in self._transfers:
            transfer.wait()

    def finish(self) -> Slot:
        """Raises SwapIOError; then the memory was given back, unless the disk was given up, which may still write."""
        try:
            wait_all(self._transfers)
        except SwapTimeoutError:
            raise
        except Exception:
            self._give_up()
            raise
        return self._slot()

    @abstractmethod
    def _slot(self) -> Slot:
        """Of weights that are there, or whose event streams can wait for."""

    @abstractmethod
    def _give_up(self) -> None:
        """Nothing is on its way there any more."""


class SlotPool(Protocol):
    """Where slots come from. `start` returns None when there is no room: evicting is units/room.py's business."""

    def start(self, home: WeightsHome, after: Written, version: int) -> Fetch | None:
        """
        Args:
            after: new weights that are on their way; they are to be fetched.
            version: of the weights that are to be fetched; grows with every change of them.
        """

    def free(self, slot: Slot) -> None: ...

    def counts(self, home: WeightsHome) -> bool:
        """Whether a slot of these weights takes of the budget: evicting them makes room for others."""

    def waits(self, home: WeightsHome) -> bool:
        """Whether a fetch of these weights needs memory that other fetches have until they are finished."""


class _There(Fetch):
    def __init__(self, slot: Slot) -> None:
        super().__init__()
        self._there = slot

    def _slot(self) -> Slot:
        return self._there

    def _give_up(self) -> None:
        self._there.free()


class HostSlots:
    """Weights used on the CPU. In RAM their home is the slot; on NVMe they are read into a lease, which is the slot
    then. Encoded weights are decoded into a lease from both ([Note: decoding] in tiers/decoding.py).

    The arena's free space is the budget: everything else in it was leased before.
    """

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self._from_top = long_from_top(resources.arena.free_bytes)
        self._landed: list[_DecodeFetch] = []  # that have memory they were read into

    def start(self, home: WeightsHome, after: Written, version: int) -> Fetch | None:
        decodes = home.encoded_bytes > 0
        if home.lease is not None and not decodes:
            return _There(HostSlot(home.lease.tensor(), None))
        if decodes and self.waits(home):
            return None
        lease = self._resources.arena.try_lease(home.slot_bytes, from_top=self._from_top(home.slot_bytes))
        if lease is None:
            return None
        if not decodes:
            return _LeaseFetch(lease, _read(self._resources.require_store(), home, lease, after))
        return self._decode_from_store(home, lease, after) if home.lease is None else self._decode(home, lease)

    def _decode(self, home: WeightsHome, lease: Lease) -> Fetch:
        """From RAM. What is not encoded is little, and copied now: an update may change it next."""
        if home.lease is None:
            raise AssertionError("weights that do not rest in RAM")
        begin = home.nbytes - home.encoded_bytes
        lease.tensor()[:begin].copy_(home.lease.tensor()[:begin])
        future = self._decoding.start(home, home.lease.view(begin, home.encoded_bytes), lease.view(), [])
        transfer = Transfer(future, home.name, "weight", 0)
        return _DecodeFetch(lease, None, [transfer], at_home=False)

    def _decode_from_store(self, home: WeightsHome, lease: Lease, after: Written) -> Fetch:
        landing = self._decoding.landing.lease(home.encoded_bytes, f"the encoded weights of '{home.name}'")
        store = self._resources.require_store()
        reads = _read(store, home, lease, after)
        landed, begin = [], 0
        for _, kept in home.encoded():
            landed.append(store.read(kept.stored(), landing.view(begin, kept.nbytes)))
            begin += kept.nbytes
        future = self._decoding.start(home, landing.view(), lease.view(), [read.future for read in landed])
        decoded = store.transfer(future, next(kept for _, kept in home.encoded()).stored())
        fetch = _DecodeFetch(lease, landing, [*reads, *landed, decoded], at_home=True)
        self._landed.append(fetch)
        return fetch

    @property
    def _decoding(self) -> Decoding:
        if self._resources.decoding is None:
            raise AssertionError("encoded weights, and nothing to decode them with")
        return self._resources.decoding

    def counts(self, home: WeightsHome) -> bool:
        return home.lease is None or home.encoded_bytes > 0

    def waits(self, home: WeightsHome) -> bool:
        if home.lease is not None or not home.encoded_bytes:
            return False
        self._landed = [fetch for fetch in self._landed if not fetch.give_landing_back()]
        return not self._decoding.landing.fits(home.encoded_bytes)

    def free(self, slot: Slot) -> None:
        slot.free()


def _read(store: SwapStore, home: WeightsHome, lease: Lease, after: Written) -> list[Transfer]:
    """What lies in a slot as it does at home."""
    reads = []
    for index, group in home.plain():
        new = after.get(index, Destination(group))
        reads.append(
            store.read(group.stored(), lease.view(group.start, group.nbytes), copy=new.copy, after=new.written)
        )
    return reads


class _LeaseFetch(Fetch):
    def __init__(self, lease: Lease, transfers: Sequence[Transfer]) -> None:
        super().__init__(transfers)
        self._lease = lease

    def _slot(self) -> Slot:
        return HostSlot(self._lease.tensor(), self._lease)

    def _give_up(self) -> None:
        self._lease.release()


class _DecodeFetch(Fetch):
    """Args: landing: what is decoded was read into it; None: it rests in RAM."""

    def __init__(self, lease: Lease, landing: Lease | None, transfers: Sequence[Transfer], *, at_home: bool) -> None:
        super().__init__(transfers)
        self._lease = lease
        self._landing = landing
        self._at_home = at_home

    def give_landing_back(self) -> bool:
        """Once nothing reads it any more, or writes to it. Whether it is given back. After a SwapTimeoutError it never
        is: the disk may still write."""
        if self._landing is not None and all(transfer.done() for transfer in self._transfers):
            failures = [transfer.future.failure() for transfer in self._transfers]
            if not any(failure is not None and failure.kind == "timeout" for failure in failures):
                self._landing.release()
                self._landing = None
        return self._landing is None

    def _slot(self) -> Slot:
        self.give_landing_back()
        return HostSlot(self._lease.tensor(), self._lease) if self._at_home else CopiedSlot(self._lease)

    def _give_up(self) -> None:
        self.give_landing_back()
        self._lease.release()


class SlabSlots:
    """Weights on a device, copied from pinned RAM, or from NVMe through a landing memory.

    Units of the size that most have come from the low end of the slab, the others from the high end: so units that are
    alike get the same addresses again and again, and do not break up each other's space. Units that stay have a slab
    of their own, and come elsewhere only while somebody holds views of what was there.
    """

    def __init__(self, resources: Resources, device: DeviceTier) -> None:
        self._resources = resources
        self._device = device
        units = list(zip(resources.plan.layout.units, resources.units, strict=True))
        self._staying = [homes.weights for unit, homes in units if unit.unit.stays]
        self._from_top = unusual_from_top(homes.weights.slot_bytes for unit, homes in units if not unit.unit.stays)

    def start(self, home: WeightsHome, after: Written, version: int) -> Fetch | None:
        slab, lease = self._lease(home)
        if lease is None:
            return None
        uploads = self._device.uploads
        encoded = self._device.decoding.try_lease(home.encoded_bytes) if home.encoded_bytes else None
        try:
            if home.encoded_bytes and encoded is None:
                slab.give_back(lease, lease.after)
                return None
            if home.lease is not None:
                ready = uploads.from_ram(lease, home.lease, encoded)
                return _SlabFetch(self, home, slab, lease, encoded, [], ready)
            transfer, ready = uploads.from_store(lease, home, after, self._resources.require_store(), encoded)
        except BaseException:
            self.give_back(slab, lease, encoded)
            raise
        return _SlabFetch(self, home, slab, lease, encoded, [transfer], ready)

    def give_back(self, slab: Slab, lease: SlabLease, encoded: SlabLease | None) -> None:
        """Memory that nothing is on its way to any more."""
        slab.give_back(lease, lease.after)
        if encoded is not None:
            self._device.decoding.give_back(encoded, encoded.after)

    def decode(self, home: WeightsHome, slab: Slab, lease: SlabLease, encoded: SlabLease, ready: Event) -> Event:
        """Decode on the stream that computes, behind `ready`. Returns the event behind it. Where that raises, as
        without device memory for the values on their way, both leases are given back."""
        accelerator = self._device.accelerator
        stream = accelerator.current()
        for event in (ready, *lease.after):
            accelerator.wait(stream, event)
        try:
            decode_on_device(home, encoded.memory, lease.memory)
        except BaseException:
            slab.give_back(lease, [accelerator.record(stream)])
            raise
        finally:
            decoded = accelerator.record(stream)
            self._device.decoding.give_back(encoded, [decoded])
        return decoded

    def _lease(self, home: WeightsHome) -> tuple[Slab, SlabLease | None]:
        staying, slots = self._device.staying, self._device.slots
        if any(home is each for each in self._staying):
            lease = staying.try_lease(home.slot_bytes)
            if lease is not None:
                return staying, lease
        return slots, slots.try_lease(home.slot_bytes, from_top=self._from_top(home.slot_bytes))

    def slot(self, home: WeightsHome, slab: Slab, lease: SlabLease, ready: Event) -> SlabSlot:
        return SlabSlot(slab, lease, ready, self._device.accelerator, self._device.weights, home.trained_bytes)

    def counts(self, home: WeightsHome) -> bool:
        return True

    def waits(self, home: WeightsHome) -> bool:
        return bool(home.encoded_bytes) and not self._device.decoding.fits(home.encoded_bytes)

    def free(self, slot: Slot) -> None:
        slot.free()


class _SlabFetch(Fetch):
    """Args: encoded: what is decoded is copied there; None where nothing is."""

    def __init__(
        self,
        pool: SlabSlots,
        home: WeightsHome,
        slab: Slab,
        lease: SlabLease,
        encoded: SlabLease | None,
        transfers: Sequence[Transfer],
        ready: Event,
    ) -> None:
        super().__init__(transfers)
        self._pool = pool
        self._home = home
        self._slab = slab
        self._lease = lease
        self._encoded = encoded
        self._ready = ready

    def _slot(self) -> Slot:
        ready = self._ready
        if self._encoded is not None:
            ready = self._pool.decode(self._home, self._slab, self._lease, self._encoded, ready)
        return self._pool.slot(self._home, self._slab, self._lease, ready)

    def _give_up(self) -> None:
        self._pool.give_back(self._slab, self._lease, self._encoded)


def open_slots(resources: Resources) -> SlotPool:
    """The pool that fits the device, for weights that this process has all of."""
    return HostSlots(resources) if resources.device is None else SlabSlots(resources, resources.device)
