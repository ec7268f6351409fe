"""While a unit is on its way to the store the next ones are read; each lease is given back once its bytes are there."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from infinity.access.ingest import _UnitWrites
from infinity.errors import SwapIOError, SwapTimeoutError
from infinity.sizes import PAGE_BYTES
from tests.tiers.fakes import TIMEOUT, Failure, Future, pages, transfer


def writes_in(arena: Any) -> _UnitWrites:
    return _UnitWrites(arena)


def test_units_are_on_their_way_together_as_far_as_there_is_memory() -> None:
    arena, futures = pages(2), [Future() for _ in range(3)]
    with writes_in(arena) as writes:
        for future in futures[:2]:
            writes.start(writes.lease(PAGE_BYTES, "a unit"), [partial(transfer, future)])
        assert not any(future.done() for future in futures[:2])
        assert arena.free_bytes == 0
        writes.start(writes.lease(PAGE_BYTES, "a unit"), [partial(transfer, futures[2])])
        assert [future.done() for future in futures] == [True, False, False]  # the oldest made room
    assert all(future.done() for future in futures)
    assert arena.free_bytes == 2 * PAGE_BYTES


def write(writes: _UnitWrites, futures: list[Future], then: Exception | None = None) -> None:
    with writes:
        for future in futures:
            writes.start(writes.lease(PAGE_BYTES, "a unit"), [partial(transfer, future)])
        if then is not None:
            raise then


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_write_that_fails_is_told_and_all_memory_is_given_back(failing: int) -> None:
    arena, futures = pages(3), [Future() for _ in range(3)]
    futures[failing].fate = Failure("io")
    with pytest.raises(SwapIOError):
        write(writes_in(arena), futures)
    assert all(future.done() for future in futures)
    assert arena.free_bytes == 3 * PAGE_BYTES


def test_another_error_waits_for_what_is_on_its_way_and_stays_itself(caplog: pytest.LogCaptureFixture) -> None:
    arena, future = pages(1), Future()
    future.fate = Failure("io")
    with pytest.raises(ValueError, match="a tensor"), caplog.at_level("WARNING", "infinity"):
        write(writes_in(arena), [future], ValueError("a tensor of another shape"))
    assert "a write failed as well" in caplog.text
    assert future.done()
    assert arena.free_bytes == PAGE_BYTES


def test_memory_that_the_disk_may_read_yet_is_never_given_back_and_a_timeout_is_told_first() -> None:
    arena, futures = pages(3), [Future() for _ in range(3)]
    futures[0].fate, futures[1].fate = Failure("io"), TIMEOUT
    with pytest.raises(SwapTimeoutError):
        write(writes_in(arena), futures)
    assert arena.free_bytes == 2 * PAGE_BYTES
