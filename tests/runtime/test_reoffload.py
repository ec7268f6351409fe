"""A model that is changed after it was offloaded and before its first step trains as if it had been changed before."""

from __future__ import annotations

import copy
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import infinity
from infinity.access.exact import exact_value
from infinity.coordinator import registry
from infinity.coordinator.coordinator import Coordinator
from infinity.coordinator.registry import coordinator_of
from infinity.errors import ModelError, ReleasedParameterError
from infinity.io.directory import SWAP_NAME
from tests.conftest import weights_of
from tests.models import Batch, llama

LR = 1e-2
SMALL = {"device": "640KiB", "host": "512MiB"}
"""Memory with room for half of 0.66 MB of weights."""

Load = Callable[..., Any]
Change = Callable[[Any], Any]


@pytest.fixture
def plain() -> tuple[Any, Batch]:
    return llama()


@pytest.fixture
def checkpoint(tmp_path: Path, plain: tuple[Any, Batch]) -> Path:
    plain[0].save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.fixture
def load(checkpoint: Path, tmp_path: Path, swap_config: Callable[..., dict[str, Any]]) -> Iterator[Load]:
    """load_pretrained into a store of its own; what it returned is closed at the end."""
    opened: list[Any] = []

    def make(name: str, *, defer: bool = False, **overrides: Any) -> tuple[Any, dict[str, Any]]:
        config = swap_config(**({"memory": SMALL, "nvme": {"paths": [str(tmp_path / name)]}} | overrides))
        model = infinity.load_pretrained(checkpoint, config, dtype=torch.float32, defer=defer)
        opened.append(model)
        return model, config

    yield make
    for model in opened:
        if registry.is_offloaded(model):
            infinity.close(model)


def adapted(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))


def frozen(model: Any) -> Any:
    model.model.requires_grad_(False)
    return model


def resized(model: Any) -> Any:
    torch.manual_seed(1)
    model.resize_token_embeddings(160)
    return model


def trained(model: nn.Module, batch: Batch, optimizer: type[torch.optim.Optimizer]) -> list[float]:
    made = optimizer([each for each in model.parameters() if each.requires_grad], lr=LR)  # type: ignore[call-arg]
    losses = []
    for _ in range(3):
        loss = model(**batch).loss
        loss.backward()
        made.step()
        made.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("change", [adapted, frozen], ids=lambda each: each.__name__)
def test_a_model_changed_after_it_was_loaded_has_the_bits_and_the_states_of_one_changed_before(
    change: Change, load: Load, plain: tuple[Any, Batch]
) -> None:
    before, config = load("before", defer=True)
    changed_before = change(before)
    infinity.offload(before, config)  # adapters are put into the model itself
    after, _ = load("after")
    assert trained(change(after), plain[1], infinity.AdamW) == trained(changed_before, plain[1], infinity.AdamW)
    ours, theirs = weights_of(after), weights_of(before)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())
    states = [infinity.statistics(each) for each in (before, after)]
    assert states[0].state_bytes == states[1].state_bytes
    assert states[0].trainable_numel == states[1].trainable_numel < states[0].numel


def symmetric(layer: nn.Module) -> None:
    class Symmetric(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight.triu() + weight.triu(1).mT

    parametrize.register_parametrization(layer, "weight", Symmetric())


def pruned(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", amount=0.3)


COMPUTED = [parametrizations.weight_norm, parametrizations.spectral_norm, symmetric, pruned]
"""Weights that are computed from others, which are new parameters, or the same ones of another module."""


@pytest.mark.covering(most=2)
@pytest.mark.parametrize("compute", COMPUTED, ids=lambda each: each.__name__)
def test_following_the_advice_a_weight_is_computed_from_now_on(
    compute: Callable[[Any], object], offload: Callable[..., Any], plain: tuple[Any, Batch]
) -> None:
    reference, batch = plain
    model = offload(copy.deepcopy(reference), memory=SMALL)
    layer = model.model.layers[1].self_attn.q_proj
    if compute is parametrizations.weight_norm:
        with pytest.raises(ReleasedParameterError, match=r"in `with infinity.gathered\(model, module\):`"):
            compute(layer)
    torch.manual_seed(1)
    with infinity.gathered(model, layer):
        compute(layer)
    with pytest.raises(ModelError, match=r"before the first forward: making the optimizer offloads the model again"):
        model(**batch)
    torch.manual_seed(1)
    compute(reference.model.layers[1].self_attn.q_proj)
    ours = trained(model, batch, infinity.AdamW)
    assert ours == pytest.approx(trained(reference, batch, torch.optim.AdamW), rel=1e-5)


@pytest.mark.parametrize("change", [adapted, frozen, resized], ids=lambda each: each.__name__)
def test_a_model_that_was_in_memory_is_copied_to_ram_and_trains_as_plain(
    change: Change, offload: Callable[..., Any], plain: tuple[Any, Batch]
) -> None:
    reference, batch = plain
    model = change(offload(copy.deepcopy(reference), memory=SMALL))
    ours = trained(model, batch, infinity.AdamW)
    assert ours == pytest.approx(trained(change(reference), batch, torch.optim.AdamW), rel=1e-5)


def test_resizing_embeddings_of_a_loaded_model_reads_them_from_the_checkpoint(
    load: Load, plain: tuple[Any, Batch]
) -> None:
    model, _ = load("swap")
    reference, batch = plain
    assert resized(model).get_input_embeddings().num_embeddings == 160
    resized(reference)
    assert trained(model, batch, infinity.AdamW) == pytest.approx(
        trained(reference, batch, torch.optim.AdamW), rel=1e-5
    )
    assert model.config.vocab_size == 160


def test_a_parameter_that_was_frozen_when_it_was_loaded_can_be_trained(load: Load, plain: tuple[Any, Batch]) -> None:
    model, config = load("swap", defer=True)
    infinity.offload(frozen(model), config)
    model.requires_grad_(True)
    reference, batch = plain
    assert trained(model, batch, infinity.AdamW) == pytest.approx(
        trained(reference, batch, torch.optim.AdamW), rel=1e-5
    )


def test_what_was_written_since_it_was_offloaded_is_kept(load: Load, plain: tuple[Any, Batch]) -> None:
    model, _ = load("swap")
    with infinity.gathered(model, model.lm_head, write=True), torch.no_grad():
        model.lm_head.weight.mul_(2)
    frozen(model)
    infinity.AdamW(model.lm_head.parameters(), lr=LR)
    weights = weights_of(model)
    assert torch.equal(weights.pop("lm_head.weight"), 2 * plain[0].lm_head.weight)
    assert all(torch.equal(weight, plain[0].get_parameter(name)) for name, weight in weights.items())


def test_it_can_be_changed_twice_and_called_in_between(load: Load, plain: tuple[Any, Batch]) -> None:
    reference, batch = plain
    model, _ = load("swap")
    for each in (model, reference):
        resized(each)
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, reference(**batch).logits)
    ours, theirs = adapted(model), adapted(reference)
    assert trained(ours, batch, infinity.AdamW) == pytest.approx(trained(theirs, batch, torch.optim.AdamW), rel=1e-5)


def test_the_store_is_removed_and_made_anew_and_adapters_are_saved(
    load: Load, plain: tuple[Any, Batch], tmp_path: Path
) -> None:
    from peft import PeftModel

    model, _ = load("swap", commit_every=1)
    before = (tmp_path / "swap" / SWAP_NAME).stat()
    ours = adapted(model)
    trained(ours, plain[1], infinity.AdamW)
    after = (tmp_path / "swap" / SWAP_NAME).stat()
    assert after.st_size < before.st_size / 2
    assert infinity.statistics(ours).steps == 3  # of the model in it
    infinity.save_pretrained(ours, tmp_path / "adapters")
    loaded = PeftModel.from_pretrained(plain[0], tmp_path / "adapters")
    with torch.no_grad():
        torch.testing.assert_close(loaded(**plain[1]).logits, ours(**plain[1]).logits, rtol=1e-5, atol=1e-5)


# -- when it is too late ----------------------------------------------------------------------------------------------


def test_after_a_step_the_error_names_the_order(load: Load, plain: tuple[Any, Batch]) -> None:
    model, _ = load("swap")
    trained(model, plain[1], infinity.AdamW)
    weights = weights_of(model)
    with pytest.raises(ModelError, match=r"before the first optimizer.*defer=True"):
        model.resize_token_embeddings(160)
    assert all(torch.equal(weight, weights[name]) for name, weight in weights_of(model).items())
    with pytest.raises(ModelError, match=r"before the first optimizer.*defer=True"):
        infinity.AdamW(adapted(model).parameters(), lr=LR)
    assert infinity.statistics(model).steps == 3
    model, config = load("in order", defer=True)
    changed = adapted(resized(model))
    infinity.offload(model, config)
    assert trained(changed, plain[1], infinity.AdamW)[-1] > 0


class WithHead(nn.Module):
    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(128, 2)

    def forward(self, **batch: Any) -> torch.Tensor:
        return self.head(self.body(**batch).logits).square().mean()


def test_a_head_around_an_offloaded_model_is_refused_and_trains_where_it_is_put_before(
    load: Load, plain: tuple[Any, Batch]
) -> None:
    """The error's advice works."""
    with pytest.raises(
        ModelError, match=r"is not offloaded: call infinity\.offload.*before the model is offloaded: give defer=True"
    ):
        infinity.AdamW(WithHead(load("after")[0]).parameters(), lr=LR)
    model, config = load("before", defer=True)
    whole = infinity.offload(WithHead(model), config)
    optim, before = infinity.AdamW(whole.parameters(), lr=LR), weights_of(whole)
    whole(**plain[1]).backward()
    optim.step()
    assert not torch.equal(weights_of(whole)["head.weight"], before["head.weight"])
    assert not torch.equal(weights_of(whole)["body.lm_head.weight"], before["body.lm_head.weight"])
    infinity.close(whole)


def test_parameters_frozen_after_a_step_keep_their_states(load: Load, plain: tuple[Any, Batch]) -> None:
    model, _ = load("swap")
    reference, batch = plain
    for each, optimizer in ((model, infinity.AdamW), (reference, torch.optim.AdamW)):
        trained(each, batch, optimizer)
        frozen(each)
    assert trained(model, batch, infinity.AdamW) == pytest.approx(
        trained(reference, batch, torch.optim.AdamW), rel=1e-5
    )
    assert infinity.statistics(model).trainable_numel == infinity.statistics(model).numel


def test_gradients_are_not_dropped_for_parameters_that_were_frozen(load: Load, plain: tuple[Any, Batch]) -> None:
    model, _ = load("swap")
    model(**plain[1]).loss.backward()
    frozen(model)
    infinity.AdamW(model.lm_head.parameters(), lr=LR)
    assert model.lm_head.weight.grad is not None


def test_a_model_from_memory_that_ram_has_no_room_for_names_the_order(
    offload: Callable[..., Any], plain: tuple[Any, Batch]
) -> None:
    model = offload(copy.deepcopy(plain[0]), memory=SMALL)
    object.__setattr__(coordinator_of(model).plan.budgets.limits, "host", 100 << 10)
    with pytest.raises(ModelError, match=r"takes 642\.25 KiB of RAM.*memory\.host is 100\.00 KiB.*defer=True"):
        infinity.AdamW(adapted(model).parameters(), lr=LR)


# -- what is at stake -------------------------------------------------------------------------------------------------


def fp32_values(reference: nn.Module) -> Callable[[str], torch.Tensor]:
    """Finer than bf16 weights."""
    generator = torch.Generator().manual_seed(2)
    values = {
        name: value.detach() + 1e-4 * torch.randn(value.shape, generator=generator)
        for name, value in reference.named_parameters()
    }
    return values.__getitem__


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("master", ["split16", "fp32"])
@pytest.mark.parametrize("tier", ["nvme", "host"])
def test_the_master_keeps_all_its_bits(
    tier: str, master: str, swap_config: Callable[..., dict[str, Any]], plain: tuple[Any, Batch]
) -> None:
    ends = []
    for late in (False, True):
        model = copy.deepcopy(plain[0]).bfloat16()
        if not late:
            model.model.layers[0].requires_grad_(False)
        infinity.offload(model, swap_config(tier, master=master, memory=SMALL), source=fp32_values(plain[0]))
        if late:
            model.model.layers[0].requires_grad_(False)
        trained(model, plain[1], infinity.AdamW)
        ends.append(masters_of(model))
        infinity.close(model)
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def masters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    coordinator = coordinator_of(model)
    coordinator.finish_updates()
    return {place.spec.name: exact_value(coordinator, place) for _, place in coordinator.places()}


def rewritten(checkpoint: Path, reference: Any) -> None:
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(1)
    shutil.rmtree(checkpoint)
    reference.save_pretrained(checkpoint)


FILES: dict[str, Callable[[Path, Any], object]] = {
    "as they were": lambda checkpoint, reference: None,
    "gone": lambda checkpoint, reference: shutil.rmtree(checkpoint),
    "other ones": lambda checkpoint, reference: rewritten(checkpoint, copy.deepcopy(reference)),
}


@pytest.mark.parametrize("files", FILES)
def test_values_are_those_the_model_was_loaded_with_whatever_became_of_the_files(
    files: str, load: Load, checkpoint: Path, plain: tuple[Any, Batch]
) -> None:
    model, _ = load("swap")
    FILES[files](checkpoint, plain[0])
    infinity.AdamW(frozen(model).lm_head.parameters(), lr=LR)
    assert infinity.statistics(model).trainable_numel < infinity.statistics(model).numel
    assert all(torch.equal(value, plain[0].get_parameter(name)) for name, value in weights_of(model).items())


def test_where_the_new_plan_does_not_fit_the_model_is_as_it_was(load: Load, plain: tuple[Any, Batch]) -> None:
    model, config = load("swap", defer=True)
    model.requires_grad_(False)
    infinity.offload(model, config | {"memory": {"device": "640KiB", "host": "1MiB"}, "optimizer": "host"})
    model.requires_grad_(True)
    with pytest.raises(infinity.PlanError, match=r"memory\.host"):
        infinity.AdamW(model.parameters(), lr=LR)
    with torch.no_grad():
        assert torch.equal(model(**plain[1]).logits, plain[0](**plain[1]).logits)


def test_a_hyperparameter_out_of_range_is_refused_before_anything_is_done(load: Load) -> None:
    model, _ = load("swap")
    before = coordinator_of(model)
    with pytest.raises(infinity.ConfigError, match="lr"):
        infinity.AdamW(frozen(model).lm_head.parameters(), lr=-1)
    assert coordinator_of(model) is before


def test_ctrl_c_comes_when_the_model_is_deferred_or_offloaded(
    load: Load, plain: tuple[Any, Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = load("swap")
    before, close = coordinator_of(model), Coordinator.close

    def interrupted(self: Coordinator, **options: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        close(self, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Coordinator, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            infinity.AdamW(frozen(model).lm_head.parameters(), lr=LR)
    assert before.closed
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert all(torch.equal(value, plain[0].get_parameter(name)) for name, value in values.items())


def test_a_closed_model_is_not_changed(load: Load) -> None:
    model, _ = load("swap")
    infinity.close(model)
    with pytest.raises(ModelError, match="cannot be offloaded again: it was closed"):
        model.resize_token_embeddings(160)


def test_in_gathered_it_says_what_to_leave(load: Load) -> None:
    model, _ = load("swap")
    with infinity.gathered(model, model.lm_head), pytest.raises(ModelError, match=r"leave infinity\.gathered"):
        infinity.AdamW(adapted(model).parameters(), lr=LR)


def test_the_backward_of_an_earlier_forward_says_what_to_do(load: Load, plain: tuple[Any, Batch]) -> None:
    model, _ = load("swap")
    loss = model(**plain[1]).loss
    infinity.AdamW(frozen(model).lm_head.parameters(), lr=LR)
    with pytest.raises(infinity.InfinityError, match="was offloaded again after this forward"):
        loss.backward()


def test_a_parameter_that_was_replaced_takes_no_memory(offload: Callable[..., Any], plain: tuple[Any, Batch]) -> None:
    model = offload(copy.deepcopy(plain[0]), memory=SMALL)
    size = plain[0].lm_head.weight.numel() * 4
    object.__setattr__(coordinator_of(model).plan.budgets.limits, "host", 657_664 - size)
    model.lm_head = nn.Linear(64, 128, bias=False)
    infinity.AdamW(model.parameters(), lr=LR)
    assert not torch.equal(weights_of(model)["lm_head.weight"], plain[0].lm_head.weight)
