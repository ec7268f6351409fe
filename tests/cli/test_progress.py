"""The lines that a run shows while it trains."""

from __future__ import annotations

import io
import re
import signal
from collections.abc import Callable

import pytest

from infinity.cli import progress as module
from infinity.cli.progress import PlainProgress, StepFacts


class Interrupted(io.RawIOBase):
    """Where a signal comes whenever a line is being written; keeps the lines."""

    def __init__(self) -> None:
        self.written = b""

    def writable(self) -> bool:
        return True

    def write(self, data: bytes, /) -> int:
        self.written += bytes(data)
        signal.raise_signal(signal.SIGUSR1)
        return len(data)


@pytest.fixture
def on_signal(request: pytest.FixtureRequest) -> Callable[[Callable[[], None]], None]:
    def do(what: Callable[[], None]) -> None:
        before = signal.signal(signal.SIGUSR1, lambda *_: what())
        request.addfinalizer(lambda: signal.signal(signal.SIGUSR1, before))

    return do


def test_what_a_handler_says_in_the_middle_of_a_line_comes_after_it(
    on_signal: Callable[[Callable[[], None]], None],
) -> None:
    raw, said = Interrupted(), iter(["stopping after this step", "really"])
    progress = PlainProgress(2, io.TextIOWrapper(io.BufferedWriter(raw)))
    on_signal(lambda: [progress.say(text) for text in said] and None)
    progress.say("step 1/2")
    assert raw.written.decode() == "step 1/2\nstopping after this step\nreally\n"


def test_the_time_that_is_left_is_that_of_the_steps_after_the_first_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([100.0, 102.0, 104.0])  # the first step of the resumed run has taken 100 s
    stream = io.StringIO()
    progress = PlainProgress(20, stream, every=1)
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    for step in (11, 12, 13):
        progress.update(StepFacts(step, 1.0, 1e-3, 1.0, seconds=1.0, tokens=1, read_bytes=0, written_bytes=0))
    lines = stream.getvalue().splitlines()
    assert [re.findall(r"left (.*) s", line) for line in lines] == [[], ["16"], ["14"]]
