"""The table of keys: each key has one fate and what its fate needs, and what it names of infinity is there."""

from __future__ import annotations

import pytest

from infinity.cli.arguments import build_finetune_parser
from infinity.cli.deepspeed.keys import (
    _BY_ITSELF,
    _IN_THE_SCRIPT,
    _LOST,
    _PLACES,
    ACCELERATE_KEYS,
    ACCELERATE_NAMES,
    KEYS,
    OPTIMIZERS,
    SCHEDULES,
    SECTIONS,
    Fate,
    Key,
)
from infinity.config import SwapConfig, _known_keys

ALL = [*KEYS.values(), *ACCELERATE_KEYS.values()]


def test_no_key_has_two_entries() -> None:
    entries = [key.name for key in (*_PLACES, *_BY_ITSELF, *_IN_THE_SCRIPT, *_LOST)]
    assert len(entries) == len(set(entries)) == len(KEYS)


def test_a_key_is_no_section_so_that_its_value_is_taken_as_a_whole() -> None:
    assert not KEYS.keys() & SECTIONS


@pytest.mark.parametrize("key", ALL, ids=lambda key: key.name)
def test_each_key_says_what_its_fate_needs(key: Key) -> None:
    if key.fate is Fate.MAPPED:
        assert set(key.to.split(", ")) <= set(_known_keys(SwapConfig))
        assert key.says
    elif key.fate is Fate.SCRIPT:
        options = {name for action in build_finetune_parser()._actions for name in action.option_strings}
        assert {part.split()[0] for part in key.to.split(", ") if part} <= options
        assert key.to or key.trainer or key.says
    else:
        assert key.fate in (Fate.NONE, Fate.NOT_NEEDED)
        assert key.says
    assert "|" not in key.says
    assert not key.says.endswith(".")


def test_arguments_of_the_trainer_are_there() -> None:
    from dataclasses import fields

    from transformers import TrainingArguments

    known = {field.name for field in fields(TrainingArguments)}
    named = {name for key in ALL for name in key.trainer.split(", ") if name}
    assert named <= known


def test_optimizers_and_schedules_are_those_of_finetune() -> None:
    choices = {action.dest: action.choices for action in build_finetune_parser()._actions}
    assert set(OPTIMIZERS.values()) <= set(choices["optimizer"] or ())
    assert set(SCHEDULES.values()) <= set(choices["schedule"] or ())


def test_names_of_accelerate_are_names_of_keys() -> None:
    assert set(ACCELERATE_NAMES.values()) <= KEYS.keys()
