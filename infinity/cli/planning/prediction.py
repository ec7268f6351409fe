"""How long a step takes, from what it moves and computes, and the rates of a machine.

[Note: how a step is predicted]
Each resource has so much to do in a step: the disks, the links to the device and from it, the processor (Adam, landing
of gradients, checksums, and without a device forward, backward and decoding), memory, and the device. Where updates run
beside the passes, a step takes as long as the busiest of them, and a little more, as nothing is hidden without a rest
(`OVERLAPPED`). With `overlap: off` the passes come first and the updates after them: the busiest of each is added up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from infinity.cli.planning.rates import ADAM_BYTES, Machine
from infinity.plan.expected import Moved
from infinity.plan.plan import Plan

OVERLAPPED = 1.08
"""Seconds of a step over those of its busiest resource, measured on the CPU: 1.05 to 1.15 (bench/results)."""


@dataclass(frozen=True)
class Work:
    """What a step computes.

    Attributes:
        flops: forward and backward of all micro-batches.
        tokens: of all micro-batches of this process.
        landings: how often each gradient comes, be it to be added to others.
        peak_bytes: of device memory beside slots, at most, with what all micro-batches that pass a unit together keep
            between forward and backward.
    """

    flops: float
    tokens: int
    landings: int
    peak_bytes: int


@dataclass(frozen=True)
class Prediction:
    """Seconds of one step.

    Attributes:
        seconds: of the step.
        busy: of each resource alone, by name: compute, disk, processor, memory, up, down, between; those that have
            something to do.
        compute_s: of forward and backward, wherever they are computed.
        moved: what was counted with.
    """

    seconds: float
    busy: Mapping[str, float]
    compute_s: float
    moved: Moved

    @property
    def bound(self) -> str:
        """The busiest resource."""
        return max(self.busy, key=lambda name: self.busy[name])


def predict(plan: Plan, work: Work, machine: Machine, *, clips: bool = False, checksums: bool = True) -> Prediction:
    """Predict a step of one process of the plan, of `plan.peers.on_machine` that share this machine.

    Args:
        clips: gradients are clipped in most steps.
        checksums: of what goes to the store and comes from it, as in the swap config.
    """
    moved = plan.forecast.moved_clipping if clips else plan.forecast.moved
    ranks = plan.peers.on_machine
    share = _Share(plan, machine if checksums else replace(machine, checksums=math.inf), ranks)
    passes = share.passes(moved, work)
    updates = share.updates(moved)
    together = {name: passes.get(name, 0.0) + updates.get(name, 0.0) for name in {**passes, **updates}}
    busy = {name: seconds for name, seconds in together.items() if seconds > 0}
    if plan.placement.updates.overlap == "off":
        seconds = max(passes.values(), default=0.0) + max(updates.values(), default=0.0)
    else:
        seconds = OVERLAPPED * max(busy.values(), default=0.0)
    return Prediction(seconds, busy, work.flops / machine.flops * (1 if machine.is_gpu else ranks), moved)


class _Share:
    """What one of `ranks` processes gets of a machine, and how long it is busy with what a step has."""

    def __init__(self, plan: Plan, machine: Machine, ranks: int) -> None:
        self._plan, self._machine, self._ranks = plan, machine, ranks

    def disk(self, read: float, written: float) -> float:
        """Reads and writes take turns, and those that there are as many bytes of get what the mix of both gets."""
        machine, mixed = self._machine, min(read, written)
        by_turns = read / machine.disk_read + written / machine.disk_write
        of_mix = mixed / machine.disk_read + mixed / machine.disk_write
        return self._ranks * (by_turns + (1 / machine.disk_mixed - 1) * of_mix)

    def passes(self, moved: Moved, work: Work) -> dict[str, float]:
        """Forward and backward."""
        machine, cores = self._machine, self._of_cores
        # Of micro-batches that go through a layer together, each one's gradients come, if they do not add up before.
        passes = max(self._plan.forecast.passes, 1)
        landings = 1.0 if self._plan.budgets.adds_up else work.landings / passes
        landed = self._plan.layout.trainable_numel * landings * passes
        checked = moved.weights + 2 * moved.gradients
        busy = {
            "disk": self.disk(moved.weights + moved.gradients, moved.gradients),
            "processor": cores(landed / machine.land) + cores(checked / machine.checksums),
        }
        if machine.is_gpu:
            busy |= {"compute": work.flops / machine.flops}
            busy |= {"up": moved.up / machine.up, "down": landings * moved.down / machine.down}
            busy["memory"] = self._ranks * (moved.up + moved.down + moved.weights) / machine.dram
        else:
            busy["processor"] += cores(work.flops / machine.flops)
            busy["processor"] += cores(moved.decoded / 2 / machine.decode) if machine.decode else 0.0
        if machine.between and self._plan.peers.cut.count > 1:
            busy["between"] = (moved.gathered + landings * moved.exchanged) / machine.between
        return busy

    def updates(self, moved: Moved) -> dict[str, float]:
        machine, numel = self._machine, self._plan.layout.trainable_numel
        moments = self._plan.placement.form.moments
        adam = self._of_cores(numel / machine.adam.get(moments, machine.adam["fp32"]))
        states = moved.states + moved.written + moved.commit_share
        return {
            "disk": self.disk(moved.states, moved.written + moved.commit_share),
            "processor": adam + self._of_cores(states / machine.checksums),
            "memory": self._ranks * numel * ADAM_BYTES[moments] / machine.dram,
        }

    def _of_cores(self, seconds: float) -> float:
        """With all cores, which the ranks share."""
        return self._ranks * seconds
