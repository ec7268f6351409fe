"""Gradients that are read and changed between backward and step."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.access import lent_gradients
from infinity.coordinator import registry
from infinity.coordinator.gradient_handle import GradientHandle
from tests.conftest import states_of
from tests.runtime.gathering import assert_same, weights

IDS = torch.arange(12).view(2, 6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.act = nn.Tanh()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + self.act(block(x))
        return x.float().square().mean()


def net() -> Any:
    torch.manual_seed(0)
    return Net()


def optimizers(plain: Any, model: Any) -> tuple[torch.optim.SGD, infinity.SGD]:
    """Their bits are the same in fp32, with a rate that multiplies exactly."""
    return torch.optim.SGD(plain.parameters(), lr=0.125), infinity.SGD(model.parameters(), lr=0.125)


# -- what is changed --------------------------------------------------------------------------------------------------


def scale(parameter: Any) -> None:
    parameter.grad.mul_(1 / 3)


def clip(parameter: Any) -> None:
    nn.utils.clip_grad_value_([parameter], 1e-4)


def clip_as_old_code_does(parameter: Any) -> None:
    parameter.grad.data.clamp_(-1e-4, 1e-4)


def zero(parameter: Any) -> None:
    parameter.grad.zero_()


def add_noise(parameter: Any) -> None:
    noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    parameter.grad += 0.01 * noise.to(parameter.device)


def replace(parameter: Any) -> None:
    parameter.grad = parameter.grad.sign()


def reverse(parameter: Any) -> None:
    parameter.grad.data.copy_(parameter.grad.flip(0))


def forget(parameter: Any) -> None:
    parameter.grad = None


CHANGES = [scale, clip, clip_as_old_code_does, zero, add_noise, replace, reverse, forget]


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("gradients", ["host", "nvme"])
@pytest.mark.parametrize("overlap", ["off", "before_forward", "during_backward"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_step_takes_what_was_changed(change: Any, overlap: str, gradients: str, offload: Any) -> None:
    """In the first and the last micro-batch, of a part of the parameters."""
    plain, model = net(), offload(net(), overlap=overlap, gradients=gradients, accumulation_steps=2)
    optims, models = optimizers(plain, model), (plain, model)
    for _ in range(3):
        for micro in range(2):
            for each in models:
                each(IDS + micro).backward()
                with infinity.gathered(each, each.blocks[1], each.embed, grads=True):
                    change(each.blocks[1].weight)
                    if micro:
                        change(each.embed.weight)
        for optim in optims:
            optim.step()
            optim.zero_grad()
    assert_same(weights(model), plain.state_dict())


def test_gradients_in_the_context_are_those_of_torch_and_stay_as_they_are(offload: Any) -> None:
    """Two micro-batches in bf16 add up in fp32: gradients that were read are not rounded."""
    ends = []
    for reads in (False, True):
        model = offload(net().bfloat16(), overlap="during_backward", accumulation_steps=2)
        optim = infinity.AdamW(model.parameters(), lr=1e-2, accumulation_steps=2)
        for _ in range(2):
            for micro in range(2):
                model(IDS + micro).backward()
            if reads:
                with infinity.gathered(model, grads=True):
                    assert {each.grad.dtype for each in model.parameters()} == {torch.bfloat16}
                    assert all(type(each.grad) is torch.Tensor for each in model.parameters())
                    norms = [each.grad.float().norm().item() for each in model.parameters()]
                found = [each.grad.norm().item() for each in model.parameters()]
                assert found == pytest.approx(norms, rel=1e-2)
            optim.step()
            optim.zero_grad()
        assert registry.coordinator_of(model).speculation_choice.counts.undone == 0
        ends.append(weights(model) | states_of(model))
        infinity.close(model)
    assert_same(*ends)


def test_values_are_torchs_to_the_bit(offload: Any) -> None:
    plain, model = net(), offload(net())
    for each in (plain, model):
        each(IDS).backward()
    with infinity.gathered(model, model.blocks, grads=True):
        for mine, theirs in zip(model.blocks.parameters(), plain.blocks.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)
        assert isinstance(model.embed.weight.grad, GradientHandle)


def test_a_change_undoes_the_updates_that_have_begun_and_says_so_once(offload: Any, caplog: Any) -> None:
    caplog.set_level(logging.WARNING, "infinity")
    model = offload(net(), overlap="during_backward", accumulation_steps=1)
    optim = infinity.SGD(model.parameters(), lr=0.1, accumulation_steps=1)
    coordinator = registry.coordinator_of(model)
    counts = coordinator.speculation_choice.counts
    for _ in range(2):
        coordinator.finish_updates()  # a unit whose update is under way begins no other
        undone = counts.undone
        model(IDS).backward()
        with infinity.gathered(model, model.blocks[3], grads=True):
            scale(model.blocks[3].weight)
        assert counts.undone > undone
        optim.step()
        optim.zero_grad()
    assert [each.getMessage() for each in caplog.records if "by hand" in each.getMessage()] == [
        "updates that began during backward are repeated, with the same result: a gradient was set, changed or "
        "cleared by hand. Set overlap: before_forward if this happens often."
    ]


def test_clipping_takes_the_norm_of_what_was_changed(offload: Any) -> None:
    model = offload(net(), overlap="during_backward")
    optim = infinity.SGD(model.parameters(), lr=0.1, max_grad_norm=1e-3)
    model(IDS).backward()
    assert model.embed.weight.grad.norm() > 0  # the norm was taken
    with infinity.gathered(model, grads=True):
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
        norm = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        before = {name: value.clone() for name, value in model.state_dict().items()}
        wanted = {
            name: before[name] - 0.1 * parameter.grad * (1e-3 / norm) for name, parameter in model.named_parameters()
        }
    optim.step()
    assert optim.last_grad_norm == pytest.approx(norm.item(), rel=1e-6)
    for name, weight in weights(model).items():
        torch.testing.assert_close(weight, wanted[name])


def test_a_gradient_that_was_clipped_before_is_clipped_in_the_context_and_not_again(offload: Any) -> None:
    plain, model = net(), offload(net())
    optims = optimizers(plain, model)
    for each in (plain, model):
        each(IDS).backward()
        for parameter in each.parameters():
            parameter.grad.mul_(0.25)
        with infinity.gathered(each, grads=True):
            scale(each.blocks[2].weight)
    for optim in optims:
        optim.step()
    assert_same(weights(model), plain.state_dict())


def test_a_parameter_without_a_gradient_is_not_touched(offload: Any) -> None:
    """Neither are its moments."""
    model = offload(net())
    optim = infinity.AdamW(model.parameters(), lr=0.125)
    before = weights(model)
    model(IDS).backward()
    with infinity.gathered(model, model.blocks[0], grads=True):
        forget(model.blocks[0].weight)
    assert model.blocks[0].weight.grad is None
    optim.step()
    after = weights(model)
    same = [name for name in before if torch.equal(before[name], after[name])]
    assert same == ["blocks.0.weight"]
    assert "step" not in optim.state[model.blocks[0].weight]


def test_unscaled_gradients_stay_unscaled_when_some_are_changed(offload: Any) -> None:
    ends = []
    for power in (0, 10):
        model = offload(net())
        optim, scaler = infinity.SGD(model.parameters(), lr=0.125), torch.amp.GradScaler("cpu", init_scale=2.0**power)
        scaler.scale(model(IDS)).backward()
        scaler.unscale_(optim)
        with infinity.gathered(model, model.blocks[1], grads=True):
            scale(model.blocks[1].weight)
            assert model.blocks[1].weight.grad.norm() < 1
        scaler.step(optim)
        ends.append(weights(model) | {"norm": torch.tensor(optim.last_grad_norm)})
        infinity.close(model)
    assert_same(*ends)


# -- what is as before ------------------------------------------------------------------------------------------------


def test_an_exception_drops_the_changes(offload: Any) -> None:
    model = offload(net())
    model(IDS).backward()
    before = [parameter.grad.norm() for parameter in model.parameters()]

    def fail() -> None:
        with infinity.gathered(model, grads=True):
            for parameter in model.parameters():
                zero(parameter)
            forget(model.embed.weight)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fail()
    assert [parameter.grad.norm() for parameter in model.parameters()] == before


def test_what_cannot_be_taken_back_leaves_handles(offload: Any) -> None:
    """A weight of another shape is refused before any gradient is taken."""
    model = offload(net())
    model(IDS).backward()
    before = model.embed.weight.grad.norm()

    def resize() -> None:
        with infinity.gathered(model, grads=True):
            zero(model.embed.weight)
            model.blocks[0].bias.data = torch.zeros(3)

    with pytest.raises(infinity.ModelError, match="change values only"):
        resize()
    assert model.embed.weight.grad.norm() == before


def test_an_inner_context_leaves_an_outer_ones_gradients_to_it(offload: Any) -> None:
    plain, model = net(), offload(net())
    optims = optimizers(plain, model)
    for each in (plain, model):
        each(IDS).backward()
        with infinity.gathered(each, each.blocks[1], grads=True):
            scale(each.blocks[1].weight)
            with infinity.gathered(each, grads=True):
                scale(each.blocks[1].weight)
                scale(each.blocks[2].weight)
            scale(each.blocks[1].weight)
    for optim in optims:
        optim.step()
    assert_same(weights(model), plain.state_dict())


def test_zero_grad_in_the_context_leaves_none(offload: Any) -> None:
    model = offload(net())
    optim = infinity.SGD(model.parameters(), lr=0.125)
    before = weights(model)
    model(IDS).backward()
    with infinity.gathered(model, grads=True):
        optim.zero_grad()
    assert [parameter.grad for parameter in model.parameters()] == [None] * 9
    optim.step()
    assert_same(weights(model), before)


def test_gradients_after_a_step_are_those_it_used(offload: Any) -> None:
    """In torch they stay until zero_grad, too."""
    plain, model = net(), offload(net())
    optims = optimizers(plain, model)
    for each, optim in zip((plain, model), optims, strict=True):
        each(IDS).backward()
        optim.step()
        with infinity.gathered(each, each.blocks[0], grads=True):
            scale(each.blocks[0].weight)
        optim.step()
    assert_same(weights(model), plain.state_dict())


# -- errors -----------------------------------------------------------------------------------------------------------


def enter(model: Any, *modules: Any) -> None:
    with infinity.gathered(model, *modules, grads=True):
        pass


def test_without_gradients_it_is_refused_by_name(offload: Any) -> None:
    model = offload(net())
    optim = infinity.SGD(model.parameters(), lr=0.125)
    model(IDS).backward()
    optim.zero_grad()
    refused = r"no parameter of the model has a gradient. Enter the context between backward\(\) and zero_grad\(\)"
    with pytest.raises(infinity.ModelError, match=refused):
        enter(model, model.blocks[0])


def test_a_module_that_has_no_gradient_beside_others_gives_none(offload: Any) -> None:
    model = net()
    model.blocks[0].requires_grad_(False)
    model = offload(model)
    infinity.SGD(model.parameters(), lr=0.125)
    model(IDS).backward()
    for module, count in ((model.blocks[0], 0), (model.act, 0), (model.blocks[1], 2)):
        with infinity.gathered(model, module, grads=True):
            assert sum(parameter.grad is not None for parameter in module.parameters()) == count


def test_gradients_that_zero_grad_dropped_stay_dropped_whatever_ends_the_context(offload: Any) -> None:
    model = offload(net())
    optim = infinity.SGD(model.parameters(), lr=0.125)
    model(IDS).backward()
    before = weights(model)
    with suppress(KeyError), infinity.gathered(model, grads=True):
        optim.zero_grad()
        raise KeyError
    assert all(parameter.grad is None for parameter in model.parameters())
    optim.step()
    assert_same(weights(model), before)


def test_a_handle_that_is_kept_says_that_its_gradient_is_gone(offload: Any) -> None:
    model = offload(net())
    optim = infinity.SGD(model.parameters(), lr=0.125)
    model(IDS).backward()
    kept = model.blocks[0].weight.grad
    with infinity.gathered(model, model.blocks[0], grads=True):
        copied = model.blocks[0].weight.grad.clone()
    assert copied.norm() == pytest.approx(float(kept.norm()))
    optim.step()
    optim.zero_grad()
    for use in (lambda: kept.abs().max(), kept.norm):
        with pytest.raises(infinity.ReleasedParameterError, match="'blocks.0.weight' is gone.*copy them in"):
            use()


def test_in_a_pass_it_is_refused_and_a_pass_in_it_too(offload: Any) -> None:
    model = offload(net())
    optim = infinity.SGD(model.parameters(), lr=0.125)
    model(IDS).backward()
    before = model.embed.weight.grad.norm()

    for register in (model.blocks[1].register_forward_hook, model.embed.weight.register_hook):
        hook = register(lambda *_: enter(model))
        with pytest.raises(infinity.ModelError, match=r"grads=True\) in a forward or backward pass"):
            model(IDS).backward()
        hook.remove()
    optim.zero_grad()
    model(IDS).backward()
    refused = pytest.raises(infinity.ModelError, match=r"a backward pass inside .*Leave the context first")
    with refused, infinity.gathered(model, grads=True):
        model(IDS).backward()
    assert model.embed.weight.grad.norm() == before
    optim.step()  # the model goes on
    model(IDS).backward()


def test_copies_that_do_not_fit_are_counted_with_the_gradients(offload: Any, monkeypatch: Any) -> None:
    model = offload(net())
    model(IDS).backward()
    monkeypatch.setattr("infinity.access.gathering.available_device_bytes", lambda device: 3 * 4096)
    with infinity.gathered(model, model.blocks[0].weight, model.blocks[1].weight):
        pass
    with pytest.raises(infinity.PlanError, match="needs 16.00 KiB for copies"):
        enter(model, model.blocks[0].weight, model.blocks[1].weight)


def test_unscaled_gradients_in_float16_are_refused_with_the_order(offload: Any) -> None:
    model = offload(net().half())
    optim, scaler = infinity.SGD(model.parameters(), lr=0.125), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(IDS)).backward()
    with infinity.gathered(model, grads=True):  # as the message says
        zero(model.embed.weight)
    scaler.unscale_(optim)
    assert model.blocks[0].weight.grad.abs().max().dtype == torch.float32
    with pytest.raises(infinity.ModelError, match="before scaler.unscale_"):
        enter(model)
    assert isinstance(model.embed.weight.grad, GradientHandle)


def test_ctrl_c_in_the_context_leaves_a_gradient_that_is_whole(offload: Any, monkeypatch: Any) -> None:
    model = offload(net())
    model(IDS).backward()
    before = model.embed.weight.grad.norm()

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(lent_gradients, "_changed", interrupt)
    with pytest.raises(KeyboardInterrupt), infinity.gathered(model, grads=True):
        zero(model.embed.weight)
    assert [type(parameter.grad) for parameter in model.parameters()] == [GradientHandle] * 9
    assert model.embed.weight.grad.norm() == before


# -- loops as they are published --------------------------------------------------------------------------------------


class Perturbation:
    """The change that FGM, PGD and AWP make to weights, in the published operations.

    Args:
        named: a part of the names of parameters that are perturbed.
    """

    def __init__(self, model: Any, named: str) -> None:
        self.model, self.named = model, named
        self.backup: dict[str, torch.Tensor] = {}
        self.grad_backup: dict[str, torch.Tensor] = {}

    def fgm(self, epsilon: float = 1.0) -> None:
        for name, param in self.model.named_parameters():
            if param.requires_grad and self.named in name:
                self.backup[name] = param.data.clone()
                norm = torch.norm(param.grad)
                if norm != 0 and not torch.isnan(norm):
                    r_at = epsilon * param.grad / norm
                    param.data.add_(r_at)

    def awp(self, lr: float = 1.0, eps: float = 0.2) -> None:
        for name, param in self.model.named_parameters():
            if param.requires_grad and param.grad is not None and self.named in name:
                self.backup[name] = param.data.clone()
                reach = eps * param.abs().detach()
                norm, of_weight = torch.norm(param.grad), torch.norm(param.data.detach())
                if norm != 0 and not torch.isnan(norm):
                    param.data.add_(lr * param.grad / (norm + 1e-6) * (of_weight + 1e-6))
                    low, high = self.backup[name] - reach, self.backup[name] + reach
                    param.data = torch.min(torch.max(param.data, low), high)

    def restore(self) -> None:
        for name, param in self.model.named_parameters():
            if name in self.backup:
                param.data = self.backup[name]
        self.backup = {}

    def backup_grad(self) -> None:
        for name, param in self.model.named_parameters():
            self.grad_backup[name] = param.grad.clone()

    def restore_grad(self) -> None:
        for name, param in self.model.named_parameters():
            param.grad = self.grad_backup[name]


def train_with(model: Any, optim: Any, attack: Callable[[], None], own: Perturbation, *, clears: bool) -> list[float]:
    losses = []
    for _ in range(3):
        loss = model(IDS)
        loss.backward()
        with infinity.gathered(model, write=True, grads=True):
            attack()
        if clears:
            optim.zero_grad()
        adversarial = model(IDS)
        adversarial.backward()
        with infinity.gathered(model, write=True):
            own.restore()
        optim.step()
        model.zero_grad()
        losses += [loss.item(), adversarial.item()]
    return losses


@pytest.mark.parametrize("method", ["fgm", "awp"])
def test_fgm_and_awp_train_as_in_torch(method: str, offload: Any) -> None:
    """FGM adds the second gradient to the first, AWP takes the second alone."""
    plain = net()
    model = offload(net(), overlap="during_backward")
    ends = []
    for each, optim in zip((plain, model), optimizers(plain, model), strict=True):
        own = Perturbation(each, "embed" if method == "fgm" else "weight")
        ends.append(train_with(each, optim, getattr(own, method), own, clears=method == "awp"))
    assert ends[0] == ends[1]
    assert ends[0][1] > ends[0][0]
    assert_same(weights(model), plain.state_dict())


def test_pgd_keeps_gradients_and_sets_them_back_as_in_torch(offload: Any) -> None:
    plain = net()
    model = offload(net(), overlap="during_backward")
    for each, optim in zip((plain, model), optimizers(plain, model), strict=True):
        own = Perturbation(each, "embed")
        for _ in range(2):
            each(IDS).backward()
            with infinity.gathered(each, grads=True):
                own.backup_grad()
            for last in (False, True):
                with infinity.gathered(each, each.embed, write=True, grads=True):
                    kept = own.backup
                    own.fgm(0.3)
                    own.backup = kept or own.backup
                each.zero_grad()
                if last:
                    own.restore_grad()
                each(IDS).backward()
            with infinity.gathered(each, write=True):
                own.restore()
            optim.step()
            optim.zero_grad()
    assert_same(weights(model), plain.state_dict())


def test_following_the_messages_leads_from_a_loop_that_fails_to_one_that_trains(offload: Any) -> None:
    """FGM in a script that knows nothing of infinity: `.data` says gathered, the gradient in it says grads=True."""
    model = offload(net())
    own = Perturbation(model, "embed")
    model(IDS).backward()
    with pytest.raises(infinity.ReleasedParameterError, match=r"with write=True to change it"):
        own.fgm()
    refused = pytest.raises(infinity.ReleasedParameterError, match=r"gathered\(model, module, grads=True\)")
    with refused, infinity.gathered(model, model.embed, write=True):
        own.fgm()
    before = weights(model)["embed.weight"]
    with infinity.gathered(model, model.embed, write=True, grads=True):
        own.fgm()
    assert not torch.equal(weights(model)["embed.weight"], before)


# -- without the context ----------------------------------------------------------------------------------------------

REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda grad: grad.norm(),
    "data.norm": lambda grad: grad.data.norm(2.0),
    "norm of order 1": lambda grad: grad.detach().norm(1),
    "norm of order inf": lambda grad: grad.data.norm(float("inf")),
    "norm along a dimension": lambda grad: grad.norm(dim=0),
    "the largest": lambda grad: grad.abs().max(),
    "all finite": lambda grad: torch.isfinite(grad).all(),
    "any NaN": lambda grad: torch.isnan(grad).any(),
    "any infinite": lambda grad: grad.isinf().any(),
    "squares": lambda grad: grad.data.pow(2).sum().sqrt(),
    "mean and std": lambda grad: torch.stack([grad.mean(), grad.std()]),
    "zeros": lambda grad: (grad == 0).sum(),
    "histogram": lambda grad: torch.histc(grad, 8),
}


@pytest.mark.parametrize("use", REDUCTIONS)
def test_reductions_of_a_gradient_are_those_of_torch(use: str, offload: Any) -> None:
    """Before and after it was multiplied through an alias."""
    plain, model = net(), offload(net(), gradients="nvme")
    for each in (plain, model):
        each(IDS).backward()
    for _ in range(2):
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(REDUCTIONS[use](mine.grad).cpu(), REDUCTIONS[use](theirs.grad))
            assert isinstance(mine.grad, GradientHandle)
            for parameter in (mine, theirs):
                parameter.grad.data.mul_(0.5)


@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
def test_torchs_clipping_works_with_any_order(order: float, offload: Any) -> None:
    plain, model = net(), offload(net())
    optims, found = optimizers(plain, model), []
    for each, optim in zip((plain, model), optims, strict=True):
        each(IDS).backward()
        found.append(float(nn.utils.clip_grad_norm_(each.parameters(), 1e-3, norm_type=order)))
        optim.step()
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    for name, weight in weights(model).items():
        torch.testing.assert_close(weight, plain.state_dict()[name])


NEED_A_COPY: list[Callable[[Any], Any]] = [
    lambda grad: grad.clone(),
    lambda grad: grad.data.clamp_(-1, 1),
    lambda grad: grad + 1,
    lambda grad: grad.detach().cpu().numpy(),
    lambda grad: grad.tolist(),
    lambda grad: copy.deepcopy(grad),
]


@pytest.mark.parametrize("use", NEED_A_COPY)
def test_what_needs_a_copy_that_stays_raises_and_works_as_the_message_says(use: Any, offload: Any) -> None:
    model = offload(net())
    model(IDS).backward()
    with pytest.raises(
        infinity.ReleasedParameterError, match=r"`with infinity.gathered\(model, module, grads=True\):`"
    ):
        use(model.embed.weight.grad)
    with infinity.gathered(model, model.embed, grads=True):
        use(model.embed.weight.grad)
