"""Ctrl-C comes between transitions, or where one waits."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from infinity.base import interrupt
from infinity.base.interrupt import give_back, interruptible, interrupts_deferred, uninterruptible


@uninterruptible
def interrupted(done: list[str]) -> None:
    signal.raise_signal(signal.SIGINT)
    done.append("to the end")


def test_something_whole_ends_before_ctrl_c_comes() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(done)
    assert done == ["to the end"]


def test_ctrl_c_comes_where_something_whole_waits() -> None:
    @uninterruptible
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


NUMBERS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    """Handlers of a process in which no uninterruptible function has run; handlers that a test installs are removed
    afterwards."""
    give_back()
    previous = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


def stop(number: int, frame: object) -> None:
    raise SystemExit(number)


def test_handlers_are_given_back_also_those_that_raise() -> None:
    signal.signal(signal.SIGTERM, stop)
    handlers = [signal.getsignal(number) for number in NUMBERS]
    with pytest.raises(SystemExit):
        uninterruptible(signal.raise_signal)(signal.SIGTERM)
    give_back()
    assert [signal.getsignal(number) for number in NUMBERS] == handlers


def test_no_handler_is_installed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = uninterruptible(lambda: None)
    nothing()
    installed: list[object] = []
    monkeypatch.setattr(signal, "signal", lambda *arguments: installed.append(arguments))
    for _ in range(3):
        nothing()
    assert installed == []


def test_a_handler_that_is_installed_later_waits_too() -> None:
    uninterruptible(lambda: None)()
    signal.signal(signal.SIGINT, stop)
    done: list[str] = []
    with pytest.raises(SystemExit):
        interrupted(done)
    assert done == ["to the end"]


def test_a_handler_that_calls_the_one_before_it_does_not_go_in_circles() -> None:
    uninterruptible(lambda: None)()
    ours = signal.getsignal(signal.SIGINT)
    calls: list[int] = []

    def mine(number: int, frame: FrameType | None) -> None:
        calls.append(number)
        assert callable(ours)
        ours(number, frame)

    signal.signal(signal.SIGINT, mine)
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(done)
    assert (done, calls) == (["to the end"], [signal.SIGINT])


def test_a_handler_of_ours_that_was_saved_and_put_back_works() -> None:
    uninterruptible(lambda: None)()
    saved = signal.signal(signal.SIGINT, stop)
    give_back()
    signal.signal(signal.SIGINT, saved)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(done)
    assert done == ["to the end"]


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_is_no_function_is_left_alone(handler: signal.Handlers) -> None:
    signal.signal(signal.SIGTERM, handler)
    uninterruptible(lambda: None)()
    assert signal.getsignal(signal.SIGTERM) is handler


def test_of_several_signals_the_first_is_delivered_and_none_comes_late() -> None:
    @uninterruptible
    def twice() -> None:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGTERM, stop)
    with pytest.raises(SystemExit):
        twice()
    uninterruptible(lambda: None)()


def test_other_threads_defer_nothing() -> None:
    def wait() -> None:
        began.set()
        over.wait()

    began, over = threading.Event(), threading.Event()
    thread = threading.Thread(target=uninterruptible(wait))
    thread.start()
    began.wait()
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        over.set()
        thread.join()


def test_a_child_that_is_forked_in_something_whole_can_be_stopped() -> None:
    @uninterruptible
    def fork() -> int:
        child = os.fork()
        if child == 0:
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                os._exit(7)
            os._exit(0)
        return child

    _, status = os.waitpid(fork(), 0)
    assert os.waitstatus_to_exitcode(status) == 7


def test_where_no_thread_gets_signals_nothing_is_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int, handler: object) -> None:
        raise ValueError("signal only works in main thread of the main interpreter")

    with monkeypatch.context() as patched:
        patched.setattr(interrupt, "_signals", interrupt._DeferredSignals())
        patched.setattr(signal, "signal", refuse)
        run = uninterruptible(lambda: interrupt._signals.deferred)
        run()
        assert not run()
