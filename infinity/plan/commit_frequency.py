"""Frequency of commits with `commit_every: auto`.

| where the trained weights and the optimizer's states rest | commits |
|---|---|
| all of them on NVMe | every step: a commit writes nothing that the step does not write anyway |
| some of them in RAM | as often as the additional writes take 5 % of the time at most |
| nowhere, or on disks without room for `keep` + `pins` + 1 copies | none |

[Note: what the plan knows of a step's time]
Before training, the time that a step computes is not known. Two facts are known: how many bytes the step moves, and
that the step takes at least as long as its I/O. The plan therefore compares the commit's I/O with the steps' I/O. A
commit that takes 5 % of the I/O of N steps takes at most 5 % of the time of these steps, however fast the disks are. If
a step moves few bytes, the planned N is larger than necessary. N is an upper bound, which the run lowers after it has
measured steps and commits (durable/commit_pace.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from infinity.sizes import format_bytes

COMMITS_SHARE = 0.05
"""Largest share of the time, or of the I/O, that commits may take with `commit_every: auto`."""
EVERY_MAX = 1000
"""Largest number of steps between commits with `commit_every: auto`."""


@dataclass(frozen=True)
class CommitFrequency:
    """Frequency of a run's commits.

    Attributes:
        every: number of steps between durable generations; 0: no generations, states are updated in place.
        reason: reason for the frequency with `commit_every: auto`; '' if the config sets the frequency.
        at_most: whether the run may commit more often than every `every`-th step, as far as measured times allow.
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
        sooner = " or more often, as long as commits take at most 5 % of the time" if self.at_most else ""
        return f"every {self.every} steps{sooner}{why}"


NOTHING_TRAINED = CommitFrequency(0, "nothing is trained")
NO_PATHS = CommitFrequency(0, "no nvme.paths")


def rarest(found: Sequence[CommitFrequency]) -> CommitFrequency:
    """Return how often several ranks commit: as rarely as the rank that commits most rarely. If one rank cannot commit,
    the ranks never commit."""
    none = [each for each in found if not each.every]
    most = none[0] if none else max(found, key=lambda each: each.every)
    return replace(most, at_most=any(each.at_most for each in found) and most.every > 1)


def affordable_every(commit: float, step: float) -> int:
    """Return the smallest N with which a commit costs at most `COMMITS_SHARE` of N steps; at most `EVERY_MAX`.

    Args:
        commit: cost of a commit in addition to the steps.
        step: cost of a step, in the same unit: seconds or bytes.
    """
    if commit >= COMMITS_SHARE * EVERY_MAX * step:
        return EVERY_MAX if commit > 0 else 1
    every = max(math.ceil(commit / (COMMITS_SHARE * step)), 1)
    # every + 1 corrects a division that was rounded down
    return every if commit <= COMMITS_SHARE * every * step else every + 1


def frequency_of(commit_bytes: int, step_bytes: int) -> CommitFrequency:
    """Return how often to commit if the disks have room.

    Args:
        commit_bytes: bytes of the states that rest in RAM; a commit writes all of them.
        step_bytes: bytes that a step reads and writes without a commit.
    """
    if not commit_bytes:
        return CommitFrequency(1, "all states are on NVMe")
    every = affordable_every(commit_bytes, step_bytes)
    written = f"a commit writes {format_bytes(commit_bytes)} of states in RAM"
    if step_bytes:
        written += f": {100 * commit_bytes / (every * step_bytes):.1f} % of the I/O"
    return CommitFrequency(every, written, at_most=every > 1)
