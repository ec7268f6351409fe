"""Interface to a device with separate memory: streams, events, copies, pinning. No other file names a vendor.

[Note: streams and events] A stream is a queue of work on the device; the host runs ahead of the stream. An event is a
position in a stream. `wait` orders the work of another stream after an event. `synchronize` orders the host after an
event; the waiting thread sleeps, because the host's cores are needed for the update. A write to memory must be ordered
after all earlier uses of the memory, and a read must be ordered after the last write. No order is implicit. A copy runs
after all work that is already queued on its stream, and after the events that the caller passes to `copy`. The memory
of a copy must not change before the copy's event.

tests/sim has another Accelerator, which simulates a device. Its copies run as late, as early or as randomly as their
events allow. It checks that any two uses of the same bytes are ordered.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from infinity.base import device_runtime, pci
from infinity.errors import ConfigError
from infinity.sizes import format_bytes

Stream: TypeAlias = Any
"""Queue of work on a device; each accelerator has its own type of stream."""
Event: TypeAlias = Any
"""Position in a stream; each accelerator has its own type of event."""


@dataclass(frozen=True)
class DeviceFunctionTable:
    """Addresses of C functions with which the native core copies and waits without Python.

    The functions have the signatures of the CUDA runtime; each function returns 0 or an error code.

    Attributes:
        enter: cudaSetDevice(int), called by each native thread; 0 if no call is needed.
        copy: cudaMemcpyAsync(to, from, nbytes, kind, stream).
        record: cudaEventRecord(event, stream).
        wait: cudaStreamWaitEvent(stream, event, flags).
        synchronize: cudaEventSynchronize(event).
        keep: object that must live as long as the addresses are used.
    """

    enter: int
    copy: int
    record: int
    wait: int
    synchronize: int
    keep: object = None


class Accelerator(Protocol):
    """Device with its own memory ([Note: streams and events]). Any thread may call the methods.

    Attributes:
        device: the torch device, with its index.
        pins_resident: whether pinning makes all pages resident in one thread. If so, pinning is faster after all
            threads together have touched the pages.
        nice: niceness of the threads that compute updates. These threads yield to the threads that feed the device
            (_native.ThreadPool).
    """

    pins_resident: bool
    nice: int

    @property
    def device(self) -> torch.device: ...

    @property
    def numa_node(self) -> int:
        """NUMA node that the device is attached to; -1 if there is none or the system does not report the node."""

    def stream(self) -> Stream:
        """Make a new stream."""

    def current(self) -> Stream:
        """Return the stream on which this thread's kernels are queued."""

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Return a context manager in which this thread's kernels are queued on the stream."""

    def record(self, on: Stream, *, timed: bool = False) -> Event:
        """Record and return an event behind all work that is queued on the stream so far.

        Args:
            on: the stream.
            timed: whether `seconds` may be called with the event.
        """

    def wait(self, on: Stream, event: Event) -> None:
        """Make the stream wait for the event before it runs work that is queued after this call."""

    def reached(self, event: Event) -> bool:
        """Return whether the event has happened, without waiting."""

    def synchronize(self, event: Event) -> None:
        """Sleep until the event has happened."""

    def synchronize_all(self) -> None:
        """Sleep until all work that this process has queued on the device, on any stream, is done."""

    def seconds(self, began: Event, ended: Event) -> float:
        """Return the seconds between two timed events that have happened, by the device's clock."""

    def slab(self, nbytes: int) -> torch.Tensor:
        """Return device memory as a uint8 tensor [nbytes], aligned to 4 KiB. Raises torch.OutOfMemoryError."""

    def copy(self, into: torch.Tensor, source: torch.Tensor, *, on: Stream, after: Sequence[Event] = ()) -> Event:
        """Queue a copy between the host's pinned memory and the device, and return the event behind the copy.

        Args:
            into: destination, contiguous; of the same size as `source`, and uint8 or of the same dtype.
            source: contiguous; neither tensor may be changed or freed before the event has happened.
            on: the stream on which the copy is queued.
            after: events that the copy waits for; all work that is queued on the stream later waits for them, too.
        """

    def lend(self, tensor: torch.Tensor) -> None:
        """Let this thread's stream use memory that torch allocated for kernels of another stream.

        When the tensor is freed, torch gives the memory to others only behind the work that is queued until then.
        """

    def pin(self, address: int, nbytes: int) -> str:
        """Pin host memory for copies.

        Return '', or why the runtime refused; after a refusal copies are slower, but correct.
        """

    def unpin(self, address: int) -> None:
        """Unpin memory that `pin` pinned."""

    def event(self) -> Event:
        """Make an event that native code will record.

        Waiting for the event is allowed once native code has recorded it.
        """

    def handle(self, of: Stream | Event) -> int:
        """Return a stream or an event as an integer handle for native code."""

    def gate(self) -> DeviceFunctionTable:
        """Return the entry points for native code."""


_ALIGNMENT = 4096
_SUPPORTED = (
    "cuda",
)  # torch uses the name "cuda" for ROCm, too. XPU's runtime has no C functions for a DeviceFunctionTable.
_BLOCKING = {"cuda": {"blocking": True}}
"""Arguments of an event that make the host sleep while it waits for the event.

(torch.Event has an argument `blocking`, but ignores it.)
"""
_FUNCTIONS = ("SetDevice", "MemcpyAsync", "EventRecord", "StreamWaitEvent", "EventSynchronize")


class TorchAccelerator:
    """Device of torch: CUDA or ROCm. torch uses the module `torch.cuda` for both.

    Args:
        device: the device with its index; without the index the runtime would open a context on the first device.
    """

    pins_resident = True
    nice = 10

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = torch.get_device_module(device)

    @property
    def numa_node(self) -> int:
        return pci.numa_node(device_runtime.pci_address(self.device.index or 0))

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
        # Without `device`, leaving `stream` on a thread of infinity would make a context on the first device.
        with self._module.device(self.device), self._module.stream(on):
            into.copy_(source, non_blocking=True)
        return self.record(on)

    def lend(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self.current())

    def pin(self, address: int, nbytes: int) -> str:
        if not hasattr(self._module, "cudart"):
            return f"torch has no function that pins memory for {self.device.type}"
        with self._module.device(self.device):
            error = int(self._module.cudart().cudaHostRegister(address, nbytes, 0))
            if error != 0:
                device_runtime.forget_error(self.device)
                return f"cudaHostRegister refused {format_bytes(nbytes)} (error {error})"
        return ""

    def unpin(self, address: int) -> None:
        with self._module.device(self.device):
            if int(self._module.cudart().cudaHostUnregister(address)) != 0:
                device_runtime.forget_error(self.device)

    def event(self) -> Event:
        return self.record(self.current())  # torch creates the runtime's event when the event is first recorded

    def handle(self, of: Stream | Event) -> int:
        return int(of.cuda_event if hasattr(of, "cuda_event") else of.cuda_stream)

    def gate(self) -> DeviceFunctionTable:
        """Return the addresses of the runtime's C functions.

        Raises:
            ConfigError: the entry points are not found; the message says why.
        """
        found = device_runtime.addresses(_FUNCTIONS)
        if found is None:
            raise ConfigError(
                f"the runtime of {self.device} is linked into torch's own libraries, where infinity cannot find its "
                "functions. Install torch with pip: that build has the runtime in a separate library."
            )
        enter, copy, record, wait, synchronize = found
        return DeviceFunctionTable(enter, copy, record, wait, synchronize)


def open_accelerator(device: torch.device) -> Accelerator | None:
    """Return the device that models compute on; None for the CPU, which has no separate memory."""
    return None if device.type == "cpu" else TorchAccelerator(device)


def bring(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to a device for this thread's kernels. The host does not wait for the copy."""
    if tensor.device == device or device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


# -- available devices -------------------------------------------------------------------------------------------------


def current_device() -> torch.device:
    """Return torch's default device: the current accelerator, with its index, or the CPU."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    if kind is None or kind.type not in _SUPPORTED:
        return torch.device("cpu")
    return torch.device(kind.type, torch.get_device_module(kind).current_device())


def resolve(device: torch.device | str | None) -> torch.device:
    """Return the device with its index: "cuda" becomes the GPU that is current at this moment.

    Args:
        device: a device or its name; None for the current device.

    Raises:
        ConfigError: torch finds no such device, or infinity cannot use it.
    """
    if device is not None and torch.device(device).type == "cpu":
        return torch.device("cpu")  # cpu:0 is the same device as cpu; no context is opened on a GPU
    current = current_device()
    resolved = current if device is None else torch.device(device)
    if resolved.type != current.type:
        raise ConfigError(
            f"device {resolved}: this torch ({torch.__version__}) does not find this device, or infinity cannot use "
            "it. Leave device= out to use the GPU if there is one, or install a torch that supports the device."
        )
    return current if resolved.index is None else resolved


@dataclass(frozen=True)
class DeviceFacts:
    """Facts that a device's runtime reports.

    Attributes:
        architecture: 'compute capability 9.0', or ROCm's name of the architecture.
        address: address on the PCI bus ('0000:65:00.0'); '' if the runtime does not report it.
    """

    name: str
    total_bytes: int
    free_bytes: int
    architecture: str
    address: str


def torch_build() -> str:
    """Describe in words what this torch was built for."""
    if torch.version.hip is not None:
        return f"for ROCm {torch.version.hip}"
    return "for the CPU only" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"


def has_runtime() -> bool:
    """Return whether this torch was built for devices that infinity can use."""
    return torch.version.hip is not None or torch.version.cuda is not None


def devices() -> list[torch.device]:
    """Return all devices that infinity can use, except the CPU."""
    kind = current_device().type
    if kind == "cpu":
        return []
    return [torch.device(kind, index) for index in range(torch.get_device_module(kind).device_count())]


def why_no_device() -> str:
    """Return why the runtime finds no device; '' if the runtime finds a device, or if torch has no runtime."""
    if not has_runtime():
        return ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error)
    return ""


def identity(device: torch.device) -> str:
    """Return a text that no other device of this machine has. Instances of a device that is divided (MIG) have its
    address on the bus, but ids of their own."""
    facts = torch.get_device_module(device).get_device_properties(device)
    return f"{device_runtime.pci_address(device.index or 0) or device} {getattr(facts, 'uuid', '')}"


def choice_of_rank(device: torch.device, local_rank: int) -> str:
    """Return, for messages, what gives a rank of this machine a device of its own."""
    if torch.get_device_module(device).device_count() < 2:
        return "Give each process another value of CUDA_VISIBLE_DEVICES"
    rank = "int(os.environ['LOCAL_RANK'])" if "LOCAL_RANK" in os.environ else str(local_rank)
    return f"Call torch.{device.type}.set_device({rank}) before the model is offloaded"


def describe(device: torch.device) -> DeviceFacts:
    """Return facts about a device. The call opens a context on the device."""
    module = torch.get_device_module(device)
    facts, (free, total) = module.get_device_properties(device), module.mem_get_info(device)
    architecture = getattr(facts, "gcnArchName", "") if torch.version.hip is not None else ""
    return DeviceFacts(
        name=str(facts.name),
        total_bytes=int(total),
        free_bytes=int(free),
        architecture=architecture or f"compute capability {facts.major}.{facts.minor}",
        address=device_runtime.pci_address(device.index or 0),
    )


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of an accelerator, including unused memory that torch's allocator could give back."""
    module = torch.get_device_module(device)
    kept = int(module.memory_reserved(device)) - int(module.memory_allocated(device))
    kept -= int(module.memory_stats(device).get("inactive_split_bytes.all.current", 0))
    return int(module.mem_get_info(device)[0]) + kept


def random_states() -> list[torch.Tensor]:
    """Return the generator states of all accelerators, without drawing a number.

    The list is empty if no accelerator was used yet: the generators of unused accelerators start with torch's seed.
    """
    module = _module_in_use()
    return [] if module is None else list(module.get_rng_state_all())


def set_random_states(states: Sequence[torch.Tensor]) -> int:
    """Restore states from `random_states`; states of accelerators that do not exist are ignored.

    Return the number of accelerators that exist.
    """
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
