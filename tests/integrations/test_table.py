"""Operations of libraries on an offloaded model: each works, or an error names the fix. One test for each case that was
silently wrong, or ended in an error that helped nobody."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import InfinityError, ReleasedParameterError
from tests.conftest import weights_of
from tests.models import Batch, llama

Offload = Callable[..., Any]
LR = 1e-2


@pytest.fixture
def plain() -> tuple[nn.Module, Batch]:
    """A model that stays in memory, with the weights of the one that is offloaded."""
    return llama()


@pytest.fixture
def model(plain: tuple[nn.Module, Batch], offload: Offload) -> Any:
    """One that evicts, in fp32: 0.66 MB of weights, of which half fit."""
    return offload(copy.deepcopy(plain[0]), memory={"device": "640KiB", "host": "512MiB"})


def backward(model: nn.Module, batch: Batch) -> float:
    loss = model(**batch).loss
    loss.backward()
    return float(loss)


def same_weights(model: nn.Module, plain: nn.Module) -> None:
    expected = dict(plain.named_parameters())
    for name, weight in weights_of(model).items():
        torch.testing.assert_close(weight, expected[name].detach(), rtol=1e-5, atol=1e-6, msg=name)


# -- gradients --------------------------------------------------------------------------------------------------------


def test_torchs_clip_grad_norm_clips(model: Any, plain: tuple[nn.Module, Batch]) -> None:
    reference, batch = plain
    ours, theirs = infinity.AdamW(model.parameters(), lr=LR), torch.optim.AdamW(reference.parameters(), lr=LR)
    for _ in range(2):
        backward(model, batch)
        backward(reference, batch)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    same_weights(model, reference)


def test_the_norm_of_unclipped_gradients_can_be_logged(model: Any, plain: tuple[nn.Module, Batch]) -> None:
    reference, batch = plain
    infinity.AdamW(model.parameters(), lr=LR)
    backward(model, batch)
    backward(reference, batch)
    norm, expected = (
        torch.nn.utils.get_total_norm([p.grad for p in each.parameters() if p.grad is not None])
        for each in (model, reference)
    )
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)


def test_zero_grad_of_the_model_drops_gradients(model: Any, plain: tuple[nn.Module, Batch]) -> None:
    optimizer = infinity.AdamW(model.parameters(), lr=LR)
    before = weights_of(model)
    backward(model, plain[1])
    model.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    optimizer.step()
    after = weights_of(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


# -- optimizers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {}], ids=str)
def test_torchs_optimizer_on_offloaded_parameters_names_ours(
    options: dict[str, Any], model: Any, plain: tuple[nn.Module, Batch]
) -> None:
    def train() -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, **options)
        backward(model, plain[1])
        optimizer.step()

    with pytest.raises(InfinityError, match=r"infinity\.AdamW"):
        train()


def test_an_optimizers_state_can_be_pickled_and_read_safely(model: Any, plain: tuple[nn.Module, Batch]) -> None:
    optimizer = infinity.AdamW(model.parameters(), lr=LR)
    backward(model, plain[1])
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded["param_groups"][0]["lr"] == LR
    optimizer.load_state_dict(loaded)


def test_parameters_frozen_after_offload_stay_as_they_are(model: Any, plain: tuple[nn.Module, Batch]) -> None:
    reference, batch = plain
    for each in (model, reference):
        each.model.requires_grad_(False)
    before = weights_of(model)
    ours = infinity.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
    theirs = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], lr=LR)
    for _ in range(2):
        assert backward(model, batch) == pytest.approx(backward(reference, batch), rel=1e-6)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    after = weights_of(model)
    assert [name for name in before if not torch.equal(before[name], after[name])] == ["lm_head.weight"]
    same_weights(model, reference)


# -- weights ----------------------------------------------------------------------------------------------------------


def test_reading_data_names_gathered(model: Any) -> None:
    with pytest.raises(ReleasedParameterError, match=r"with infinity\.gathered\(model, module\)"):
        model.lm_head.weight.data.norm()


def test_a_state_dict_has_values_and_can_be_loaded(model: Any, plain: tuple[nn.Module, Batch]) -> None:
    state = model.state_dict()
    expected = plain[0].state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in state.items())
    model.load_state_dict({name: value + 1 for name, value in expected.items()})
    assert all(torch.equal(weight, expected[name] + 1) for name, weight in weights_of(model).items())


@pytest.mark.parametrize("grad", [True, False], ids=["training", "evaluation"])
def test_a_head_that_the_models_forward_uses_by_its_weight_has_values(
    grad: bool, model: Any, plain: tuple[nn.Module, Batch]
) -> None:
    """TRL's fused head does this."""

    def fused(self: Any, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.model(input_ids=input_ids).last_hidden_state
        logits = hidden[:, :-1] @ self.lm_head.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())

    reference, batch = plain
    for each in (model, reference):
        each.forward = fused.__get__(each)
    with torch.set_grad_enabled(grad):
        loss, expected = model(**batch), reference(**batch)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    if grad:
        loss.backward()
        expected.backward()
        norm, wanted = (nn.utils.clip_grad_norm_(each.parameters(), 1.0) for each in (model, reference))
        torch.testing.assert_close(norm, wanted, rtol=1e-5, atol=0)


# -- dtypes -----------------------------------------------------------------------------------------------------------


def test_autocast_inside_the_forward_of_fp32_weights_names_the_dtype(
    model: Any, plain: tuple[nn.Module, Batch]
) -> None:
    """Accelerate and Trainer's bf16=True do this."""
    model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
    with pytest.raises(InfinityError, match="bfloat16"):
        model(**plain[1])


def test_converting_an_offloaded_model_names_when_to_convert(model: Any) -> None:
    """Trainer's bf16_full_eval and Lightning's bf16-true do this."""
    with pytest.raises(InfinityError, match=r"before infinity\.offload|dtype="):
        model.to(torch.bfloat16)


# -- PEFT -------------------------------------------------------------------------------------------------------------


def attach_adapters(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))


def require_trains_as_plain(model: Any, reference: Any, batch: Batch) -> None:
    ours, theirs = infinity.AdamW(model.parameters(), lr=LR), torch.optim.AdamW(reference.parameters(), lr=LR)
    for _ in range(2):
        assert backward(model, batch) == pytest.approx(backward(reference, batch), rel=1e-6)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()


def test_adapters_attached_after_offload_train_as_plain(model: Any, plain: tuple[nn.Module, Batch]) -> None:
    require_trains_as_plain(attach_adapters(model), attach_adapters(plain[0]), plain[1])


def test_resizing_the_embeddings_after_offload_works(model: Any, plain: tuple[Any, Batch]) -> None:
    for each in (model, plain[0]):
        torch.manual_seed(1)
        each.resize_token_embeddings(200)
        each.tie_weights()
    require_trains_as_plain(model, *plain)


@pytest.fixture
def checkpoint(tmp_path: Path, plain: tuple[Any, Batch]) -> Path:
    plain[0].save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def test_adapters_attached_after_load_pretrained_train_as_plain(
    checkpoint: Path, plain: tuple[nn.Module, Batch], swap_config: Callable[..., dict[str, Any]]
) -> None:
    model = infinity.load_pretrained(checkpoint, swap_config(), dtype=torch.float32)
    try:
        require_trains_as_plain(attach_adapters(model), attach_adapters(plain[0]), plain[1])
    finally:
        infinity.close(model)
