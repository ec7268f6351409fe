"""The bytes that a step moves between memory and NVMe, for a placement. The forecast and the choice of a placement
count alike."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from infinity.plan.problem import Problem, UnitBytes


@dataclass(frozen=True)
class Traffic:
    """NVMe bytes while no slot outlives a pass (design §4, with the weights read once more where the update is a phase
    of its own).

    Attributes:
        read_bytes, written_bytes: of one step, without commits.
        commit_bytes: what a whole commit writes of the states in RAM; 0 where there are no commits.
        commit_share_bytes: of those, what falls to one step.
    """

    read_bytes: int
    written_bytes: int
    commit_bytes: int
    commit_share_bytes: int

    @property
    def step_bytes(self) -> int:
        """Both directions, with the share of a commit."""
        return self.read_bytes + self.written_bytes + self.commit_share_bytes


def traffic(
    problem: Problem, weights_in_ram: Collection[int], states_in_ram: Collection[int], gradients_in_ram: Collection[int]
) -> Traffic:
    """Count what a step moves. Each argument but the first names the units, by index, that have so much in RAM."""
    passes, read, written, committed = problem.passes, 0, 0, 0
    for unit in problem.units:
        if unit.index in weights_in_ram:
            committed += unit.trained_weight
        else:
            read += 2 * passes * unit.weight + unit.trained_weight
            written += unit.trained_weight
        if unit.index in states_in_ram:
            committed += unit.state
        else:
            read += unit.state
            written += unit.state
        if unit.index not in gradients_in_ram:
            moved = gradient_traffic(problem, unit)
            read += moved
            written += moved
    committed = committed if problem.commit_every else 0
    return Traffic(read, written, committed, committed // max(problem.commit_every, 1))


def gradient_traffic(problem: Problem, unit: UnitBytes) -> int:
    """What a unit's gradients, which spill, move in one step, each way."""
    # The first of several gradients comes from a device as autograd gives it; on the CPU in fp32, as the others.
    widens = not (problem.passes > 1 or problem.config.vertical) or not problem.limits.in_place
    first = unit.gradient_native if widens else unit.gradient_fp32
    return first + (problem.passes - 1) * unit.gradient_fp32
