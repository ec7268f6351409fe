"""Whether the call that a hook was called from still runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from infinity.runtime.caller_frame import CallerFrame


def hooked(hook: Callable[[], CallerFrame]) -> tuple[CallerFrame, bool]:
    """Return the call that a hook finds, and whether the call was seen to run after the hook."""
    call = hook()
    return call, call.runs


@pytest.mark.parametrize("wrap", [lambda hook: hook, torch.compiler.disable], ids=["plain", "disabled"])
def test_a_call_runs_until_it_has_ended(wrap: Any) -> None:
    call, seen = hooked(wrap(CallerFrame))
    assert (seen, call.runs) == (True, False)


def test_a_call_of_another_thread_is_seen_to_run() -> None:
    made: list[CallerFrame] = []
    called, end = threading.Event(), threading.Event()

    def work() -> None:
        made.append(CallerFrame())
        called.set()
        assert end.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    assert called.wait(60)
    assert (made[0].runs, made[0].of_this_thread) == (True, False)
    end.set()
    thread.join()
    assert not made[0].runs


def test_what_is_beyond_a_name_is_what_called_it() -> None:
    def passed() -> CallerFrame:
        return CallerFrame(beyond=("passed",))

    call, seen = hooked(passed)
    assert (seen, call.runs) == (True, False)
