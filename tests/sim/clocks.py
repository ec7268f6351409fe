"""Order of memory uses: vector clocks, and a checker of happens-before over byte ranges.

[Note: happens-before]
An actor is sequential: a stream of a device, the host, or a request that native threads work on. The clock of an actor
has, for each other actor, the point that the other actor is known to have reached. Everything that the other actor did
up to this point happens before the next operation of the clock's owner. A snapshot of a clock is taken when an event is
recorded or a request ends; an actor that waits for the event joins the snapshot. Two uses of the same bytes by
different actors, at least one of them a write, must be ordered. Without an order, the result depends on timing, even if
the test has always passed.

For each byte, the last write and the reads after this write are kept. A use that is ordered behind this write and these
reads is ordered behind all earlier uses.
"""

from __future__ import annotations

import functools
import gc
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias, TypeVar

import infinity

Snapshot: TypeAlias = Mapping[int, int]
"""Point that each actor had reached."""
Place: TypeAlias = tuple[str, int]
"""A file, and a line in it."""
Result = TypeVar("Result")


class Unordered(AssertionError):  # noqa: N818 (the name says what is wrong with the two uses)
    """Two uses of the same bytes, at least one of them a write, without an order between them.

    Attributes:
        other: the earlier use.
    """

    def __init__(self, text: str, other: Access) -> None:
        super().__init__(text)
        self.other = other


@dataclass(slots=True, eq=False)
class Actor:
    """A sequential user of memory.

    Attributes:
        index: index of the actor in clocks. After the actor has ended, a new actor whose clock knows this end may reuse
            the index.
        clock: the actor's own position, and the known positions of other actors.
        place: the line of code that began the actor, for reports of uses by native threads.
    """

    name: str
    index: int
    clock: dict[int, int]
    place: Place | None = None

    @property
    def now(self) -> int:
        return self.clock[self.index]


@dataclass(slots=True, frozen=True)
class Access:
    """One use of bytes: its actor, the actor's clock, a description, and the line of infinity that caused it."""

    actor: str
    index: int
    at: int
    write: bool
    text: str
    place: Place

    def __str__(self) -> str:
        file, line = self.place
        return f"{'write' if self.write else 'read'} ({self.text}) by {self.actor} at {shortened(file)}:{line}"


@dataclass(slots=True, eq=False)
class _Segment:
    begin: int
    end: int
    writer: Access | None
    readers: dict[int, Access]


def _uncollected(method: Callable[..., Result]) -> Callable[..., Result]:
    """Run a method with the garbage collector disabled, so that no finalizer of an object in a reference cycle runs
    meanwhile.
    """

    @functools.wraps(method)
    def run(*args: Any) -> Result:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return method(*args)
        finally:
            if enabled:
                gc.enable()

    return run


class Memory:
    """The last write, and the reads after this write, of every byte that was used.

    Invariant: `_segments` are disjoint and sorted; `_begins` are the begins of the segments. The collector does not run
    while these lists change, because a closed model's finalizer calls `forget`.
    """

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._segments: list[_Segment] = []

    @_uncollected
    def use(self, begin: int, end: int, access: Access, clock: Snapshot) -> tuple[Access, int, int] | None:
        """Record an access and return None. If there is an earlier use without an order to the access, return this use
        and its range instead.
        """
        if begin == end:
            return None  # a use of 0 bytes needs no order, and must leave no empty segment
        low, high = self._cut(begin, end)
        for segment in self._segments[low:high]:
            other = _unordered(segment, access, clock)
            if other is not None:
                return other, segment.begin, segment.end
        if access.write:
            self._replace(low, high, [_Segment(begin, end, access, {})])
        else:
            self._read(low, high, begin, end, access)
        return None

    @_uncollected
    def forget(self, begin: int, end: int) -> None:
        """Forget the uses of bytes that get a new owner. The new owner must be ordered behind these uses in another
        way.
        """
        self._replace(*self._cut(begin, end), [])

    def last_write(self, address: int) -> Access | None:
        index = bisect_right(self._begins, address) - 1
        if index < 0 or self._segments[index].end <= address:
            return None
        return self._segments[index].writer

    def __len__(self) -> int:
        return len(self._segments)

    def _read(self, low: int, high: int, begin: int, end: int, access: Access) -> None:
        filled, at = [], begin
        for segment in self._segments[low:high]:
            if segment.begin > at:
                filled.append(_Segment(at, segment.begin, None, {access.index: access}))
            segment.readers[access.index] = access  # the actor's earlier reads are ordered before this one
            filled.append(segment)
            at = segment.end
        if at < end:
            filled.append(_Segment(at, end, None, {access.index: access}))
        if len(filled) != high - low:
            self._replace(low, high, filled)

    def _cut(self, begin: int, end: int) -> tuple[int, int]:
        """Split segments at both addresses. Return the range of indices of the segments between the addresses."""
        for at in (begin, end):
            index = bisect_right(self._begins, at) - 1
            if index >= 0:
                segment = self._segments[index]
                if segment.begin < at < segment.end:
                    rest = _Segment(at, segment.end, segment.writer, dict(segment.readers))
                    segment.end = at
                    self._replace(index + 1, index + 1, [rest])
        return bisect_left(self._begins, begin), bisect_left(self._begins, end)

    def _replace(self, low: int, high: int, segments: list[_Segment]) -> None:
        self._segments[low:high] = segments
        self._begins[low:high] = [segment.begin for segment in segments]


def _unordered(segment: _Segment, access: Access, clock: Snapshot) -> Access | None:
    writer = segment.writer
    if writer is not None and clock.get(writer.index, 0) < writer.at:
        return writer
    if access.write:
        for reader in segment.readers.values():
            if clock.get(reader.index, 0) < reader.at:
                return reader
    return None


class Order:
    """All actors, and the memory that they use."""

    def __init__(self) -> None:
        self.memory = Memory()
        self._indices = 0
        self._ended: list[Actor] = []

    def actor(self, name: str, *, behind: Actor | None = None) -> Actor:
        """Return a new actor. Everything that `behind` has done so far happens before all uses of the new actor."""
        if behind is None:
            return self._new(name, {})
        known = dict(self.snapshot(behind))
        for ended in self._ended:
            if known.get(ended.index, 0) >= ended.now:  # reuse the index, because all uses of the ended actor are known
                self._ended.remove(ended)
                known[ended.index] = ended.now + 1
                return Actor(name, ended.index, known)
        return self._new(name, known)

    def _new(self, name: str, known: dict[int, int]) -> Actor:
        self._indices += 1
        known[self._indices] = 1
        return Actor(name, self._indices, known)

    def snapshot(self, actor: Actor) -> Snapshot:
        """Return a snapshot. An actor that joins the snapshot is ordered behind all uses so far, and not behind later
        uses.
        """
        taken = dict(actor.clock)
        actor.clock[actor.index] += 1
        return taken

    def end(self, actor: Actor) -> Snapshot:
        """End the actor. An actor that joins the returned snapshot is ordered behind all uses of the ended actor."""
        self._ended.append(actor)
        return dict(actor.clock)

    def join(self, actor: Actor, snapshot: Snapshot) -> None:
        """Order the actor's next uses behind the snapshot."""
        clock = actor.clock
        for index, at in snapshot.items():
            if clock.get(index, 0) < at:
                clock[index] = at

    def knows(self, actor: Actor, snapshot: Snapshot) -> bool:
        """Return whether the actor is already ordered behind the snapshot."""
        return all(actor.clock.get(index, 0) >= at for index, at in snapshot.items())

    def use(self, actor: Actor, begin: int, end: int, *, write: bool, text: str, place: Place) -> None:
        """Declare that the actor uses bytes [begin, end).

        Raises:
            Unordered: another use of some of these bytes is not ordered; the message names both.
        """
        if begin >= end:
            return
        access = Access(actor.name, actor.index, actor.now, write, text, place)
        conflict = self.memory.use(begin, end, access, actor.clock)
        if conflict is not None:
            other, first, last = conflict
            first, last = max(first, begin), min(last, end)
            raise Unordered(f"{access} is not ordered behind {other}: {last - first} bytes at {first:#x}", other)


# -- the line that caused it -------------------------------------------------------------------------------------------

_HERE = str(Path(__file__).parent)
_INFINITY = str(Path(infinity.__file__).parent)
_OURS = tuple(
    f"{_HERE}/{name}.py" for name in ("accelerator", "clocks", "fixtures", "gate", "host", "queues", "slab", "watch")
)
_ranks: dict[str, int] = {}


def shortened(file: str) -> str:
    """Return a path relative to the repository's root."""
    root = str(Path(_INFINITY).parent)
    return file[len(root) + 1 :] if file.startswith(root) else file


def _rank(file: str) -> int:
    """Return 2 for infinity, 1 for a test or a model, 0 for other code."""
    if file.startswith(_INFINITY):
        return 2
    machinery = file in _OURS or "/torch/" in file or "site-packages" in file or file.startswith("<")
    return 0 if machinery or "/lib/python" in file else 1


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


NATIVE: Place = ("a native thread", 0)


def place() -> Place:
    """Return the innermost running line of infinity. If there is no such line, return the innermost line of a test; if
    there is neither, return NATIVE.
    """
    test = None
    for frame in _frames(sys._getframe(1)):
        file = frame.f_code.co_filename
        rank = _ranks.get(file)
        if rank is None:
            rank = _ranks[file] = _rank(file)
        if rank == 2:
            return file, frame.f_lineno
        if rank == 1 and test is None:
            test = file, frame.f_lineno
    return test or NATIVE
