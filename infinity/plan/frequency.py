"""How often a run commits where the swap config leaves it open (commit_every: auto).

| where the trained weights and the optimizer's states rest | a commit |
|---|---|
| all of them on NVMe | every step: nothing is written that the step does not write anyway |
| some of them in RAM | as often as what it writes besides takes 5 % of the time at most |
| nowhere, or nowhere on a disk that has room for `keep` + `pins` + 1 copies | none |

[Note: what the plan knows of a step's time]
Before training nobody knows how long a step computes. What is known is how many bytes it moves, and that it takes as
long as its I/O at least. So the plan compares I/O with I/O: a commit that takes 5 % of the I/O of N steps takes 5 % of
their time at most, whatever the disks' rate. Where steps move little that N is larger than it need be: it is an upper
bound, and the run lowers it to what it measures (durable/pace.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from infinity.sizes import format_bytes

COMMITS_SHARE = 0.05
"""Of the time, or of the I/O: what commits may take where the config leaves it open."""
EVERY_MAX = 1000
"""Steps between commits at most, where the config leaves it open."""


@dataclass(frozen=True)
class Frequency:
    """How often a run commits.

    Attributes:
        every: steps between durable generations; 0: none, states are updated in place.
        reason: why, where the config leaves it open; '' where the config says how often.
        at_most: the run may commit more often than every `every`-th step, as far as measured times allow.
    """

    every: int
    reason: str = ""
    at_most: bool = False

    def __str__(self) -> str:
        why = f" ({self.reason})" if self.reason else ""
        if not self.every:
            return f"none{why or ' (commit_every: 0)'}"
        if self.every == 1:
            return f"every step{why}"
        sooner = " at the latest, sooner as far as that takes 5 % of the time" if self.at_most else ""
        return f"every {self.every} steps{sooner}{why}"


NOTHING_TRAINED = Frequency(0, "nothing is trained")
NO_PATHS = Frequency(0, "no nvme.paths")


def rarest(found: Sequence[Frequency]) -> Frequency:
    """How often several ranks commit, each of which can and would as often as this says: none where one cannot."""
    none = [each for each in found if not each.every]
    most = none[0] if none else max(found, key=lambda each: each.every)
    return replace(most, at_most=any(each.at_most for each in found) and most.every > 1)


def affordable_every(commit: float, step: float) -> int:
    """The smallest number of steps of which a commit takes `COMMITS_SHARE` at most; `EVERY_MAX` where that is more.

    Args:
        commit: what a commit costs beside the steps.
        step: what a step costs, in the same unit: seconds or bytes.
    """
    if commit >= COMMITS_SHARE * EVERY_MAX * step:
        return EVERY_MAX if commit > 0 else 1
    every = max(math.ceil(commit / (COMMITS_SHARE * step)), 1)
    return every if commit <= COMMITS_SHARE * every * step else every + 1  # where the division was rounded down


def frequency_of(commit_bytes: int, step_bytes: int) -> Frequency:
    """How often to commit where the disks have room.

    Args:
        commit_bytes: what a commit writes of the states that rest in RAM.
        step_bytes: what a step reads and writes without a commit.
    """
    if not commit_bytes:
        return Frequency(1, "all states rest on NVMe")
    every = affordable_every(commit_bytes, step_bytes)
    written = f"a commit writes {format_bytes(commit_bytes)} that rest in RAM"
    if step_bytes:
        written += f": {100 * commit_bytes / (every * step_bytes):.1f} % of the I/O"
    return Frequency(every, written, at_most=every > 1)
