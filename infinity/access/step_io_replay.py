"""Replay of the reads and writes of one training step, through the code that trains.

A replay has no forward, no backward and no Adam. Units are fetched in the order of a step, and every state is read and
written back unchanged. So a replay measures only the I/O of a step, and does not change the bits of the run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from infinity.coordinator.coordinator import Coordinator
from infinity.state.update_request import GroupUpdate, SegmentRequest


@dataclass(frozen=True)
class ReplayTimings:
    """Measurements of one replay.

    Attributes:
        seconds: time from the first fetch to the last write.
        io_s: seconds with at least one transfer in flight.
        read_bytes: bytes read, as counted by the engine.
        written_bytes: bytes written, as counted by the engine.
    """

    seconds: float
    io_s: float
    read_bytes: int
    written_bytes: int


def replay_step(coordinator: Coordinator, micro_batches: int = 1) -> ReplayTimings:
    """Do all reads and writes of a step with `micro_batches` forward and backward passes.

    Raises:
        SwapIOError: the device failed; the model refuses further calls, as after a failed step.
    """
    before = coordinator.counters().io
    began = time.perf_counter()
    for _ in range(micro_batches):
        _replay_passes(coordinator)
    _replay_update(coordinator)
    seconds = time.perf_counter() - began
    after = coordinator.counters().io
    return ReplayTimings(
        seconds=seconds,
        io_s=(after["busy_ns"] - before["busy_ns"]) / 1e9,
        read_bytes=_moved(after, "read") - _moved(before, "read"),
        written_bytes=_moved(after, "write") - _moved(before, "write"),
    )


def _replay_passes(coordinator: Coordinator) -> None:
    indices = [unit.index for unit in coordinator.units]
    coordinator.begin_root_forward(training=True)
    for index in indices:
        coordinator.begin_use(index)
        coordinator.end_use(index)
    for index in reversed(indices):
        coordinator.begin_units_backward([index])
        coordinator.units[index].replay_gradients()
    coordinator.end_backward(outermost=True)


def _replay_update(coordinator: Coordinator) -> None:
    coordinator.begin_step({}, "")
    requests = {}
    for unit in coordinator.units:
        for group_index, group, _ in unit.trained():
            whole = SegmentRequest(0, group.numel, 1, 0, True, 1.0, (("lr", 0.0), ("eps", 1.0)))
            requests[unit.index, group_index] = GroupUpdate((whole,), None, arithmetic=False)
    coordinator.update(requests)
    coordinator.end_step()
    coordinator.finish_updates()
    for unit in coordinator.units:
        unit.forget_gradients()


def _moved(counters: Mapping[str, int], direction: str) -> int:
    return sum(value for key, value in counters.items() if key.startswith(f"{direction}_bytes_"))
