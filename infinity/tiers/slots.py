"""Memory for fetched weights: one interface for all sources and all devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch

from infinity.base.accelerator import Accelerator, Event
from infinity.errors import SwapTimeoutError
from infinity.io.arena import Lease
from infinity.io.engine import BackgroundWork, Transfer
from infinity.io.store import SwapStore, wait_all
from infinity.plan.policy import long_from_top, unusual_from_top
from infinity.tiers.decoding import SlotDecoder, decode_on_device
from infinity.tiers.destination import StateDestination, Written
from infinity.tiers.device import DeviceTier
from infinity.tiers.downloads import WeightsCopy, WeightsDownloads
from infinity.tiers.home import WeightsHome
from infinity.tiers.resident import ResidentMemory
from infinity.tiers.resources import ModelResources
from infinity.tiers.slab import Slab, SlabLease, StreamUses, separate_storage


def _references(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


class Slot(ABC):
    """A piece of memory that a unit's weights occupy while the weights are used. torch counts the references to this
    memory.

    Args:
        tensor: uint8 [weight_bytes], on the device; no other tensor has its storage.
        lease: host memory of the slot, if an update may use this memory; None if the slot is the home of weights in
            RAM, or is memory of a device.

    Attributes:
        at_home: whether updates use the slot's memory directly; False: the slot is a copy, and an update makes the copy
            out of date.
    """

    at_home = True

    def __init__(self, tensor: torch.Tensor, lease: Lease | None) -> None:
        self.tensor = tensor
        self.lease = lease
        self._own = self._expected = _references(tensor)

    @abstractmethod
    def wait(self) -> None:
        """Make the work that this thread queues next wait until the weights are complete."""

    def rest(self) -> bool:
        """End the use of the weights until `wait` is called again. The caller has checked that only parameters refer to
        the slot.

        Returns:
            Whether reads of the parameters must be forbidden until `wait` is called; False when reads are harmless.
        """
        return False

    def copy_down(self) -> WeightsCopy | None:
        """Start to copy the weights to host memory for an update.

        Returns:
            The copy; None when an update needs no copy, or when there is no memory for a copy.
        """
        return None

    def outstanding(self) -> bool:
        """Return whether other tensors than the slot's own and the expected views of parameters refer to the memory."""
        return _references(self.tensor) > self._expected

    def expect(self, views: int) -> None:
        """Set the number of references that do not count as outstanding: the views of the parameters."""
        self._expected = self._own + views

    @abstractmethod
    def free(self) -> None: ...


class HostSlot(Slot):
    """Slot in host memory. A slot without a lease is the home of the weights in RAM, which is never given back."""

    def wait(self) -> None:
        return

    def free(self) -> None:
        if self.lease is not None:
            self.lease.release()


class MaterializedHostSlot(Slot):
    """Copy in host memory of weights whose home in RAM has another form: encoded, or divided over several ranks.

    After an update of the unit the copy no longer has the current weights.
    """

    at_home = False

    def __init__(self, lease: Lease) -> None:
        super().__init__(lease.tensor(), None)
        self._memory = lease

    def wait(self) -> None:
        return

    def free(self) -> None:
        self._memory.release()


class ResidentSlot(Slot):
    """Slot of a resident unit: the home of the weights on the device, which is never given back."""

    def __init__(self, home: ResidentMemory) -> None:
        super().__init__(separate_storage(home.memory), None)
        self._uses = home.uses

    def wait(self) -> None:
        self._uses.begin_reading()

    def rest(self) -> bool:
        self._uses.end_reading()
        return True

    def free(self) -> None:
        self._uses.end_reading()


class SlabSlot(Slot):
    """Weights that are copied to a device.

    Args:
        slab: slab of the memory.
        lease: memory of the slot.
        ready: event that follows the copy to the device.
        accelerator: the device.
        down: queue for copies of the weights to the host.
        trained_bytes: number of bytes at the start of the weights that updates read; None: all bytes.
    """

    at_home = False

    def __init__(
        self,
        slab: Slab,
        lease: SlabLease,
        ready: Event,
        accelerator: Accelerator,
        down: WeightsDownloads,
        trained_bytes: int | None = None,
    ) -> None:
        super().__init__(lease.tensor(), None)
        self._trained_bytes = lease.nbytes if trained_bytes is None else trained_bytes
        self._down = down
        self._slab = slab
        self._leased = lease
        self._ready = ready
        self._uses = StreamUses(accelerator, lambda: [ready])

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
        # Each use waited for `ready`. Without a use the next owner waits for `ready`, which a decoding may record.
        self._slab.give_back(self._leased, self._uses.events() or [self._ready])


class Fetch(ABC):
    """Weights in flight to a slot. Life cycle: SlotPool.start() → finish(), which waits and is called only once."""

    def __init__(self, transfers: Sequence[Transfer] = ()) -> None:
        self._transfers = transfers

    def wait(self) -> None:
        """Wait until finish() can return without waiting. Ctrl-C can end this wait."""
        for transfer in self._transfers:
            transfer.wait()

    def finish(self) -> Slot:
        """Wait for the weights, and return their slot.

        Raises:
            SwapIOError: a read failed. The memory is given back, unless the disk did not answer before the deadline and
                may still write to it.
        """
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
        """Return the slot.

        The slot's weights are complete, or will be complete at an event that streams can wait for.
        """

    @abstractmethod
    def _give_up(self) -> None:
        """Give the memory back, after all transfers to it have ended."""


class SlotPool(Protocol):
    """Source of slots. When there is no room, `start` returns None, and units/fetcher.py decides which unit is
    evicted."""

    def start(self, home: WeightsHome, after: Written, version: int) -> Fetch | None:
        """Start to fetch weights.

        Args:
            home: homes of the weights.
            after: destinations of the new weights of an update in progress; the fetch waits for these new weights and
                reads them.
            version: version of the weights; every change of the weights increases the version.

        Returns:
            The fetch; None when there is no room.
        """

    def free(self, slot: Slot) -> None: ...

    def counts(self, home: WeightsHome) -> bool:
        """Return whether a slot for these weights takes memory from the budget for slots. If so, its eviction makes
        room for other slots."""

    def waits(self, home: WeightsHome) -> bool:
        """Return whether a fetch of these weights must wait for memory that other fetches still use."""

    def changed(self, home: WeightsHome, version: int, after: Written) -> BackgroundWork | None:
        """Record that the weights have, or will have, another version.

        Args:
            home: homes of the weights.
            version: the new version.
            after: destinations of the new weights of a decided update, by group; empty if the homes have the version.

        Returns:
            Work that must end before the memory of the update is given back; None if there is no such work.
        """


class _ResidentFetch(Fetch):
    def __init__(self, slot: Slot) -> None:
        super().__init__()
        self._there = slot

    def _slot(self) -> Slot:
        return self._there

    def _give_up(self) -> None:
        self._there.free()


class HostSlotPool:
    """Slots of weights that are used on the CPU.

    For weights that are kept in RAM, the slot is their home. Weights on NVMe are read into a lease, which is then the
    slot. Encoded weights from RAM or NVMe are decoded into a lease ([Note: decoding] in tiers/decoding.py).

    The budget for slots is the free space of ModelResources.transfers.
    """

    def __init__(self, resources: ModelResources) -> None:
        self._resources = resources
        self._from_top = long_from_top(resources.transfers.free_bytes)
        self._bouncing: list[_DecodeFetch] = []  # fetches that still own a bounce buffer

    def start(self, home: WeightsHome, after: Written, version: int) -> Fetch | None:
        decodes = home.encoded_bytes > 0
        if home.lease is not None and not decodes:
            return _ResidentFetch(HostSlot(home.lease.tensor(), None))
        if decodes and self.waits(home):
            return None
        lease = self._resources.transfers.try_lease(home.slot_bytes, from_top=self._from_top(home.slot_bytes))
        if lease is None:
            return None
        if not decodes:
            return _LeaseFetch(lease, _read(self._resources.require_store(), home, lease, after))
        return self._decode_from_store(home, lease, after) if home.lease is None else self._decode(home, lease)

    def _decode(self, home: WeightsHome, lease: Lease) -> Fetch:
        """Decode weights from RAM.

        Groups that are not encoded are small, and are copied before this method returns, because the next update may
        change their home.
        """
        if home.lease is None:
            raise AssertionError("weights that do not rest in RAM")
        begin = home.nbytes - home.encoded_bytes
        lease.tensor()[:begin].copy_(home.lease.tensor()[:begin])
        future = self._decoding.start(
            home.encoded_groups(), home.lease.view(begin, home.encoded_bytes), lease.view(), []
        )
        transfer = Transfer(future, home.name, "weight", 0)
        return _DecodeFetch(lease, None, [transfer], at_home=False)

    def _decode_from_store(self, home: WeightsHome, lease: Lease, after: Written) -> Fetch:
        bounce = self._decoding.encoded_space.lease(home.encoded_bytes, f"the encoded weights of '{home.name}'")
        store = self._resources.require_store()
        reads = _read(store, home, lease, after)
        encoded_reads, begin = [], 0
        for _, kept in home.encoded():
            encoded_reads.append(store.read(kept.stored(), bounce.view(begin, kept.nbytes)))
            begin += kept.nbytes
        futures = [read.future for read in encoded_reads]
        future = self._decoding.start(home.encoded_groups(), bounce.view(), lease.view(), futures)
        decoded = store.transfer(future, next(kept for _, kept in home.encoded()).stored())
        fetch = _DecodeFetch(lease, bounce, [*reads, *encoded_reads, decoded], at_home=True)
        self._bouncing.append(fetch)
        return fetch

    @property
    def _decoding(self) -> SlotDecoder:
        if self._resources.decoding is None:
            raise AssertionError("encoded weights, and nothing to decode them with")
        return self._resources.decoding

    def counts(self, home: WeightsHome) -> bool:
        return home.lease is None or home.encoded_bytes > 0

    def waits(self, home: WeightsHome) -> bool:
        if home.lease is not None or not home.encoded_bytes:
            return False
        self._bouncing = [fetch for fetch in self._bouncing if not fetch.give_bounce_back()]
        return not self._decoding.encoded_space.fits(home.encoded_bytes)

    def changed(self, home: WeightsHome, version: int, after: Written) -> None:
        return

    def free(self, slot: Slot) -> None:
        slot.free()


def _read(store: SwapStore, home: WeightsHome, lease: Lease, after: Written) -> list[Transfer]:
    """Start to read the groups that are not encoded into a slot."""
    reads = []
    for index, group in home.plain():
        new = after.get(index, StateDestination(group))
        reads.append(
            store.read(
                group.stored(), lease.view(group.start, group.nbytes), copy_index=new.copy_index, after=new.written
            )
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
    """Fetch that decodes weights.

    Args:
        lease: memory of the slot.
        bounce: bounce buffer of the encoded weights from the store; None for weights in RAM.
        transfers: the reads and the decoding.
        at_home: whether updates use the slot's memory directly (Slot.at_home).
    """

    def __init__(self, lease: Lease, bounce: Lease | None, transfers: Sequence[Transfer], *, at_home: bool) -> None:
        super().__init__(transfers)
        self._lease = lease
        self._bounce = bounce
        self._at_home = at_home

    def give_bounce_back(self) -> bool:
        """Give the bounce buffer back if no transfer uses it any more.

        After a SwapTimeoutError the bounce buffer is never given back, because the disk may still write to it.

        Returns:
            Whether no bounce buffer is left.
        """
        if self._bounce is not None and all(transfer.done() for transfer in self._transfers):
            failures = [transfer.future.failure() for transfer in self._transfers]
            if not any(failure is not None and failure.kind == "timeout" for failure in failures):
                self._bounce.release()
                self._bounce = None
        return self._bounce is None

    def _slot(self) -> Slot:
        self.give_bounce_back()
        return HostSlot(self._lease.tensor(), self._lease) if self._at_home else MaterializedHostSlot(self._lease)

    def _give_up(self) -> None:
        self.give_bounce_back()
        self._lease.release()


class SlabSlotPool:
    """Slots of weights on a device. The weights are copied from pinned RAM, or from NVMe through a bounce buffer.

    Units of the most common size get memory from the low end of the slab, and all other units from the high end. So
    units of the most common size reuse the same addresses, and units of other sizes do not fragment their space. Units
    that are never evicted have a separate slab. They use the common slab only while views of their memory in the
    separate slab exist.
    """

    def __init__(self, resources: ModelResources, device: DeviceTier, homes: Sequence[WeightsHome]) -> None:
        self._resources = resources
        self._device = device
        pairs = zip(resources.plan.layout.units, homes, strict=True)
        units = [(unit, home) for unit, home in pairs if home.resident is None]
        self._staying = [home for unit, home in units if unit.full.stays]
        self._from_top = unusual_from_top(home.slot_bytes for unit, home in units if not unit.full.stays)

    def start(self, home: WeightsHome, after: Written, version: int) -> Fetch | None:
        if home.resident is not None:
            return _ResidentFetch(ResidentSlot(home.resident))
        slab, lease = self.lease(home)
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
        """Give back the memory of a fetch, after all transfers to it have ended."""
        slab.give_back(lease, lease.after)
        if encoded is not None:
            self._device.decoding.give_back(encoded, encoded.after)

    def decode(self, home: WeightsHome, slab: Slab, lease: SlabLease, encoded: SlabLease, ready: Event) -> Event:
        """Decode on the compute stream, after `ready`, and return an event that follows the decoding.

        If decoding raises, for example because there is no device memory for intermediate values, both leases are given
        back.
        """
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

    def lease(self, home: WeightsHome) -> tuple[Slab, SlabLease | None]:
        """Return a slab, and memory of it for a slot; None if there is no room."""
        staying, slots = self._device.staying, self._device.slots
        if any(home is each for each in self._staying):
            lease = staying.try_lease(home.slot_bytes)
            if lease is not None:
                return staying, lease
        return slots, slots.try_lease(home.slot_bytes, from_top=self._from_top(home.slot_bytes))

    def slot(self, home: WeightsHome, slab: Slab, lease: SlabLease, ready: Event) -> SlabSlot:
        return SlabSlot(slab, lease, ready, self._device.accelerator, self._device.weights, home.trained_bytes)

    def counts(self, home: WeightsHome) -> bool:
        return home.resident is None

    def waits(self, home: WeightsHome) -> bool:
        return bool(home.encoded_bytes) and not self._device.decoding.fits(home.encoded_bytes)

    def changed(self, home: WeightsHome, version: int, after: Written) -> None:
        return

    def free(self, slot: Slot) -> None:
        slot.free()


class _SlabFetch(Fetch):
    """Fetch to a device.

    Args:
        pool: pool of the slot.
        home: homes of the weights.
        slab: slab of the slot.
        lease: memory of the slot.
        encoded: device memory for encoded weights; None when nothing is decoded.
        transfers: the reads from the store.
        ready: event that follows the copies to the device.
    """

    def __init__(
        self,
        pool: SlabSlotPool,
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


def open_slots(resources: ModelResources, homes: Sequence[WeightsHome]) -> SlotPool:
    """Return the pool of slots for the device on which the model computes.

    Args:
        resources: resources of the model.
        homes: homes of the weights of each complete unit.
    """
    return HostSlotPool(resources) if resources.device is None else SlabSlotPool(resources, resources.device, homes)
