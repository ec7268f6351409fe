"""Bounds of infinity's step, the ratio of the step to its bounds, and the hidden share of the update. All figures
compare measurements of the same round."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from peers.contenders import Setting

Steps = Sequence[Mapping[str, Any]]
"""Steps of one contender; each has its `round`, `seconds` and `counters`, and `replay` if its states are on NVMe."""


def by_round(steps: Steps) -> dict[int, Mapping[str, Any]]:
    return {step["round"]: step for step in steps}


def median_ratio(mine: Steps, theirs: Steps) -> float | None:
    """Return the median ratio of the seconds of two contenders, over the rounds in which both had a turn; None if there
    are no such rounds."""
    others = by_round(theirs)
    ratios = [step["seconds"] / others[step["round"]]["seconds"] for step in mine if step["round"] in others]
    return statistics.median(ratios) if ratios else None


def update_stall_s(step: Mapping[str, Any]) -> float:
    """Return the seconds of a step in which computing waited for the update or for weights.

    The sum has two parts: `update_s`, the wait inside optim.step, and `fetch_wait_s`, the waits of units for their own
    updates and for reads of their weights.
    """
    return float(step["counters"]["update_s"] + step["counters"]["fetch_wait_s"])


def hidden_update_share(mine: Steps, serial: Steps) -> float | None:
    """Return the share of the update that was hidden behind computing: 1 − stalled / update, the median over rounds.

    stalled is `update_stall_s` of the contender. update is `update_s` of the same contender with overlap off in the
    same round, where optim.step is the complete update and nothing is hidden. A share of 0 therefore means that
    computing waits as long as with overlap off, and a share of 1 means that it never waits. Weights that are read too
    late lower the share: with weights on NVMe, the share of overlap off is below 0. The result is None if the contender
    with overlap off did not run.
    """
    others = by_round(serial)
    shares = [
        1 - update_stall_s(step) / others[step["round"]]["counters"]["update_s"]
        for step in mine
        if step["round"] in others
    ]
    return statistics.median(shares) if shares else None


def bounds(mine: Steps, processor: Steps) -> dict[str, float | None]:
    """Return how long the CPU's work alone and the disk's work alone take in the contender's rounds, and the ratio of
    the contender's time to the longer of the two times.

    The CPU's work is the step of a contender that has all states in memory and does not overlap: compute and Adam. The
    disk's work is the replay, which moves the same bytes at the same offsets of the same file. Overlap cannot make a
    step faster than the longer of the two times.

    Returns:
        `processor_s`, `io_s`: medians. `of_bound`: median of the step's seconds divided by the longer time, within
            rounds. `replayed_bytes_ratio`: bytes of the replay divided by those of a step, which shows that both do the
            same work. A value is None when it could not be measured.
    """
    alone = by_round(processor)
    io = {step["round"]: step["replay"] for step in mine if "replay" in step}
    both = [step for step in mine if step["round"] in alone]
    of_bound = [
        step["seconds"] / max(alone[step["round"]]["seconds"], io.get(step["round"], {}).get("seconds", 0.0))
        for step in both
    ]
    moved = [
        _moved(io[step["round"]]) / _moved(step["counters"])
        for step in mine
        if step["round"] in io and _moved(step["counters"])
    ]
    return {
        "processor_s": _median([float(alone[step["round"]]["seconds"]) for step in both]),
        "io_s": _median([replay["seconds"] for replay in io.values()]),
        "of_bound": _median(of_bound),
        "replayed_bytes_ratio": _median(moved),
    }


def _moved(counts: Mapping[str, Any]) -> float:
    return float(counts["read_bytes"] + counts["written_bytes"])


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def host_budget(target_rss: int, uncached_rss: int, uncached_host_bytes: int) -> int:
    """Return the memory.host with which a contender's peak RSS is `target_rss`.

    Args:
        target_rss: requested peak RSS in bytes.
        uncached_rss: peak RSS of the same contender without cached states.
        uncached_host_bytes: bytes of memory.host that the plan of that contender uses. The contender's other memory
            stays the same.

    Raises:
        ValueError: the contender needs more memory even without cached states.
    """
    spare = target_rss - uncached_rss
    if spare < 0:
        raise ValueError(
            f"nothing can be cached in {target_rss / 1e9:.2f} GB: with nothing cached the peak is "
            f"{uncached_rss / 1e9:.2f} GB"
        )
    return uncached_host_bytes + spare


def summarise_infinity(setting: Setting, steps: Mapping[str, Steps]) -> dict[str, Any]:
    """Return the figures that are measured for infinity only, by their names in the tables and the JSON."""
    mine = steps[setting.name]
    counters = [step["counters"] for step in mine]
    figures: dict[str, Any] = {
        "cached_bytes": counters[-1]["cached_bytes"],
        "counted_bytes": statistics.median(_moved(each) for each in counters),
        "update_s": statistics.median(each["update_s"] for each in counters),
        "fetch_wait_s": statistics.median(each["fetch_wait_s"] for each in counters),
        "adam_s": statistics.median(each["adam_s"] for each in counters),
    }
    if setting.in_memory:
        return figures
    hidden = hidden_update_share(mine, steps.get(setting.serial.name, ()))
    return figures | bounds(mine, steps.get(setting.processor.name, ())) | {"hidden_update_share": hidden}
