"""Makers of generations: a single process, or all ranks together (sharded/multi_rank_generation_maker.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from infinity.durable.commit_pace import CommitSchedule
from infinity.io.generations import Generations


class GenerationMaker(Protocol):
    """A maker of generations. All ranks must make the same calls in the same order.

    Attributes:
        agrees_on_pace: whether several ranks agree on the steps that are committed. A single process decides by its own
            clock.
        decides_alone: whether this process can decide without other ranks that the loop has reached its top.
        makes_again: whether a generation can be made again after states were written outside of a step.
    """

    agrees_on_pace: bool
    decides_alone: bool
    makes_again: bool

    def make(self, generations: Generations, step: int, facts: dict[str, Any], body: dict[str, Any]) -> None:
        """Make generation `step`. Its states must already be durable. Raises the errors of Generations.prepare."""

    def payload(self, pace: CommitSchedule) -> list[int]:
        """Return the report that this rank sends to the other ranks before each step.

        The report has the number of steps between commits that this process measured, and the steps of its generations.
        The report of a single process is empty.
        """

    def receive(self, told: Sequence[Sequence[int]], pace: CommitSchedule, following: int) -> None:
        """Process the reports of all ranks while no write is in flight.

        Remove generations that some ranks do not have. `following` is the next step.
        """

    def agree(self, what: str, pace: CommitSchedule, following: int) -> None:
        """Send this rank's report to all ranks, and process the reports of all ranks.

        `what` names the operation in errors. Raises PeerError.
        """

    def require_made(self, step: int) -> None:
        """Raise InfinityError if any rank has not made generation `step`."""

    def retire_early(self) -> None:
        """If all ranks are known to have made the newest generation, remove older generations before a step."""


class SingleProcessGenerationMaker:
    """GenerationMaker of a single process."""

    agrees_on_pace = False
    decides_alone = True
    makes_again = True

    def make(self, generations: Generations, step: int, facts: dict[str, Any], body: dict[str, Any]) -> None:
        generations.make(step, facts, body)

    def payload(self, pace: CommitSchedule) -> list[int]:
        return []

    def receive(self, told: Sequence[Sequence[int]], pace: CommitSchedule, following: int) -> None:
        return

    def agree(self, what: str, pace: CommitSchedule, following: int) -> None:
        return

    def require_made(self, step: int) -> None:
        return

    def retire_early(self) -> None:
        return
