"""Device memory for fetched weights: three ways to fill it, one interface, one byte budget."""

from __future__ import annotations

from typing import Protocol

import torch

from infinity.errors import SwapTimeoutError
from infinity.io.arena import Lease, PinnedArena
from infinity.io.engine import Transfer
from infinity.io.store import Extent, SwapStore
from infinity.schedule.backing import Backing, Home
from infinity.schedule.device import CpuDevice, CudaDevice, CudaSlot, HostSlot, Slot


class Fetch(Protocol):
    """Weights on their way into a slot. Life cycle: SlotPool.start() → finish(), once, which waits."""

    def advance(self) -> None:
        """Start what can be started now, without waiting."""

    def finish(self) -> Slot: ...


class SlotPool(Protocol):
    """Where slots come from. `start` returns None when there is no room: evicting is the ledger's business."""

    def start(self, home: Home) -> Fetch | None: ...

    def free(self, slot: Slot) -> None: ...


class HomeSlots:
    """Weights in RAM, used on the CPU: the slot is their home."""

    def start(self, home: Home) -> Fetch | None:
        if not isinstance(home, Lease):
            raise AssertionError("weights on NVMe in a pool of homes")
        return _Landed(HostSlot(home.tensor(), None))

    def free(self, slot: Slot) -> None:
        slot.free()


class _Landed:
    def __init__(self, slot: Slot) -> None:
        self._slot = slot

    def advance(self) -> None:
        return

    def finish(self) -> Slot:
        return self._slot


class LeaseSlots:
    """Weights on NVMe, used on the CPU: read straight into a lease, which is the slot.

    The arena's free space is the budget: everything else in it was leased before.
    """

    def __init__(self, arena: PinnedArena, store: SwapStore) -> None:
        self._arena = arena
        self._store = store
        self._long_bytes = arena.free_bytes // 4

    def start(self, home: Home) -> Fetch | None:
        if not isinstance(home, Extent):
            raise AssertionError("weights in RAM in a pool of leases")
        lease = self._arena.try_lease(home.nbytes, from_top=home.nbytes > self._long_bytes)
        return None if lease is None else _LeaseFetch(lease, self._store.read(home, lease.view()))

    def free(self, slot: Slot) -> None:
        slot.free()


class _LeaseFetch:
    def __init__(self, lease: Lease, transfer: Transfer) -> None:
        self._lease = lease
        self._transfer = transfer

    def advance(self) -> None:
        return

    def finish(self) -> Slot:
        try:
            self._transfer.result()
        except SwapTimeoutError:
            raise  # the device may still write to the lease
        except Exception:
            self._lease.release()
            raise
        return HostSlot(self._lease.tensor(), self._lease)


class CudaSlots:
    """Weights on a GPU, copied from pinned RAM, or from NVMe through a lease."""

    def __init__(self, backing: Backing, device: CudaDevice) -> None:
        self._backing = backing
        self._device = device
        self._free_bytes = backing.plan.slot_bytes

    def start(self, home: Home) -> Fetch | None:
        if home.nbytes > self._free_bytes:
            return None
        if isinstance(home, Lease):
            self._free_bytes -= home.nbytes
            return _Landed(self._device.upload(home.tensor(), lambda: None))
        lease = self._landing(home.nbytes)
        if lease is None or self._backing.store is None:
            return None
        self._free_bytes -= home.nbytes
        return _UploadFetch(self, self._device, lease, self._backing.store.read(home, lease.view()))

    def _landing(self, nbytes: int) -> Lease | None:
        arena = self._backing.arena
        for wait in (False, True):
            self._device.reclaim(wait=wait)
            lease = arena.try_lease(nbytes)
            if lease is not None:
                return lease
        return None

    def give_back(self, nbytes: int) -> None:
        self._free_bytes += nbytes

    def free(self, slot: Slot) -> None:
        self.give_back(slot.tensor.numel())
        slot.free()


class _UploadFetch:
    def __init__(self, pool: CudaSlots, device: CudaDevice, lease: Lease, transfer: Transfer) -> None:
        self._pool = pool
        self._device = device
        self._lease = lease
        self._transfer = transfer
        self._slot: CudaSlot | None = None

    def advance(self) -> None:
        if self._slot is None and self._transfer.done():
            self._start_upload()

    def finish(self) -> Slot:
        return self._slot or self._start_upload()

    def _start_upload(self) -> CudaSlot:
        try:
            self._transfer.result()
        except SwapTimeoutError:
            raise  # the device may still write to the lease
        except Exception:
            self._pool.give_back(self._lease.nbytes)
            self._lease.release()
            raise
        self._slot = self._device.upload(self._lease.tensor(), self._lease.release)
        return self._slot


def open_slots(backing: Backing) -> SlotPool:
    """The pool that fits the device and the tier of the weights."""
    device = backing.device
    if isinstance(device, CudaDevice):
        return CudaSlots(backing, device)
    if not isinstance(device, CpuDevice):
        raise AssertionError(f"no slots for {device}")
    if backing.plan.weights == "nvme":
        if backing.store is None:
            raise AssertionError("weights on NVMe without a store")
        return LeaseSlots(backing.arena, backing.store)
    return HomeSlots()


def nan_placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What a released parameter holds: one NaN, expanded to the true shape and dtype."""
    with torch.inference_mode(False):
        return torch.full((), float("nan"), dtype=dtype, device=device).expand(shape)
