"""Streams of the simulation, their queues, and the time when queued operations run.

[Note: what is late]
"Device" memory is ordinary memory. Copies, records and waits are queued. By the policy, they run as late as their
events permit (`lazy`), as early as possible (`eager`), or at random times (`random`). Kernels are torch's CPU
operations and run immediately. Therefore, when a computing stream waits, the operations for which it waits run
immediately, too. As a consequence, wrong bytes only reveal a copy that is not ordered with a later kernel. All other
orders are checked by the clocks (clocks.py), which follow the operations when they are queued, not when they run.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from tests.sim.clocks import Actor, Snapshot


@dataclass(frozen=True)
class Policy:
    """Time when queued operations run.

    Attributes:
        seed: seed of `random`.
    """

    when: Literal["lazy", "eager", "random"]
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.when}({self.seed})" if self.when == "random" else self.when


LAZY, EAGER = Policy("lazy"), Policy("eager")


def random_policy(seed: int) -> Policy:
    return Policy("random", seed)


@dataclass(slots=True, eq=False)
class Recording:
    """One recording of an event. `at` is the device's time when the recording ran."""

    stream: SimStream
    snapshot: Snapshot
    done: bool = False
    at: int = 0
    asked: int = 0


@dataclass(slots=True, eq=False, weakref_slot=True)
class SimEvent:
    handle: int
    timed: bool = False
    last: Recording | None = None


@dataclass(slots=True, eq=False)
class Copy:
    into: int
    source: int
    nbytes: int
    text: str


@dataclass(slots=True, eq=False)
class Wait:
    recording: Recording


@dataclass(slots=True, eq=False)
class SimStream:
    name: str
    handle: int
    actor: Actor
    computes: bool = False
    queue: deque[Copy | Wait | Recording] = field(default_factory=deque)


class Queues:
    """All streams. The caller must hold the lock.

    Args:
        move: carries out a copy.
    """

    def __init__(self, policy: Policy, lock: threading.RLock, move: Callable[[Copy], None]) -> None:
        self.policy = policy
        self.streams: list[SimStream] = []
        self.random = random.Random(policy.seed)
        self._ran = threading.Condition(lock)
        self._move = move
        self._time = 0

    def queued(self, on: SimStream) -> None:
        """Run the operations that must run now. This method is called after an operation was queued on a stream."""
        if self.policy.when == "eager" or (on.computes and not isinstance(on.queue[-1], Recording)):
            self.drain(on)

    def force(self, recording: Recording) -> None:
        """Run the operations that a recording needs, and nothing else."""
        while not recording.done:
            self._step(recording.stream)

    def drain(self, stream: SimStream) -> None:
        while stream.queue:
            self._step(stream)

    def park(self, recording: Recording, seconds: float) -> None:
        """Release the lock for at most `seconds`, so that other threads can run the recording."""
        self._ran.wait_for(lambda: recording.done, seconds)

    def run_some(self) -> None:
        """Run a random number of the operations that may run."""
        for _ in range(self.random.randrange(sum(len(stream.queue) for stream in self.streams) + 1)):
            streams = [stream for stream in self.streams if stream.queue and _may_run(stream.queue[0])]
            if not streams:
                return
            self._step(self.random.choice(streams))

    def copies(self) -> list[tuple[SimStream, Copy]]:
        """Return the copies that have not run."""
        return [(stream, each) for stream in self.streams for each in stream.queue if isinstance(each, Copy)]

    def _step(self, stream: SimStream) -> None:
        """Run the next operation of a stream. First run the operations for which this operation waits."""
        head = stream.queue[0]
        if isinstance(head, Wait):
            self.force(head.recording)
        stream.queue.popleft()
        self._time += 1
        if isinstance(head, Recording):
            head.done, head.at = True, self._time
            self._ran.notify_all()
        elif isinstance(head, Copy):
            self._move(head)


def _may_run(head: Copy | Wait | Recording) -> bool:
    return not isinstance(head, Wait) or head.recording.done
