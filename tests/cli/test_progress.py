"""The lines that a run shows while it trains."""

from __future__ import annotations

import io
import signal
from collections.abc import Callable

import pytest

from infinity.cli.progress import PlainProgress


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
