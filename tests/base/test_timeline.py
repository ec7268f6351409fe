"""Time that compute waits is counted once, by cause; activities are recorded only when asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from infinity.base import timeline as module
from infinity.base.timeline import CAUSES, JobTag, Timeline, TimelineSpan
from infinity.errors import InfinityError


class Ticks:
    """A clock that goes on by what a test says."""

    def __init__(self) -> None:
        self.now = 1_000

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ticks]:
    clock = Ticks()
    monkeypatch.setattr(time, "perf_counter_ns", clock)
    return clock


def test_a_stall_counts_for_its_cause(ticks: Ticks) -> None:
    timeline = Timeline()
    with timeline.stall("fetch", "a"):
        ticks.now += 5
    with timeline.stall("fetch", "b"):
        ticks.now += 2
    assert timeline.stalled_ns() == dict.fromkeys(CAUSES, 0) | {"fetch": 7}


def test_a_stall_in_a_stall_is_counted_once(ticks: Ticks) -> None:
    timeline = Timeline()
    with timeline.stall("step"):
        ticks.now += 1
        with timeline.stall("update", "a"):
            ticks.now += 10
            with timeline.stall("commit"):
                ticks.now += 100
        with timeline.stall("step"):
            ticks.now += 1000
    assert timeline.stalled_ns() == dict.fromkeys(CAUSES, 0) | {"step": 1001, "update": 10, "commit": 100}


def test_what_is_recorded_of_stalls_does_not_overlap_and_adds_up(ticks: Ticks) -> None:
    timeline = Timeline()
    timeline.record()
    with timeline.stall("commit"):
        ticks.now += 1
        with timeline.stall("update", "a"):
            ticks.now += 10
        ticks.now += 100
    spans = sorted(timeline.stop().spans, key=lambda span: span.begin_ns)
    assert [(span.cause, span.end_ns - span.begin_ns) for span in spans] == [
        ("commit", 1),
        ("update", 10),
        ("commit", 100),
    ]
    assert all(one.end_ns == other.begin_ns for one, other in pairwise(spans))
    assert timeline.stalled_ns()["commit"] == 101


def test_a_stall_that_an_exception_ends_is_counted(ticks: Ticks) -> None:
    timeline = Timeline()

    def fail() -> None:
        with timeline.stall("step"), timeline.stall("fetch"):
            ticks.now += 3
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    with timeline.stall("step"):
        ticks.now += 4
    assert timeline.stalled_ns() == dict.fromkeys(CAUSES, 0) | {"step": 4, "fetch": 3}


def test_stalls_of_two_threads_are_not_inside_each_other(ticks: Ticks) -> None:
    timeline = Timeline()

    def elsewhere() -> None:
        with timeline.stall("gradient"):
            ticks.now += 10

    with timeline.stall("step"):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        ticks.now += 1
    assert timeline.stalled_ns()["gradient"] == 10
    assert timeline.stalled_ns()["step"] == 11


def test_off_no_span_is_kept() -> None:
    timeline = Timeline()
    timeline.begin("forward", "a")
    with timeline.stall("fetch", "a"):
        pass
    timeline.end("forward", "a")
    timeline.end_step(1)
    timeline.record()
    timeline.end("forward", "a")
    assert timeline.stop().spans == []


def test_spans_have_their_unit_and_times(ticks: Ticks) -> None:
    timeline = Timeline()
    timeline.record()
    ticks.now += 1
    timeline.begin("forward", "a")
    ticks.now += 2
    with timeline.stall("fetch", "b"):
        ticks.now += 3
    timeline.end("forward", "a")
    timeline.begin("backward", "a")
    timeline.begin("backward", "b")
    ticks.now += 4
    timeline.end_all("backward")
    timeline.end_step(7)
    assert timeline.stop() == module.TimelineRecording(
        [
            TimelineSpan("stall", "b", 1003, 1006, cause="fetch"),
            TimelineSpan("forward", "a", 1001, 1006),
            TimelineSpan("backward", "a", 1006, 1010),
            TimelineSpan("backward", "b", 1006, 1010),
            TimelineSpan("step", "", 1000, 1010, step=7),
        ],
        1000,
        1010,
        0,
    )


def test_a_forward_that_enters_itself_is_one_span(ticks: Ticks) -> None:
    timeline = Timeline()
    timeline.record()
    for _ in range(2):
        timeline.begin("forward", "a")
    for _ in range(2):
        ticks.now += 1
        timeline.end("forward", "a")
    assert timeline.stop().spans == [TimelineSpan("forward", "a", 1000, 1002)]


def test_what_is_under_way_at_the_end_is_cut_there_and_what_was_abandoned_is_forgotten(ticks: Ticks) -> None:
    timeline = Timeline()
    timeline.record()
    timeline.begin("fetch", "a")
    timeline.begin("forward", "b")
    ticks.now += 1
    timeline.forget("forward", "backward")
    assert timeline.stop().spans == [TimelineSpan("fetch", "a", 1000, 1001)]
    timeline.record()
    assert timeline.stop().spans == []


def test_spans_beyond_the_room_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SPANS_MAX", 2)
    timeline = Timeline()
    timeline.record()
    for step in range(5):
        timeline.end_step(step)
    recorded = timeline.stop()
    assert (len(recorded.spans), recorded.dropped) == (2, 3)


def test_recording_twice_is_refused() -> None:
    timeline = Timeline()
    timeline.record()
    with pytest.raises(InfinityError, match="traced already"):
        timeline.record()


def test_a_job_tag_comes_back() -> None:
    tag = JobTag(step=123_456, unit=70_000, group=3)
    assert JobTag.unpack(tag.pack()) == tag
    assert tag.pack() < 2**64
