"""The first request to stop is noted, a second one interrupts, and what a launcher repeats is no second one."""

from __future__ import annotations

import os
import signal

import pytest

from infinity.cli import stopping
from infinity.cli.stopping import stop_when_asked


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_request_interrupts_unless_a_launcher_repeats_the_first(
    number: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "rank_and_world", lambda: (0, ranks))
    said: list[str] = []
    with stop_when_asked(said.append, "stopping") as stop:
        os.kill(os.getpid(), number)
        assert (stop.asked, said) == (128 + number, ["stopping"])
        if ranks > 1:
            os.kill(os.getpid(), number)
            stop.at -= stopping._REPEATED_S
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert said == ["stopping"]
