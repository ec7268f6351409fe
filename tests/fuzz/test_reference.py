"""The fuzzer's reference optimizer makes the same steps as torch's optimizer, except for rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.fuzz.reference import Reference
from tests.optim.test_rules import PublishedLion

RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}),
    "Lion": (PublishedLion, {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}),
    "Adagrad": (
        torch.optim.Adagrad,
        {"lr": 1e-2, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1, "eps": 1e-10},
    ),
    "SGD": (
        torch.optim.SGD,
        {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1, "nesterov": False},
    ),
}


def backward(parameter: nn.Parameter, step: int, size: float) -> None:
    gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step)) * size
    (parameter * gradient.to(parameter.dtype)).sum().backward()


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("rule", RULES)
def test_the_reference_steps_as_torch_does(rule: str, clip: float | None) -> None:
    """Each step has up to four roundings of the weight, and ten of the change that is subtracted from it."""
    make, options = RULES[rule]
    torch.manual_seed(0)
    ours = nn.Parameter(torch.randn(1000))
    theirs = nn.Parameter(ours.detach().clone())
    reference = Reference([ours], rule, max_grad_norm=clip, maximize=False, **options)
    optimizer = make([theirs], **options)
    for step in range(1, 6):
        for _ in range(2):
            backward(ours, step, 0.1)
            backward(theirs, step, 0.1)
        if clip:
            nn.utils.clip_grad_norm_([theirs], clip)
        for each in (reference, optimizer):
            each.step()
            each.zero_grad()
        torch.testing.assert_close(ours, theirs, rtol=step * 4 * 2**-24, atol=step * 10 * 2**-24 * options["lr"])


def test_what_is_not_finite_is_skipped_and_a_missing_gradient_is_no_zero() -> None:
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    reference = Reference([first, second], "AdamW", max_grad_norm=None, maximize=False, **RULES["AdamW"][1])
    (first * float("nan")).sum().backward()
    reference.step()
    assert reference.skipped_steps == 1
    assert torch.equal(first, torch.ones(3))
    first.grad = None
    first.sum().backward()
    reference.step()
    assert reference.moved == {0}
    assert torch.equal(second, torch.ones(3))
    assert not torch.equal(first, torch.ones(3))


def test_bf16_weights_are_an_fp32_master_rounded_half_up_and_gradients_add_up_in_fp32() -> None:
    torch.manual_seed(0)
    narrow = nn.Parameter(torch.randn(1000).bfloat16())
    wide = nn.Parameter(narrow.detach().float())
    references = [
        Reference([parameter], "SGD", max_grad_norm=None, maximize=False, **RULES["SGD"][1])
        for parameter in (narrow, wide)
    ]
    for step in range(20):
        for _ in range(3):
            backward(narrow, step, 1.0)
            (
                wide * torch.randn(1000, generator=torch.Generator().manual_seed(step)).bfloat16().float()
            ).sum().backward()
        for reference in references:
            reference.step()
            reference.zero_grad()
        bits = wide.detach().view(torch.int32)
        assert torch.equal(narrow.detach().view(torch.int16).int() & 0xFFFF, ((bits + 0x8000) >> 16) & 0xFFFF)
