"""Ctrl-C comes between transitions, or where one waits."""

from __future__ import annotations

import signal

import pytest

from infinity.base.interrupt import interruptible, interrupts_deferred, whole


@whole
def interrupted(done: list[str]) -> None:
    signal.raise_signal(signal.SIGINT)
    done.append("to the end")


def test_something_whole_ends_before_ctrl_c_comes() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(done)
    assert done == ["to the end"]


def test_ctrl_c_comes_where_something_whole_waits() -> None:
    @whole
    def waiting() -> None:
        signal.raise_signal(signal.SIGINT)
        with interruptible():
            done.append("waited")
        done.append("went on")

    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        waiting()
    assert done == []


def test_a_step_lets_no_ctrl_c_in_where_it_waits() -> None:
    def step() -> None:
        with interrupts_deferred():
            interrupted(done)
            with interruptible():
                done.append("waited")

    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        step()
    assert done == ["to the end", "waited"]


def test_the_handlers_are_back_afterwards_also_those_that_raise() -> None:
    def stop(number: int, frame: object) -> None:
        raise SystemExit(number)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        with pytest.raises(SystemExit):
            whole(signal.raise_signal)(signal.SIGTERM)
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    finally:
        signal.signal(signal.SIGTERM, previous)
