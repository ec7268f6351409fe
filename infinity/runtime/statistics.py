"""What a run has done so far: counters from the engine, times from the ledger."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from infinity.schedule import registry
from infinity.state.plan import Plan


@dataclass(frozen=True)
class Statistics:
    """Cumulative since infinity.offload.

    Attributes:
        numel, trainable_numel: parameters.
        state_bytes: weights, residuals and moments together, in whatever tier.
        read_bytes, written_bytes: moved by the engine; `weight_bytes_read` of them weights for forward and backward.
        io_busy_s: time with at least one transfer in flight.
        fetch_wait_s: time the forward and backward waited for weights.
        gradient_s: time taken by landing gradients in host memory.
        update_s: time inside optim.step.
        adam_s: time of the arithmetic inside it.
        steps: optimizer steps, skipped ones and those before a resume included.
        committed: the step of the newest durable generation; None where there is none.
        cached_bytes, cached_weight_bytes: optimizer states, and weights, that rest in RAM.
        arena_bytes, slot_bytes: the one allocation, and the memory for fetched weights.
        engine: io_uring or threads.
        plan: what was decided.
    """

    numel: int
    trainable_numel: int
    state_bytes: int
    read_bytes: int
    written_bytes: int
    weight_bytes_read: int
    io_busy_s: float
    fetch_wait_s: float
    gradient_s: float
    update_s: float
    adam_s: float
    steps: int
    committed: int | None
    cached_bytes: int
    cached_weight_bytes: int
    arena_bytes: int
    slot_bytes: int
    engine: str
    plan: Plan


def statistics(model: nn.Module) -> Statistics:
    """Read the counters of an offloaded model that is not closed yet."""
    ledger = registry.ledger_of(model)
    ledger.require_usable()
    backing, plan = ledger.backing, ledger.backing.plan
    moved = backing.engine.counters()
    update = backing.pipeline.counters()
    return Statistics(
        numel=plan.numel,
        trainable_numel=plan.trainable_numel,
        state_bytes=plan.weight_bytes + plan.state_bytes,
        read_bytes=sum(value for key, value in moved.items() if key.startswith("read_bytes_")),
        written_bytes=sum(value for key, value in moved.items() if key.startswith("write_bytes_")),
        weight_bytes_read=moved["read_bytes_weights"],
        io_busy_s=moved["busy_ns"] / 1e9,
        fetch_wait_s=ledger.clock.fetch_wait_ns / 1e9,
        gradient_s=ledger.clock.gradient_ns / 1e9,
        update_s=ledger.clock.update_ns / 1e9,
        adam_s=update["adam_ns"] / 1e9,
        steps=ledger.steps,
        committed=ledger.commits.newest,
        cached_bytes=plan.state_ram_bytes,
        cached_weight_bytes=plan.weight_ram_bytes,
        arena_bytes=backing.arena.nbytes,
        slot_bytes=plan.slot_bytes,
        engine=backing.engine.name,
        plan=plan,
    )
