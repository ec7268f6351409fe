"""Weights and gradients from RAM for updates on the device, and the new weights back to RAM.

[Note: the way of an update whose weights rest in RAM]

    RAM ──bring──▶ operands on the device ──update, with the states that stay there──▶ operands ──send──▶ RAM

The operands of one group are copied while the group before is updated: there are two buffers, which groups use in turn.
Each kind of work has its own stream, and waits for the other streams by events. The host does not wait.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from infinity import _native
from infinity.base.accelerator import Accelerator, Event
from infinity.sizes import PAGE_BYTES, round_up
from infinity.tiers.downloads import D2HStream
from infinity.tiers.resident import ResidentMemory, ResidentUses


@dataclass(frozen=True)
class Operands:
    """Device memory of a group's weights and gradients.

    Attributes:
        weight: the weights, which the update changes.
        gradient: the gradients, in `dtype`.
        dtype: dtype of the gradients.
        home: pinned memory in which the weights rest; None if they rest on the device.
    """

    weight: ResidentMemory
    gradient: ResidentMemory
    dtype: torch.dtype
    home: memoryview | None = None


class OperandQueue(D2HStream):
    """Queue of the operands of updates. The methods are called under the coordinator's lock.

    Args:
        accelerator: the device.
        gate: native entry points of the device.
        pool: threads of the native part.
        memory: device memory of both buffers, uint8.

    Attributes:
        updates: stream of the updates, beside which other streams compute.
    """

    def __init__(
        self, accelerator: Accelerator, gate: _native.DeviceGate, pool: _native.ThreadPool, memory: torch.Tensor
    ) -> None:
        super().__init__(accelerator, gate, pool)
        self._up, self.updates = accelerator.stream(), accelerator.stream()
        half = memory.numel() // 2
        self._buffers = [ResidentMemory(each, ResidentUses(accelerator)) for each in (memory[:half], memory[half:])]
        self._sent = deque[tuple[_native.IOFuture, Event]]()  # a native thread uses the event until the future is done
        for buffer in self._buffers:  # later uses, on any stream, wait for this one
            with buffer.uses.writing():
                pass

    def bring(self, home: memoryview, gradient: memoryview, dtype: torch.dtype) -> Operands:
        """Start to copy a group's weights and gradients to the buffer that was used the longest ago.

        Args:
            home: pinned memory of the weights, which `send` overwrites.
            gradient: pinned memory of the gradients. Nothing may change it until the copy has ended.
            dtype: dtype of the gradients.
        """
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        begin = round_up(home.nbytes, PAGE_BYTES)
        weight, values = buffer.memory[: home.nbytes], buffer.memory[begin : begin + gradient.nbytes]
        with buffer.uses.writing(self._up):
            for into, source in ((weight, home), (values, gradient)):
                self._accelerator.copy(into, torch.frombuffer(source, dtype=torch.uint8), on=self._up)
        return Operands(ResidentMemory(weight, buffer.uses), ResidentMemory(values, buffer.uses), dtype, home)

    def send(self, operands: Operands) -> _native.IOFuture | None:
        """Start to copy new weights to RAM, behind all uses of the operands so far.

        Returns:
            A future that is done when the weights are in RAM, or the device has failed; None if the weights rest on the
            device.
        """
        if operands.home is None:
            return None
        while self._sent and self._sent[0][0].done():
            self._sent.popleft()
        with operands.weight.uses.reading(self._stream):
            into = torch.frombuffer(operands.home, dtype=torch.uint8)
            event = self._accelerator.copy(into, operands.weight.memory, on=self._stream)
        future = self.future_of(event)
        self._sent.append((future, event))
        return future

    def give_back(self) -> None:
        """Let go of the device memory. Call this after `close`."""
        for buffer in self._buffers:
            buffer.give_back()
