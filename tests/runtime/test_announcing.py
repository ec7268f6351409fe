"""An output announces the backward of the block that made it, and of no block that only hands it on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.coordinator.registry import coordinator_of

WIDTH = 32


class Block(nn.Module):
    """Adds to `total` in place, and hands `bias` on, which the first block makes. Args: makes: it is the first."""

    def __init__(self, *, makes: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.makes = makes

    def forward(self, given: torch.Tensor, total: torch.Tensor, bias: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        if self.makes:
            bias = self.layer.weight.sum(0) * 2
        return total.add_(self.layer(given + bias)), bias


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(makes=number == 0) for number in range(4))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        total, bias = torch.zeros_like(given), None
        for block in self.blocks:
            total, bias = block(given, total, bias=bias)
        return total.pow(2).sum()


def test_a_block_announces_what_it_made_or_changed_in_place_and_nothing_that_it_hands_on(
    offload: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    plain, given = Blocks(), torch.randn(4, WIDTH)
    plain(given).backward()
    model = offload(Blocks(), "nvme", memory={"device": "64KiB", "host": "64MiB"})
    with infinity.gathered(model, model, write=True):
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            mine.data.copy_(theirs.detach())
    coordinator, held = coordinator_of(model), list[int]()
    hold = coordinator.begin_units_backward

    def noted(units: Any) -> None:
        held.extend(units)
        hold(units)

    loss = model(given)
    monkeypatch.setattr(coordinator, "begin_units_backward", noted)
    loss.backward()
    monkeypatch.undo()
    blocks = [index for index in held if not coordinator.units[index].full.stays]
    # The first block's bias has its gradient once all blocks have had theirs.
    assert blocks == [3, 2, 1, 0, 0]
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert float(mine.grad.norm()) == pytest.approx(float(theirs.grad.norm()), rel=1e-5)
