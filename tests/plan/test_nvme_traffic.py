"""The bytes of a step are those of the design's formula."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from infinity.config import load_config
from infinity.plan.disk import DiskLimits
from infinity.plan.nvme_traffic import traffic
from infinity.plan.plan_input import MemoryLimits, PlanInput, UnitBytes, count
from infinity.state.discover import discover
from infinity.state.moments import STORED

NUMEL = 1024 * 1024


def problem(told: int | None, commit_every: int, *, in_place: bool = True) -> PlanInput:
    """Two bf16 units of `NUMEL` elements, the second of which is frozen."""
    with torch.device("meta"):
        blocks = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(2)).bfloat16()
    blocks[1].requires_grad_(False)
    config, stored, found = load_config({}), STORED["adamw"], discover(blocks).units
    units = tuple(UnitBytes(unit, unit, tuple(count(group, config, stored) for group in unit.groups)) for unit in found)
    return PlanInput(config, MemoryLimits(0, 0, in_place), DiskLimits(0), units, stored, told, commit_every)


def test_everything_on_nvme_moves_26_bytes_and_the_gradients_and_what_is_frozen_is_read() -> None:
    moved = traffic(problem(None, 0), (), (), ())
    assert moved.read_bytes == (6 + 10 + 2) * NUMEL + 4 * NUMEL
    assert moved.written_bytes == (2 + 10 + 2) * NUMEL
    assert moved.commit_bytes == moved.commit_share_bytes == 0


def test_everything_in_ram_is_written_by_commits_alone() -> None:
    moved = traffic(problem(1, 4), (0, 1), (0,), (0,))
    assert (moved.read_bytes, moved.written_bytes) == (0, 0)
    assert moved.commit_bytes == 12 * NUMEL
    assert moved.step_bytes == moved.commit_share_bytes == 3 * NUMEL


@pytest.mark.parametrize(("in_place", "first"), [(True, 4), (False, 2)])
def test_further_passes_add_in_fp32_and_the_first_comes_as_it_is_from_a_device(in_place: bool, first: int) -> None:
    moved = traffic(problem(3, 0, in_place=in_place), (0, 1), (0,), ())
    assert moved.read_bytes == moved.written_bytes == (first + 2 * 4) * NUMEL
