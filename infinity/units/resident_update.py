"""The update of a unit on the device that keeps its optimizer states.

The update begins when the step is decided, and never speculates: its kernels are queued on the stream of the step, in
front of the next forward. So the update of a resident unit counts as computed at once for everything that uses the unit
on the device, and the old values need not be kept. It is written when its kernels have run and, in a step that is
committed, when its states are in the store.

If the weights and gradients rest in RAM, because several ranks share them, they are copied to the device for the update
(tiers/operands.py), beside the compute of other streams. The new weights are published when they are in RAM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from infinity import _native
from infinity.base.accelerator import Accelerator, Event
from infinity.device_update.arithmetic_check import Verdict, check_of
from infinity.device_update.compared_updates import StateDtypes
from infinity.device_update.rules import SCRATCH_ITEMSIZE, Scratch
from infinity.device_update.states import DeviceStates, update_on_device
from infinity.errors import InfinityError
from infinity.io.engine import Transfer
from infinity.state.update_request import GroupUpdate, SegmentRequest
from infinity.tiers.device import DeviceTier
from infinity.tiers.home import StateHome
from infinity.tiers.operands import Operands
from infinity.tiers.resident import ResidentMemory
from infinity.tiers.resources import ModelResources
from infinity.tiers.state_writer import StateWrite
from infinity.units.resident_gradients import ResidentGradients
from infinity.units.unit import OffloadedUnit
from infinity.units.update import Destinations, Milestone, UnitUpdate


@dataclass(frozen=True)
class ResidentTransfer:
    """The update of one group on the device, in progress; the interface is that of UpdateTransfer.

    Attributes:
        step: the optimizer step.
        milestone: the milestone that `done`, `wait` and `result` refer to.
        landed: arrival of the new weights in RAM; None if they stay on the device.
    """

    step: int
    milestone: Milestone
    _updates: ResidentUpdates
    _computed: Event
    _flag: ResidentMemory
    _writes: Sequence[StateWrite | Transfer]
    landed: Transfer | None = None

    def until(self, milestone: Milestone) -> ResidentTransfer:
        """Return the transfer up to a milestone."""
        return replace(self, milestone=milestone)

    def done_until(self, milestone: Milestone) -> bool:
        """Return whether the transfer has reached a milestone or has failed."""
        return self.until(milestone).done()

    def landing(self, milestone: Milestone) -> Transfer | None:
        """Return the transfer of the new weights to RAM; None if they stay on the device."""
        return self.landed

    def done(self) -> bool:
        """Return whether the transfer has reached its milestone or has failed.

        All later uses on the device are ordered behind the update, and uses of new weights in RAM wait for their
        publication (UnitUpdate.publication). So only "written" takes time. It includes the kernels, so that `finite`
        need not wait for them.
        """
        if self.milestone != "written":
            return True
        return all(write.done() for write in self._writes) and self._updates.accelerator.reached(self._computed)

    def wait(self) -> None:
        """Wait until the states are in the store, or a write has failed. This does not wait for the device."""
        for write in self._writes if self.milestone == "written" else ():
            write.wait()

    def result(self) -> None:
        """Wait, and raise the error of a write to the store.

        Raises:
            SwapIOError: a write failed.
        """
        for write in self._writes if self.milestone == "written" else ():
            write.result()

    @property
    def has_failed(self) -> bool:
        """Whether a write to the store has failed. Does not wait."""
        return any(write.has_failed for write in self._writes)

    @property
    def finite(self) -> bool:
        """Whether all new weights and moments are finite; valid after `result`."""
        return self._updates.read_flag(self._flag)


class ResidentUpdates:
    """The updates of all units of a model that the device updates."""

    def __init__(self, resources: ModelResources) -> None:
        self._resources = resources
        self._checked = 0  # step of `_verdicts`
        self._verdicts: dict[tuple[_native.RuleName, StateDtypes], Verdict] = {}
        self._side = None if resources.device is None else self.accelerator.stream()

    @property
    def accelerator(self) -> Accelerator:
        return self._device.accelerator

    @property
    def _device(self) -> DeviceTier:
        if self._resources.device is None:
            raise AssertionError("an update on the device without a device")
        return self._resources.device

    def begin(self, unit: OffloadedUnit, update: UnitUpdate, *, step: int) -> dict[int, ResidentTransfer]:
        """Queue the update of a unit, and begin its writes to the store.

        The update of a resident unit is queued on this thread's stream, in front of the next forward. Other updates
        have a stream of their own, because the next forward waits for each unit's new weights in RAM only. The writes
        begin behind the updates of all groups: an update would wait for copies that are under way.

        Returns:
            The transfers, by group index.

        Raises:
            InfinityError: the device's arithmetic is no longer the native kernel's.
        """
        queue = self._device.operands
        stream = (
            self.accelerator.current() if queue is None or unit.homes.weights.resident is not None else queue.updates
        )
        flags, landed = dict[int, ResidentMemory](), dict[int, Transfer | None]()
        with self.accelerator.on(stream):
            for index in update.wanted:
                operands = self._operands(unit, index)
                flags[index] = self._compute(unit, update, index, operands, step=step)
                future = None if queue is None else queue.send(operands)
                landed[index] = None if future is None else Transfer(future, unit.name, "weight", step)
            computed = self.accelerator.record(stream)
        return {
            index: ResidentTransfer(
                step,
                "written",
                self,
                computed,
                flag,
                self._write(update.destinations[index], landed[index]),
                landed[index],
            )
            for index, flag in flags.items()
        }

    def _operands(self, unit: OffloadedUnit, group_index: int) -> Operands:
        """Return the device memory of a group's weights and gradients. If they rest in RAM, they are copied first."""
        home, gradients = unit.homes.weights.groups[group_index], unit.gradients.groups[group_index]
        if isinstance(gradients, ResidentGradients):
            return Operands(home.on_device(), gradients.memory, gradients.dtype)
        if self._device.operands is None:
            raise AssertionError("an update from RAM on a device without memory for it")
        return self._device.operands.bring(home.view(), gradients.in_ram(), gradients.dtype)

    def _compute(
        self, unit: OffloadedUnit, update: UnitUpdate, group_index: int, operands: Operands, *, step: int
    ) -> ResidentMemory:
        """Queue the update of a group, and return its flag."""
        group, wanted = unit.local.groups[group_index], update.wanted[group_index]
        homes, flags = unit.homes.states[group_index], unit.homes.flags
        if flags is None:
            raise AssertionError(f"unit '{unit.name}' is not updated on the device")
        flag = ResidentMemory(flags.memory[group_index : group_index + 1], flags.uses)
        numel = group.numel

        def view(home: StateHome | None, dtype: torch.dtype) -> torch.Tensor | None:
            return None if home is None else home.on_device().view(dtype, numel)

        scratch, weight, gradient = self._device.scratch, operands.weight, operands.gradient
        states = [home.on_device() for home in homes.homes()]
        with ExitStack() as uses:
            for each in dict.fromkeys(memory.uses for memory in (weight, flag, scratch, *states)):
                uses.enter_context(each.writing())
            if gradient.uses is not weight.uses:
                uses.enter_context(gradient.uses.reading())
            if not wanted.arithmetic:
                flag.memory.fill_(True)
                return flag
            of_group = DeviceStates(
                homes.master,
                weight.view(group.dtype, numel),
                view(homes.residual, torch.int16 if homes.master == "split16" else torch.float32),
                view(homes.exp_avg, torch.float32),
                view(homes.exp_avg_sq, torch.float32),
                gradient.view(operands.dtype, numel),
            )
            dtypes = StateDtypes(group.dtype, homes.master, operands.dtype)
            temporary = self._scratch_of(wanted, dtypes, step, scratch.memory)
            flag.memory.copy_(update_on_device(of_group, list(_native_segments(wanted)), temporary))
        return flag

    def _write(self, destinations: Destinations, landed: Transfer | None) -> list[StateWrite | Transfer]:
        """Begin the writes of a group's new values to the store; there are none if the step is not committed.

        Args:
            destinations: destinations of the group.
            landed: arrival of the new weights in RAM; None if they stay on the device.
        """
        after = None if landed is None else landed.future
        return [
            each.home.save(self._resources, each.copy_index, after)
            for each in destinations.values()
            if each.copy_index is not None
        ]

    def _scratch_of(self, wanted: GroupUpdate, dtypes: StateDtypes, step: int, memory: torch.Tensor) -> Scratch:
        """Return the temporary memory for an update, with the kernels or the form of root that are right on this
        device."""
        rules = {dict(segment.options)["rule"] for segment in wanted.segments}
        verdicts = [self._verdict(rule, dtypes, step) for rule in rules]
        numel = memory.numel() // SCRATCH_ITEMSIZE
        wide_root = any(verdict.wide_root for verdict in verdicts)
        kernels = verdicts[0].kernels if verdicts and all(verdict.kernels for verdict in verdicts) else None
        memory = memory[: numel * SCRATCH_ITEMSIZE]
        return Scratch(memory.device, numel, wide_root=wide_root, kernels=kernels, memory=memory)

    def _verdict(self, rule: _native.RuleName, dtypes: StateDtypes, step: int) -> Verdict:
        """Return the verdict about a rule's arithmetic. It is asked for once per step, because the mode for denormal
        numbers may have changed."""
        if step != self._checked:
            self._checked, self._verdicts = step, {}
        if (rule, dtypes) not in self._verdicts:
            verdict = check_of(self.accelerator.device).verdict(rule, dtypes)
            if verdict.difference is not None:
                raise InfinityError(
                    f"the arithmetic of {self.accelerator.device} is no longer the CPU's ({verdict.difference}): an "
                    "update there would not give the same bits. Call torch.set_flush_denormal(False), or resume the "
                    "run with optimizer: host."
                )
            self._verdicts[rule, dtypes] = verdict
        return self._verdicts[rule, dtypes]

    def read_flag(self, flag: ResidentMemory) -> bool:
        """Return a flag, without waiting for what is queued on the stream of the forward."""
        with self.accelerator.on(self._side):
            return bool(flag.read(0, 1).item())


def _native_segments(wanted: GroupUpdate) -> Iterator[_native.Segment]:
    """Yield the segments. Neighbours with the same hyperparameters are one segment, which takes fewer kernels."""
    merged: list[SegmentRequest] = []
    for segment in wanted.segments:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.end == segment.begin
            and last._replace(begin=0, end=0, model_index=0) == (segment._replace(begin=0, end=0, model_index=0))
        ):
            merged[-1] = last._replace(end=segment.end)
        else:
            merged.append(segment)
    yield from replace(wanted, segments=tuple(merged)).native_segments()
