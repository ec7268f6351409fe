"""The trace event format that Perfetto (ui.perfetto.dev) and chrome://tracing read.

Source: "Trace Event Format", Google, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

ROWS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("model", ("steps", "compute", "stalls")),
    ("host", ("fetches", "gradients", "updates (Adam)")),
    ("store", ("read weights", "read states", "write states", "write weights", "sync")),
)
"""Processes and their rows, in the order of display.

A row that is not in this list is displayed last, under "store".
"""

_NESTING = ("steps", "compute", "stalls", "gradients")
"""Rows with the events of a single thread. If two events of such a row overlap, one event contains the other."""


class TraceEvent(NamedTuple):
    """A bar of the trace.

    Attributes:
        row: the row in which the bar is drawn; see ROWS.
        category: the kind of the bar; viewers can show or hide bars by their kind.
        args: details that viewers show when the bar is clicked.
    """

    row: str
    category: str
    name: str
    begin_ns: int
    end_ns: int
    args: Mapping[str, Any]


def document(events: Iterable[TraceEvent], begin_ns: int, end_ns: int, about: Mapping[str, Any]) -> Iterator[str]:
    """Yield the JSON document in pieces; times are microseconds from `begin_ns`.

    Args:
        events: the events, in any order; the times of each event are limited to [begin_ns, end_ns].
        begin_ns: begin of the trace.
        end_ns: end of the trace.
        about: facts about the trace.
    """
    cut = [
        event._replace(begin_ns=max(event.begin_ns, begin_ns), end_ns=min(event.end_ns, end_ns))
        for event in events
        if event.end_ns >= begin_ns and event.begin_ns <= end_ns
    ]
    cut.sort(key=lambda event: (event.begin_ns, -event.end_ns))
    lanes = spread(cut)
    numbers = _number({(event.row, lane) for event, lane in zip(cut, lanes, strict=True)})
    yield '{"displayTimeUnit": "ms", "otherData": ' + json.dumps(about) + ', "traceEvents": [\n'
    yield ",\n".join(json.dumps(entry) for entry in _names(numbers))
    for event, lane in zip(cut, lanes, strict=True):
        process, thread = numbers[event.row, lane]
        entry = {
            "ph": "X",
            "pid": process,
            "tid": thread,
            "ts": (event.begin_ns - begin_ns) / 1000,
            "dur": (event.end_ns - event.begin_ns) / 1000,
            "cat": event.category,
            "name": event.name,
            "args": event.args,
        }
        yield ",\n" + json.dumps(entry)
    yield "\n]}\n"


def spread(events: Iterable[TraceEvent]) -> list[int]:
    """Return for each event the number of its lane in its row.

    A lane is one line of bars in a row. The events must be sorted by their begin; of events with the same begin, the
    longest must be first. Viewers draw two overlapping events of one lane wrong, unless one event contains the other.
    An event is therefore assigned to the first free lane of its row. In rows of one thread (`_NESTING`), an event may
    be in the same lane as an event that contains it.
    """
    ends: dict[str, list[list[int]]] = {}  # by row and lane: ends of the events that have not ended, outermost first
    chosen = []
    for event in events:
        lanes = ends.setdefault(event.row, [])
        for lane, stack in enumerate(lanes):
            while stack and stack[-1] <= event.begin_ns:
                stack.pop()
            if not stack or (event.row in _NESTING and event.end_ns <= stack[-1]):
                stack.append(event.end_ns)
                chosen.append(lane)
                break
        else:
            chosen.append(len(lanes))
            lanes.append([event.end_ns])
    return chosen


def _number(lanes: set[tuple[str, int]]) -> dict[tuple[str, int], tuple[int, int]]:
    """Assign process and thread numbers to (row, lane), in the order of ROWS."""
    known = [(process, row) for process, rows in ROWS for row in rows]
    others = sorted({row for row, _ in lanes} - {row for _, row in known})
    order = {row: index for index, row in enumerate([*(row for _, row in known), *others])}
    processes = {row: process for process, row in known}
    first = {process: index for index, (process, _) in enumerate(ROWS, start=1)}
    return {
        (row, lane): (first[processes.get(row, "store")], thread)
        for thread, (row, lane) in enumerate(sorted(lanes, key=lambda key: (order[key[0]], key[1])), start=1)
    }


def _names(numbers: Mapping[tuple[str, int], tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """Yield the entries that tell viewers the names and the order of processes and threads."""
    for process, (name, _) in enumerate(ROWS, start=1):
        yield _metadata("process_name", process, 0, {"name": name})
        yield _metadata("process_sort_index", process, 0, {"sort_index": process})
    for (row, lane), (process, thread) in numbers.items():
        yield _metadata("thread_name", process, thread, {"name": row if lane == 0 else f"{row} {lane + 1}"})
        yield _metadata("thread_sort_index", process, thread, {"sort_index": thread})


def _metadata(name: str, process: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "ts": 0, "pid": process, "tid": thread, "name": name, "args": args}
