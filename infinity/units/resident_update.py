"""The update of a resident unit, on the device that keeps its states.

The update begins when the step is decided, and never speculates: its kernels are queued on the stream of the step, in
front of the next forward. So it counts as computed at once for everything that uses the unit on the device, and the old
values need not be kept. It is written when its kernels have run and, in a step that is committed, when its states are
in the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from infinity import _native
from infinity.base.accelerator import Accelerator, Event
from infinity.device_update.arithmetic_check import Verdict, check_of
from infinity.device_update.compared_updates import StateDtypes
from infinity.device_update.rules import SCRATCH_ITEMSIZE, Scratch
from infinity.device_update.states import DeviceStates, update_on_device
from infinity.errors import InfinityError
from infinity.state.update_request import GroupUpdate, SegmentRequest
from infinity.tiers.device import DeviceTier
from infinity.tiers.home import StateHome
from infinity.tiers.resident import ResidentMemory
from infinity.tiers.resources import ModelResources
from infinity.tiers.state_writer import StateWrite
from infinity.units.resident_gradients import ResidentGradients
from infinity.units.unit import OffloadedUnit
from infinity.units.update import Destinations, Milestone, UnitUpdate


@dataclass(frozen=True)
class ResidentTransfer:
    """The update of one group of a resident unit, in progress; the interface is that of UpdateTransfer.

    Attributes:
        step: the optimizer step.
        milestone: the milestone that `done`, `wait` and `result` refer to.
    """

    step: int
    milestone: Milestone
    _updates: ResidentUpdates
    _computed: Event
    _flag: ResidentMemory
    _writes: Sequence[StateWrite]

    def until(self, milestone: Milestone) -> ResidentTransfer:
        """Return the transfer up to a milestone."""
        return replace(self, milestone=milestone)

    def done_until(self, milestone: Milestone) -> bool:
        """Return whether the transfer has reached a milestone or has failed."""
        return self.until(milestone).done()

    def done(self) -> bool:
        """Return whether the transfer has reached its milestone or has failed.

        All later uses on the device are ordered behind the update, so only "written" takes time. It includes the
        kernels, so that `finite` need not wait for them.
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
        return any(write.failure is not None for write in self._writes)

    @property
    def finite(self) -> bool:
        """Whether all new weights and moments are finite; valid after `result`."""
        return self._updates.read_flag(self._flag)


class ResidentUpdates:
    """The updates of all resident units of a model."""

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
            raise AssertionError("a resident unit without a device")
        return self._resources.device

    def begin(self, unit: OffloadedUnit, update: UnitUpdate, *, step: int) -> dict[int, ResidentTransfer]:
        """Queue the update of a unit on this thread's stream, and begin its writes to the store.

        The writes begin behind the updates of all groups: an update would wait for copies that are under way.

        Returns:
            The transfers, by group index.

        Raises:
            InfinityError: the device's arithmetic is no longer the native kernel's.
        """
        flags = {index: self._compute(unit, update, index, step=step) for index in update.wanted}
        computed = self.accelerator.record(self.accelerator.current())
        return {
            index: ResidentTransfer(step, "written", self, computed, flag, self._write(update.destinations[index]))
            for index, flag in flags.items()
        }

    def _compute(self, unit: OffloadedUnit, update: UnitUpdate, group_index: int, *, step: int) -> ResidentMemory:
        """Queue the update of a group, and return its flag."""
        group, wanted = unit.local.groups[group_index], update.wanted[group_index]
        homes, gradients, flags = unit.homes.states[group_index], unit.gradients.groups[group_index], unit.homes.flags
        weight = unit.homes.weights.groups[group_index].on_device()
        if not isinstance(gradients, ResidentGradients) or flags is None:
            raise AssertionError(f"unit '{unit.name}' is not resident")
        flag = ResidentMemory(flags.memory[group_index : group_index + 1], flags.uses)
        numel = group.numel

        def view(home: StateHome | None, dtype: torch.dtype) -> torch.Tensor | None:
            return None if home is None else home.on_device().view(dtype, numel)

        scratch = self._device.scratch
        with weight.uses.writing(), flag.uses.writing(), scratch.uses.writing(), gradients.memory.uses.reading():
            if not wanted.arithmetic:
                flag.memory.fill_(True)
                return flag
            states = DeviceStates(
                homes.master,
                weight.view(group.dtype, numel),
                view(homes.residual, torch.int16 if homes.master == "split16" else torch.float32),
                view(homes.exp_avg, torch.float32),
                view(homes.exp_avg_sq, torch.float32),
                gradients.values,
            )
            dtypes = StateDtypes(group.dtype, homes.master, gradients.dtype)
            temporary = self._scratch_of(wanted, dtypes, step, scratch.memory)
            flag.memory.copy_(update_on_device(states, list(_native_segments(wanted)), temporary))
        return flag

    def _write(self, destinations: Destinations) -> list[StateWrite]:
        """Begin the writes of a group's new values to the store; there are none if the step is not committed."""
        return [
            self._resources.require_state_writer().write(each.home, each.copy_index)
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
