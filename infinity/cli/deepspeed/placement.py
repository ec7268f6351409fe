"""The keys of a DeepSpeed config that become keys of the swap config, and why each value is what it is.

[Note: what is not offloaded]
Weights and states that DeepSpeed keeps on the GPUs become `auto`, not `device`. With ZeRO-3 each of N GPUs has a share
of the weights, and one device may not hold them all; `weights: device` would be an error there, and with several ranks
always. `auto` keeps them on the device where they take half of its memory at most, else in RAM. The optimizer's states
have no place on the device yet.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infinity.cli.deepspeed.reading import AUTO, Item
from infinity.echo import quoted
from infinity.errors import ConfigError, printable
from infinity.files import require_different, require_possible
from infinity.sizes import PAGE_BYTES, exact_bytes

_ZERO, _PARAM, _STATES = "zero_optimization", "zero_optimization.offload_param", "zero_optimization.offload_optimizer"
_TIERS = {"cpu": "host", "nvme": "nvme"}
_BLOCK_DEFAULT, _DEPTH_DEFAULT = 1 << 20, 8
_BLOCK_MAX, _DEPTH_MAX = 1 << 30, 1024
_RECOMPUTING = ("partition_activations", "cpu_checkpointing", "number_checkpoints")
_WORD_CHARS_MAX = 40
_MEASURED = "it is DeepSpeed's default; infinity-bench measures what each disk needs"


@dataclass(frozen=True)
class Line:
    """A key of the swap config.

    Attributes:
        key: with its section.
        why: what it comes from, in words.
        sources: the keys of the DeepSpeed config that it comes from.
    """

    key: str
    value: str | int | list[str]
    why: str
    sources: tuple[str, ...]


@dataclass
class Placed:
    """What the swap config says.

    Attributes:
        unused: keys that could become a part of it and do not, with the reason.
        remarks: sentences for the user.
    """

    lines: list[Line] = field(default_factory=list)
    unused: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def add(self, key: str, value: str | int | list[str], why: str, *sources: str) -> None:
        self.lines.append(Line(key, value, why, sources))

    def lines_of(self, source: str) -> list[str]:
        """The keys of the swap config that come from a key."""
        return [line.key for line in self.lines if source in line.sources]


def place(items: Mapping[str, Item], *, stage_default: int = 0) -> Placed:
    """The lines of the swap config.

    Args:
        items: by DeepSpeed's names.
        stage_default: of ZeRO, where the config has none.

    Raises:
        ConfigError: a value that decides on a line is none of those that the key has, or NVMe has no path.
    """
    placed = Placed()
    stage = _whole(items, f"{_ZERO}.stage", 0, 3)
    stage = stage_default if stage is None and f"{_ZERO}.stage" not in items else stage
    shown = _said(items, f"{_ZERO}.stage") or f"ZeRO stage {stage_default}, the default"
    weights = _weights(items, placed, stage, shown)
    states, source = _offloaded(items, _STATES, ("cpu_offload",))
    if states != "none":
        placed.add("optimizer", _TIERS[states], _say(items[source]), source)
    else:
        placed.add("optimizer", "auto", f"{shown}; the states are not offloaded", f"{_ZERO}.stage")
        placed.remarks.append(
            "The optimizer's states were on the GPUs. Here they rest in RAM, and the CPU updates them beside the "
            "backward pass. Where RAM is too small for them add `nvme: {paths: [...]}`."
        )
    _nvme(items, placed, {_PARAM: weights, _STATES: states})
    _ranks_and_forms(items, placed)
    if not placed.lines_of(f"{_ZERO}.stage"):
        placed.unused[f"{_ZERO}.stage"] = "where weights and states are offloaded to says it already"
    return placed


def place_fsdp(items: Mapping[str, Item]) -> Placed:
    """The lines of the swap config for a config of FSDP. Raises ConfigError as `place`."""
    placed, checkpointing = Placed(), "fsdp.activation_checkpointing"
    given = [key for key in ("fsdp.offload_params", "fsdp.cpu_offload") if key in items]
    offload = any(_flag(items, key) for key in given)
    why = ", ".join(_say(items[key]) for key in given) or "FSDP, with nothing offloaded"
    for key in ("weights", "optimizer"):
        placed.add(key, "host" if offload else "auto", why, *given)
    if _flag(items, checkpointing):
        placed.add("activations", "auto", _say(items[checkpointing]), checkpointing)
    placed.remarks.append(
        "FSDP has no place on NVMe. Where RAM is too small for weights and states, write `weights: nvme`, "
        "`optimizer: nvme` and `nvme: {paths: [DIRECTORY]}` in their place."
    )
    return placed


def _weights(items: Mapping[str, Item], placed: Placed, stage: int | None, shown: str) -> str:
    device, source = _offloaded(items, _PARAM, ("cpu_offload_param", "cpu_offload_params"))
    if device != "none" and stage is not None and stage < 3:
        for key in (f"{_PARAM}.device", f"{_ZERO}.cpu_offload_param", f"{_ZERO}.cpu_offload_params"):
            placed.unused[key] = f"weights are offloaded with stage 3 only, and the stage is {stage}"
        device = "none"
    if device != "none":
        placed.add("weights", _TIERS[device], _say(items[source]), source)
    else:
        why = f"{shown}; the weights are not offloaded: on the device if they fit there, else in RAM"
        placed.add("weights", "auto", why, f"{_ZERO}.stage")
    return device


def _offloaded(items: Mapping[str, Item], section: str, old_names: tuple[str, ...]) -> tuple[str, str]:
    """Where a section offloads to (cpu | nvme | none), and the key that says so."""
    item = items.get(f"{section}.device")
    if item is not None and item.value not in (None, AUTO):
        if item.value not in ("cpu", "nvme", "none"):
            raise ConfigError(f"{item.shown} is {quoted(item.value)}, and none of cpu, nvme, none")
        return str(item.value), item.key
    for name in old_names:
        if _flag(items, f"{_ZERO}.{name}"):
            return "cpu", f"{_ZERO}.{name}"
    return "none", ""


# -- disks -------------------------------------------------------------------------------------------------------------


def _nvme(items: Mapping[str, Item], placed: Placed, devices: Mapping[str, str]) -> None:
    found = [item for section, device in devices.items() if (item := _path(items, placed, section, device)) is not None]
    if not found:
        for name in ("block_size", "queue_depth", "intra_op_parallelism", "thread_count"):
            placed.unused[f"aio.{name}"] = "nothing is on NVMe"
        return
    paths: list[str] = []
    for item in found:
        if item.value in paths:
            continue
        try:
            require_different([*map(Path, paths), Path(item.value)])
        except ValueError as error:
            placed.unused[item.key] = str(error)
            continue
        paths.append(item.value)
        if not os.path.exists(os.path.expanduser(item.value)):
            placed.remarks.append(
                f"nvme.paths: {printable(item.value)} is not there on this machine. A run makes it if the directory "
                "above it is there."
            )
    used = [item for item in found if item.key not in placed.unused]
    placed.add("nvme.paths", paths, ", ".join(item.shown for item in used), *(item.key for item in used))
    _block(items, placed)
    _depth(items, placed)


def _path(items: Mapping[str, Item], placed: Placed, section: str, device: str) -> Item | None:
    key = f"{section}.nvme_path"
    item = items.get(key)
    if device != "nvme":
        placed.unused[key] = "nothing is offloaded to it: the device is not nvme"
        return None
    if item is None or item.value in (None, AUTO):
        shown = items[f"{section}.device"].shown
        raise ConfigError(
            f"{shown} is nvme, and no nvme_path is named beside it: add the directory that the swap files are to be in"
        )
    if not isinstance(item.value, str):
        raise ConfigError(f"{item.shown} is {quoted(item.value)}; the path of a directory belongs there")
    try:
        require_possible(item.value)
    except ValueError as error:
        raise ConfigError(f"{item.shown}: {error}") from None
    return item


def _block(items: Mapping[str, Item], placed: Placed) -> None:
    block = _whole(items, "aio.block_size", 1, 1 << 60)
    if block is None:
        return
    if block == _BLOCK_DEFAULT:
        placed.unused["aio.block_size"] = _MEASURED
    elif block % PAGE_BYTES or block > _BLOCK_MAX:
        placed.unused["aio.block_size"] = "infinity's blocks are multiples of 4 KiB, 1 GiB at most"
    else:
        placed.add("nvme.block", exact_bytes(block), _say(items["aio.block_size"]), "aio.block_size")


def _depth(items: Mapping[str, Item], placed: Placed) -> None:
    names = [name for name in ("intra_op_parallelism", "thread_count") if f"aio.{name}" in items]
    threads = next((each for name in names if (each := _whole(items, f"aio.{name}", 1, 1 << 20)) is not None), 1)
    for name in names[1:]:
        placed.unused[f"aio.{name}"] = "intra_op_parallelism says it already"
    depth = _whole(items, "aio.queue_depth", 1, 1 << 20)
    depth = (_DEPTH_DEFAULT if depth is None else depth) * threads
    keys = [f"aio.{name}" for name in ("queue_depth", *names[:1]) if f"aio.{name}" in items]
    if depth == _DEPTH_DEFAULT:
        placed.unused |= dict.fromkeys(keys, _MEASURED)
        return
    most = f"; {_DEPTH_MAX} at most" if depth > _DEPTH_MAX else ""
    said = " × ".join(_say(items[key]) for key in keys)
    placed.add("nvme.queue_depth", min(depth, _DEPTH_MAX), f"{said}{most}", *keys)


# -- ranks, and forms of states ----------------------------------------------------------------------------------------


def _ranks_and_forms(items: Mapping[str, Item], placed: Placed) -> None:
    ranks = _whole(items, f"{_ZERO}.zero_hpz_partition_size", 0, 1 << 30)
    if ranks is not None and ranks > 1:
        key = f"{_ZERO}.zero_hpz_partition_size"
        placed.add("ranks.gather", "node", _say(items[key]), key)
    recompute = [f"activation_checkpointing.{name}" for name in _RECOMPUTING]
    recompute = [key for key in recompute if _number_or_flag(items, key)]
    if recompute:
        why = f"{', '.join(_say(items[key]) for key in recompute)}; recomputed where the model can"
        placed.add("activations", "auto", why, *recompute)
    for key, ours, value in (
        (f"{_ZERO}.zero_quantized_nontrainable_weights", "frozen", "int8"),
        ("bf16.bf16_master_weights_and_grads", "master", "none"),
        ("bf16.bf16_optimizer_states", "moments", "bf16"),
    ):
        if not _flag(items, key):
            continue
        if key.startswith("bf16.") and not _flag(items, "bf16.enabled") and not _is_auto(items, "bf16.enabled"):
            placed.unused[key] = "bf16 is off"
            continue
        placed.add(ours, value, _say(items[key]), key)


# -- values ------------------------------------------------------------------------------------------------------------


def whole_number(value: Any) -> int | None:
    """3, 3.0 and '3' as 3, and 1e9 as 1000000000; None for what is no whole number."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 18:
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if isinstance(value, int) or (math.isfinite(value) and value == int(value)) else None


def _whole(items: Mapping[str, Item], key: str, low: int, high: int) -> int | None:
    """A whole number; None where the config leaves it open. Raises ConfigError."""
    item = items.get(key)
    if item is None or item.value in (None, AUTO):
        return None
    value = whole_number(item.value)
    if value is None or not low <= value <= high:
        raise ConfigError(f"{item.shown} is {quoted(item.value)}; a whole number from {low} to {high} belongs there")
    return value


def _flag(items: Mapping[str, Item], key: str) -> bool:
    """True or false; false where the config leaves it open. Raises ConfigError."""
    item = items.get(key)
    if item is None or item.value in (None, AUTO):
        return False
    words = {"true": True, "false": False}
    value = words.get(item.value.lower(), item.value) if isinstance(item.value, str) else item.value
    if value not in (True, False):
        raise ConfigError(f"{item.shown} is {quoted(item.value)}; true or false belongs there")
    return bool(value)


def _number_or_flag(items: Mapping[str, Item], key: str) -> bool:
    item = items.get(key)
    if item is None or isinstance(item.value, bool | str):
        return _flag(items, key)
    return bool(_whole(items, key, 0, 1 << 30))


def _is_auto(items: Mapping[str, Item], key: str) -> bool:
    return key in items and items[key].value == AUTO


def _said(items: Mapping[str, Item], key: str) -> str:
    return _say(items[key]) if key in items else ""


def _say(item: Item) -> str:
    return f"{item.shown}: {said(item.value)}"


def said(value: Any) -> str:
    """A value as JSON writes it, shortened."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float) and abs(value) < 1e15 and value == int(value):
        return f"{value:.0f}"
    is_word = isinstance(value, str) and len(value) <= _WORD_CHARS_MAX and value.isidentifier()
    return str(value) if is_word else quoted(value)
