"""A device with separate memory: one slab, divided into slots and a ring for gradients, and the copy queues."""

from __future__ import annotations

import logging
from contextlib import ExitStack

import torch

from infinity import _native
from infinity.base.accelerator import Accelerator
from infinity.errors import PlanError
from infinity.io.arena import PinnedArena, Space
from infinity.plan.plan import Plan
from infinity.sizes import format_bytes
from infinity.tiers.downloads import GradientQueue, WeightsDownloads
from infinity.tiers.slab import Slab
from infinity.tiers.uploads import UploadQueue

logger = logging.getLogger(__name__)


class DeviceTier:
    """The memory and the copy queues of a device.

    The tier is opened after the arena and the compute threads, and closed before the engine.

    Attributes:
        staying: slab for the weights of units that stay while the model runs. This slab is separate, so that a staying
            unit that is fetched late does not fragment the slots.
        slots: slab for all other weights.
        ring: slab for gradients.
        decoding: slab for encoded weights, which are kept there until they are decoded into slots.

    Raises:
        PlanError: the device has less free memory than the plan needs.
        ConfigError: as Accelerator.gate.
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
        memory, slots = _slab(accelerator, plan), budgets.slot_bytes
        refused = arena.pin(accelerator, pool)
        if refused:
            logger.warning("%s; copies to and from the device are slower, results are the same", refused)
        # torch may return memory that was just freed and that kernels in the queue still use.
        after = [accelerator.record(accelerator.current())]
        stays = sum(unit.local.weight_bytes for unit in plan.layout.units if unit.local.stays)
        self.staying = Slab(accelerator, memory[:stays], after)
        self.slots = Slab(accelerator, memory[stays:slots], after)
        self.ring = Slab(accelerator, memory[slots : slots + budgets.ring_bytes], after)
        self.decoding = Slab(accelerator, memory[slots + budgets.ring_bytes :], after)
        bounce = _part(arena, budgets.bounce_bytes, "gradients from the device")
        self.uploads = UploadQueue(accelerator, gate, engine, arena, budgets.upload_bytes, budgets.piece_bytes)
        copies = _part(arena, budgets.copies_bytes, "weights from the device")
        self.gradients = GradientQueue(accelerator, gate, self.ring, bounce, pool)
        self.weights = WeightsDownloads(accelerator, gate, copies, pool)

    def close(self) -> None:
        """Wait for all copies in flight and all kernels that use the slab, so that the memory can be freed."""
        with ExitStack() as closing:  # close all queues, even if one raises
            closing.callback(self.accelerator.synchronize_all)
            for queue in (self.weights, self.gradients, self.uploads):
                closing.callback(queue.close)

    def give_back(self) -> None:
        """Free the device memory after close(), when the slab is not used any more."""
        for slab in (self.staying, self.slots, self.ring, self.decoding):
            slab.give_all_back()


def open_gate(accelerator: Accelerator) -> _native.DeviceGate:
    """Return the entry points of the device's runtime, for native threads.

    Raises:
        ConfigError: as Accelerator.gate.
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
    try:
        return accelerator.slab(slots + ring + decoding)
    except torch.OutOfMemoryError as error:
        encoded = f", for encoded weights ({format_bytes(decoding)})" if decoding else ""
        raise PlanError(
            f"{accelerator.device} has no free block of {format_bytes(slots + ring + decoding)}, which the plan needs "
            f"for weights ({format_bytes(slots)}){encoded} and for gradients under way ({format_bytes(ring)}). Lower "
            "memory.device, or free memory that other models and processes use there."
        ) from error


def _part(arena: PinnedArena, nbytes: int, what: str) -> Space:
    return arena.lease(nbytes, what).space() if nbytes else Space(arena.memory, 0, 0)


def open_device(
    accelerator: Accelerator | None,
    plan: Plan,
    arena: PinnedArena,
    engine: _native.IOEngine,
    pool: _native.ThreadPool,
) -> DeviceTier | None:
    """Return the device tier; None when the model computes in host memory."""
    return None if accelerator is None else DeviceTier(accelerator, plan, arena, engine, pool)


def torch_device(accelerator: Accelerator | None) -> torch.device:
    return torch.device("cpu") if accelerator is None else accelerator.device
