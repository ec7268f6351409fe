"""Order in which the memory that a forward kept comes back in its backward, learned from earlier passes.

[Note: which memory moves, and when it comes back]
The memory of a forward is numbered in the order in which autograd saves it, over all its micro-batches. The last memory
comes back first, so it stays on the device as far as `stay_bytes` reach. Memory that was still in use when the forward
ended was moved in vain (a mask, positional embeddings, the model's output): in the next forward, this memory has
precedence among what stays. All this is known from the last forward that followed a forward with as many numbers as the
one before. In the first forward everything moves.

Memory comes back in the order of the last backward of such a forward. Without such a backward, the last memory comes
back first. A wrong prediction costs time, never bits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

_KNOWN_MAX = 16


@dataclass(eq=False)
class KeptMemory:
    """The memory that one forward keeps for its backward.

    Attributes:
        room: bytes that may still stay.
        sizes: bytes of each number.
        moved: numbers that moved, without the last ones that have come back already.
        stays: numbers that stay in the next forward like this one.
        returned: numbers that came back, in this order.
        like: the earlier forward that is expected to be like this one; None if there is none, and after the end.
        order: predicted order, from `like`; `position` is that of the first number that has not come back.
    """

    room: int
    like: KeptMemory | None
    sizes: list[int] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    stays: frozenset[int] = frozenset()
    returned: dict[int, None] = field(default_factory=dict)
    position: int = 0

    def __post_init__(self) -> None:
        self.order = [] if self.like is None else list(self.like.returned)
        self._known = set(self.order)
        self._done = set[int]()

    def stay(self, number: int) -> None:
        """Record that a number stays."""
        self._done.add(number)

    def came_back(self, number: int) -> None:
        """Record that a number came back."""
        self._done.add(number)
        self.returned.setdefault(number)

    def following(self) -> Iterator[int]:
        """Yield the numbers that will come back next, in this order. Some of them may never have moved."""
        while self.position < len(self.order) and self.order[self.position] in self._done:
            self.position += 1
        while self.moved and self.moved[-1] in self._done:
            self.moved.pop()
        yield from (number for number in self.order[self.position :] if number not in self._done)
        yield from (each for each in reversed(self.moved) if each not in self._known and each not in self._done)


class ActivationOrder:
    """Knowledge about the forwards of one model, from which the next forward is predicted.

    Args:
        stay_bytes: bytes of a forward that stay on the device.
    """

    def __init__(self, stay_bytes: int) -> None:
        self._stay_bytes = stay_bytes
        self._last = 0
        self._after: OrderedDict[int, KeptMemory] = OrderedDict()  # by the number of numbers of the forward before

    def begin(self) -> KeptMemory:
        """Begin a forward."""
        return KeptMemory(self._stay_bytes, self._after.get(self._last))

    def stays(self, kept: KeptMemory, nbytes: int) -> bool:
        """Return whether the next memory of a forward stays on the device. The memory gets the next number."""
        number = len(kept.sizes)
        kept.sizes.append(nbytes)
        if kept.like is not None and number in kept.like.stays and nbytes <= kept.room:
            kept.room -= nbytes
            kept.stay(number)
            return True
        kept.moved.append(number)
        return False

    def end(self, kept: KeptMemory, in_use: Collection[int]) -> None:
        """End a forward.

        Args:
            kept: what the forward kept.
            in_use: numbers of the memory that is still in use.
        """
        room, stays = self._stay_bytes, set[int]()
        for number in in_use:
            if kept.sizes[number] <= room:
                room -= kept.sizes[number]
                stays.add(number)
        for number in reversed(range(len(kept.sizes))):
            if number not in stays:
                room -= kept.sizes[number]
                if room < 0:
                    break
                stays.add(number)
        kept.stays, kept.like = frozenset(stays), None
        self._after.pop(self._last, None)
        self._after[self._last] = kept
        self._last = len(kept.sizes)
        while len(self._after) > _KNOWN_MAX:
            self._after.popitem(last=False)
