"""The random numbers a loop draws come back as they were, and noting them draws none."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import pytest
import torch

from infinity.durable import rng
from infinity.errors import ResumeError
from infinity.io import document


def draw() -> list[Any]:
    return [random.random(), random.gauss(), np.random.rand(), np.random.randn(), torch.rand(2).tolist()]


def test_what_is_drawn_after_restoring_is_what_was_drawn_after_noting() -> None:
    draw()  # a second normal number is left in each generator
    noted = document.copy_of(rng.snapshot())
    first = draw()
    assert draw() != first
    rng.restore(noted)
    assert draw() == first


def test_noting_draws_nothing() -> None:
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(5)
    expected = draw()
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(5)
    rng.snapshot()
    assert draw() == expected


@pytest.mark.parametrize("name", ["python", "numpy", "torch", "cuda"])
def test_what_is_no_such_state_is_an_error(name: str) -> None:
    noted = rng.snapshot()
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    try:
        for broken in (noted | {name: None}, {key: value for key, value in noted.items() if key != name}):
            with pytest.raises(ResumeError, match="do not fit this machine"):
                rng.restore(broken)
    finally:
        rng.restore(noted)
    assert before[0] == random.getstate()
    assert before[1] == np.random.get_state()[1].tolist()
    assert torch.equal(before[2], torch.get_rng_state())


def test_gpus_that_are_not_here_are_told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with caplog.at_level(logging.WARNING, logger="infinity"):
        rng.restore(rng.snapshot() | {"cuda": [torch.zeros(1), torch.zeros(1)]})
    assert "drew random numbers on 2 GPUs, and this machine has 0" in caplog.text
