"""Which uses of memory are ordered: vector clocks, and a checker of happens-before over byte ranges.

[Note: happens-before]
An actor does one thing after the other: a stream of a device, the host, a request that native threads work on. Its
clock counts for each actor how far that one is known to have got: what that one did until there happens before what
this one does next. A snapshot of a clock is taken where an event is recorded, or a request ends; who waits for it joins
it. Two uses of the same bytes by different actors, of which one writes, must be ordered: else it depends on speed alone
which comes first, however often the test came out well.

Of each byte the last write is kept, and the reads since: what is ordered behind these is ordered behind all before
them.
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
"""How far each actor had got."""
Place: TypeAlias = tuple[str, int]
"""A file, and a line of it."""
Result = TypeVar("Result")


class Unordered(AssertionError):  # noqa: N818 (the name says what is wrong with the two uses)
    """Two uses of the same bytes, of which one writes, and nothing orders them.

    Attributes:
        other: the use that came before.
    """

    def __init__(self, text: str, other: Access) -> None:
        super().__init__(text)
        self.other = other


@dataclass(slots=True, eq=False)
class Actor:
    """One who does one thing after the other.

    Attributes:
        index: in clocks. Taken over by another actor once this one ended and everybody who counts knows it.
        clock: of itself, where it is now; of the others, how far they are known to have got.
        place: the line that began it, for what native threads do for it.
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
    """One use of bytes: by whom, when on its own clock, what it is, and the line of infinity that caused it."""

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
    """The method runs without the collector, and so without the finalizers of what hangs in cycles."""

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
    """The last write and the reads since, of every byte that was used.

    Invariant: `_segments` are disjoint and sorted; `_begins` are their begins. The collector does not run while they
    change: a finalizer of a model that was closed forgets its memory.
    """

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._segments: list[_Segment] = []

    @_uncollected
    def use(self, begin: int, end: int, access: Access, clock: Snapshot) -> tuple[Access, int, int] | None:
        """Note an access, and return None; or return what it is not ordered with, and where that is."""
        if begin == end:
            return None  # of no byte: nothing to order, and a segment without bytes would stand between others
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
        """The bytes are given to, or taken from, somebody else, who orders this by other means."""
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
            segment.readers[access.index] = access  # what this actor did before is ordered before this
            filled.append(segment)
            at = segment.end
        if at < end:
            filled.append(_Segment(at, end, None, {access.index: access}))
        if len(filled) != high - low:
            self._replace(low, high, filled)

    def _cut(self, begin: int, end: int) -> tuple[int, int]:
        """Make segments begin or end at both; the indices of those between."""
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
        """A new one; what `behind` did so far happens before all that it does."""
        if behind is None:
            return self._new(name, {})
        known = dict(self.snapshot(behind))
        for ended in self._ended:
            if known.get(ended.index, 0) >= ended.now:  # as if it went on: all it did is known to the new one
                self._ended.remove(ended)
                known[ended.index] = ended.now + 1
                return Actor(name, ended.index, known)
        return self._new(name, known)

    def _new(self, name: str, known: dict[int, int]) -> Actor:
        self._indices += 1
        known[self._indices] = 1
        return Actor(name, self._indices, known)

    def snapshot(self, actor: Actor) -> Snapshot:
        """Whoever joins it is ordered behind what the actor did so far, and not behind what it does from now on."""
        taken = dict(actor.clock)
        actor.clock[actor.index] += 1
        return taken

    def end(self, actor: Actor) -> Snapshot:
        """The actor does nothing any more. Who joins what is returned is ordered behind all of it."""
        self._ended.append(actor)
        return dict(actor.clock)

    def join(self, actor: Actor, snapshot: Snapshot) -> None:
        """What comes next is ordered behind the snapshot."""
        clock = actor.clock
        for index, at in snapshot.items():
            if clock.get(index, 0) < at:
                clock[index] = at

    def knows(self, actor: Actor, snapshot: Snapshot) -> bool:
        """Whether the actor is ordered behind the snapshot already."""
        return all(actor.clock.get(index, 0) >= at for index, at in snapshot.items())

    def use(self, actor: Actor, begin: int, end: int, *, write: bool, text: str, place: Place) -> None:
        """The actor uses bytes [begin, end).

        Raises:
            Unordered: with another use of some of them; names both.
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
    """From the repository's root on."""
    root = str(Path(_INFINITY).parent)
    return file[len(root) + 1 :] if file.startswith(root) else file


def _rank(file: str) -> int:
    """2: infinity; 1: a test or a model; 0: what carries out."""
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
    """The nearest line of infinity that is running; without one that of a test; NATIVE without one."""
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
