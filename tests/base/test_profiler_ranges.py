"""A profiler sees the engine's phases; without one there are no ranges."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import infinity
from infinity.base import profiler_ranges


def train(directory: Path) -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    memory = {"device": "40KiB", "host": "1MiB"}
    config = {"weights": "nvme", "optimizer": "nvme", "memory": memory, "nvme": {"paths": [str(directory)]}}
    infinity.offload(model, config, device="cpu")
    optim = infinity.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(torch.ones(1, 32)).sum().backward()
        optim.step()
        optim.zero_grad()
    infinity.close(model)


def test_a_profiler_shows_the_phases(tmp_path: Path) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        train(tmp_path)
    names = {event.key for event in seen.key_averages()}
    phases = {"fetch", "release", "update", "stall fetch", "stall gradient", "stall step", "stall commit"}
    assert {f"infinity::{phase}" for phase in phases} <= names


def test_without_a_profiler_no_range_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*_: object) -> None:
        raise AssertionError("a range was made")

    monkeypatch.setattr(profiler_ranges, "record_function", made)
    train(tmp_path)
