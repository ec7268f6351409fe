"""A DeepSpeed config becomes a swap config and a list of findings: what became of each key that it has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from infinity.cli.deepspeed import trainer
from infinity.cli.deepspeed.keys import COMPRESSING, OPTIMIZERS, SCHEDULES, SECTIONS, Effect, Fate, Key
from infinity.cli.deepspeed.placement import Line, Placed, place, place_fsdp, said
from infinity.cli.deepspeed.reading import AUTO, Item, Source, known_key, nearest_key
from infinity.cli.deepspeed.training import optimizer_name

STAGE_OF_ACCELERATE = 2
"""The stage of ZeRO that Accelerate takes where its config file names none."""
HINTS_MAX = 50
_COMMENTS = ("_", "//", "#")
_OFF = "it is off"
_BY_TRAINER = "auto: the Trainer says it already, with an argument of its own"


@dataclass(frozen=True)
class Finding:
    """What became of one key of a config.

    Attributes:
        shown: the key, as the file has it.
        value: of the key, shortened.
        says: why, or what to do; without a full stop.
        to: keys of the swap config, or options of `infinity finetune`.
        trainer: the argument of TrainingArguments, with its value where that is another word.
        effect: of a key without counterpart.
    """

    shown: str
    value: str
    fate: Fate
    says: str = ""
    to: str = ""
    trainer: str = ""
    effect: Effect | None = None


@dataclass(frozen=True)
class Conversion:
    """Attributes:
    lines: of the swap config.
    findings: one for each key of the DeepSpeed config, in the order of their importance.
    remarks: sentences about the whole.
    """

    lines: tuple[Line, ...]
    findings: tuple[Finding, ...]
    remarks: tuple[str, ...]

    def of(self, fate: Fate) -> list[Finding]:
        """The findings with one fate."""
        return [finding for finding in self.findings if finding.fate is fate]


def convert(source: Source) -> Conversion:
    """The swap config that says what a config of DeepSpeed or FSDP says, and what became of its keys.

    Raises:
        ConfigError: a value that decides on a key of the swap config is none that DeepSpeed has.
    """
    items = {item.key: item for item in source.items}
    default = STAGE_OF_ACCELERATE if source.accelerate and not source.file else 0
    placed = place_fsdp(items) if source.fsdp else place(items, stage_default=default)
    findings = [_finding(item, items, placed) for item in source.items]
    findings = [*_with_hints(findings, {item.shown: item.key for item in source.items})]
    doubled = "another key says it, and this one is not read"
    findings += [Finding(item.shown, said(item.value), Fate.NOT_NEEDED, doubled) for item in source.overruled]
    fates, effects = [Fate.NONE, Fate.UNKNOWN, Fate.SCRIPT, Fate.NOT_NEEDED, Fate.MAPPED], list(Effect)
    findings.sort(key=lambda each: (fates.index(each.fate), effects.index(each.effect) if each.effect else 0))
    return Conversion(tuple(placed.lines), tuple(findings), tuple(placed.remarks))


def _finding(item: Item, items: Mapping[str, Item], placed: Placed) -> Finding:
    key = known_key(item.key)
    if item.key in SECTIONS:
        return Finding(item.shown, said(item.value), Fate.NOT_NEEDED, "it is empty")
    if key is None:
        return _unknown(item)
    says = _why_nothing(key, item, items)
    if key.fate is Fate.MAPPED:
        ours = placed.lines_of(item.key)
        if ours:
            return Finding(item.shown, said(item.value), Fate.MAPPED, key.says, ", ".join(ours))
        says = says or placed.unused.get(item.key) or f"{said(item.value)} changes nothing"
    if says:
        return Finding(item.shown, said(item.value), Fate.NOT_NEEDED, says)
    if key.fate is Fate.SCRIPT and item.value == AUTO:
        return Finding(item.shown, AUTO, Fate.SCRIPT, _BY_TRAINER)
    lost = _lost_by_value(item)
    if lost:
        return Finding(item.shown, said(item.value), Fate.NONE, lost, effect=Effect.TRAINING)
    effect = key.effect if key.fate is Fate.NONE else None
    word, theirs = _words(item, items)
    to, arguments = f"{key.to} {word}".rstrip(), f"{key.trainer} {theirs}".rstrip()
    return Finding(item.shown, said(item.value), key.fate, key.says, to, arguments, effect)


def _words(item: Item, items: Mapping[str, Item]) -> tuple[str, str]:
    """The value that an option of `infinity finetune` has another word for, and an argument of Trainer; "" where there
    is none."""
    if item.key == "scheduler.type":
        word = SCHEDULES[item.value]
        return word, trainer.SCHEDULES[word]
    if item.key == "optimizer.type":
        word = optimizer_name({key: each.value for key, each in items.items()}) or ""
        return word, trainer.OPTIMIZERS.get(word, "")
    return "", ""


def _unknown(item: Item) -> Finding:
    if item.key.rpartition(".")[2].startswith(_COMMENTS):
        return Finding(item.shown, said(item.value), Fate.NOT_NEEDED, "it is a comment")
    return Finding(item.shown, said(item.value), Fate.UNKNOWN)


def _with_hints(findings: list[Finding], keys: Mapping[str, str]) -> Iterator[Finding]:
    """The findings; the first unknown keys with the known ones that they are most like, which takes time."""
    unknown = 0
    for finding in findings:
        unknown += finding.fate is Fate.UNKNOWN
        if finding.fate is not Fate.UNKNOWN or unknown > HINTS_MAX:
            yield finding
            continue
        near = nearest_key(keys[finding.shown])
        yield replace(
            finding, says=f"did you mean {near}?" if near else "infinity knows no such key of DeepSpeed or FSDP"
        )


def _why_nothing(key: Key, item: Item, items: Mapping[str, Item]) -> str:
    """Why the key does nothing in this config; "" where it does something."""
    value = item.value
    if value is None or value in ({}, "none") or (value is False and False in key.off):
        return _OFF
    if _is_one_of(value, key.off):
        return f"{said(value)} changes nothing"
    if key.switch:
        on = value.get(key.switch, False) if isinstance(value, Mapping) else value
        if on is False:
            return _OFF
    if value == AUTO and key.fate in (Fate.MAPPED, Fate.NONE):
        return "auto: infinity chooses"
    section, _, name = item.key.rpartition(".")
    if section in ("fp16", "bf16") and name != "enabled" and key.fate is not Fate.NOT_NEEDED:
        enabled = items.get(f"{section}.enabled")
        if enabled is None or enabled.value is False:
            return f"{section} is off"
    return ""


def _is_one_of(value: Any, values: tuple[object, ...]) -> bool:
    """Whether it is one of these; 0 is false, as in DeepSpeed."""
    return not isinstance(value, list | dict) and value in values


def _lost_by_value(item: Item) -> str:
    """What is lost where infinity has the key and not the value."""
    if item.key == "optimizer.type" and str(item.value).lower() not in OPTIMIZERS:
        why = (
            "it compresses gradients between GPUs" if str(item.value).lower() in COMPRESSING else "infinity has it not"
        )
        return f"{why}: take AdamW (optim adamw_torch | --optimizer adamw), or Adam, Lion, Adagrad, SGD"
    if item.key == "scheduler.type" and item.value not in tuple(SCHEDULES):
        return "infinity finetune has constant, linear and cosine; a script has torch's own"
    return ""
