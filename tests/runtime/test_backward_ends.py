"""A backward pass that raised is over: the next one is an outermost pass, and adds to what came."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.coordinator.coordinator import Coordinator
from tests.conftest import weights_of
from tests.runtime.test_threads import BATCH, Blocks


class _Once:
    """A hook that raises, the first time."""

    def __init__(self) -> None:
        self._called = False

    def __call__(self, gradient: torch.Tensor) -> None:
        if not self._called:
            self._called = True
            raise ArithmeticError


def passes(model: Blocks, where: str) -> None:
    """One that ends, one that raises in the middle, and one through the same graph that ends."""
    model(BATCH).backward()
    raises = _Once()
    if where == "an output":
        model.blocks[1].register_forward_hook(lambda module, args, output: output.register_hook(raises) and None)
    else:
        model.blocks[1].weight.register_hook(raises)
    loss = model(BATCH)
    with pytest.raises(ArithmeticError):
        loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize("where", ["an output", "a parameter"])
def test_a_pass_after_one_that_raised_has_torchs_bits_and_an_end(
    where: str, offload: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain: Any = Blocks()
    passes(plain, where)
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    ends: list[bool] = []
    end = Coordinator.end_backward

    def noted(self: Coordinator, *, outermost: bool) -> None:
        ends.append(outermost)
        end(self, outermost=outermost)

    monkeypatch.setattr(Coordinator, "end_backward", noted)
    model: nn.Module = offload(Blocks(), "nvme", memory={"host": "1MiB"})
    passes(model, where)  # type: ignore[arg-type]
    assert ends == [True, True]
    infinity.SGD(model.parameters(), lr=0.5).step()
    found = weights_of(model)
    assert [name for name, value in plain.named_parameters() if not torch.equal(found[name], value)] == []
