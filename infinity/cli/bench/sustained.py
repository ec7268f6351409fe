"""`--sustained`: writing until the rate is constant.

A drive first writes into a cache of fast cells, and writes more slowly once the cache is full. The slower rate is the
rate of a long training run.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infinity.cli.bench.workload import Workload, WorkloadRunner

_MINUTE_S = 60.0
_SETTLED = 0.05


@dataclass(frozen=True)
class SustainedRate:
    """The mean rate in each minute, in bytes per second. If `settled` is true, the last value is the sustained rate."""

    rates: Sequence[float]
    written_bytes: int
    settled: bool


def settled(rates: Sequence[float]) -> bool:
    """Return whether the rates of the last three minutes differ by less than 5 % from minute to minute.

    Two minutes would not suffice, because their rates may be equal by chance.
    """
    last = rates[-3:]
    return len(last) == 3 and all(abs(after - before) < _SETTLED * before for before, after in itertools.pairwise(last))


def sustain(
    rig: WorkloadRunner, workload: Workload, limit_s: float, say: Callable[[float, int], None]
) -> SustainedRate:
    """Overwrite the file repeatedly, a minute at a time.

    Args:
        rig: the file and its memory.
        workload: the workload of each run.
        limit_s: seconds after which the writing stops, even if the rate is not constant.
        say: function that is called after each minute, with the rate and the bytes of that minute.

    Raises:
        BenchError: the disk failed.
    """
    rates, in_all = list[float](), 0
    end = time.monotonic() + limit_s
    while time.monotonic() < end and not settled(rates):
        began, written, busy = time.monotonic(), 0, 0.0
        while time.monotonic() - began < _MINUTE_S:
            sample = rig.run(workload)
            written += sample.nbytes
            busy += sample.seconds
        rates.append(written / busy)
        in_all += written
        say(rates[-1], written)
    return SustainedRate(rates, in_all, settled(rates))
