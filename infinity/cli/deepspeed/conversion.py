"""The conversion of a DeepSpeed config to a swap config and a list of findings.

The list has one finding for each key of the DeepSpeed config.

[Note: what is not offloaded]
Weights and states that DeepSpeed keeps on the GPUs become `auto`, not `device`. With ZeRO-3 each of N GPUs has a part
of the weights, and a single device may have no room for all weights. `weights: device` is an error if the device has no
room for all weights, and is always an error with several ranks. With `auto`, the weights are on the device if they take
at most half of the device's memory, otherwise in RAM. The optimizer's states cannot be placed on the device yet.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infinity.cli.deepspeed.config_reader import AUTO, ConfigItem, SourceConfig, nearest_key
from infinity.cli.deepspeed.keys import KEYS, SECTIONS, DeepSpeedKey, KeyTreatment
from infinity.errors import ConfigError, printable
from infinity.files import require_different, require_possible
from infinity.quoting import quoted
from infinity.sizes import PAGE_BYTES, exact_bytes

HINTS_MAX = 50
"""Maximum number of unknown keys for which the report names the most similar known key.

The search for similar keys takes time.
"""
_ZERO = "zero_optimization"
_BLOCK_DEFAULT, _BLOCK_MAX = 1 << 20, 1 << 30
_DEPTH_DEFAULT, _DEPTH_MAX = 8, 1024
_COUNT_MAX = 1 << 60
_WORD_CHARS_MAX = 40
_STATES_WERE_ON_GPUS = (
    "The optimizer's states were on the GPUs. Here they stay on the GPU for as many units as fit, and the CPU updates "
    "the other units in RAM. If RAM is too small for these, add `nvme: {paths: [...]}`."
)
_FSDP_HAS_NO_NVME = (
    "FSDP does not offload to NVMe. If RAM is too small for weights and states, write `weights: nvme`, `optimizer: "
    "nvme` and `nvme: {paths: [DIRECTORY]}` in their place."
)
_OPEN_BATCH = (
    "The batch sizes are auto: the script's own arguments set them. One process instead of N GPUs needs N times the "
    "gradient accumulation for the same step."
)
_LOGARITHMIC = (
    "scheduler.params.warmup_type is not set, so DeepSpeed's warm-up is logarithmic. Here the warm-up is linear: its "
    "learning rates are lower until its last step. If you want a linear warm-up, there is nothing to do. For a "
    "logarithmic one, make the scheduler in the script (torch.optim.lr_scheduler.LambdaLR)."
)
_WARMUP = "scheduler.params.warmup_type", "scheduler.params.warmup_num_steps"
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class SwapConfigLine:
    """A key of the swap config.

    Attributes:
        key: name of the key, with its section.
        why: text that says where the value comes from.
        sources: the keys of the DeepSpeed config from which this key is made.
    """

    key: str
    value: str | int | list[str]
    why: str
    sources: tuple[str, ...]


@dataclass(frozen=True)
class KeyFinding:
    """The treatment of one key of a config.

    Attributes:
        shown: the key, as written in the file.
        value: value of the key, shortened.
        fate: the kind of treatment.
        says: the reason for the treatment, or an instruction for the user. The text does not end with a full stop. The
            report needs no text for keys of the swap config and for keys without an effect.
        to: options of `infinity finetune`.
        trainer: the corresponding argument of TrainingArguments, with its value if the value is not the key's value.
    """

    shown: str
    value: str
    fate: KeyTreatment
    says: str = ""
    to: str = ""
    trainer: str = ""


@dataclass
class ConfigConversion:
    """The result of a conversion.

    Attributes:
        lines: lines of the swap config.
        findings: one finding for each key of the DeepSpeed config, in the order of importance.
        remarks: sentences about the complete config.
    """

    lines: list[SwapConfigLine] = field(default_factory=list)
    findings: list[KeyFinding] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def of(self, *fates: KeyTreatment) -> list[KeyFinding]:
        """Return the findings whose fate is one of these."""
        return [finding for finding in self.findings if finding.fate in fates]

    def add(self, key: str, value: str | int | list[str], why: str, *sources: str) -> None:
        """Add a line to the swap config."""
        self.lines.append(SwapConfigLine(key, value, why, sources))


def convert(source: SourceConfig) -> ConfigConversion:
    """Convert a config of DeepSpeed or FSDP to a swap config, with the treatment of each of its keys.

    Raises:
        ConfigError: a value that determines a key of the swap config is invalid, or NVMe has no path.
    """
    items, conversion = {item.key: item for item in source.items}, ConfigConversion()
    active = {key: item for key, item in items.items() if key in KEYS and not _is_idle(KEYS[key], item, items)}
    _add_tiers(conversion, source, items, active)
    _add_disks(conversion, active)
    if any(key in items and items[key].value == AUTO for key in _BATCH):
        conversion.remarks.append(_OPEN_BATCH)
    if _has_logarithmic_warmup(items):
        conversion.remarks.append(_LOGARITHMIC)
    for ours in ("ranks.gather", "activations", "frozen", "master", "moments"):
        if found := _meant(active, ours):
            conversion.add(ours, _meaning(found[0]), ", ".join(map(_say, found)), *(item.key for item in found))
    hints = [item for item in source.items if _is_unknown(item)][:HINTS_MAX]
    conversion.findings += [_finding(item, items, conversion.lines, hinted=item in hints) for item in source.items]
    conversion.findings += [
        KeyFinding(item.shown, said(item.value), KeyTreatment.NOT_NEEDED) for item in source.overruled
    ]
    conversion.findings.sort(key=lambda each: list(KeyTreatment).index(each.fate))
    return conversion


def _has_logarithmic_warmup(items: Mapping[str, ConfigItem]) -> bool:
    """Return whether a schedule of DeepSpeed has its default warm-up, for which the config has no key."""
    if "scheduler.type" not in items or not isinstance(words_of(KEYS["scheduler.type"], items), list):
        return False
    form, steps = (items[key].value if key in items else None for key in _WARMUP)
    return form is None and (steps is None or whole_number(steps) != 0)


# -- the swap config ---------------------------------------------------------------------------------------------------


def _add_tiers(
    conversion: ConfigConversion,
    source: SourceConfig,
    items: Mapping[str, ConfigItem],
    active: Mapping[str, ConfigItem],
) -> None:
    default = 2 if source.accelerate and not source.file else 0  # if no stage is set, Accelerate uses stage 2
    given = items.get(f"{_ZERO}.stage")
    stage = default if given is None else _whole(given, 0, 3)
    why = f"ZeRO stage {default}, the default" if given is None else _say(given)
    kept = "the weights are not offloaded: on the device if they fit there, else in RAM"
    for ours, rest in (("weights", kept), ("optimizer", "the states are not offloaded")):
        found = _meant(active, ours)
        if ours == "weights" and stage is not None and stage < 3 and not source.fsdp:
            found = []  # ZeRO offloads weights only in stage 3
        if found:
            conversion.add(ours, _meaning(found[0]), _say(found[0]), found[0].key)
        elif source.fsdp:
            conversion.add(ours, "auto", "FSDP, with nothing offloaded")
        else:
            conversion.add(ours, "auto", f"{why}; {rest}", f"{_ZERO}.stage")
    if source.fsdp:
        conversion.remarks.append(_FSDP_HAS_NO_NVME)
    elif conversion.lines[1].value == "auto":
        conversion.remarks.append(_STATES_WERE_ON_GPUS)


def _add_disks(conversion: ConfigConversion, active: Mapping[str, ConfigItem]) -> None:
    paths: dict[str, list[ConfigItem]] = {}
    for line in [line for line in conversion.lines if line.value == "nvme"]:
        item = _path(active, line.sources[0])
        try:
            require_different(list(map(Path, {*paths, item.value})))
        except ValueError:
            continue
        paths.setdefault(item.value, []).append(item)
    for path in paths:
        if not os.path.exists(os.path.expanduser(path)):
            conversion.remarks.append(
                f"nvme.paths: {printable(path)} does not exist on this machine. A run makes it if its parent directory "
                "exists."
            )
    if not paths:
        return
    items = [item for each in paths.values() for item in each]
    conversion.add("nvme.paths", [*paths], ", ".join(item.shown for item in items), *(item.key for item in items))
    if (block := active.get("aio.block_size")) is not None:
        nbytes = _whole(block, 1, _COUNT_MAX)
        if nbytes != _BLOCK_DEFAULT and nbytes % PAGE_BYTES == 0 and nbytes <= _BLOCK_MAX:
            conversion.add("nvme.block", exact_bytes(nbytes), _say(block), block.key)
    threads = next((name for name in ("aio.intra_op_parallelism", "aio.thread_count") if name in active), "")
    used = [active[name] for name in ("aio.queue_depth", threads) if name in active]
    depth = math.prod(_whole(item, 1, _COUNT_MAX) for item in used)
    depth *= 1 if "aio.queue_depth" in active else _DEPTH_DEFAULT
    if depth != _DEPTH_DEFAULT:
        most = f"; {_DEPTH_MAX} at most" if depth > _DEPTH_MAX else ""
        why = f"{' × '.join(map(_say, used))}{most}"
        conversion.add("nvme.queue_depth", min(depth, _DEPTH_MAX), why, *(item.key for item in used))


def _path(active: Mapping[str, ConfigItem], device: str) -> ConfigItem:
    """Return the item `nvme_path` of a section whose device is nvme. Raise ConfigError if there is no usable path."""
    item = active.get(f"{device.rpartition('.')[0]}.nvme_path")
    if item is None:
        raise ConfigError(
            f"{active[device].shown} is nvme, but nvme_path is missing: add the directory for the swap files"
        )
    if not isinstance(item.value, str):
        raise ConfigError(f"{item.shown} is {quoted(item.value)}; it must be the path of a directory")
    try:
        require_possible(item.value)
    except ValueError as error:
        raise ConfigError(f"{item.shown}: {error}") from None
    return item


def _meant(active: Mapping[str, ConfigItem], ours: str) -> list[ConfigItem]:
    """Return the items whose values determine a key of the swap config, in the order of keys.yaml.

    If two keys say where the states are offloaded to, the key with the newer name comes first.
    """
    found = [active[key.name] for key in KEYS.values() if key.name in active and ours in key.to.split(", ")]
    return [item for item in found if _meaning(item)]


# -- findings ----------------------------------------------------------------------------------------------------------


def _finding(
    item: ConfigItem, items: Mapping[str, ConfigItem], lines: list[SwapConfigLine], *, hinted: bool
) -> KeyFinding:
    key, value = KEYS.get(item.key), said(item.value)
    if item.key in SECTIONS or (key is None and not _is_unknown(item)):  # an empty section, or a comment
        return KeyFinding(item.shown, value, KeyTreatment.NOT_NEEDED)
    if key is None:
        near = nearest_key(item.key) if hinted else ""
        hint = f"did you mean {near}?" if near else "infinity does not know this key of DeepSpeed or FSDP"
        return KeyFinding(item.shown, value, KeyTreatment.UNKNOWN, hint if hinted else "")
    if any(item.key in line.sources for line in lines):
        return KeyFinding(item.shown, value, KeyTreatment.MAPPED)
    if key.fate is KeyTreatment.MAPPED or _is_idle(key, item, items):
        return KeyFinding(item.shown, value, KeyTreatment.NOT_NEEDED)
    if key.fate is KeyTreatment.SCRIPT and item.value == AUTO:
        trainer_says = "auto: an argument of the Trainer sets it already"
        return KeyFinding(item.shown, AUTO, KeyTreatment.SCRIPT, trainer_says)
    words = words_of(key, items)
    if isinstance(words, str) and words:
        return KeyFinding(item.shown, value, KeyTreatment.TRAINING, words)
    to, trainer = words or (key.to, key.trainer)
    return KeyFinding(item.shown, value, key.fate, key.says, to, trainer.removeprefix("--"))


def words_of(key: DeepSpeedKey, items: Mapping[str, ConfigItem]) -> list[str] | str:
    """Return the option of `infinity finetune` and the argument of Trainer that keys.yaml has for a value.

    If a value has no counterpart, return the reason as a string, or "" if keys.yaml has no reason.
    """
    word = said(items[key.name].value).lower()
    plain = items.get("optimizer.params.adam_w_mode")
    if key.name == "optimizer.type" and word == "adam" and plain is not None and plain.value is False:
        word = "adam without adam_w_mode"
    return key.words.get(word, key.otherwise)


def _is_unknown(item: ConfigItem) -> bool:
    """Return whether keys.yaml lacks the key, and the key is not a comment."""
    is_comment = item.key.rpartition(".")[2].startswith(("_", "//", "#"))
    return item.key not in KEYS and item.key not in SECTIONS and not is_comment


def _is_idle(key: DeepSpeedKey, item: ConfigItem, items: Mapping[str, ConfigItem]) -> bool:
    """Return whether the key has no effect in this config."""
    value, (section, _, name) = item.value, item.key.rpartition(".")
    switch = value.get(key.switch, False) if key.switch and isinstance(value, Mapping) else value
    if value in (None, {}, "none", *key.off) or (key.switch and switch is False):  # 0 equals False, as in DeepSpeed
        return True
    if value == AUTO and key.fate not in (KeyTreatment.SCRIPT, KeyTreatment.NOT_NEEDED):
        return True
    enabled = items.get(f"{section}.enabled")
    return section in ("fp16", "bf16") and name != "enabled" and (enabled is None or enabled.value is False)


# -- values ------------------------------------------------------------------------------------------------------------


def whole_number(value: Any) -> int | None:
    """Return 3, 3.0 and '3' as 3, and 1e9 as 1000000000; None for a value that is not an integer."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 18:
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if isinstance(value, int) or (math.isfinite(value) and value == int(value)) else None


def _whole(item: ConfigItem, low: int, high: int) -> Any:
    """Return the value of an item as an integer; None if the value is "auto" or missing.

    Raise ConfigError for another value.
    """
    value = whole_number(item.value)
    if item.value in (None, AUTO) or (value is not None and low <= value <= high):
        return value
    raise ConfigError(f"{item.shown} is {quoted(item.value)}; a whole number from {low} to {high} is needed")


def _meaning(item: ConfigItem) -> str:
    """Return the swap config's value that keys.yaml has for the value of an item; "" if it has none.

    Raises ConfigError.
    """
    key, value = KEYS[item.key], item.value
    if not key.values:
        return ""
    if key.above is not None and not isinstance(value, bool):
        value = _whole(item, 0, _COUNT_MAX) > key.above
    elif isinstance(value, str):
        value = {"true": True, "false": False}.get(value.lower(), value)
    if isinstance(value, list | dict) or value not in key.values:
        values = ", ".join(said(each) for each in key.values)
        raise ConfigError(f"{item.shown} is {quoted(item.value)}, not one of {values}")
    return key.values[value]


def _say(item: ConfigItem) -> str:
    return f"{item.shown}: {said(item.value)}"


def said(value: Any) -> str:
    """Return a value as JSON text, which is shortened if it is long."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float) and abs(value) < 1e15 and value == int(value):
        return f"{value:.0f}"
    is_word = isinstance(value, str) and len(value) <= _WORD_CHARS_MAX and value.isidentifier()
    return str(value) if is_word else quoted(value)
