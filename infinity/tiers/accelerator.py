"""The device seam: how a unit's weights become tensors, and how gradients come back.

[Note: streams on CUDA]
A slot's memory comes from torch's caching allocator on the compute stream, so memory freed by the compute stream may
be reused without waiting for the host. The upload stream therefore first waits for an event recorded on the compute
stream after the allocation; the compute stream waits for the upload's event at first use. The pinned source is given
back only when that event has happened. Gradients go down on a third stream that waits for the compute stream; the
host waits for its event before it reads them. A stream that computes waits for the upload once; a stream other than
the one the slot was allocated on is recorded, so that the allocator reuses the memory only when that stream is done.
The host sleeps while it waits for an event (`blocking`): its cores belong to the update.

[Note: what a GPU's clock says]
The host runs ahead of a GPU, so the time for which the host waits is not the time for which the GPU idles. Two timed
events on the compute stream, one before what may keep the GPU waiting and one behind it, have no kernel between them:
the time between them is time without work.

On the CPU the slot is the lease: nothing is copied and there is nothing to wait for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

import torch

from infinity.base.accelerator import TorchAccelerator
from infinity.io.arena import Lease, PinnedArena


def _references(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


class Slot(ABC):
    """A piece of device memory that a unit's weights occupy. torch counts the references to it.

    Args:
        tensor: uint8 [weight_bytes], on the device.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._own = self._expected = _references(tensor)

    @abstractmethod
    def wait(self) -> None:
        """Make the running stream wait until the weights are there."""

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

    def __init__(self, tensor: torch.Tensor, lease: Lease | None) -> None:
        super().__init__(tensor)
        self.lease = lease

    def wait(self) -> None:
        return

    def free(self) -> None:
        if self.lease is not None:
            self.lease.release()


class CudaSlot(Slot):
    """Weights copied to the GPU. Dropping the tensor gives the memory back to torch's allocator.

    Args:
        event: the copy is complete.
        stream: that the memory was allocated on.
    """

    def __init__(self, tensor: torch.Tensor, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        super().__init__(tensor)
        self._event = event
        self._allocated_on = stream
        self._waited: set[torch.cuda.Stream] = set()

    def wait(self) -> None:
        stream = torch.cuda.current_stream(self.tensor.device)
        if stream in self._waited:
            return
        stream.wait_event(self._event)
        if stream != self._allocated_on:
            self.tensor.record_stream(stream)
        self._waited.add(stream)

    def free(self) -> None:
        return


class CpuDevice:
    """The CPU as a full device."""

    device = torch.device("cpu")
    shares_memory = True
    idle_s = 0.0  # the host's clock tells (timeline.py)

    def download(self, gradient: torch.Tensor, into: torch.Tensor) -> None:
        """Start copying a gradient into flat host memory of the same dtype or fp32."""
        into.copy_(gradient.reshape(-1))

    def download_now(self, gradient: torch.Tensor) -> torch.Tensor:
        """A contiguous, flat host tensor with the gradient's values, ready to be read."""
        return gradient.reshape(-1).contiguous()

    def synchronize_downloads(self) -> None:
        return

    def synchronize_uploads(self) -> None:
        return

    def idle_begins(self) -> None:
        return

    def idle_ends(self) -> None:
        return

    def close(self) -> None:
        return


class CudaDevice:
    """A GPU: one stream up, one down ([Note: streams on CUDA])."""

    shares_memory = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._up = torch.cuda.Stream(device)
        self._down = torch.cuda.Stream(device)
        self._pending: deque[tuple[torch.cuda.Event, Callable[[], None]]] = deque()  # in the order of their copies
        self._idle = _IdleClock(device)

    def upload(self, source: torch.Tensor, done: Callable[[], None]) -> CudaSlot:
        """Start copying pinned host bytes to new device memory.

        Args:
            source: uint8 [nbytes] on the host; must stay as it is until `done` is called by a later `reclaim`.

        Raises:
            torch.OutOfMemoryError: nothing was started, and `done` will not be called.
        """
        self.reclaim(wait=False)
        tensor = torch.empty(source.numel(), dtype=torch.uint8, device=self.device)
        stream = torch.cuda.current_stream(self.device)
        self._up.wait_event(stream.record_event())
        with torch.cuda.stream(self._up):
            tensor.copy_(source, non_blocking=True)
            event = self._up.record_event(torch.cuda.Event(blocking=True))
        tensor.record_stream(self._up)  # evicted before anybody waited: not reused while the copy runs
        self._pending.append((event, done))
        return CudaSlot(tensor, event, stream)

    def reclaim(self, *, wait: bool) -> None:
        """Run the `done` callbacks of the uploads that are complete; all of them with `wait`."""
        while self._pending:
            event, done = self._pending[0]
            if wait:
                event.synchronize()
            elif not event.query():
                return
            self._pending.popleft()
            done()

    def download(self, gradient: torch.Tensor, into: torch.Tensor) -> None:
        flat = gradient.reshape(-1)
        self._down.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._down):
            into.copy_(flat, non_blocking=True)
        flat.record_stream(self._down)

    def download_now(self, gradient: torch.Tensor) -> torch.Tensor:
        self.synchronize_downloads()
        return gradient.reshape(-1).cpu()

    def synchronize_downloads(self) -> None:
        self._down.record_event(torch.cuda.Event(blocking=True)).synchronize()

    def synchronize_uploads(self) -> None:
        """Wait until no copy reads host memory any more: the update is about to change it."""
        self.reclaim(wait=True)

    def idle_begins(self) -> None:
        """What follows, until `idle_ends`, may keep the GPU waiting. What it idles is counted."""
        self._idle.begin()

    def idle_ends(self) -> None:
        self._idle.end()

    def close(self) -> None:
        """Wait for the copies under way, so that host memory can be unregistered and given back."""
        self.synchronize_downloads()
        self.synchronize_uploads()

    @property
    def idle_s(self) -> float:
        """Seconds the GPU has idled so far, as far as it has got ([Note: what a GPU's clock says])."""
        return self._idle.seconds()


class _IdleClock:
    """Pairs of timed events on the compute stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began: torch.cuda.Event | None = None
        self._pairs: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._seconds = 0.0

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        torch.cuda.current_stream(self._device).record_event(event)
        return event

    def begin(self) -> None:
        self._began = self._now()  # one that an exception left open is forgotten

    def end(self) -> None:
        if self._began is not None:
            self._pairs.append((self._began, self._now()))
            self._began = None
            self.seconds()

    def seconds(self) -> float:
        """Of the pairs the GPU has passed. The others stay."""
        while self._pairs and all(event.query() for event in self._pairs[0]):
            began, ended = self._pairs.popleft()
            self._seconds += began.elapsed_time(ended) / 1e3
        return self._seconds


Device = CpuDevice | CudaDevice


def open_device(device: torch.device) -> Device:
    return CudaDevice(device) if device.type == "cuda" else CpuDevice()


def pin(arena: PinnedArena, device: Device) -> str:
    """Register the arena for DMA where there is a GPU. Returns '' or why that was refused."""
    return arena.pin(TorchAccelerator(device.device)) if isinstance(device, CudaDevice) else ""
