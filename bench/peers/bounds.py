"""Bounds of infinity's step, its distance from them, and the hidden share of the update: figures within rounds."""

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
    """Return the median ratio of seconds over the rounds in which both had a turn; None when there are none."""
    others = by_round(theirs)
    ratios = [step["seconds"] / others[step["round"]]["seconds"] for step in mine if step["round"] in others]
    return statistics.median(ratios) if ratios else None


def update_stall_s(step: Mapping[str, Any]) -> float:
    """Return the seconds of a step in which computing waited for the update or for weights.

    They are `update_s`, inside optim.step, and `fetch_wait_s`, which includes the waits of a unit for its own update
    and the waits for its weights to be read.
    """
    return float(step["counters"]["update_s"] + step["counters"]["fetch_wait_s"])


def hidden_update_share(mine: Steps, serial: Steps) -> float | None:
    """Return the share of the update that was hidden behind computing: 1 − stalled / update, the median over rounds.

    stalled is `update_stall_s` of the contender. update is `update_s` of the same contender with overlap off in the
    same round, where optim.step is the complete update and nothing is hidden. So 0 means a wait as long as with overlap
    off, and 1 means no wait. Weights that are read too late lower the share: with weights on NVMe, overlap off itself
    is below 0. None when the contender with overlap off did not run.
    """
    others = by_round(serial)
    shares = [
        1 - update_stall_s(step) / others[step["round"]]["counters"]["update_s"]
        for step in mine
        if step["round"] in others
    ]
    return statistics.median(shares) if shares else None


def bounds(mine: Steps, processor: Steps) -> dict[str, float | None]:
    """Return the times of the CPU's and the disk's work alone, in the contender's rounds, and its ratio to the larger.

    The CPU's work is the step of a contender that has all states in memory and overlaps nothing: compute and Adam. The
    disk's work is the replay: the same bytes at the same offsets of the same file. No overlap makes a step faster than
    the longer of the two.

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
    """Return the memory.host with which a contender's peak is `target_rss`.

    Args:
        target_rss: wanted peak RSS in bytes.
        uncached_rss: peak RSS of the same contender with nothing cached.
        uncached_host_bytes: bytes of memory.host that the plan of that contender uses. Its other memory stays the same.

    Raises:
        ValueError: with nothing cached the contender already needs more.
    """
    spare = target_rss - uncached_rss
    if spare < 0:
        raise ValueError(
            f"nothing can be cached in {target_rss / 1e9:.2f} GB: with nothing cached the peak is "
            f"{uncached_rss / 1e9:.2f} GB"
        )
    return uncached_host_bytes + spare


def summarise_infinity(setting: Setting, steps: Mapping[str, Steps]) -> dict[str, Any]:
    """Return the figures that only infinity has, by their names in the tables and the JSON."""
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
