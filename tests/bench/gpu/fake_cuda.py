"""Fake of the parts of `torch.cuda` that TorchAccelerator and the stages of `make gpu-check` call, without a GPU.

Every copy and kernel is done when it is queued, so tests with this fake prove nothing about order, lifetimes or speed.
Tests with this fake only run the code of the stages and of TorchAccelerator. tests/sim proves the order of operations.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from infinity.base import accelerator, device_runtime

_ALREADY_REGISTERED = 712
_handles = itertools.count(0x1000, 0x10)


@dataclass(eq=False)
class Event:
    """An event whose time is the count of all records so far."""

    enable_timing: bool = False
    blocking: bool = False
    at: int | None = None
    cuda_event: int = field(default_factory=lambda: next(_handles))

    def record(self, stream: Stream | None = None) -> None:
        self.at = next(_records)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return

    def elapsed_time(self, end: Event) -> float:
        assert self.at is not None
        assert end.at is not None
        assert self.enable_timing
        assert end.enable_timing
        return float(end.at - self.at)


_records = itertools.count()


class Stream:
    def __init__(self, device: Any = None) -> None:
        self.cuda_stream = next(_handles)

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        assert event.at is not None

    def wait_stream(self, other: Stream) -> None:
        return

    def synchronize(self) -> None:
        return


class Cudart:
    """Calls of libcudart that torch binds."""

    def __init__(self) -> None:
        self.registered: set[int] = set()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        if address in self.registered:
            return _ALREADY_REGISTERED
        self.registered.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        if address not in self.registered:
            return 1
        self.registered.discard(address)
        return 0


class Library:
    """C functions of the runtime, by the names that device_runtime asks for, and the number of calls of each."""

    def __init__(self) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self.calls: dict[str, int] = {}

        def function(name: str, *types: Any, act: Any = None) -> Any:
            def called(*arguments: Any) -> int:
                self.calls[name] = self.calls.get(name, 0) + 1
                if act is not None:
                    act(*arguments)
                return 0

            return ctypes.CFUNCTYPE(number, *types)(called)

        def copy(to: int, source: int, nbytes: int, kind: int, stream: int) -> None:
            ctypes.memmove(to, source, nbytes)

        self._functions = {
            "SetDevice": function("SetDevice", number),
            "MemcpyAsync": function("MemcpyAsync", pointer, pointer, ctypes.c_size_t, number, pointer, act=copy),
            "EventRecord": function("EventRecord", pointer, pointer),
            "StreamWaitEvent": function("StreamWaitEvent", pointer, pointer, ctypes.c_uint),
            "EventSynchronize": function("EventSynchronize", pointer),
        }

    def addresses(self, names: Sequence[str]) -> list[int]:
        return [ctypes.cast(self._functions[name], ctypes.c_void_p).value or 0 for name in names]


@dataclass
class Fake:
    """The fake that replaces torch.cuda.

    Attributes:
        streams: the stack of current streams; the last one is current.
        forgotten: devices whose errors were cleared.
    """

    cudart: Cudart = field(default_factory=Cudart)
    library: Library = field(default_factory=Library)
    streams: list[Stream] = field(default_factory=lambda: [Stream()])
    forgotten: list[torch.device] = field(default_factory=list)


def install(patch: pytest.MonkeyPatch) -> Fake:
    """Replace torch.cuda by the fake until the test ends, and make it the module of the CPU as a device."""
    fake = Fake()

    @contextlib.contextmanager
    def stream(chosen: Stream) -> Iterator[None]:
        fake.streams.append(chosen)
        try:
            yield
        finally:
            fake.streams.pop()

    fakes: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: fake.streams[-1],
        "stream": stream,
        "current_device": lambda: 0,
        "device": contextlib.nullcontext,
        "synchronize": lambda device=None: None,
        "cudart": lambda: fake.cudart,
        "empty_cache": lambda: None,
        "max_memory_reserved": lambda: 0,
        "memory_reserved": lambda: 0,
        "reset_peak_memory_stats": lambda: None,
        "set_sync_debug_mode": lambda mode: None,
        "_sleep": lambda _: None,
    }
    for name, each in fakes.items():
        patch.setattr(torch.cuda, name, each)
    patch.setattr(torch, "get_device_module", lambda device=None: torch.cuda)
    patch.setitem(accelerator._BLOCKING, "cpu", accelerator._BLOCKING["cuda"])
    patch.setattr(device_runtime, "addresses", fake.library.addresses)
    patch.setattr(device_runtime, "forget_error", fake.forgotten.append)
    patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    return fake
