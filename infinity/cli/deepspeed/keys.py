"""The table of keys.yaml: the treatment of every key of a DeepSpeed config."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from infinity.strict_parsers import parse_yaml


class KeyTreatment(Enum):
    """The kinds of treatment of a key, with their titles in the report, in the order of the report.

    Each key has exactly one kind of treatment.
    """

    TRAINING = "No counterpart, changes the training"
    COST = "No counterpart, costs time or memory"
    WATCHING = "No counterpart, diagnostics only"
    UNKNOWN = "Unknown keys, ignored"
    SCRIPT = "Belongs to the training script (TrainingArguments), or to `infinity finetune` (--options)"
    NOT_NEEDED = "Not needed"
    MAPPED = "In the swap config"


LOST = (KeyTreatment.TRAINING, KeyTreatment.COST, KeyTreatment.WATCHING)
"""Fates of keys without a counterpart."""


class DeepSpeedKey(BaseModel, frozen=True, extra="forbid"):
    """A row of the table.

    A row in keys.yaml may have several keys; this object is for one key. keys.yaml explains the attributes.
    """

    name: str
    fate: KeyTreatment
    accelerate: str = ""
    to: str = ""
    trainer: str = ""
    says: str = ""
    off: tuple[Any, ...] = ()
    switch: str = ""
    takes: str = ""
    below: float = float("inf")
    only: tuple[str, ...] = ()
    words: dict[str, list[str] | str] = {}
    otherwise: str = ""
    values: dict[bool | str, str] = {}
    above: int | None = None


def _rows() -> list[DeepSpeedKey]:
    keys = []
    for title, rows in parse_yaml(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items():
        fate = KeyTreatment(title)
        for row in rows:
            off = row.pop("off", [False] if fate in LOST else [])
            keys += [DeepSpeedKey(name=name, fate=fate, off=off, **row) for name in row.pop("keys").split()]
    return keys


ROWS = _rows()
KEYS = MappingProxyType({key.name: key for key in ROWS})
"""All keys, by name."""

DEEPSPEED = tuple(key.name for key in ROWS if not key.name.startswith(("accelerate.", "fsdp.")))
SECTIONS = frozenset(name.rsplit(".", depth)[0] for name in DEEPSPEED for depth in range(1, name.count(".") + 1))
"""Sections of DeepSpeed whose keys are in the table."""
