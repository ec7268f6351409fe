"""Fakes of the layers below homes, slots and units. The requests of these fakes end when the test says so, with success
or with failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from infinity import _native
from infinity.io.arena import ArenaRegion, PinnedArena
from infinity.io.engine import Transfer
from infinity.io.store import Extent
from infinity.sizes import PAGE_BYTES

few = settings(
    max_examples=50,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
"""Settings of hypothesis for all state machines of the tests. With these settings, all state machines together take
seconds.
"""

_memory = PinnedArena(64 * PAGE_BYTES)


def pages(count: int) -> ArenaRegion:
    """Return a new space. The memory of this space is also the memory of the spaces of earlier tests."""
    return ArenaRegion(_memory.memory, 0, count * PAGE_BYTES)


@dataclass(frozen=True)
class Failure:
    """Counterpart of _native.Failure."""

    kind: str = "io"
    operation: str = "write"
    path: str = "/swap"
    offset: int = 0
    nbytes: int = PAGE_BYTES
    errno: int = 5
    cause: str = "the test said so"


CANCELED = Failure("canceled")
TIMEOUT = Failure("timeout")


class Future:
    """Counterpart of _native.IOFuture. The request ends when `end` is called, or when somebody waits for the request;
    in the second case, `fate` is its failure.

    Attributes:
        waits: number of waits before the request had ended.
    """

    def __init__(self, at_end: Callable[[Failure | None], None] = lambda _: None) -> None:
        self.fate: Failure | None = None
        self.waits = 0
        self._at_end = at_end
        self._ended = False
        self._failure: Failure | None = None

    def end(self, failure: Failure | None = None) -> None:
        if not self._ended:
            self._ended, self._failure = True, failure
            self._at_end(failure)

    def done(self) -> bool:
        return self._ended

    def wait(self, timeout_s: float | None = None) -> bool:
        self.waits += not self._ended
        self.end(self.fate)
        return True

    def failure(self) -> Any:
        if not self._ended:
            raise RuntimeError("not done")
        return self._failure


class _Part(Future):
    """Milestone of an update."""

    def __init__(self, whole: UpdateFuture) -> None:
        super().__init__()
        self._whole = whole

    def wait(self, timeout_s: float | None = None) -> bool:
        if not self.done():
            self._whole.waits += 1
            if self._whole.fate is not None:
                self._whole.end(self._whole.fate)
            else:
                self._whole.reach(self)
        return True


class UpdateFuture(Future):
    """Counterpart of _native.UpdateFuture with the milestones `computed`, `weights` and the end. A failure also fails
    all later milestones.

    Attributes:
        job: arguments of the pipeline's submit.
        begun: whether the update has begun, so that it cannot be withdrawn.
    """

    def __init__(self, **job: Any) -> None:
        super().__init__()
        self.job = job
        self.begun = False
        self.finite = True
        self.computed, self.weights = _Part(self), _Part(self)

    def reach(self, part: Future) -> None:
        """Succeed up to a milestone, or to the end."""
        self.begun = True
        for each in (self.computed, self.weights, self):
            Future.end(each)
            if each is part:
                return

    def advance(self) -> None:
        """Succeed up to the next milestone."""
        self.reach(next(each for each in (self.computed, self.weights, self) if each is self or not each.done()))

    def end(self, failure: Failure | None = None) -> None:
        if not self.done():
            for part in (self.computed, self.weights):
                Future.end(part, failure)
            super().end(failure)


@dataclass
class Stream:
    """Counterpart of _native.StateStream with readable fields."""

    memory: Any = None
    file: Any = None
    offset: int = 0
    write_offset: int | None = None
    source: Any = None
    current: bool = True


def imitate_streams(patch: pytest.MonkeyPatch) -> None:
    """Replace the native pipeline's streams by streams whose fields a test can read."""
    patch.setattr(_native, "StateStream", Stream)


class Store:
    """A store whose transfers take effect when they end, so that memory reused too early is visible."""

    file = "the swap file"
    checksums = True

    def __init__(self) -> None:
        self.stored: dict[tuple[str, int], bytes] = {}
        self.under_way: list[Future] = []
        self.syncs: list[Future] = []
        self.ended: Callable[[Extent, Failure | None], None] = lambda extent, failure: None

    def _start(self, extent: Extent, act: Callable[[], None]) -> Transfer:
        def end(failure: Failure | None) -> None:
            self.under_way.remove(future)
            if failure is None:
                act()
            self.ended(extent, failure)

        future = Future(end)
        self.under_way.append(future)
        return transfer(future, extent.unit, extent.state)

    def read(
        self,
        extent: Extent,
        into: memoryview,
        *,
        io_class: str = "weights",
        copy_index: int | None = None,
        after: Transfer | None = None,
    ) -> Transfer:
        def act() -> None:
            if after is not None:
                after.result()
            there = self.stored.get(self._key(extent, copy_index), b"")
            into[: len(there)] = there[: len(into)]

        return self._start(extent, act)

    def write(
        self, extent: Extent, data: memoryview, *, io_class: str, copy_index: int | None = None, after: Any = None
    ) -> Transfer:
        def act() -> None:
            if after is not None:
                after.wait()
            self.stored[self._key(extent, copy_index)] = bytes(data)

        return self._start(extent, act)

    def sync(self) -> Transfer:
        self.syncs.append(Future())
        return transfer(self.syncs[-1])

    @staticmethod
    def _key(extent: Extent, copy: int | None) -> tuple[str, int]:
        return f"{extent.unit}.{extent.group}.{extent.state}", extent.newest_copy if copy is None else copy

    def is_scratch(self, path: str, offset: int) -> bool:
        return False


def transfer(future: Future, unit: str = "", state: str = "") -> Transfer:
    native: Any = future
    return Transfer(native, unit, state, 1)


def extent(unit: str, state: str, *, group: int = 0, count: int = 1, copies: int = 2) -> Extent:
    return Extent(unit, group, state, tuple(PAGE_BYTES * count * copy for copy in range(copies)), PAGE_BYTES * count)


@dataclass
class Generations:
    """Counterpart of the store's generations, with the methods that commits use.

    Attributes:
        made: step and body of each generation that was made.
        failure: exception of the next generation that is made.
        prepared: steps of generations that the other ranks must also make.
        retired: arguments of retire().
    """

    made: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    failure: BaseException | None = None
    settled: int = 0
    prepared: list[int] = field(default_factory=list)
    retired: list[set[int]] = field(default_factory=list)

    @property
    def newest(self) -> int | None:
        return self.made[-1][0] if self.made else None

    def copy_to_write(self, extent: Extent) -> int:
        return (extent.newest_copy + 1) % len(extent.offsets)

    def make(self, step: int, facts: dict[str, Any], body: dict[str, Any]) -> None:
        if self.failure is not None:
            raise self.failure
        self.made.append((step, body))

    def prepare(self, step: int, facts: dict[str, Any], body: dict[str, Any]) -> None:
        self.make(step, facts, body)
        self.prepared.append(step)

    def retire(self, whole: set[int]) -> None:
        self.retired.append(whole)

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.made]

    def finish_recovery(self) -> None:
        self.settled += 1


@contextmanager
def nobody_waits(*futures: Future) -> Iterator[None]:
    """Require that none of these futures is waited for within the context."""
    before = [future.waits for future in futures]
    yield
    assert [future.waits for future in futures] == before
