"""Events that the native core records for a trace, as numpy arrays: engine requests, and tiles of the update pipeline.

Times are in nanoseconds, by the clock of time.perf_counter_ns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infinity import _native

OPERATIONS = ("read", "write", "sync")
IO_CLASSES: tuple[_native.IOClassName, ...] = ("weights", "activations", "states", "writeback")

IO_EVENT = np.dtype(
    [
        ("begin_ns", np.uint64),  # submitted
        ("start_ns", np.uint64),  # when the disk got the first block; 0 if the request failed before
        ("end_ns", np.uint64),
        ("offset", np.uint64),  # bytes, in the swap file
        ("nbytes", np.uint64),  # bytes moved; 0 for a sync and for a failed request
        ("tag", np.uint64),  # tag of the update to which the request belongs; 0 if there is none
        ("operation", np.uint8),  # an index into OPERATIONS
        ("io_class", np.uint8),  # an index into IO_CLASSES
        ("failed", np.bool_),
        ("unused", np.uint8, 5),
    ]
)
TILE_EVENT = np.dtype(
    [
        ("begin_ns", np.uint64),
        ("end_ns", np.uint64),
        ("first", np.uint64),  # index of the tile's first element in the job
        ("numel", np.uint64),
        ("tag", np.uint64),
    ]
)


@dataclass(frozen=True)
class NativeEvents:
    """Recorded events, and the number of events that were dropped because the log was full."""

    events: NDArray[Any]
    dropped: int


def take(log: _native.IOEngine | _native.UpdatePipeline) -> NativeEvents:
    """Return the events that a log recorded since the last call."""
    packed, dropped = log.take_trace()
    dtype = IO_EVENT if isinstance(log, _native.IOEngine) else TILE_EVENT
    return NativeEvents(np.frombuffer(packed, dtype), dropped)
