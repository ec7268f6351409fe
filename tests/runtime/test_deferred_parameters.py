"""A model that is loaded and not offloaded yet behaves as one with its values."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.runtime.deferred_parameters import defer, defer_in_memory, is_deferred, values_of
from infinity.units.released_parameters import ReleasedParameter
from tests.conftest import weights_of
from tests.models import llama, loss_of

CPU = torch.device("cpu")


class Deferred:
    """A deferred model, its values, and how often each was read."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        plain, self.batch = llama()
        self.values = {name: value.clone() for name, value in plain.state_dict().items()}
        self.read: list[str] = []
        self.model: Any = copy.deepcopy(plain).to("meta")
        self.model.tie_weights()
        for name, buffer in plain.named_buffers():
            owner, _, key = name.rpartition(".")
            self.model.get_submodule(owner)._buffers[key] = buffer
        defer(self.model, self._read, CPU)

    def _read(self, name: str) -> torch.Tensor:
        self.read.append(name)
        return self.values[name].clone()


@pytest.fixture
def deferred() -> Deferred:
    return Deferred()


def test_nothing_is_read_until_it_is_needed_and_then_as_often_as_it_is(deferred: Deferred) -> None:
    weight = deferred.model.lm_head.weight
    assert weight.shape == deferred.values["lm_head.weight"].shape
    assert weight.device == CPU
    assert deferred.read == []
    with torch.no_grad():
        assert torch.equal(weight + 0, deferred.values["lm_head.weight"])
        assert weight.norm() == deferred.values["lm_head.weight"].norm()
    assert deferred.read == ["lm_head.weight"] * 2
    assert isinstance(weight, ReleasedParameter)


def test_what_autograd_records_keeps_its_values_for_the_backward(deferred: Deferred) -> None:
    weight = deferred.model.lm_head.weight
    (weight**2).sum().backward()
    assert torch.equal(weight.grad, 2 * deferred.values["lm_head.weight"])
    assert type(weight) is nn.Parameter


def test_what_is_written_stays_written(deferred: Deferred, offload: Any) -> None:
    layer = deferred.model.model.layers[0]
    with torch.no_grad():
        layer.mlp.up_proj.weight.mul_(2)
    layer.mlp.down_proj.weight.data[0] = 7.0
    layer.mlp.gate_proj.weight.data = torch.zeros_like(layer.mlp.gate_proj.weight)
    with values_of(deferred.model) as source:
        infinity.offload(deferred.model, {"weights": "host", "optimizer": "host"}, source=source)
    found = weights_of(deferred.model)
    infinity.close(deferred.model)
    expected = dict(deferred.values)
    expected["model.layers.0.mlp.up_proj.weight"] = 2 * expected["model.layers.0.mlp.up_proj.weight"]
    expected["model.layers.0.mlp.down_proj.weight"][0] = 7.0
    expected["model.layers.0.mlp.gate_proj.weight"].zero_()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_conversions_read_nothing_and_hold(deferred: Deferred) -> None:
    model = deferred.model.to(torch.bfloat16).half().bfloat16().to("cpu")
    assert deferred.read == []
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert is_deferred(model)
    with torch.no_grad():
        found = model.lm_head.weight + 0
    assert torch.equal(found, deferred.values["lm_head.weight"].bfloat16())


def test_a_copy_of_the_model_has_the_same_values_and_reads_them_itself(deferred: Deferred) -> None:
    other = copy.deepcopy(deferred.model)
    assert deferred.read == []
    with torch.no_grad():
        other.lm_head.weight.zero_()
        assert torch.equal(deferred.model.lm_head.weight + 0, deferred.values["lm_head.weight"])
        assert not other.lm_head.weight.any()


def test_pickling_a_parameter_writes_its_values(deferred: Deferred) -> None:
    read = pickle.loads(pickle.dumps(deferred.model.lm_head.weight))
    assert torch.equal(read, deferred.values["lm_head.weight"])


def test_embeddings_can_be_resized_and_tied_weights_stay_tied(deferred: Deferred) -> None:
    rows = deferred.values["model.embed_tokens.weight"].shape[0]
    deferred.model.resize_token_embeddings(rows + 8)
    with torch.no_grad():
        found = deferred.model.get_input_embeddings().weight + 0
    assert torch.equal(found[:rows], deferred.values["model.embed_tokens.weight"])
    tied = Deferred()
    tied.model.config.tie_word_embeddings = True
    tied.model.tie_weights()
    assert tied.model.lm_head.weight is tied.model.model.embed_tokens.weight


def test_a_checkpoint_of_another_shape_is_an_error_that_names_the_parameter(deferred: Deferred) -> None:
    deferred.values["lm_head.weight"] = torch.zeros(3, 3)
    with torch.no_grad(), pytest.raises(infinity.ModelError, match=r"'lm_head.weight' is \(3, 3\) in the checkpoint"):
        deferred.model.lm_head.weight.sum()


def test_after_an_offload_that_failed_the_model_is_deferred_as_before(deferred: Deferred) -> None:
    tight = {"weights": "nvme", "optimizer": "host", "memory": {"device": "128KiB"}, "nvme": {"paths": ["/proc/never"]}}
    with pytest.raises(infinity.InfinityError), values_of(deferred.model) as source:
        infinity.offload(deferred.model, tight, source=source)
    assert is_deferred(deferred.model)
    with torch.no_grad():
        assert torch.equal(deferred.model.lm_head.weight + 0, deferred.values["lm_head.weight"])


def test_it_trains_as_a_model_that_was_there(deferred: Deferred, offload: Any) -> None:
    losses = []
    for mine in (True, False):
        if mine:
            with values_of(deferred.model) as source:
                model = infinity.offload(deferred.model, {"weights": "host", "optimizer": "host"}, source=source)
        else:
            plain, _ = llama()
            plain.load_state_dict(deferred.values)
            model = offload(plain, "host")
        model.train()
        optim = infinity.AdamW(model.parameters(), lr=1e-3)
        for _ in range(3):
            loss = loss_of(model, deferred.batch)
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(loss.item())
    infinity.close(deferred.model)
    assert losses[:3] == losses[3:]


def test_a_model_in_memory_keeps_the_values_that_it_had_before_it_is_converted() -> None:
    model = nn.Linear(3, 5)
    expected = model.weight.detach().clone()
    defer_in_memory(model)
    model.to(torch.bfloat16)
    assert model.weight.dtype == torch.bfloat16
    with values_of(model) as source:
        assert torch.equal(source("weight"), expected)


def test_what_is_written_to_a_view_stays_written(deferred: Deferred) -> None:
    model = deferred.model
    with torch.no_grad():
        model.lm_head.weight[-3:].zero_()
        model.model.embed_tokens.weight.view(-1)[:5].fill_(7)
        model.model.norm.weight.detach().fill_(3)
        assert not model.lm_head.weight[-3:].any()
        assert (model.model.embed_tokens.weight.flatten()[:5] == 7).all()
        assert (model.model.norm.weight == 3).all()
