"""What a run did when, on one clock: what compute waited for, always; every unit's passes and fetches, while recording.

[Note: one clock]
Times are nanoseconds of time.perf_counter_ns, which is the steady clock of the native core: what the engine and the
update pipeline record (io/events.py) lies on the same axis.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Literal, NamedTuple, get_args

from infinity.base.ranges import profiled
from infinity.errors import InfinityError

Cause = Literal["fetch", "update", "gradient", "room", "commit", "step"]
"""What the compute thread does instead of computing.

fetch: waiting for weights from the store. update: waiting until a unit's update of the step before is computed, or lets
go of its slot. gradient: landing gradients in host memory. room: waiting for, or making, room for weights. commit:
making a step durable. step: the rest of optimizer.step: the norm, deciding, submitting, and what it waits for.
"""
CAUSES: tuple[Cause, ...] = get_args(Cause)

Kind = Literal["forward", "backward", "fetch", "stall", "step"]

_SPANS_MAX = 1 << 20
"""Some 200 MB."""


class Span(NamedTuple):
    """Something that took from `begin_ns` to `end_ns`.

    Attributes:
        unit: its name, "" where it is of none.
        cause: of a stall; "" else.
        step: of a step, its number; 0 else.
    """

    kind: Kind
    unit: str
    begin_ns: int
    end_ns: int
    cause: str = ""
    step: int = 0


class JobTag(NamedTuple):
    """Which update a tile, or a transfer of states, belongs to: what the native core calls the tag of a job."""

    step: int
    unit: int
    group: int

    def pack(self) -> int:
        return self.step << 32 | self.unit << 8 | self.group

    @classmethod
    def unpack(cls, tag: int) -> JobTag:
        return cls(tag >> 32, tag >> 8 & 0xFFFFFF, tag & 0xFF)


class Recording(NamedTuple):
    """What was recorded.

    Attributes:
        begin_ns, end_ns: when recording was switched on and off. What was under way then is cut there.
        dropped: spans that came when there was no room for more.
    """

    spans: list[Span]
    begin_ns: int
    end_ns: int
    dropped: int


class Timeline:
    """One per coordinator. Any thread may call anything; a stall is of the thread that enters it.

    Invariant: the causes' times add up to no more than the time passed in each thread: a stall inside another is
    counted, and recorded, for its own cause only.
    """

    def __init__(self) -> None:
        self.recording = False
        self._lock = threading.Lock()
        self._stalled_ns = dict.fromkeys(CAUSES, 0)
        self._threads = _Stalls()
        self._clear()

    def _clear(self) -> None:
        self._spans: list[Span] = []
        self._dropped = 0
        self._open: dict[tuple[Kind, str], _Open] = {}
        self._began_ns = self._step_began_ns = time.perf_counter_ns()

    # -- stalls, always -----------------------------------------------------------------------------------------------

    def stall(self, cause: Cause, unit: str = "") -> Stall:
        """A context manager: in it the thread does not compute."""
        return Stall(self, self._threads.stack, cause, unit)

    def stalled_ns(self) -> dict[Cause, int]:
        """Nanoseconds by cause so far, of the stalls that are over, or gave way to one inside."""
        with self._lock:
            return dict(self._stalled_ns)

    def stalled(self, stall: Stall, now: int) -> None:
        """Count a stall: the part of it since it began, or since the last stall inside it ended."""
        with self._lock:
            self._stalled_ns[stall.cause] += now - stall.counted_ns
            if self.recording:
                self._add(Span("stall", stall.unit, stall.counted_ns, now, cause=stall.cause))

    # -- spans, while recording ---------------------------------------------------------------------------------------

    def begin(self, kind: Kind, unit: str) -> None:
        """A unit's forward, backward or fetch begins; one that begins again inside itself is still one."""
        if not self.recording:
            return
        with self._lock:
            entry = self._open.setdefault((kind, unit), _Open(time.perf_counter_ns()))
            entry.depth += 1

    def end(self, kind: Kind, unit: str) -> None:
        """It ends. Nothing happens when it began before the recording, or was forgotten."""
        if not self.recording:
            return
        with self._lock:
            entry = self._open.get((kind, unit))
            if entry is None:
                return
            entry.depth -= 1
            if entry.depth == 0:
                self._close(kind, unit, time.perf_counter_ns())

    def end_all(self, kind: Kind) -> None:
        """Those of every unit end."""
        if not self.recording:
            return
        with self._lock:
            now = time.perf_counter_ns()
            for key in [key for key in self._open if key[0] == kind]:
                self._close(*key, now)

    def forget(self, *kinds: Kind) -> None:
        """An exception ended what began and did not end: nobody knows when."""
        if not self.recording:
            return
        with self._lock:
            self._open = {key: entry for key, entry in self._open.items() if key[0] not in kinds}

    def end_step(self, step: int) -> None:
        """Optimizer step `step` is done, and what comes now belongs to the next."""
        if not self.recording:
            return
        with self._lock:
            now = time.perf_counter_ns()
            self._add(Span("step", "", self._step_began_ns, now, step=step))
            self._step_began_ns = now

    def _close(self, kind: Kind, unit: str, now: int) -> None:
        self._add(Span(kind, unit, self._open.pop((kind, unit)).began_ns, now))

    def _add(self, span: Span) -> None:
        if len(self._spans) < _SPANS_MAX:
            self._spans.append(span)
        else:
            self._dropped += 1

    def record(self) -> None:
        """Keep spans from now on.

        Raises:
            InfinityError: it is recording already.
        """
        with self._lock:
            if self.recording:
                raise InfinityError("this model is being traced already: end that infinity.trace first")
            self._clear()
            self.recording = True

    def stop(self) -> Recording:
        """Keep no more; returns what was kept. What is under way ends now, as far as it is known."""
        with self._lock:
            self.recording = False
            now = time.perf_counter_ns()
            for key in list(self._open):
                self._close(*key, now)
            recorded = Recording(self._spans, self._began_ns, now, self._dropped)
            self._clear()
            return recorded


class Stall:
    """See Timeline.stall. Entered once.

    Attributes:
        counted_ns: until when it was counted.
    """

    __slots__ = ("_range", "_stack", "_timeline", "cause", "counted_ns", "unit")

    def __init__(self, timeline: Timeline, stack: list[Stall], cause: Cause, unit: str) -> None:
        self._timeline = timeline
        self._stack = stack
        self.cause = cause
        self.unit = unit
        self.counted_ns = 0
        self._range = profiled(f"stall {cause}", unit)

    def __enter__(self) -> None:
        self._range.__enter__()
        self.counted_ns = time.perf_counter_ns()
        if self._stack:
            self._timeline.stalled(self._stack[-1], self.counted_ns)
        self._stack.append(self)

    def __exit__(self, *raised: Any) -> None:
        self._range.__exit__(*raised)
        ended_ns = time.perf_counter_ns()
        self._stack.pop()
        if self._stack:
            self._stack[-1].counted_ns = ended_ns
        self._timeline.stalled(self, ended_ns)


class _Stalls(threading.local):
    """The stalls a thread is in, outermost first."""

    def __init__(self) -> None:
        self.stack: list[Stall] = []


class _Open:
    __slots__ = ("began_ns", "depth")

    def __init__(self, began_ns: int) -> None:
        self.began_ns = began_ns
        self.depth = 0
