"""What an offloaded model has counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from infinity.base.timeline import Cause
from infinity.units.speculation import Counts


@dataclass(frozen=True)
class Counters:
    """Since the model was offloaded.

    Attributes:
        io, updates: of the native engine and of the update pipeline.
        stalled_ns: how long the loop waited, by cause.
        idle_s: how long the device idled while the loop waited, in seconds.
        speculation: updates that began before their step was decided.
        committed: the step of the newest durable generation.
        arena_bytes: of pinned RAM.
        engine: how files are read and written.
    """

    io: Mapping[str, int]
    updates: Mapping[str, int]
    stalled_ns: Mapping[Cause, int]
    idle_s: float
    speculation: Counts
    committed: int | None
    arena_bytes: int
    engine: str
