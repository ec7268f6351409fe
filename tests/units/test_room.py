"""Units on the device: which of them make room, and what becomes of those that are in use meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.coordinator import registry
from infinity.coordinator.coordinator import Coordinator

PAGES = (3, 3, 7)
"""Units of these many pages; two of them fit beside each other."""


@pytest.fixture
def three(offload: Any) -> tuple[Coordinator, list[torch.Tensor]]:
    """The first two are where no room in one piece is left for the third."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Linear(32, 32 * count, bias=False) for count in PAGES)
    values = [block.weight.detach().clone() for block in blocks]
    coordinator = registry.coordinator_of(offload(blocks, memory={"device": "40KiB", "host": "64MiB"}))
    assert coordinator.resources.plan.budgets.slot_bytes == 10 * 4096
    coordinator.acquire(0)
    coordinator.acquire(1)
    coordinator.release(0)
    return coordinator, values


def weight(coordinator: Coordinator, index: int) -> torch.Tensor:
    return next(iter(coordinator.units[index].parameters.values()))


def test_a_unit_in_use_moves_where_the_room_is_not_in_one_piece(three: tuple[Coordinator, list[torch.Tensor]]) -> None:
    coordinator, values = three
    coordinator.acquire(2)
    for index in (1, 2):
        assert torch.equal(weight(coordinator, index), values[index])
    assert coordinator.units[0].weights.slot is None
    coordinator.release(1)
    coordinator.acquire(0)
    assert torch.equal(weight(coordinator, 0), values[0])


def test_a_unit_that_somebody_holds_views_of_stays_where_it_is(three: tuple[Coordinator, list[torch.Tensor]]) -> None:
    coordinator, values = three
    view = weight(coordinator, 1).detach().view(-1)
    with pytest.raises(infinity.PlanError, match="no device memory for unit '2'.* in use .1. take the 40.00 KiB"):
        coordinator.acquire(2)
    assert torch.equal(view, values[1].view(-1))
    assert torch.equal(weight(coordinator, 1), values[1])
    del view
    coordinator.acquire(2)
    for index in (1, 2):
        assert torch.equal(weight(coordinator, index), values[index])


def test_units_that_were_to_move_are_back_where_that_does_not_help(
    three: tuple[Coordinator, list[torch.Tensor]],
) -> None:
    coordinator, values = three
    coordinator.acquire(0)
    with pytest.raises(infinity.PlanError, match=r"no device memory for unit '2'.* in use \(0, 1\) take"):
        coordinator.acquire(2)
    for index in (0, 1):
        assert torch.equal(weight(coordinator, index), values[index])
    coordinator.release(0)
    coordinator.acquire(2)
    assert torch.equal(weight(coordinator, 2), values[2])
