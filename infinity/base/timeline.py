"""Timeline of a run, on one clock.

The time during which compute waits is always counted. The spans of every unit's passes and fetches are kept only while
the timeline records.

[Note: one clock]
Times are nanoseconds of time.perf_counter_ns, which is the steady clock of the native core. So the spans and the events
of the engine and the update pipeline (io/events.py) share one time axis.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Literal, NamedTuple, get_args

from infinity.base.profiler_ranges import profiled
from infinity.errors import InfinityError

Cause = Literal["fetch", "update", "gradient", "activation", "room", "commit", "step"]
"""Reason why the compute thread is not computing.

fetch     It waits for weights from the store.
update    It waits until a unit's update of the previous step is computed, or until the update releases the unit's slot.
gradient  It lands gradients in host memory.
activation  It moves tensors that are kept for the backward, or waits for them.
room      It waits for room for weights, or makes room.
commit    It makes a step durable.
step      It does the remaining work of optimizer.step: it computes the norm, decides the step and submits updates, and
          waits in between.
"""
CAUSES: tuple[Cause, ...] = get_args(Cause)

Kind = Literal["forward", "backward", "fetch", "stall", "step"]

_SPANS_MAX = 1 << 20
"""Maximum number of spans that are kept; this number of spans takes some 200 MB."""


class TimelineSpan(NamedTuple):
    """Activity from `begin_ns` to `end_ns`.

    Attributes:
        kind: the kind of activity.
        unit: name of the unit; "" if the span belongs to none.
        cause: cause of a stall; "" for other kinds.
        step: number of the step, for a span of a step; 0 for other kinds.
    """

    kind: Kind
    unit: str
    begin_ns: int
    end_ns: int
    cause: str = ""
    step: int = 0


class JobTag(NamedTuple):
    """Identity of the update that a tile or a transfer belongs to; the native core calls this identity a job's tag."""

    step: int
    unit: int
    group: int

    def pack(self) -> int:
        return self.step << 32 | self.unit << 8 | self.group

    @classmethod
    def unpack(cls, tag: int) -> JobTag:
        return cls(tag >> 32, tag >> 8 & 0xFFFFFF, tag & 0xFF)


class TimelineRecording(NamedTuple):
    """Result of a recording.

    Attributes:
        spans: the spans that were kept.
        begin_ns, end_ns: times when recording was switched on and off. A span that is open when the recording ends gets
            the end of the recording as its end.
        dropped: number of spans that were not kept because the list was full.
    """

    spans: list[TimelineSpan]
    begin_ns: int
    end_ns: int
    dropped: int


class Timeline:
    """Record of how one coordinator spends its time.

    Any thread may call any method; a stall belongs to the thread that enters it.

    Invariant: in each thread, the times of all causes add up to no more than the time that has passed. While one stall
    is inside another stall, time is counted and recorded only for the inner stall.
    """

    def __init__(self) -> None:
        self.recording = False
        self._lock = threading.Lock()
        self._stalled_ns = dict.fromkeys(CAUSES, 0)
        self._threads = _Stalls()
        self._clear()

    def _clear(self) -> None:
        self._spans: list[TimelineSpan] = []
        self._dropped = 0
        self._open: dict[tuple[Kind, str], _OpenSpan] = {}
        self._began_ns = self._step_began_ns = time.perf_counter_ns()

    # -- stalls, always -----------------------------------------------------------------------------------------------

    def stall(self, cause: Cause, unit: str = "") -> Stall:
        """Return a context manager for a period in which the thread does not compute."""
        return Stall(self, self._threads.stack, cause, unit)

    def stalled_ns(self) -> dict[Cause, int]:
        """Return by cause the nanoseconds of stalls so far, without the current part of stalls in progress."""
        with self._lock:
            return dict(self._stalled_ns)

    def stalled(self, stall: Stall, now: int) -> None:
        """Count the part of a stall since the stall began, or since the last inner stall ended."""
        with self._lock:
            self._stalled_ns[stall.cause] += now - stall.counted_ns
            if self.recording:
                self._add(TimelineSpan("stall", stall.unit, stall.counted_ns, now, cause=stall.cause))

    # -- spans, while recording ---------------------------------------------------------------------------------------

    def begin(self, kind: Kind, unit: str) -> None:
        """Begin a unit's forward, backward or fetch. Nested begins of the same kind and unit form one span."""
        if not self.recording:
            return
        with self._lock:
            entry = self._open.setdefault((kind, unit), _OpenSpan(time.perf_counter_ns()))
            entry.depth += 1

    def end(self, kind: Kind, unit: str) -> None:
        """End a unit's span. The call does nothing if the span began before the recording, or was dropped."""
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
        """End the spans of one kind of all units."""
        if not self.recording:
            return
        with self._lock:
            now = time.perf_counter_ns()
            for key in [key for key in self._open if key[0] == kind]:
                self._close(*key, now)

    def forget(self, *kinds: Kind) -> None:
        """Drop the open spans of these kinds, because an exception ended them at an unknown time."""
        if not self.recording:
            return
        with self._lock:
            self._open = {key: entry for key, entry in self._open.items() if key[0] not in kinds}

    def end_step(self, step: int) -> None:
        """End the span of optimizer step `step`, and begin the span of the next step."""
        if not self.recording:
            return
        with self._lock:
            now = time.perf_counter_ns()
            self._add(TimelineSpan("step", "", self._step_began_ns, now, step=step))
            self._step_began_ns = now

    def _close(self, kind: Kind, unit: str, now: int) -> None:
        self._add(TimelineSpan(kind, unit, self._open.pop((kind, unit)).began_ns, now))

    def _add(self, span: TimelineSpan) -> None:
        if len(self._spans) < _SPANS_MAX:
            self._spans.append(span)
        else:
            self._dropped += 1

    def record(self) -> None:
        """Start keeping spans.

        Raises:
            InfinityError: the timeline already records.
        """
        with self._lock:
            if self.recording:
                raise InfinityError("this model is being traced already: end that infinity.trace first")
            self._clear()
            self.recording = True

    def stop(self) -> TimelineRecording:
        """Stop recording, and return the spans that were kept. Open spans end now."""
        with self._lock:
            self.recording = False
            now = time.perf_counter_ns()
            for key in list(self._open):
                self._close(*key, now)
            recorded = TimelineRecording(self._spans, self._began_ns, now, self._dropped)
            self._clear()
            return recorded


class Stall:
    """Context manager of Timeline.stall. It is entered once.

    Attributes:
        cause: reason for the stall.
        unit: name of the unit that the stall belongs to; "" without a unit.
        counted_ns: time up to which the stall has been counted.
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
    """Stalls that are in progress in a thread, outermost first."""

    def __init__(self) -> None:
        self.stack: list[Stall] = []


class _OpenSpan:
    __slots__ = ("began_ns", "depth")

    def __init__(self, began_ns: int) -> None:
        self.began_ns = began_ns
        self.depth = 0
