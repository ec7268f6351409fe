"""Counters of an offloaded model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from infinity.base.timeline import Cause
from infinity.units.speculation_choice import UpdateCounts


@dataclass(frozen=True)
class ModelCounters:
    """Counters since the model was offloaded.

    Attributes:
        io: counters of the native engine.
        updates: counters of the update pipeline.
        stalled_ns: time that the training loop waited, by cause.
        idle_s: time that the device was idle while the loop waited, in seconds.
        speculation: numbers of speculative updates and of other updates (units/speculation_choice.py: UpdateCounts).
        committed: step of the newest durable generation; None without a durable generation.
        arena_bytes: bytes of pinned RAM.
        engine: name of the I/O engine.
    """

    io: Mapping[str, int]
    updates: Mapping[str, int]
    stalled_ns: Mapping[Cause, int]
    idle_s: float
    speculation: UpdateCounts
    committed: int | None
    arena_bytes: int
    engine: str
