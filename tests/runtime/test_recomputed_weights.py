"""Checkpoints around several blocks keep none of them on the device: what is recomputed comes and goes."""

from __future__ import annotations

import copy
import gc
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as torchs
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import infinity
from infinity.errors import StaleWeightsError
from infinity.runtime import recomputed_weights
from tests.conftest import require_no_leaks, weights_of
from tests.processes import Forked
from tests.runtime.alike import tight

WIDTH = 48
LR = 2**-3  # products with it are exact, whether or not they are added in the same instruction
THEIRS = torchs._checkpoint_hook, torchs._recomputation_hook, torchs.CheckpointFunction.backward


class Lists(nn.Module):
    """Four lists of two layers. `around` calls them, or lets a checkpoint call them."""

    def __init__(self, around: Callable[[Lists, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.lists = nn.ModuleList(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)) for _ in range(4))
        self.around = around

    @property
    def layers(self) -> list[nn.Module]:
        return [layer for each in self.lists for layer in each]

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.around(self, x).square().mean()


def body(model: Lists, x: torch.Tensor, *, reentrant: bool) -> torch.Tensor:
    return checkpoint(model.run, x, use_reentrant=reentrant)


def sequential(model: Lists, x: torch.Tensor, *, reentrant: bool) -> torch.Tensor:
    return checkpoint_sequential(model.layers, 2, x, use_reentrant=reentrant)


def every_second(model: Lists, x: torch.Tensor, *, reentrant: bool) -> torch.Tensor:
    for position, each in enumerate(model.lists):
        run = nn.Sequential(*each)
        x = checkpoint(run, x, use_reentrant=reentrant) if position % 2 else run(x)
    return x


def nested(model: Lists, x: torch.Tensor, *, reentrant: bool, within: bool) -> torch.Tensor:
    def run(x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=within) if torch.is_grad_enabled() else layer(x)
        return x

    return checkpoint(run, x, use_reentrant=reentrant)


WAYS = {
    "body": body,
    "sequential": sequential,
    "every second": every_second,
    "nested in a reentrant one": partial(nested, within=True),
    "nested in a non-reentrant one": partial(nested, within=False),
}


def made(around: Any) -> Lists:
    torch.manual_seed(0)
    return Lists(around)


def given() -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()


def train(model: nn.Module, optim: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(3):
        loss = model(given())
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("way", WAYS)
def test_room_for_two_units_is_enough_for_the_bits_of_plain_torch(way: str, reentrant: bool, offload: Any) -> None:
    plain = made(partial(WAYS[way], reentrant=reentrant))
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=LR, foreach=False))
    model = made(partial(WAYS[way], reentrant=reentrant))
    model = offload(model, memory=tight(model))
    assert train(model, infinity.SGD(model.parameters(), lr=LR)) == expected
    after = dict(plain.named_parameters())
    assert all(torch.equal(weight, after[name]) for name, weight in weights_of(model).items())
    require_no_leaks(model)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("way", WAYS)
def test_micro_batches_that_go_through_the_units_together_need_no_more_room(
    way: str, reentrant: bool, offload: Any
) -> None:
    plain, model = (made(partial(WAYS[way], reentrant=reentrant)) for _ in range(2))
    batches = [(given().detach() * (1 + index)).requires_grad_() for index in range(3)]
    expected = [loss.item() for loss in map(plain, batches) if loss.backward() is None]
    model = offload(model, memory=tight(model))
    assert [loss.item() for loss in infinity.backward(model, model, batches)] == expected
    torch.optim.SGD(plain.parameters(), lr=LR, foreach=False).step()
    infinity.SGD(model.parameters(), lr=LR).step()
    after = dict(plain.named_parameters())
    assert all(torch.equal(weight, after[name]) for name, weight in weights_of(model).items())


class Product(torch.autograd.Function):
    """A product that records the tensors that autograd gives its backward."""

    seen: list[torch.Tensor] = []  # noqa: RUF012

    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        x, weight = context.saved_tensors
        assert type(weight) is torch.Tensor
        assert weight.data_ptr()  # as a kernel asks
        return gradients[0] @ weight, gradients[0].t() @ x


class Multiplied(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(x, self.weight)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_function_of_the_users_gets_weights_with_an_address(reentrant: bool, offload: Any) -> None:
    model = made(partial(body, reentrant=reentrant))
    for each in model.lists:
        each[0] = Multiplied(WIDTH, WIDTH, bias=False)
    model = offload(model, memory=tight(model))
    train(model, infinity.SGD(model.parameters(), lr=LR))


def test_no_operation_is_given_what_stands_for_a_weight(offload: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    operations: list[Any] = []
    monkeypatch.setattr(
        recomputed_weights._ViewStandIn, "__torch_dispatch__", lambda operation, *given: operations.append(operation)
    )
    model = made(partial(body, reentrant=False))
    model = offload(model, memory=tight(model))
    train(model, infinity.SGD(model.parameters(), lr=LR))
    assert operations == []


def test_selective_checkpoints_keep_what_they_chose(offload: Any) -> None:
    """Their modes see every operation of the recomputation, and refuse one that the forward had not."""

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
        keeps = operation is torch.ops.aten.tanh.default
        return torchs.CheckpointPolicy.MUST_SAVE if keeps else torchs.CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(torchs.create_selective_checkpoint_contexts, policy)

    def around(model: Lists, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(model.run, x, use_reentrant=False, context_fn=contexts)

    plain, model = made(around), made(around)
    model = offload(model, memory=tight(model))
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=LR, foreach=False))
    assert train(model, infinity.SGD(model.parameters(), lr=LR)) == expected


def test_a_second_backward_of_a_kept_graph_recomputes_again(offload: Any) -> None:
    plain, model = made(partial(body, reentrant=False)), made(partial(body, reentrant=False))
    model = offload(model, memory=tight(model))
    for each in (plain, model):
        loss = each(given())
        loss.backward(retain_graph=True)
        loss.backward()
    infinity.SGD(model.parameters(), lr=LR).step()
    torch.optim.SGD(plain.parameters(), lr=LR, foreach=False).step()
    after = dict(plain.named_parameters())
    for name, weight in weights_of(model).items():
        torch.testing.assert_close(weight, after[name].detach(), msg=name)


def test_what_a_reentrant_recomputation_changes_in_place_is_refused_as_torch_does(offload: Any) -> None:
    """The other kind is not told by torch either: it recomputes no further than to what was saved last."""

    def around(model: Lists, x: torch.Tensor) -> torch.Tensor:
        def run(x: torch.Tensor) -> torch.Tensor:
            x = model.run(x)
            x.mul_(2)  # tanh has saved it
            return x

        return checkpoint(run, x, use_reentrant=True)

    model = made(around)
    model = offload(model, memory=tight(model))
    with pytest.raises(StaleWeightsError, match="modified in place"):
        model(given()).backward()


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_what_a_recomputation_raises_leaves_no_hook_and_the_next_step_is_good(
    kind: type[BaseException], reentrant: bool, offload: Any
) -> None:
    fails = [False]

    def around(model: Lists, x: torch.Tensor) -> torch.Tensor:
        calls = [0]

        def run(x: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            x = model.layers[1](model.layers[0](x))
            if fails[0] and calls[0] == 2:
                raise kind("of the user")
            return model.run(x)

        return checkpoint(run, x, use_reentrant=reentrant)

    plain, model = made(around), made(around)
    model = offload(model, memory=tight(model))
    optim = infinity.SGD(model.parameters(), lr=LR)
    fails[0] = True
    with pytest.raises(kind, match="of the user"):
        model(given()).backward()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    fails[0] = False
    optim.zero_grad()
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=LR, foreach=False))
    assert train(model, optim) == expected
    require_no_leaks(model)


def torchs_now() -> tuple[Any, ...]:
    return torchs._checkpoint_hook, torchs._recomputation_hook, torchs.CheckpointFunction.backward


def _goes_through_two_models() -> int:
    models = [infinity.offload(made(body), {"memory": {"device": "1MiB", "host": "64MiB"}}) for _ in range(2)]
    for model in models:
        infinity.close(model)
    assert all(ours is not theirs for ours, theirs in zip(torchs_now(), THEIRS, strict=True))
    del models[0], model
    gc.collect()
    assert all(ours is not theirs for ours, theirs in zip(torchs_now(), THEIRS, strict=True))
    models.clear()
    gc.collect()
    assert torchs_now() == THEIRS
    return 77


def test_torch_has_its_own_classes_back_when_no_offloaded_model_is_left() -> None:
    """In a process of its own, which has no models of other tests."""
    process = Forked(_goes_through_two_models)
    said, _ = process.finished()
    assert process.returncode == 77, said


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_model_that_is_not_offloaded_is_recomputed_as_ever(reentrant: bool, offload: Any) -> None:
    alone = made(partial(body, reentrant=reentrant))
    beside = copy.deepcopy(alone)
    expected = train(alone, torch.optim.SGD(alone.parameters(), lr=LR))
    offloaded = made(partial(body, reentrant=reentrant))
    offload(offloaded, memory=tight(offloaded))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(beside, torch.optim.SGD(beside.parameters(), lr=LR)) == expected


def test_following_the_advice_about_views_that_are_held_works(offload: Any) -> None:
    """A script that keeps all weights of a pass: then memory.device must have room for all."""
    held: list[torch.Tensor] = []

    def around(model: Lists, x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = torch.tanh(layer(x))
            held.append(layer.weight.detach())
        return x

    model = made(around)
    model = offload(model, memory=tight(model))
    with pytest.raises(infinity.PlanError, match=r"holds views of them.* raise memory.device to ") as caught:
        model(given())
    held.clear()
    infinity.close(model, discard=True)
    device = re.findall(r"to (\d+[KM]iB)", str(caught.value))
    assert len(device) == 2
    model = offload(made(around), memory={"device": device[-1], "host": "64MiB"})
    model(given()).backward()
    held.clear()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_forward_from_before_the_model_was_offloaded_has_its_backward_after(reentrant: bool, offload: Any) -> None:
    """Then torch's own classes hand on what ours keep."""
    gc.collect()  # no model of another test has ours in place
    plain, model = (made(partial(body, reentrant=reentrant)) for _ in range(2))
    loss = model(given())
    plain(given()).backward()
    model = offload(model, memory=tight(model))
    loss.backward()
    torch.optim.SGD(plain.parameters(), lr=LR, foreach=False).step()
    infinity.SGD(model.parameters(), lr=LR).step()
    after = dict(plain.named_parameters())
    assert all(torch.equal(weight, after[name]) for name, weight in weights_of(model).items())
