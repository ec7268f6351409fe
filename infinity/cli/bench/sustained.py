"""`--sustained`: writing until the rate settles. Drives write fast into a cache of fast cells, and slower once it is
full; a training run lives with the second rate."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infinity.cli.bench.workload import Rig, Workload

_MINUTE_S = 60.0
_SETTLED = 0.05


@dataclass(frozen=True)
class Minute:
    """Bytes per second of one minute of overwriting."""

    rate: float
    written_bytes: int


@dataclass(frozen=True)
class Sustained:
    """All minutes; the last is the sustained rate when `settled`."""

    minutes: Sequence[Minute]
    settled: bool

    @property
    def written_bytes(self) -> int:
        return sum(minute.written_bytes for minute in self.minutes)


def settled(rates: Sequence[float]) -> bool:
    """Less than 5 % between each two of the last three minutes: once may be chance."""
    if len(rates) < 3:
        return False
    last = rates[-3:]
    return all(abs(after - before) < _SETTLED * before for before, after in itertools.pairwise(last))


def sustain(
    rig: Rig,
    workload: Workload,
    limit_s: float,
    say: Callable[[Minute], None] = lambda _: None,
    minute_s: float = _MINUTE_S,
) -> Sustained:
    """Overwrite the file again and again, a minute at a time.

    Args:
        limit_s: stop after so long in any case.
        minute_s: for tests.

    Raises:
        BenchError: the disk failed.
    """
    minutes: list[Minute] = []
    end = time.monotonic() + limit_s
    while time.monotonic() < end and not settled([minute.rate for minute in minutes]):
        began, written, busy = time.monotonic(), 0, 0.0
        while time.monotonic() - began < minute_s:
            sample = rig.run(workload)
            written += sample.nbytes
            busy += sample.seconds
        minutes.append(Minute(written / busy, written))
        say(minutes[-1])
    return Sustained(tuple(minutes), settled([minute.rate for minute in minutes]))
