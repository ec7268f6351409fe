"""Prediction of a step's time from the bytes that the step moves, its computation, and the rates of a machine.

[Note: how a step is predicted]
The resources of a machine are the disks, the links to and from the device, the processor, memory, and the device. In a
step, each resource has an amount of work. The processor computes Adam and checksums, and adds up landing gradients. If
there is no device, the processor also computes forward, backward and decoding. The device also updates the resident
units. If updates run in parallel with forward and backward, a step takes slightly longer than its busiest resource
needs, because the resources never overlap completely (`OVERLAPPED`). With `overlap: off` the updates run after forward
and backward. The step then takes the time of the busiest resource in forward and backward, plus the time of the busiest
resource in the updates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from infinity.plan.link_traffic import LinkBytes, UnitLoad, operands_of
from infinity.plan.plan import Plan
from infinity.plan.step_flow import StepFlow, UnitSeconds
from infinity.state.machine_rates import ADAM_BYTES, RESIDENT_ADAM_BYTES, RESIDENT_NORM_BYTES, MachineRates
from infinity.state.training_step import StepWork

OVERLAPPED = 1.08
"""Ratio of a step's time to the time that its busiest resource needs.

Measurements on the CPU gave 1.05 to 1.15 (bench/results).
"""


@dataclass(frozen=True)
class StepTimePrediction:
    """The predicted time of one step.

    Attributes:
        seconds: seconds of the step.
        busy: seconds that each resource needs for its work, by name: compute, disk, processor, memory, up, down,
            between. Resources without work are left out.
        compute_s: seconds of forward and backward, on the device or on the processor.
        moved: bytes that the step moves, on which the prediction is based.
    """

    seconds: float
    busy: Mapping[str, float]
    compute_s: float
    moved: LinkBytes

    @property
    def bound(self) -> str:
        """The busiest resource."""
        return max(self.busy, key=lambda name: self.busy[name])


def predict(
    plan: Plan, work: StepWork, machine: MachineRates, *, clips: bool = False, checksums: bool = True
) -> StepTimePrediction:
    """Predict the time of a step of one process. The machine is shared by `plan.peers.on_machine` processes.

    Args:
        plan: the plan.
        work: the computation of a step.
        machine: rates of the machine.
        clips: whether gradients are clipped in most steps.
        checksums: whether checksums are computed for all data to and from the store, as the swap config says.
    """
    moved = plan.forecast.moved_clipping if clips else plan.forecast.moved
    ranks = plan.peers.on_machine
    share = _MachineShare(plan, machine if checksums else replace(machine, checksums=math.inf), ranks)
    passes = share.passes(moved, work)
    updates = share.updates(moved)
    together = {name: passes.get(name, 0.0) + updates.get(name, 0.0) for name in {**passes, **updates}}
    busy = {name: seconds for name, seconds in together.items() if seconds > 0}
    if plan.placement.updates.overlap == "off":
        seconds = max(passes.values(), default=0.0) + max(updates.values(), default=0.0)
    else:
        seconds = OVERLAPPED * max([*busy.values(), share.flow(moved, work, busy)])
    return StepTimePrediction(seconds, busy, work.flops / machine.flops * (1 if machine.is_gpu else ranks), moved)


def _products(load: UnitLoad, work: StepWork) -> float:
    """Return the number of elements of a unit by which activations are multiplied."""
    specs = [spec for group in load.unit.full.groups for spec in group.specs]
    return float(sum(spec.numel for spec in specs if len(spec.shape) > 1 and spec.name not in work.looked_up))


class _MachineShare:
    """The share of a machine that one of `ranks` processes has, with the times for which a step occupies this share."""

    def __init__(self, plan: Plan, machine: MachineRates, ranks: int) -> None:
        self._plan, self._machine, self._ranks = plan, machine, ranks

    def disk(self, read: float, written: float) -> float:
        """Return the seconds that the disks need to read and write these numbers of bytes.

        As long as there are bytes to read and bytes to write, both run at the same time at the mixed rate. The
        remaining bytes are read at the read rate, or written at the write rate.
        """
        machine, mixed = self._machine, min(read, written)
        by_turns = read / machine.disk_read + written / machine.disk_write
        of_mix = mixed / machine.disk_read + mixed / machine.disk_write
        return self._ranks * (by_turns + (1 / machine.disk_mixed - 1) * of_mix)

    def passes(self, moved: LinkBytes, work: StepWork) -> dict[str, float]:
        """Return the seconds for which forward and backward occupy each resource."""
        machine, cores = self._machine, self._of_cores
        # If several micro-batches go through a layer in one pass, each has its own gradients, except if they are added
        # up on the device.
        passes = max(self._plan.forecast.passes, 1)
        landings = 1.0 if self._plan.budgets.ring.adds_up else work.landings / passes
        landed = self._landing_numel * landings * passes * self._senders
        on_nvme = work.moved_bytes if self._plan.placement.activations == "nvme" else 0
        checked = moved.weights + 2 * moved.gradients + 2 * on_nvme
        busy = {
            "disk": self.disk(moved.weights + moved.gradients + on_nvme, moved.gradients + on_nvme),
            "processor": cores(landed / machine.land) + cores(checked / machine.checksums),
        }
        if machine.is_gpu:
            busy |= {"compute": work.flops / machine.flops}
            down = landings * moved.down + moved.resident + work.moved_bytes
            busy |= {"up": (moved.up + work.moved_bytes) / machine.up, "down": down / machine.down}
            busy["memory"] = self._ranks * (moved.up + moved.down + moved.resident + moved.weights) / machine.dram
        else:
            busy["processor"] += cores(work.flops / machine.flops)
            busy["processor"] += cores(moved.decoded / 2 / machine.decode) if machine.decode else 0.0
        exchanged = landings * moved.exchanged
        between = moved.gathered + exchanged
        if self._plan.peers.sharing != "nothing":  # bytes are read from one region of RAM and written to another
            copied = exchanged if machine.is_gpu else between  # the bytes to a device are in moved.up
            busy["memory"] = busy.get("memory", 0.0) + self._ranks * 2 * copied / machine.dram
        elif machine.between and not self._plan.peers.cut.whole:
            busy["between"] = between / machine.between
        return busy

    def updates(self, moved: LinkBytes) -> dict[str, float]:
        machine, layout = self._machine, self._plan.layout
        numel = layout.trainable_numel - layout.updated_on_device_numel
        moments = self._plan.placement.form.moments
        adam = self._of_cores(numel / machine.adam.get(moments, machine.adam["fp32"]))
        states = moved.states + moved.written + moved.commit_share
        busy = {
            "disk": self.disk(moved.states, moved.written + moved.commit_share),
            "processor": adam + self._of_cores(states / machine.checksums),
            "memory": self._ranks * numel * ADAM_BYTES[moments] / machine.dram,
        }
        if layout.updated_on_device_numel:
            there = layout.updated_on_device_numel * RESIDENT_ADAM_BYTES + layout.resident_numel * RESIDENT_NORM_BYTES
            busy["compute"] = there / machine.hbm
            busy["up"], busy["down"] = moved.operands / machine.up, moved.results / machine.down
            busy["memory"] += self._ranks * (moved.operands + moved.results) / machine.dram
        return busy

    def flow(self, moved: LinkBytes, work: StepWork, busy: Mapping[str, float]) -> float:
        """Return the seconds of the flow of a step (step_flow.py); 0 if the processor computes the model.

        Args:
            moved: bytes that the step moves.
            work: the computation of the step.
            busy: seconds that each resource needs.
        """
        machine, cores = self._machine, self._of_cores
        if not machine.is_gpu or not moved.loads:
            return 0.0
        moments = self._plan.placement.form.moments
        adam = machine.adam.get(moments, machine.adam["fp32"])
        products = [_products(load, work) for load in moved.loads]
        whole, landings = sum(products) or 1.0, work.landings / max(self._plan.forecast.passes, 1)
        landings = 1.0 if self._plan.budgets.ring.adds_up else landings
        slowed = max(busy.get("memory", 0.0) / busy["processor"], 1.0) if busy.get("processor") else 1.0

        def seconds(load: UnitLoad, of_unit: float) -> UnitSeconds:
            numel = sum(group.group.numel for group in load.unit.groups if group.group.trainable)
            written = self.disk(0, load.states_written)
            there = load.resident or load.updated_on_device
            checked = cores((load.states_read + load.states_written + load.read * load.forwards) / machine.checksums)
            return UnitSeconds(
                forward_s=of_unit / whole * work.forward_flops / machine.flops,
                backward_s=of_unit / whole * (work.flops - work.forward_flops) / machine.flops,
                on_device=numel * RESIDENT_ADAM_BYTES / machine.hbm if load.resident else 0.0,
                beside=self._beside(load, numel) if load.updated_on_device else 0.0,
                fetch_forward=load.forwards * load.fetched / machine.up,
                fetch_backward=load.backwards * load.fetched / machine.up,
                read_forward=self.disk(load.forwards * load.read, 0),
                read_backward=self.disk(load.backwards * load.read, 0),
                down=landings * load.down / machine.down,
                land=0.0 if load.resident else slowed * cores(landings * numel * self._senders / machine.land),
                spill=self.disk(0, load.spilled),
                update=0.0 if there else slowed * (cores(numel / adam) + checked),
                read=self.disk(load.states_read + load.spilled, load.states_written) - written,
                write=written,
                slot_bytes=load.slot,
                ring_bytes=0 if load.resident else load.unit.full.gradient_bytes,
                speculates=load.speculates,
            )

        units = [seconds(load, of_unit) for load, of_unit in zip(moved.loads, products, strict=True)]
        norm = self._plan.layout.resident_numel * RESIDENT_NORM_BYTES / machine.hbm
        return StepFlow(units, self._plan.budgets.slot_bytes, self._plan.budgets.ring_bytes, norm).seconds()

    def _beside(self, load: UnitLoad, numel: int) -> float:
        """Return the seconds of a unit's update on the device with weights and gradients from RAM. Its copies run
        beside the updates of other units."""
        machine, unit = self._machine, load.unit
        copies = max(operands_of(unit) / machine.up, unit.trained_weight / machine.down)
        return max(numel * RESIDENT_ADAM_BYTES / machine.hbm, copies)

    @property
    def _senders(self) -> int:
        """Number of ranks whose gradients a rank adds."""
        return max(self._plan.budgets.limits.slice_count, 1)

    @property
    def _landing_numel(self) -> int:
        """Number of parameters whose gradients go to host memory."""
        return self._plan.layout.trainable_numel - self._plan.layout.resident_numel

    def _of_cores(self, seconds: float) -> float:
        """Return the seconds that a rank's work takes on the cores.

        All cores together would need `seconds`, but the ranks share the cores.
        """
        return self._ranks * seconds
