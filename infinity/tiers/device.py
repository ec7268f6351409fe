"""The memory of a device, which is divided into slots and a ring for gradients, and the queues of copies to and from
the device."""

from __future__ import annotations

import logging
from contextlib import ExitStack

import torch

from infinity import _native
from infinity.base.accelerator import Accelerator
from infinity.errors import PlanError
from infinity.io.arena import ArenaRegion, PinnedArena
from infinity.plan.plan import Plan
from infinity.sizes import format_bytes
from infinity.tiers.downloads import GradientQueue, WeightsDownloads
from infinity.tiers.operands import OperandQueue
from infinity.tiers.resident import ResidentMemory, ResidentUses
from infinity.tiers.slab import Slab, separate_storage
from infinity.tiers.uploads import UploadQueue

logger = logging.getLogger(__name__)


class DeviceTier:
    """The memory of a device, and the queues of copies to and from the device.

    The tier is opened after the arena and the compute threads, and closed before the engine.

    Attributes:
        staying: slab for the weights of units that are never evicted. This slab is separate, because such a unit may be
            fetched late and would then fragment the slots.
        slots: slab for all other weights.
        ring: slab for gradients.
        decoding: slab for encoded weights that wait to be decoded into slots.
        scratch: memory for temporary values in updates on the device, and in the sums of squares of resident gradients.
        operands: queue of the weights and gradients from RAM for updates on the device; None if there are none.
        gate: native entry points of the device.

    Raises:
        PlanError: the device has less free memory than the plan needs.
        ConfigError: the errors of Accelerator.gate.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        plan: Plan,
        arena: PinnedArena,
        engine: _native.IOEngine,
        pool: _native.ThreadPool,
    ) -> None:
        self.accelerator = accelerator
        budgets, gate = plan.budgets, open_gate(accelerator)
        self.gate = gate
        memory, slots = _slab(accelerator, plan), budgets.slot_bytes
        refused = arena.pin(accelerator, pool)
        if refused:
            logger.warning("%s; copies to and from the device are slower, results are the same", refused)
        # Other code may have freed the new memory just before. Kernels in the queue may then still use this memory, so
        # its first use must wait for them.
        after = [accelerator.record(accelerator.current())]
        stays = sum(unit.full.weight_bytes for unit in plan.layout.units if unit.full.stays and not unit.is_resident)
        self.staying = Slab(accelerator, memory[:stays], after)
        self.slots = Slab(accelerator, memory[stays:slots], after)
        self.ring = Slab(accelerator, memory[slots : slots + budgets.ring_bytes], after)
        resident = slots + budgets.ring_bytes + budgets.decoding_bytes
        self.decoding = Slab(accelerator, memory[slots + budgets.ring_bytes : resident], after)
        gradients = resident + budgets.operand_bytes + sum(unit.resident_bytes for unit in plan.layout.units)
        self._resident_states = Slab(accelerator, memory[resident:gradients], after)
        # The sums of squares of all gradients are computed through one tensor, which has this memory and no other.
        scratch = memory.numel() - plan.budgets.scratch_bytes
        self._resident_gradients = Slab(accelerator, separate_storage(memory[gradients:scratch]), after)
        self.scratch = ResidentMemory(memory[scratch:], ResidentUses(accelerator))
        with self.scratch.uses.writing():  # later uses, on any stream, wait for this one, which comes after `after`
            pass
        bounce = _part(arena, budgets.bounce_bytes, "gradients from the device")
        self.uploads = UploadQueue(accelerator, gate, engine, arena, budgets.upload_bytes, budgets.piece_bytes)
        copies = _part(arena, budgets.copies_bytes, "weights from the device")
        self.gradients = GradientQueue(accelerator, gate, self.ring, bounce, pool)
        self.weights = WeightsDownloads(accelerator, gate, copies, pool)
        self.operands: OperandQueue | None = None
        if budgets.operand_bytes:
            memory = self.memory_for_resident_states(budgets.operand_bytes)
            self.operands = OperandQueue(accelerator, gate, pool, memory)

    def close(self) -> None:
        """Wait for all copies in flight, and for all kernels that use the slab. After that the memory can be freed."""
        with ExitStack() as closing:  # close all queues, even if one raises
            closing.callback(self.accelerator.synchronize_all)
            for queue in (self.operands, self.weights, self.gradients, self.uploads):
                if queue is not None:
                    closing.callback(queue.close)

    def memory_for_resident_states(self, nbytes: int) -> torch.Tensor:
        """Return memory for the states of a unit, or for operands: uint8 [nbytes]. This thread's stream may use it
        first."""
        return self._take(self._resident_states, nbytes)

    def memory_for_resident_gradients(self, nbytes: int) -> torch.Tensor:
        """Return memory for the gradients of a group of a resident unit: uint8 [nbytes]. This thread's stream may use
        it first."""
        return self._take(self._resident_gradients, nbytes)

    def _take(self, slab: Slab, nbytes: int) -> torch.Tensor:
        lease = slab.try_lease(nbytes)
        if lease is None:
            raise AssertionError(f"no memory for {nbytes} bytes of a resident unit")
        for event in lease.after:
            self.accelerator.wait(self.accelerator.current(), event)
        return lease.memory

    def give_back(self) -> None:
        """Free the device memory. Call this after close(), when nothing uses the slab any more."""
        self.scratch.give_back()
        if self.operands is not None:
            self.operands.give_back()
        resident = (self._resident_states, self._resident_gradients)
        for slab in (self.staying, self.slots, self.ring, self.decoding, *resident):
            slab.give_all_back()


def open_gate(accelerator: Accelerator) -> _native.DeviceGate:
    """Return the object through which native threads call the device's runtime.

    Raises:
        ConfigError: the errors of Accelerator.gate.
    """
    table = accelerator.gate()
    return _native.DeviceGate(
        accelerator.device.index or 0,
        copy=table.copy,
        record=table.record,
        wait=table.wait,
        synchronize=table.synchronize,
        enter=table.enter,
        keep=table,
    )


def _slab(accelerator: Accelerator, plan: Plan) -> torch.Tensor:
    slots, ring, decoding = plan.budgets.slot_bytes, plan.budgets.ring_bytes, plan.budgets.decoding_bytes
    nbytes = slots + ring + decoding + plan.budgets.resident_bytes
    try:
        return accelerator.slab(nbytes)
    except torch.OutOfMemoryError as error:
        encoded = f", for encoded weights ({format_bytes(decoding)})" if decoding else ""
        if plan.budgets.resident_bytes:
            encoded += f", for states that stay there ({format_bytes(plan.budgets.resident_bytes)})"
        raise PlanError(
            f"{accelerator.device} has no free block of {format_bytes(nbytes)}, which the plan needs "
            f"for weights ({format_bytes(slots)}){encoded} and for gradients under way ({format_bytes(ring)}). Lower "
            "memory.device, or free memory that other models and processes use there."
        ) from error


def _part(arena: PinnedArena, nbytes: int, what: str) -> ArenaRegion:
    return arena.lease(nbytes, what).space() if nbytes else ArenaRegion(arena.memory, 0, 0)


def open_device(
    accelerator: Accelerator | None,
    plan: Plan,
    arena: PinnedArena,
    engine: _native.IOEngine,
    pool: _native.ThreadPool,
) -> DeviceTier | None:
    """Return the device tier; None when the model computes on the CPU."""
    return None if accelerator is None else DeviceTier(accelerator, plan, arena, engine, pool)


def torch_device(accelerator: Accelerator | None) -> torch.device:
    return torch.device("cpu") if accelerator is None else accelerator.device
