"""The table of keys: each key has one fate and what its fate needs, and what it names of infinity is there."""

from __future__ import annotations

from dataclasses import fields

import pytest
from transformers import TrainingArguments

from infinity.cli.deepspeed.keys import DEEPSPEED, KEYS, LOST, ROWS, SECTIONS, DeepSpeedKey, KeyTreatment
from infinity.cli.finetune_options import build_finetune_parser
from infinity.cli.optimizers import _BETAS, _HAVE_EPS
from infinity.config import SwapConfig, _known_keys, load_config

ALL = [*KEYS.values()]


def test_no_key_has_two_rows() -> None:
    assert len(ROWS) == len(KEYS) > 250


def test_a_key_is_no_section_so_that_its_value_is_taken_as_a_whole() -> None:
    assert not KEYS.keys() & SECTIONS


@pytest.mark.parametrize("key", ALL, ids=lambda key: key.name)
def test_each_key_says_what_its_fate_needs(key: DeepSpeedKey) -> None:
    if key.fate is KeyTreatment.MAPPED:
        assert set(key.to.split(", ")) <= set(_known_keys(SwapConfig))
        assert key.says
        for name in key.to.split(", "):
            for value in filter(None, key.values.values()):
                paths = {"nvme": {"paths": ["/tmp"]}} if value == "nvme" else {}
                section, _, last = name.rpartition(".")
                load_config(({section: {last: value}} if section else {last: value}) | paths)
    elif key.fate is KeyTreatment.SCRIPT:
        options = {name for action in build_finetune_parser()._actions for name in action.option_strings}
        assert {part.split()[0] for part in key.to.split(", ") if part} <= options
        assert key.to or key.trainer or key.says
    else:
        assert key.fate in (*LOST, KeyTreatment.NOT_NEEDED)
        assert key.says
    assert "|" not in key.says
    assert not key.says.endswith(".")


def test_arguments_of_the_trainer_are_there() -> None:
    known = {field.name for field in fields(TrainingArguments)}
    assert {name for key in ALL for name in key.trainer.split(", ") if name} <= known


def test_the_words_of_finetune_are_options_that_it_takes() -> None:
    told = [words for key in ALL for words in key.words.values() if isinstance(words, list)]
    assert len(told) > 10
    for words in told:
        build_finetune_parser().parse_args(words[0].split())


def test_an_option_goes_to_the_optimizers_that_have_it() -> None:
    assert set(KEYS["optimizer.params.betas"].only) == set(_BETAS)
    assert set(KEYS["optimizer.params.eps"].only) == set(_HAVE_EPS)


def test_names_of_accelerate_are_those_of_deepspeeds_keys() -> None:
    named = [key.name for key in ALL if key.accelerate]
    assert len({KEYS[name].accelerate for name in named}) == len(named) == 8
    assert set(named) <= set(DEEPSPEED)
