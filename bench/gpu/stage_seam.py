"""Stage 3: the device seam beside kernels that sleep. What today's design is known not to meet is said to be so."""

from __future__ import annotations

import os

from gpu import seam_order, seam_training
from gpu.cuda import Sleeper
from gpu.record import Options, Record, run

_WAITS_FOR_ALL = "an upload waits for all compute that is queued, even into memory that nothing uses"
_NO_BOUND = "memory.device is no bound yet: blocks that are given up wait for the upload stream, and new ones are taken"


def stage(record: Record, options: Options) -> None:
    """Settings: `schedules`, how many random ones."""
    options.work.mkdir(parents=True, exist_ok=True)
    os.environ["GPU_WORK"] = str(options.work)
    sleeper = record.measure("sleeping kernel", "the GPU can be kept busy for a known time", Sleeper)
    if sleeper is None:
        return
    _order(record, sleeper)
    _training(record, options)
    count = int(options.settings.get("schedules", 500))
    record.measure(
        f"{count} random schedules",
        "no value is wrong",
        lambda: seam_order.random_schedules(sleeper, count, lambda: record.left_s),
        good=lambda found: found["schedules"] == count and not found["wrong seeds"],
        least_s=12,
    )


def _order(record: Record, sleeper: Sleeper) -> None:
    record.measure(
        "canary: a missing wait shows",
        "without the wait all bytes are stale, with it all are right",
        lambda: seam_order.missing_wait_shows(sleeper),
        good=lambda found: all(found.values()),
    )
    record.measure(
        "an upload overlaps compute queued after it",
        "it ends while the kernel sleeps",
        lambda: seam_order.upload_overlaps(sleeper, queued_before=False),
        good=lambda found: found["overlapped"] and found["right"],
    )
    record.measure(
        "an upload overlaps compute queued before it",
        "it ends while the kernel sleeps",
        lambda: seam_order.upload_overlaps(sleeper, queued_before=True),
        good=lambda found: found["overlapped"] and found["right"],
        known=_WAITS_FOR_ALL,
    )
    for side in (False, True):
        record.measure(
            f"eviction under a sleeping kernel{' on a side stream' if side else ''}",
            "what the kernel reads later is what was there",
            lambda side=side: seam_order.evict_under_sleep(sleeper, side_stream=side),
            good=lambda found: found["wrong"] == 0,
        )


def _training(record: Record, options: Options) -> None:
    record.measure(
        "backward from another thread, weights in RAM and on NVMe",
        "the same losses four times",
        seam_training.threads_and_tiers,
        good=lambda found: len({tuple(losses) for losses in found.values()}) == 1,
        least_s=5,
    )
    record.measure(
        "reserved device memory",
        "max_memory_reserved ≤ memory.device",
        seam_training.reserved_memory,
        good=lambda found: found["reserved_mib"] <= found["memory_device_mib"],
        known=_NO_BOUND,
        least_s=3,
    )
    record.measure(
        "events in evaluation",
        "no more than a pass has, however many passes there were: fewer than 60",
        seam_training.events_in_evaluation,
        good=lambda found: found["after 60"] < 60,
        least_s=3,
    )
    record.measure(
        "three steps under TORCH_CUDA_SANITIZER=1",
        "no race",
        lambda: seam_training.sanitized(options.work, min(40.0, record.left_s - 2)),
        good=lambda found: found["rc"] == 0 and found["races"] == 0,
        least_s=15,
    )


if __name__ == "__main__":
    run(stage)
