"""Counters of a run. The I/O engine counts bytes, and the coordinator measures times."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from infinity.base.timeline import Cause
from infinity.coordinator import registry
from infinity.plan.plan import Plan
from infinity.units.speculation_choice import UpdateCounts


@dataclass(frozen=True)
class Statistics:
    """Counters since infinity.offload.

    Attributes:
        numel, trainable_numel: number of parameters. With several ranks, these numbers and all numbers of bytes count
            only this rank's slices.
        state_bytes: bytes of weights, residuals and moments together, in any tier.
        read_bytes, written_bytes: bytes that the engine read from and wrote to the store.
        weight_bytes_read: bytes of weights that were read for forward and backward, a part of read_bytes.
        io_busy_s: time with at least one transfer in flight.
        stall_s: time in which the compute thread did not compute, by cause (base/timeline.py: Cause).
        fetch_wait_s: part of stall_s: waiting for weights, or for memory for weights (fetch, room).
        gradient_s: part of stall_s: landing gradients in host memory (gradient).
        update_s: part of stall_s: inside optim.step, and waiting for updates (step, update).
        device_idle_s: time in which a GPU had no work because it waited for weights or for optimizer.step, measured by
            the GPU's clock; 0 on the CPU, for which `stall_s` is the corresponding time.
        adam_s: time of the updates' arithmetic, on the threads of the updates.
        steps: number of optimizer steps, including skipped steps and steps before a resume.
        updates: numbers of three kinds of unit updates: speculative and applied, speculative and undone, begun with the
            step.
        committed: the step of the newest durable generation; None if there is none.
        cached_bytes, cached_weight_bytes: bytes of optimizer states, and of weights, whose home is RAM.
        arena_bytes, slot_bytes: bytes of the arena (the only pinned allocation), and of the memory for fetched weights.
        engine: kind of I/O engine: io_uring or threads.
        device: type of the device on which the model computes: cpu or cuda.
        plan: the plan of the run.
    """

    numel: int
    trainable_numel: int
    state_bytes: int
    read_bytes: int
    written_bytes: int
    weight_bytes_read: int
    io_busy_s: float
    stall_s: dict[Cause, float]
    device_idle_s: float
    adam_s: float
    steps: int
    updates: UpdateCounts
    committed: int | None
    cached_bytes: int
    cached_weight_bytes: int
    arena_bytes: int
    slot_bytes: int
    engine: str
    device: str
    plan: Plan

    @property
    def fetch_wait_s(self) -> float:
        return self.stall_s["fetch"] + self.stall_s["room"]

    @property
    def gradient_s(self) -> float:
        return self.stall_s["gradient"]

    @property
    def update_s(self) -> float:
        return self.stall_s["step"] + self.stall_s["update"]


def statistics(model: nn.Module) -> Statistics:
    """Read the counters of an offloaded model that is not closed yet."""
    coordinator = registry.coordinator_of(model)
    coordinator.require_usable()
    plan, counted = coordinator.plan, coordinator.counters()
    moved = counted.io
    return Statistics(
        numel=plan.layout.numel,
        trainable_numel=plan.layout.trainable_numel,
        state_bytes=plan.layout.weight_bytes + plan.layout.state_bytes,
        read_bytes=sum(value for key, value in moved.items() if key.startswith("read_bytes_")),
        written_bytes=sum(value for key, value in moved.items() if key.startswith("write_bytes_")),
        weight_bytes_read=moved["read_bytes_weights"],
        io_busy_s=moved["busy_ns"] / 1e9,
        stall_s={cause: stalled / 1e9 for cause, stalled in counted.stalled_ns.items()},
        device_idle_s=counted.idle_s,
        adam_s=counted.updates["adam_ns"] / 1e9,
        steps=coordinator.steps,
        updates=counted.speculation,
        committed=counted.committed,
        cached_bytes=plan.layout.arena.states,
        cached_weight_bytes=plan.layout.arena.weights + plan.layout.arena.shared_weights,
        arena_bytes=counted.arena_bytes,
        slot_bytes=plan.budgets.slot_bytes,
        engine=counted.engine,
        device=coordinator.torch_device.type,
        plan=plan,
    )


def counts_of_all_ranks(plan: Plan) -> tuple[int, int]:
    """Return the number of trained parameters of a model, and the number of all its parameters. The slices of all ranks
    are counted."""
    units = [unit.full for unit in plan.layout.units]
    trained = sum(group.values_numel for unit in units for group in unit.trainable_groups)
    return trained, sum(unit.numel for unit in units)


def trained_of(trained: int, numel: int) -> str:
    """Format the trained part of a model for messages: '1,440,000 of 98,937,600 parameters'."""
    return f"{trained:,} of {numel:,} parameters"
