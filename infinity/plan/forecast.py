"""What a step will move on NVMe, and how long that will take."""

from __future__ import annotations

from dataclasses import dataclass

from infinity.config import SwapConfig
from infinity.io.profile import profile_of
from infinity.plan.layout import Layout
from infinity.plan.placement import Placement
from infinity.plan.problem import Problem


@dataclass(frozen=True)
class Forecast:
    """NVMe traffic of one step, when the step before had as many micro-batches and every moment there is room for is
    used. What is read is an upper bound: gradients that are still in the window when the next pass adds to them are not
    read. What a commit writes of the states in RAM is shared out over `commit_every` steps.

    Attributes:
        passes: backward passes before the step, as was planned for.
        rate: bytes per second of the disks together, half reads and half writes, as infinity-bench measured; None
            where it has not, or where nothing is on NVMe.
    """

    passes: int
    read_bytes: int
    written_bytes: int
    rate: float | None

    @property
    def step_bytes(self) -> int:
        """Both directions."""
        return self.read_bytes + self.written_bytes

    @property
    def io_s(self) -> float | None:
        """Seconds of I/O per step; None where the disks were not measured."""
        return None if self.rate is None else self.step_bytes / self.rate


def forecast(problem: Problem, placement: Placement, layout: Layout) -> Forecast:
    """Count what a step moves while no slot outlives a pass (design §4, with the weights read once more where the
    update is a phase of its own)."""
    passes, read, written, committed = problem.passes, 0, 0, 0
    # The first of several gradients comes as autograd gives it to a GPU's window; on the CPU in fp32, as the others.
    widens = passes == 1 or not problem.limits.shares_memory
    for unit in problem.units:
        if unit.index in placement.weights.in_ram:
            committed += unit.trained_weight
        else:
            read += 2 * passes * unit.weight + unit.trained_weight
            written += unit.trained_weight
        if unit.index in placement.optimizer.in_ram:
            committed += unit.state
        else:
            read += unit.state
            written += unit.state
        if unit.index not in placement.gradients.in_ram:
            first = unit.gradient_native if widens else unit.gradient_fp32
            moved = first + (passes - 1) * unit.gradient_fp32
            read += moved
            written += moved
    written += committed // placement.commit_every if placement.commit_every else 0
    return Forecast(passes, read, written, _rate(problem.config) if layout.swap.nbytes else None)


def _rate(config: SwapConfig) -> float | None:
    profiles = {path: profile_of(path) for path in config.nvme.paths}
    known = [profile.mixed_rate for profile in profiles.values() if profile is not None]
    return sum(known) if len(known) == len(profiles) else None
