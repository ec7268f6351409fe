"""Weights and gradients from RAM for updates on the device, and the new weights back to RAM.

[Note: the way of an update whose weights rest in RAM]

    RAM ──bring──▶ operands on the device ──update, with the states that stay there──▶ operands ──send──▶ RAM

The operands of one group are copied while the group before is updated: there are two buffers, which groups use in turn.
Each kind of work has its own stream, and waits for the other streams by events. The host does not wait.
"""

from __future__ import annotations

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
    """

    weight: ResidentMemory
    gradient: ResidentMemory
    dtype: torch.dtype


@dataclass(frozen=True)
class SentWeights:
    """New weights on their way to RAM.

    Attributes:
        future: future that is done when the weights are in RAM, or the device has failed.
        event: event behind the copy, which must be kept alive until the copy is done.
    """

    future: _native.IOFuture
    event: Event


class OperandQueue(D2HStream):
    """Queue of the operands of updates. The methods are called under the coordinator's lock.

    Args:
        accelerator: the device.
        gate: native entry points of the device.
        pool: threads of the native part.
        memory: device memory of both buffers, uint8.
    """

    def __init__(
        self, accelerator: Accelerator, gate: _native.DeviceGate, pool: _native.ThreadPool, memory: torch.Tensor
    ) -> None:
        super().__init__(accelerator, gate, pool)
        self._up = accelerator.stream()
        half = memory.numel() // 2
        self._buffers = [ResidentMemory(each, ResidentUses(accelerator)) for each in (memory[:half], memory[half:])]
        for buffer in self._buffers:  # later uses, on any stream, wait for this one
            with buffer.uses.writing():
                pass

    def bring(self, weight: memoryview, gradient: memoryview, dtype: torch.dtype) -> Operands:
        """Start to copy a group's weights and gradients to the buffer that was used the longest ago.

        Args:
            weight: pinned memory of the weights, which `send` overwrites.
            gradient: pinned memory of the gradients. Nothing may change it until the copy has ended.
            dtype: dtype of the gradients.
        """
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        weight_end = round_up(weight.nbytes, PAGE_BYTES)
        parts = buffer.memory[: weight.nbytes], buffer.memory[weight_end : weight_end + gradient.nbytes]
        with buffer.uses.writing(self._up):
            for part, source in zip(parts, (weight, gradient), strict=True):
                self._accelerator.copy(part, torch.frombuffer(source, dtype=torch.uint8), on=self._up)
        on_device, of_gradient = (ResidentMemory(part, buffer.uses) for part in parts)
        return Operands(on_device, of_gradient, dtype)

    def send(self, operands: Operands, weight: memoryview) -> SentWeights:
        """Start to copy new weights to RAM, after the update that is queued on this thread's stream."""
        with operands.weight.uses.reading(self._stream):
            into = torch.frombuffer(weight, dtype=torch.uint8)
            event = self._accelerator.copy(into, operands.weight.memory, on=self._stream)
        return SentWeights(self.future_of(event), event)
