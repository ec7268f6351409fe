"""Stage 3: the device seam while kernels sleep: order, lifetimes, chaining by native threads, and training."""

from __future__ import annotations

import os

from gpu import seam_chaining, seam_order, seam_training
from gpu.cuda import Sleeper
from gpu.record import Options, Record, run


def stage(record: Record, options: Options) -> None:
    """Run the stage. Settings: `schedules`, the number of random schedules."""
    options.work.mkdir(parents=True, exist_ok=True)
    os.environ["GPU_WORK"] = str(options.work)
    sleeper = record.measure("sleeping kernel", "the GPU can be kept busy for a known time", Sleeper)
    if sleeper is None:
        return
    _order(record, sleeper)
    _chaining(record, options, sleeper)
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
        "canary: a missing last use shows",
        "an upload waits for the sleeping kernel that reads the slot; without the event the kernel reads new bytes",
        lambda: seam_order.missing_last_use_shows(sleeper),
        good=lambda found: all(found.values()),
    )
    record.measure(
        "an upload overlaps compute queued after it",
        "it ends while the kernel sleeps",
        lambda: seam_order.upload_overlaps(sleeper, queued_before=False),
        good=lambda found: found["overlapped"] and found["right"],
    )
    record.measure(
        "an upload into fresh memory overlaps compute queued before it",
        "it ends while the kernel sleeps",
        lambda: seam_order.upload_overlaps(sleeper, queued_before=True),
        good=lambda found: found["overlapped"] and found["right"],
    )
    for side in (False, True):
        record.measure(
            f"eviction under a sleeping kernel{' on a side stream' if side else ''}",
            "what the kernel reads later is what was there",
            lambda side=side: seam_order.evict_under_sleep(sleeper, side_stream=side),
            good=lambda found: found["wrong"] == 0,
        )


def _chaining(record: Record, options: Options, sleeper: Sleeper) -> None:
    record.measure(
        "the runtime's functions",
        "five addresses, none of them 0",
        seam_chaining.runtime,
        good=lambda found: all(int(address, 16) for address in found.values()),
    )
    record.measure(
        "weights from a file",
        "32 pieces arrive, and again behind a sleeping kernel that reads the slot",
        lambda: seam_chaining.stored_weights(options.work, sleeper),
        good=lambda found: found["arrived"] and found["behind the last use"] and found["pieces"] == 64,
    )
    record.measure(
        "weights from a file with a damaged page",
        "SwapCorruptionError, and the next upload arrives",
        lambda: seam_chaining.failed_read(options.work),
        good=lambda found: found["failed as"] == "SwapCorruptionError" and found["the next is right"],
    )
    record.measure(
        "gradients land",
        "values and sums of squares are the CPU's, at their place and added",
        lambda: seam_chaining.landings(sleeper),
        good=lambda found: all(found.values()),
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
        "updates during backward",
        "weights are the CPU's in every overlap mode in RAM, on NVMe and on the device; some updates are early",
        seam_training.overlap_modes,
        good=lambda found: not found["other bits"] and found["early updates"] > 0,
        least_s=8,
    )
    record.measure(
        "arithmetic of updates on the device",
        "every rule has the CPU's bits with every dtype of the states",
        seam_training.arithmetic,
        good=lambda found: not found["other bits"],
        least_s=5,
    )
    record.measure(
        "what a step keeps the host for",
        "in forward and backward nothing; in a step no more than once for each unit",
        seam_training.host_waits,
        good=lambda found: found["in evaluation"] == 0 and found["in a step"] <= found["units"],
        least_s=3,
    )
    record.measure(
        "bytes per parameter in a step",
        "16 read (4 of them weights for the two passes) and 12 written; up to 28 and 14 where updates were undone",
        seam_training.bytes_per_parameter,
        good=lambda found: found["read"] <= 28.5 and found["written"] <= 14.5,
        least_s=3,
    )
    record.measure(
        "reserved device memory",
        "max_memory_reserved ≤ memory.device",
        seam_training.reserved_memory,
        good=lambda found: found["reserved_mib"] <= found["memory_device_mib"],
        least_s=3,
    )
    record.measure(
        "events in evaluation",
        "no more after 60 passes than a pass has slots, or than after 10",
        seam_training.events_in_evaluation,
        good=lambda found: found["after 60"] <= max(found["after 10"], seam_training.BLOCKS),
        least_s=3,
    )


if __name__ == "__main__":
    run(stage)
