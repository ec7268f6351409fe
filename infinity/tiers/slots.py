"""Device memory for fetched weights: one interface and one byte budget, wherever they come from and go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

from infinity.errors import SwapTimeoutError
from infinity.io.arena import Lease
from infinity.io.engine import Transfer
from infinity.io.store import SwapStore, wait_all
from infinity.tiers.accelerator import CpuDevice, CudaDevice, CudaSlot, HostSlot, Slot
from infinity.tiers.home import WeightsHome
from infinity.tiers.resources import Resources

Written = Mapping[int, tuple[int | None, Transfer]]
"""Of groups, by index, whose new weights are on their way to the store: to which copy, and when they are there."""


class Fetch(ABC):
    """Weights on their way into a slot. Life cycle: SlotPool.start() → finish(), once, which waits."""

    def __init__(self, transfers: Sequence[Transfer] = ()) -> None:
        self._transfers = transfers

    def wait(self) -> None:
        """Until finish() would wait no more. May be interrupted."""
        for transfer in self._transfers:
            transfer.wait()

    def advance(self) -> None:  # noqa: B027 (mostly there is nothing)
        """Start what can be started now, without waiting."""

    @abstractmethod
    def finish(self) -> Slot: ...


class SlotPool(Protocol):
    """Where slots come from. `start` returns None when there is no room: evicting is units/room.py's business."""

    def start(self, home: WeightsHome, after: Written) -> Fetch | None:
        """Args: after: new weights on their way to the store; they are to be fetched."""

    def free(self, slot: Slot) -> None: ...

    def counts(self, home: WeightsHome) -> bool:
        """Whether a slot of these weights takes of the budget: evicting them makes room for others."""


class _There(Fetch):
    def __init__(self, slot: Slot) -> None:
        super().__init__()
        self._slot = slot

    def finish(self) -> Slot:
        return self._slot


class HostSlots:
    """Weights used on the CPU. In RAM their home is the slot; on NVMe they are read into a
    lease, which is the slot then.

    The arena's free space is the budget: everything else in it was leased before.
    """

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self._long_bytes = resources.arena.free_bytes // 4

    def start(self, home: WeightsHome, after: Written) -> Fetch | None:
        if home.lease is not None:
            return _There(HostSlot(home.lease.tensor(), None))
        lease = self._resources.arena.try_lease(home.nbytes, from_top=home.nbytes > self._long_bytes)
        return None if lease is None else _LeaseFetch(lease, _read(self._resources.require_store(), home, lease, after))

    def counts(self, home: WeightsHome) -> bool:
        return home.lease is None

    def free(self, slot: Slot) -> None:
        slot.free()


def _read(store: SwapStore, home: WeightsHome, lease: Lease, after: Written) -> list[Transfer]:
    reads = []
    for index, group in enumerate(home.groups):
        copy, written = after.get(index, (None, None))
        reads.append(store.read(group.stored(), lease.view(group.start, group.nbytes), copy=copy, after=written))
    return reads


class _LeaseFetch(Fetch):
    def __init__(self, lease: Lease, transfers: Sequence[Transfer]) -> None:
        super().__init__(transfers)
        self._lease = lease

    def finish(self) -> Slot:
        try:
            wait_all(self._transfers)
        except SwapTimeoutError:
            raise  # the device may still write to the lease
        except Exception:
            self._lease.release()
            raise
        return HostSlot(self._lease.tensor(), self._lease)


class CudaSlots:
    """Weights on a GPU, copied from pinned RAM, or from NVMe through a lease."""

    def __init__(self, resources: Resources, device: CudaDevice) -> None:
        self._resources = resources
        self._device = device
        self._free_bytes = resources.plan.budgets.slot_bytes

    def start(self, home: WeightsHome, after: Written) -> Fetch | None:
        if home.nbytes > self._free_bytes:
            return None
        if home.lease is not None:
            slot = self._device.upload(home.lease.tensor(), lambda: None)
            self._free_bytes -= home.nbytes
            return _There(slot)
        lease = self._lease(home.nbytes)
        if lease is None:
            return None
        self._free_bytes -= home.nbytes
        return _UploadFetch(self, self._device, lease, _read(self._resources.require_store(), home, lease, after))

    def _lease(self, nbytes: int) -> Lease | None:
        arena = self._resources.arena
        for wait in (False, True):
            self._device.reclaim(wait=wait)
            lease = arena.try_lease(nbytes)
            if lease is not None:
                return lease
        return None

    def counts(self, home: WeightsHome) -> bool:
        return True

    def give_back(self, nbytes: int) -> None:
        self._free_bytes += nbytes

    def free(self, slot: Slot) -> None:
        self.give_back(slot.tensor.numel())
        slot.free()


class _UploadFetch(Fetch):
    def __init__(self, pool: CudaSlots, device: CudaDevice, lease: Lease, transfers: Sequence[Transfer]) -> None:
        super().__init__(transfers)
        self._pool = pool
        self._device = device
        self._lease = lease
        self._slot: CudaSlot | None = None
        self._failure: Exception | None = None  # for finish() to tell

    def advance(self) -> None:
        if self._slot is None and self._failure is None and all(each.done() for each in self._transfers):
            self._start_upload()

    def finish(self) -> Slot:
        if self._slot is None and self._failure is None:
            self._start_upload()
        if self._failure is not None:
            raise self._failure
        if self._slot is None:
            raise AssertionError("an upload that neither began nor failed")
        return self._slot

    def _start_upload(self) -> None:
        try:
            wait_all(self._transfers)
            self._slot = self._device.upload(self._lease.tensor(), self._lease.release)
        except SwapTimeoutError as error:
            self._failure = error  # the device may still write to the lease
        except Exception as error:
            self._failure = error
            self._pool.give_back(self._lease.nbytes)
            self._lease.release()


def open_slots(resources: Resources) -> SlotPool:
    """The pool that fits the device."""
    device = resources.device
    if isinstance(device, CudaDevice):
        return CudaSlots(resources, device)
    if not isinstance(device, CpuDevice):
        raise AssertionError(f"no slots for {device}")
    return HostSlots(resources)
