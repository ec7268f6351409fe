"""The seam to a device with memory of its own: streams, events, copies, pinning. No other file names a vendor.

[Note: streams and events] A stream is a queue of work on the device; the host runs ahead of it. An event is a place in
a stream. Work on another stream is ordered behind the event by `wait`; the host is by `synchronize`, which sleeps: its
cores belong to the update. Whoever writes to memory must be ordered behind everybody who used it before, and whoever
reads it behind the one who wrote it. Nothing is ordered by itself: `copy` runs behind what is queued on its own stream
and behind the events it is given, and the memory of a copy must stay as it is until the copy's event.

tests/sim has another Accelerator, whose copies run as late, as early or as randomly as their events allow, and which
checks that each two uses of the same bytes are ordered.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from infinity.base import c_runtime, pci
from infinity.errors import ConfigError
from infinity.sizes import format_bytes

Stream: TypeAlias = Any
"""A queue of work on a device, as its accelerator made it."""
Event: TypeAlias = Any
"""A place in a stream, as its accelerator made it."""


@dataclass(frozen=True)
class GateTable:
    """Addresses of C functions for the native core, which copies and waits without Python. Their signatures are those
    of cudart; each returns 0 or an error code.

    Attributes:
        enter: cudaSetDevice(int), called by each native thread; 0: nothing is to be called.
        copy: cudaMemcpyAsync(to, from, nbytes, kind, stream).
        record: cudaEventRecord(event, stream).
        wait: cudaStreamWaitEvent(stream, event, flags).
        synchronize: cudaEventSynchronize(event).
        keep: what must live as long as the addresses are used.
    """

    enter: int
    copy: int
    record: int
    wait: int
    synchronize: int
    keep: object = None


class Accelerator(Protocol):
    """A device with memory of its own ([Note: streams and events]). Any thread may call it.

    Attributes:
        device: with its index.
        pins_resident: pinning makes all pages resident, in one thread: they are better touched by all threads before.
        nice: by how much the threads that compute updates yield to those that feed the device (_native.ThreadPool).
    """

    pins_resident: bool
    nice: int

    @property
    def device(self) -> torch.device: ...

    @property
    def numa_node(self) -> int:
        """The NUMA node that the device is at; -1 where it has none or the system does not tell."""

    def stream(self) -> Stream:
        """A new stream."""

    def current(self) -> Stream:
        """The stream that this thread's kernels are queued on."""

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """In this context this thread's kernels are queued on the stream."""

    def record(self, on: Stream, *, timed: bool = False) -> Event:
        """An event behind everything that is queued on the stream now.

        Args:
            timed: for `seconds`.
        """

    def wait(self, on: Stream, event: Event) -> None:
        """What is queued on the stream from now on runs after the event."""

    def reached(self, event: Event) -> bool:
        """Whether the event has happened. The host is not kept."""

    def synchronize(self, event: Event) -> None:
        """Sleep until the event has happened."""

    def synchronize_all(self) -> None:
        """Sleep until everything that this process has queued on the device has happened, on whatever stream."""

    def seconds(self, began: Event, ended: Event) -> float:
        """Between two timed events that were reached, by the device's clock."""

    def slab(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] of device memory, aligned to 4 KiB. Raises torch.OutOfMemoryError."""

    def copy(self, into: torch.Tensor, source: torch.Tensor, *, on: Stream, after: Sequence[Event] = ()) -> Event:
        """Queue a copy between the host's pinned memory and the device, and return the event behind it.

        Args:
            into, source: uint8 or of one dtype, contiguous, of equal size. They must stay until the event.
            after: events that the copy, and whatever is queued on the stream later, waits for.
        """

    def pin(self, address: int, nbytes: int) -> str:
        """Pin host memory for copies. Returns '', or why the runtime refused: copies are then slower, and right."""

    def unpin(self, address: int) -> None:
        """Undo `pin`."""

    def event(self) -> Event:
        """An event for native code to record: it may be waited for once the native code has recorded it."""

    def handle(self, of: Stream | Event) -> int:
        """A stream or an event as native code takes it."""

    def gate(self) -> GateTable:
        """The entry points for native code."""


_ALIGNMENT = 4096
_SUPPORTED = ("cuda",)  # torch calls ROCm's devices so, too. XPU's runtime has no C functions for a GateTable.
_BLOCKING = {"cuda": {"blocking": True}}
"""Arguments of an event that the host waits for asleep. (torch.Event takes `blocking`, and ignores it.)"""
_FUNCTIONS = ("SetDevice", "MemcpyAsync", "EventRecord", "StreamWaitEvent", "EventSynchronize")


class TorchAccelerator:
    """A device of torch: CUDA or ROCm, which torch has as one module.

    Args:
        device: with its index: without it the runtime would open a context on the first one.
    """

    pins_resident = True
    nice = 10

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = torch.get_device_module(device)

    @property
    def numa_node(self) -> int:
        return pci.numa_node(c_runtime.pci_address(self.device.index or 0))

    def stream(self) -> Stream:
        return self._module.Stream(self.device)

    def current(self) -> Stream:
        return self._module.current_stream(self.device)

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        return self._module.stream(stream)  # type: ignore[no-any-return]

    def record(self, on: Stream, *, timed: bool = False) -> Event:
        arguments = {"enable_timing": True} if timed else _BLOCKING.get(self.device.type, {})
        event = self._module.Event(**arguments)
        on.record_event(event)
        return event

    def wait(self, on: Stream, event: Event) -> None:
        on.wait_event(event)

    def reached(self, event: Event) -> bool:
        return bool(event.query())

    def synchronize(self, event: Event) -> None:
        event.synchronize()

    def synchronize_all(self) -> None:
        self._module.synchronize(self.device)

    def seconds(self, began: Event, ended: Event) -> float:
        return float(began.elapsed_time(ended)) / 1e3

    def slab(self, nbytes: int) -> torch.Tensor:
        whole = torch.empty(nbytes + _ALIGNMENT, dtype=torch.uint8, device=self.device)
        begin = -whole.data_ptr() % _ALIGNMENT
        return whole[begin : begin + nbytes]

    def copy(self, into: torch.Tensor, source: torch.Tensor, *, on: Stream, after: Sequence[Event] = ()) -> Event:
        for event in after:
            self.wait(on, event)
        with self._module.stream(on):
            into.copy_(source, non_blocking=True)
        return self.record(on)

    def pin(self, address: int, nbytes: int) -> str:
        if not hasattr(self._module, "cudart"):
            return f"torch has no function that pins memory for {self.device.type}"
        with self._module.device(self.device):
            error = int(self._module.cudart().cudaHostRegister(address, nbytes, 0))
            if error != 0:
                c_runtime.forget_error(self.device)
                return f"cudaHostRegister refused {format_bytes(nbytes)} (error {error})"
        return ""

    def unpin(self, address: int) -> None:
        with self._module.device(self.device):
            if int(self._module.cudart().cudaHostUnregister(address)) != 0:
                c_runtime.forget_error(self.device)

    def event(self) -> Event:
        return self.record(self.current())  # torch makes the runtime's event when it is recorded first

    def handle(self, of: Stream | Event) -> int:
        return int(of.cuda_event if hasattr(of, "cuda_event") else of.cuda_stream)

    def gate(self) -> GateTable:
        """Raises ConfigError: the entry points are not found; says why."""
        found = c_runtime.addresses(_FUNCTIONS)
        if found is None:
            raise ConfigError(
                f"the runtime of {self.device} is linked into torch's own libraries, where infinity cannot find its "
                "functions. Install torch with pip, whose runtime is a library of its own."
            )
        enter, copy, record, wait, synchronize = found
        return GateTable(enter, copy, record, wait, synchronize)


def open_accelerator(device: torch.device) -> Accelerator | None:
    """The device that models compute on; None for the CPU, whose memory is the host's."""
    return None if device.type == "cpu" else TorchAccelerator(device)


def bring(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on a device, for this thread's kernels. The host does not wait for the copy."""
    if tensor.device == device or device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


# -- what there is -----------------------------------------------------------------------------------------------------


def current_device() -> torch.device:
    """The device that torch computes on where none is named: the accelerator that is current now, with its index, or
    the CPU."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    if kind is None or kind.type not in _SUPPORTED:
        return torch.device("cpu")
    return torch.device(kind.type, torch.get_device_module(kind).current_device())


def resolve(device: torch.device | str | None) -> torch.device:
    """With its index: "cuda" is the GPU that is current now, whichever is current later.

    Raises:
        ConfigError: torch finds no such device, or it is none that infinity can use.
    """
    if device is not None and torch.device(device).type == "cpu":
        return torch.device("cpu")  # cpu:0 is the same one; no context is opened on a GPU
    current = current_device()
    resolved = current if device is None else torch.device(device)
    if resolved.type != current.type:
        raise ConfigError(
            f"device {resolved}: this torch ({torch.__version__}) finds no such device that infinity can use. Leave "
            "device= out, which takes the GPU where there is one, or install a torch for it."
        )
    return current if resolved.index is None else resolved


@dataclass(frozen=True)
class DeviceFacts:
    """What its runtime says of a device.

    Attributes:
        architecture: 'compute capability 9.0', or ROCm's name of it.
        address: on the PCI bus ('0000:65:00.0'); '' where its runtime does not tell.
    """

    name: str
    total_bytes: int
    free_bytes: int
    architecture: str
    address: str


def torch_build() -> str:
    """What this torch was built for, in words."""
    if torch.version.hip is not None:
        return f"for ROCm {torch.version.hip}"
    return "for the CPU only" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"


def has_runtime() -> bool:
    """Whether this torch was built for devices that infinity can use."""
    return torch.version.hip is not None or torch.version.cuda is not None


def devices() -> list[torch.device]:
    """All that infinity can use, but the CPU."""
    kind = current_device().type
    if kind == "cpu":
        return []
    return [torch.device(kind, index) for index in range(torch.get_device_module(kind).device_count())]


def why_no_device() -> str:
    """What the runtime says where it finds no device; '' where it finds one, and without a runtime."""
    if not has_runtime():
        return ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error)
    return ""


def describe(device: torch.device) -> DeviceFacts:
    """Opens a context on the device."""
    module = torch.get_device_module(device)
    facts, (free, total) = module.get_device_properties(device), module.mem_get_info(device)
    architecture = getattr(facts, "gcnArchName", "") if torch.version.hip is not None else ""
    return DeviceFacts(
        name=str(facts.name),
        total_bytes=int(total),
        free_bytes=int(free),
        architecture=architecture or f"compute capability {facts.major}.{facts.minor}",
        address=c_runtime.pci_address(device.index or 0),
    )


def free_bytes(device: torch.device) -> int:
    """Free memory of an accelerator, with what torch's allocator could give back."""
    module = torch.get_device_module(device)
    kept = int(module.memory_reserved(device)) - int(module.memory_allocated(device))
    kept -= int(module.memory_stats(device).get("inactive_split_bytes.all.current", 0))
    return int(module.mem_get_info(device)[0]) + kept


def random_states() -> list[torch.Tensor]:
    """Of the generators of all accelerators, without drawing a number. Empty where none was used yet: its generator
    begins with torch's seed."""
    module = _module_in_use()
    return [] if module is None else list(module.get_rng_state_all())


def set_random_states(states: Sequence[torch.Tensor]) -> int:
    """Put back what `random_states` gave, as far as there are so many accelerators. Returns how many there are."""
    device = current_device()
    if device.type == "cpu":
        return 0
    module = torch.get_device_module(device)
    here = int(module.device_count())
    for index, state in enumerate(states[:here]):
        module.set_rng_state(state, index)
    return here


def _module_in_use() -> Any:
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None or kind.type not in _SUPPORTED:
        return None
    module = torch.get_device_module(kind)
    return module if module.is_initialized() else None
