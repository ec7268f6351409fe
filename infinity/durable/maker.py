"""Who makes generations: a process by itself, or all ranks together (sharded/maker.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from infinity.durable.pace import Pace
from infinity.io.generations import Generations


class Maker(Protocol):
    """All ranks make the same calls, in the same order.

    Attributes:
        led: which steps are committed is agreed on, and not taken from the process's own clock.
        decides_alone: whether the loop has come to its top is known of all who make the generation.
        makes_again: a generation can be made a second time, of states that were written by no step.
    """

    led: bool
    decides_alone: bool
    makes_again: bool

    def make(self, generations: Generations, step: int, facts: dict[str, Any], body: dict[str, Any]) -> None:
        """Make generation `step` of values that are durable. Raises as Generations.prepare."""

    def told(self, pace: Pace) -> list[int]:
        """What the others are told before each step: how often this process would commit, and the steps of its
        generations."""

    def heard(self, told: Sequence[Sequence[int]], pace: Pace, following: int) -> None:
        """All have told, and nothing is under way. Args: following: the next step."""

    def agree(self, what: str, pace: Pace, following: int) -> None:
        """Tell, and hear. Raises PeerError. Args: what: the ranks are at."""

    def require_made(self, step: int) -> None:
        """Raises InfinityError: not all have made generation `step`."""

    def retire_early(self) -> None:
        """Let older generations go before a step, where that is known to be right."""


class LocalMaker:
    """One process (Maker)."""

    led = False
    decides_alone = True
    makes_again = True

    def make(self, generations: Generations, step: int, facts: dict[str, Any], body: dict[str, Any]) -> None:
        generations.make(step, facts, body)

    def told(self, pace: Pace) -> list[int]:
        return []

    def heard(self, told: Sequence[Sequence[int]], pace: Pace, following: int) -> None:
        return

    def agree(self, what: str, pace: Pace, following: int) -> None:
        return

    def require_made(self, step: int) -> None:
        return

    def retire_early(self) -> None:
        return
