"""Generations of several ranks. A generation exists only when every rank has made its part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infinity.durable.commit_pace import CommitSchedule
from infinity.errors import InfinityError
from infinity.io.generations import Generations
from infinity.ranks.world import MultiRankWorld


class MultiRankGenerationMaker:
    """GenerationMaker of one of several ranks (durable/generation_maker.py)."""

    agrees_on_pace = True
    decides_alone = False
    makes_again = False  # if only some ranks made a generation again, no rank would have a complete one

    def __init__(self, world: MultiRankWorld, generations: Generations | None) -> None:
        self._world = world
        self._generations = generations

    def make(self, generations: Generations, step: int, facts: dict[str, Any], body: dict[str, Any]) -> None:
        generations.prepare(step, facts, body)
        self._world.collectives.say(step)

    def payload(self, pace: CommitSchedule) -> list[int]:
        return [pace.every, *(() if self._generations is None else self._generations.steps)]

    def receive(self, told: Sequence[Sequence[int]], pace: CommitSchedule, following: int) -> None:
        """Keep the generations that all ranks have, and delete all other generations.

        Use the longest interval between commits that any rank has measured.
        """
        if self._generations is not None:
            pace.lead(max(every for every, *_ in told), following)
            self._generations.retire(set.intersection(*(set(steps) for _, *steps in told)))

    def agree(self, what: str, pace: CommitSchedule, following: int) -> None:
        self.receive(self._world.tell(what, self.payload(pace)), pace, following)

    def require_made(self, step: int) -> None:
        if self._generations is None or self._generations.newest != step:
            raise InfinityError(f"generation {step} was not made: the ranks committed different steps")

    def retire_early(self) -> None:
        """Remove old generations already before the ranks agree on a step, so that speculative updates have copies to
        which they can write.

        This is done only if the headers of all ranks' operations prove that all ranks have made the newest generation.
        """
        generations = self._generations
        if generations is None or generations.newest is None:
            return
        if all(step == generations.newest for step in self._world.collectives.heard):
            generations.retire(generations.steps)
