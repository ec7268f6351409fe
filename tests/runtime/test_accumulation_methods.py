"""The methods that an offloaded model gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import infinity

X = torch.ones(1, 8)


class Counting(nn.Module):
    """With a zero_grad of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.calls: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layer(x).square().mean()
        return loss

    def zero_grad(self, set_to_none: bool = True, *, why: str = "") -> None:
        self.calls.append((set_to_none, why))
        super().zero_grad(set_to_none)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_the_models_class_is_called_too(set_to_none: bool, offload: Any) -> None:
    model = offload(Counting())
    model(X).backward()
    model.zero_grad(set_to_none, why="again")
    assert model.calls == [(set_to_none, "again")]
    assert [parameter.grad for parameter in model.parameters()] == [None, None]


def test_zero_grad_takes_what_torchs_takes(offload: Any) -> None:
    model = offload(nn.Linear(8, 8))
    model.zero_grad(set_to_none=False)
    with pytest.raises(TypeError, match="unexpected keyword"):
        model.zero_grad(unknown=True)


@pytest.mark.parametrize("convert", ["float", "double", "half"])
def test_a_gradient_that_is_converted_says_how_to_get_its_norm(convert: str, offload: Any) -> None:
    model = offload(nn.Linear(8, 8).bfloat16())
    model(X.bfloat16()).sum().backward()
    with pytest.raises(
        infinity.ReleasedParameterError, match=r"a conversion .* leave the conversion out: p\.grad\.norm"
    ):
        getattr(model.weight.grad, convert)()
    assert model.weight.grad.norm() > 0
