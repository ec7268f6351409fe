"""infinity.trace: a timeline of a model for Perfetto: compute, fetch, gradient, update, read, write.

[Note: what is in a trace]
Compute, fetches, gradients and stalls come from the coordinator's timeline. Tiles come from the threads of the updates,
and reads and writes from the I/O engine. A read or write request is one event, drawn from the moment when the device
got the request to its completion. A request that ended while the trace was open is included. A request that was still
in flight at the end is not included. A transfer is shown with the unit and state of the extent in which the transfer
begins. The transfer is shown with the step of its update; if it belongs to no update, it is shown with the step that
was running.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from infinity import files
from infinity.base.timeline import JobTag, TimelineRecording, TimelineSpan
from infinity.coordinator import registry
from infinity.coordinator.coordinator import Coordinator
from infinity.errors import ConfigError, InfinityError
from infinity.io.events import IO_CLASSES, OPERATIONS, NativeEvents, take
from infinity.io.store import Extent
from infinity.runtime.chrome_trace import TraceEvent, document

logger = logging.getLogger(__name__)


@contextmanager
def trace(model: nn.Module, path: str | Path) -> Iterator[None]:
    """Record the activity of an offloaded model in this context, then write the trace to `path`.

        with infinity.trace(model, "out.json"):
            for batch in itertools.islice(loader, 3): ...

    Open the file in https://ui.perfetto.dev or chrome://tracing. The trace has rows for steps, compute (forward and
    backward of each unit), stalls (named by cause), fetches, gradients, updates, and reads and writes of weights and
    states. Every event names its unit, step and bytes. Tracing changes no bit of the result. A step of a large model
    makes thousands of events of about 250 bytes, so trace a few steps only. Memory for events is bounded. If some
    events do not fit, a warning and the field "otherData" of the file give the number of missing events.

    Args:
        model: an offloaded model.
        path: file to write; an existing file is replaced, and the directory must exist.

    Raises:
        ModelError: the model is not offloaded.
        ConfigError: `path` cannot be written; raised before the context begins.
        InfinityError: another trace of the model is in progress; or the file could not be written at the end of the
            context.
    """
    coordinator = registry.coordinator_of(model)
    coordinator.require_usable()
    target = require_writable(path)
    coordinator.timeline.record()
    logs = coordinator.native_logs()
    for log in logs:
        log.take_trace()  # discard events that ended after an earlier trace was written
        log.trace(True)
    try:
        yield
    finally:
        requests, tiles = (_stop(log) for log in logs)
        _write(target, coordinator, coordinator.timeline.stop(), requests, tiles)


def require_writable(path: str | Path) -> Path:
    """Return `path` as an absolute path. Raises ConfigError if no file can be written at this path."""
    target = Path(path).expanduser().absolute()
    try:
        files.require_replaceable(target)
    except OSError as error:
        raise ConfigError(f"cannot write a trace to {target}: {error.strerror}") from error
    return target


def _stop(log: Any) -> NativeEvents | None:
    """Stop recording and return the events; None if the model was closed meanwhile."""
    try:
        log.trace(False)
        return take(log)
    except ValueError:
        return None


def _write(
    target: Path,
    coordinator: Coordinator,
    recording: TimelineRecording,
    requests: NativeEvents | None,
    tiles: NativeEvents | None,
) -> None:
    missing = [] if requests is not None and tiles is not None else ["transfers", "tiles"]
    if missing:
        logger.warning("the model was closed inside infinity.trace: its transfers and updates are not in %s", target)
    dropped = {
        "spans": recording.dropped,
        "transfers": 0 if requests is None else requests.dropped,
        "tiles": 0 if tiles is None else tiles.dropped,
    }
    if any(dropped.values()):
        logger.warning("%s is incomplete: the trace was full, and %s were dropped; trace fewer steps", target, dropped)
    events = _TraceEvents(coordinator, recording)
    about = {"producer": "infinity", "dropped": dropped, "missing": missing}
    parts = document(events.all(requests, tiles), recording.begin_ns, recording.end_ns, about)
    try:
        with files.replacing(target) as file:
            file.writelines(parts)
    except OSError as error:
        raise InfinityError(f"the trace could not be written to {target}: {error.strerror}") from error


class _TraceEvents:
    """The bars of a trace, made from a recording."""

    def __init__(self, coordinator: Coordinator, recording: TimelineRecording) -> None:
        self._units = [unit.name for unit in coordinator.units]
        self._extents = _ExtentLookup(coordinator.extents())
        steps = [span for span in recording.spans if span.kind == "step"]
        self._step_ends = np.array([span.end_ns for span in steps], np.int64)
        self._step_numbers = [span.step for span in steps] + [coordinator.steps + 1]
        self._spans = recording.spans

    def all(self, requests: NativeEvents | None, tiles: NativeEvents | None) -> Iterator[TraceEvent]:
        for span in self._spans:
            yield from self._of_span(span)
        if requests is not None:
            for request in requests.events:
                yield self._of_request(request)
        if tiles is not None:
            for tile in tiles.events:
                yield self._of_tile(tile)

    def _step_at(self, ns: int) -> int:
        """Return the step that was running at a time."""
        return self._step_numbers[int(np.searchsorted(self._step_ends, ns, side="right"))]

    def _of_span(self, span: TimelineSpan) -> Iterator[TraceEvent]:
        args = {"unit": span.unit, "step": span.step or self._step_at(span.begin_ns)}

        def event(row: str, category: str, name: str) -> TraceEvent:
            return TraceEvent(row, category, f"{name} {span.unit}".rstrip(), span.begin_ns, span.end_ns, args)

        if span.kind == "step":
            yield event("steps", "step", f"step {span.step}")
        elif span.kind == "fetch":
            yield event("fetches", "fetch", "fetch")
        elif span.kind == "stall":
            yield event("stalls", "stall", span.cause)
            if span.cause == "gradient" and span.unit:
                yield event("gradients", "gradient", "gradient")
        else:
            yield event("compute", "compute", span.kind)

    def _of_tile(self, tile: np.void) -> TraceEvent:
        tag = JobTag.unpack(int(tile["tag"]))
        unit = self._units[tag.unit]
        args = {"unit": unit, "step": tag.step, "group": tag.group}
        args |= {"first": int(tile["first"]), "numel": int(tile["numel"])}
        begin_ns, end_ns = int(tile["begin_ns"]), int(tile["end_ns"])
        return TraceEvent("updates (Adam)", "update", f"update {unit}", begin_ns, end_ns, args)

    def _of_request(self, request: np.void) -> TraceEvent:
        operation = OPERATIONS[request["operation"]]
        submitted, tag = int(request["begin_ns"]), int(request["tag"])
        begin_ns, end_ns = int(request["start_ns"]) or submitted, int(request["end_ns"])
        args: dict[str, Any] = {"step": JobTag.unpack(tag).step if tag else self._step_at(submitted)}
        args |= {"queued_us": (begin_ns - submitted) / 1000, "failed": bool(request["failed"])}
        if operation == "sync":
            return TraceEvent("sync", "sync", "sync", begin_ns, end_ns, args)
        offset = int(request["offset"])
        extent = self._extents.at(offset)
        unit, state, group = ("", "", 0) if extent is None else (extent.unit, extent.state, extent.group)
        args |= {"unit": unit, "state": state, "group": group, "bytes": int(request["nbytes"]), "offset": offset}
        args |= {"class": IO_CLASSES[request["io_class"]]}
        what = {"weight": "weights", "grad": "gradients", "": "other"}.get(state, "states")
        return TraceEvent(
            f"{operation} {what}", operation, f"{operation} {state} {unit}".rstrip(), begin_ns, end_ns, args
        )


class _ExtentLookup:
    """Lookup of the extent that a byte of the swap file belongs to, in any of the extent's copies."""

    def __init__(self, extents: Iterable[Extent]) -> None:
        placed = sorted(((offset, extent) for extent in extents for offset in extent.offsets), key=lambda pair: pair[0])
        self._offsets = np.array([offset for offset, _ in placed], np.int64)
        self._extents = [extent for _, extent in placed]

    def at(self, offset: int) -> Extent | None:
        """Return the extent at an offset; None if no extent has a copy there."""
        index = int(np.searchsorted(self._offsets, offset, side="right")) - 1
        if index < 0:
            return None
        extent = self._extents[index]
        return extent if offset < self._offsets[index] + extent.nbytes else None
