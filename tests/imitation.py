"""A GPU imitated on the CPU, for code that talks to torch.cuda: streams and events without a device behind them.

`imitate` has offloaded models take a GPU's way; `pretend` only replaces torch.cuda's streams and events.

"Device" memory is ordinary memory, and a copy happens when it is queued. But an event counts as reached only after
`lag` more events were recorded, or when somebody waits for it, as on a GPU that is behind the host. So a test sees what
is kept until an event. A test does not see a wrong order of copies: compute on the CPU is synchronous.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from infinity.plan import planner
from infinity.tiers import resources
from infinity.tiers.accelerator import CudaDevice


@dataclass
class Imitation:
    """What an imitated GPU was asked.

    Attributes:
        lag: events that are recorded before an event counts as reached.
        waits: (stream, event) for each time a stream was made to wait.
        recorded: (data pointer, stream) for each `record_stream`.
        out_of_memory: the next allocations fail.
    """

    lag: int = 2
    waits: list[tuple[Stream, Event]] = field(default_factory=list)
    recorded: list[tuple[int, Stream]] = field(default_factory=list)
    out_of_memory: int = 0
    clock: Iterator[int] = field(default_factory=itertools.count)
    now: int = 0
    default: Stream = field(init=False)
    current: Stream = field(init=False)

    def __post_init__(self) -> None:
        self.default = self.current = Stream(self)

    def device(self) -> CudaDevice:
        return CudaDevice(torch.device("cpu"))


@dataclass(eq=False)
class Event:
    gpu: Imitation
    at: int | None = None
    """When it was recorded; None: never."""
    waited: bool = False

    def record(self, stream: Stream | None = None) -> None:
        (stream or self.gpu.current).record_event(self)

    def query(self) -> bool:
        return self.waited or self.at is None or self.gpu.now >= self.at + self.gpu.lag

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds: one for each event between."""
        if self.at is None or end.at is None or not end.query():
            raise AssertionError("the time of an event that was not reached")
        return float(end.at - self.at)


@dataclass(eq=False)
class Stream:
    gpu: Imitation

    def record_event(self, event: Event | None = None) -> Event:
        event = Event(self.gpu) if event is None else event
        event.at = self.gpu.now = next(self.gpu.clock)
        return event

    def wait_event(self, event: Event) -> None:
        self.gpu.waits.append((self, event))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()


def pretend(monkeypatch: pytest.MonkeyPatch, *, lag: int) -> Imitation:
    """Replace torch.cuda's streams and events, and what allocates, until the test ends."""
    gpu = Imitation(lag)

    @contextlib.contextmanager
    def stream(chosen: Stream) -> Iterator[None]:
        before, gpu.current = gpu.current, chosen
        try:
            yield
        finally:
            gpu.current = before

    real_empty = torch.empty

    def empty(*size: Any, **options: Any) -> torch.Tensor:
        if gpu.out_of_memory:
            gpu.out_of_memory -= 1
            raise torch.OutOfMemoryError("out of memory, as the test wanted")
        return real_empty(*size, **options)

    class StreamOfGpu(Stream):
        def __init__(self, device: Any = None) -> None:
            super().__init__(gpu)

    class EventOfGpu(Event):
        def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
            super().__init__(gpu)

    monkeypatch.setattr(torch.cuda, "Stream", StreamOfGpu)
    monkeypatch.setattr(torch.cuda, "Event", EventOfGpu)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: gpu.current)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, of: gpu.recorded.append((tensor.data_ptr(), of)), raising=False
    )
    monkeypatch.setattr("infinity.tiers.accelerator.torch.empty", empty)
    return gpu


def imitate(monkeypatch: pytest.MonkeyPatch, *, lag: int = 2) -> Imitation:
    """Have models that are offloaded to the CPU take the way of a GPU, until the test ends."""
    gpu = pretend(monkeypatch, lag=lag)
    monkeypatch.setattr(resources, "open_device", lambda device: gpu.device())
    monkeypatch.setattr(resources, "pin", lambda arena, device: "")
    real_limits = planner.limits_of
    monkeypatch.setattr(planner, "limits_of", lambda *arguments: replace(real_limits(*arguments), shares_memory=False))
    return gpu
