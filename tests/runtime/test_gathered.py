"""infinity.gathered and infinity.state_dict: weights for other eyes and hands."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.coordinator import registry
from tests.models import llama, loss_of
from tests.runtime.gathering import PLACES, TIGHT, Trained, assert_same, changed, step, weights


def test_state_dict_is_that_of_the_model_in_memory(offload: Any) -> None:
    model, _ = llama()
    model.register_buffer("counted", torch.arange(3))
    before = copy.deepcopy(model.state_dict())
    mine = infinity.state_dict(offload(model, memory=TIGHT))
    assert [name for name, _ in mine] == list(before)
    assert_same(weights(model), before)


def test_in_the_context_the_model_is_as_if_it_were_not_offloaded(trained: Trained) -> None:
    model, batch, optim = trained
    expected = weights(model)
    with infinity.gathered(model):
        assert_same(model.state_dict(), expected)
        assert all(torch.equal(p.data, expected[name]) for name, p in model.named_parameters())
        assert type(model.lm_head.weight) is nn.Parameter
        norm = torch.stack([p.norm() for p in model.parameters()]).norm()
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        held = [torch.zeros_like(p) for p in model.parameters()]
        average(held, list(model.parameters()), torch.tensor(1))
    assert norm.isfinite()
    with pytest.raises(infinity.ReleasedParameterError):
        model.lm_head.weight.norm()
    assert_same(model.state_dict(), expected)
    assert_same(weights(model), expected)
    assert step(model, batch, optim) > 0


def test_only_what_was_asked_for_is_copied_and_the_rest_is_brought_when_it_is_read(trained: Trained) -> None:
    model, _, _ = trained
    expected = weights(model)
    with infinity.gathered(model, model.model.layers[0].mlp, model.lm_head.weight):
        assert torch.equal(model.lm_head.weight.data, expected["lm_head.weight"])
        other = model.model.layers[3].mlp.up_proj.weight
        assert torch.equal(other.detach(), expected["model.layers.3.mlp.up_proj.weight"])


def test_what_is_written_is_what_the_model_goes_on_with(trained: Trained) -> None:
    model, batch, optim = trained
    before = weights(model)
    with infinity.gathered(model, write=True):
        for parameter in model.model.layers[1].mlp.parameters():
            parameter.data.mul_(0.5)  # three ways to write
        with torch.no_grad():
            for parameter in model.model.layers[1].self_attn.parameters():
                parameter.mul_(0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            norm = getattr(model.model.layers[1], name)
            norm.weight.data = norm.weight.detach() * 0.5
    assert_same(weights(model), changed(before))
    step(model, batch, optim)
    assert all(not torch.equal(value, before[name]) for name, value in weights(model).items())


@pytest.mark.covering(most=3)
@pytest.mark.parametrize("place", PLACES)
def test_a_written_weight_has_a_master_of_exactly_its_value(place: str, offload: Any, tmp_path: Path) -> None:
    """Steps far below the spacing of bf16 only add up in the master: one that kept anything of the values before would
    end in other weights."""
    ends = []
    for trained_before in (False, True):
        torch.manual_seed(0)
        model, batch = llama(layers=2)
        wanted = {name: value.clone() for name, value in model.bfloat16().state_dict().items()}
        config = PLACES[place] | {"nvme": {"paths": [str(tmp_path / str(trained_before))]}}
        model = offload(model.train(), memory=TIGHT, **config)
        optim = infinity.SGD(model.parameters(), lr=1e-2)
        if trained_before:
            for _ in range(2):
                step(model, batch, optim)
            with infinity.gathered(model, write=True):
                model.load_state_dict(wanted)
        losses = [step(model, batch, optim) for _ in range(6)]
        ends.append((losses, weights(model)))
    assert ends[0][0] == ends[1][0]
    assert_same(ends[0][1], ends[1][1])


def test_without_write_a_change_ends_with_the_context_and_is_told(
    trained: Trained, caplog: pytest.LogCaptureFixture
) -> None:
    model, _, _ = trained
    expected = weights(model)
    caplog.set_level(logging.WARNING, "infinity")
    with infinity.gathered(model, model.lm_head):
        pass
    assert not caplog.records
    with infinity.gathered(model, model.lm_head):
        model.lm_head.weight.data.zero_()
    assert "'lm_head.weight' was changed, and the change is lost when the context ends" in caplog.text
    assert_same(weights(model), expected)
    with infinity.gathered(model, model.lm_head, write=True):
        model.lm_head.weight.data.zero_()
    assert not weights(model)["lm_head.weight"].any()


def test_an_exception_in_the_context_drops_the_changes(trained: Trained) -> None:
    model, _, _ = trained
    expected = weights(model)

    def write_and_fail() -> None:
        with infinity.gathered(model, write=True):
            model.lm_head.weight.data.zero_()
            raise KeyError

    with pytest.raises(KeyError):
        write_and_fail()
    assert_same(weights(model), expected)


def test_an_evaluation_in_the_context_sees_what_was_written(trained: Trained) -> None:
    """Averaged weights are swapped in like this for an evaluation."""
    model, batch, _ = trained
    with torch.no_grad():
        usual = loss_of(model, batch)
        with infinity.gathered(model):
            assert loss_of(model, batch) == usual
            for parameter in model.parameters():
                parameter.data.zero_()
            assert loss_of(model, batch) != usual
        assert loss_of(model, batch) == usual


def test_a_save_in_the_context_has_what_was_written(trained: Trained, tmp_path: Path) -> None:
    model, _, _ = trained
    with infinity.gathered(model):
        model.lm_head.weight.data.zero_()
        infinity.save_pretrained(model, tmp_path / "ours")
        model.save_pretrained(tmp_path / "theirs")
    for where in ("ours", "theirs"):
        saved = type(model).from_pretrained(tmp_path / where)
        assert not saved.lm_head.weight.any()
        assert saved.model.layers[0].mlp.up_proj.weight.any()


def test_a_model_is_resumed_with_what_was_written_last(offload: Any, swap_config: Any) -> None:
    model, batch = llama()
    config = swap_config("nvme", memory=TIGHT, commit_every=1)
    model = offload(model.bfloat16().train(), memory=TIGHT, commit_every=1)
    optim = infinity.AdamW(model.parameters(), lr=1e-2)
    step(model, batch, optim)
    infinity.commit(model)
    with infinity.gathered(model, model.lm_head, write=True):
        model.lm_head.weight.data.zero_()
    expected = weights(model)
    infinity.close(model)
    again, _ = llama()
    again = infinity.resume(again.bfloat16().train(), config)
    assert_same(weights(again), expected)
    infinity.close(again)


def test_a_crash_after_writing_resumes_the_generation_before_it(offload: Any, swap_config: Any) -> None:
    model, batch = llama()
    config = swap_config("nvme", memory=TIGHT, commit_every=1)
    model = offload(model.bfloat16().train(), memory=TIGHT, commit_every=1)
    step(model, batch, infinity.AdamW(model.parameters(), lr=1e-2))
    infinity.commit(model)
    expected = weights(model)
    with infinity.gathered(model, write=True):
        for parameter in model.parameters():
            parameter.data.zero_()
    registry.coordinator_of(model).health.fail(infinity.InfinityError("no commit comes any more, as after a crash"))
    infinity.close(model)
    again, _ = llama()
    again = infinity.resume(again.bfloat16().train(), config)
    assert_same(weights(again), expected)
    infinity.close(again)


def test_gradients_in_the_context_are_those_of_the_values(offload: Any) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    plain = copy.deepcopy(model)
    model = offload(model, memory={"device": "50KiB", "host": "64MiB"})
    optim = infinity.SGD(model.parameters(), lr=1.0)
    x = torch.randn(2, 64)
    with infinity.gathered(model, model[1]):
        (torch.nn.functional.linear(x, model[1].weight).sum() + model(x).sum()).backward()
    optim.step()
    (torch.nn.functional.linear(x, plain[1].weight).sum() + plain(x).sum()).backward()
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    assert_same(weights(model), dict(plain.state_dict()))


def test_a_step_in_the_context_is_refused(trained: Trained) -> None:
    model, batch, optim = trained
    with infinity.gathered(model, model.lm_head):
        loss_of(model, batch).backward()
        with pytest.raises(infinity.ModelError, match="Leave the context first"):
            optim.step()
    optim.step()


def test_what_cannot_be_gathered_is_named(trained: Trained) -> None:
    model, _, _ = trained
    with pytest.raises(infinity.ModelError, match=r"Linear \(2, 3\) does not belong"):
        infinity.gathered(model, nn.Linear(3, 2))
    with pytest.raises(infinity.ConfigError, match="not str"):
        infinity.gathered(model, "lm_head")
    with pytest.raises(infinity.ModelError, match="not offloaded"):
        infinity.gathered(model.lm_head)
    with pytest.raises(infinity.ModelError, match="not offloaded"):
        infinity.gathered(nn.Linear(2, 2), model.lm_head)
    with (
        infinity.gathered(model, model.lm_head),
        pytest.raises(infinity.ModelError, match="'lm_head.weight' is gathered already"),
        infinity.gathered(model, write=True),
    ):
        pass
    with pytest.raises(infinity.ModelError, match=r"has shape \(1,\) and dtype torch.bfloat16 at the end"):  # noqa: SIM117
        with infinity.gathered(model, model.lm_head, write=True):
            model.lm_head.weight.data = torch.ones(1, dtype=torch.bfloat16)
    assert model.lm_head.weight.shape == (128, 64)


@pytest.mark.parametrize("write", [False, True])
def test_a_plain_model_is_what_it_is_in_the_context_too(write: bool) -> None:
    plain = nn.Linear(2, 2)
    with infinity.gathered(plain, plain.weight, write=write):
        plain.weight.data.fill_(0.5)
    assert plain.weight.sum() == 2


def test_an_inner_context_reads_what_an_outer_one_wrote(trained: Trained) -> None:
    model, _, _ = trained
    with infinity.gathered(model, model.lm_head, write=True):
        model.lm_head.weight.data.zero_()
        with infinity.gathered(model):
            assert not model.state_dict()["lm_head.weight"].any()
        assert not model.lm_head.weight.any()
    assert not weights(model)["lm_head.weight"].any()


def test_writing_in_a_forward_is_refused_and_after_it_works(offload: Any) -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with infinity.gathered(self, self.blocks[1], write=True):
                return x

    model = offload(Writing())
    with pytest.raises(infinity.ModelError, match="in a forward or backward pass.*before or after the pass"):
        model(torch.ones(1, 8))
    with infinity.gathered(model, model.blocks[1], write=True):
        model.blocks[1].weight.data.fill_(0.5)
    assert bool((weights(model)["blocks.1.weight"] == 0.5).all())


def test_a_list_of_modules_is_refused_and_its_items_are_taken(trained: Trained) -> None:
    model, _, _ = trained
    several = [model.lm_head, model.model.norm]
    with pytest.raises(infinity.ConfigError, match=r"not list; write infinity\.gathered\(model, \*several\)"):
        infinity.gathered(model, several)  # type: ignore[arg-type]
    expected = weights(model)
    with infinity.gathered(model, *several):
        assert torch.equal(model.lm_head.weight.data, expected["lm_head.weight"])
        assert torch.equal(model.model.norm.weight.data, expected["model.norm.weight"])


def test_a_parameter_without_its_model_is_refused_and_with_its_model_it_is_taken(trained: Trained) -> None:
    model, _, _ = trained
    weight, expected = model.lm_head.weight, weights(model)
    with pytest.raises(infinity.ConfigError, match=r"not a parameter: write infinity\.gathered\(model, parameter\)"):
        infinity.gathered(weight)
    with pytest.raises(infinity.ConfigError, match=r"takes the offloaded model first, not list"):
        infinity.gathered([weight])  # type: ignore[arg-type]
    with infinity.gathered(model, weight):
        assert torch.equal(weight.data, expected["lm_head.weight"])


def test_frozen_weights_are_written_after_a_step_without_generations(offload: Any) -> None:
    """With generations an error says that all of them share one copy."""
    model, batch = llama()
    model.lm_head.weight.requires_grad_(False)
    model = offload(model.bfloat16().train(), memory=TIGHT, commit_every=0)
    step(model, batch, infinity.AdamW(model.parameters(), lr=1e-2))
    with infinity.gathered(model, model.lm_head, write=True):
        model.lm_head.weight.data.fill_(0.5)
    assert bool((weights(model)["lm_head.weight"] == 0.5).all())


def test_frozen_weights_that_generations_share_are_not_written(offload: Any) -> None:
    model, batch = llama()
    model.lm_head.weight.requires_grad_(False)
    model = offload(model.bfloat16().train(), memory=TIGHT, commit_every=1)
    with infinity.gathered(model, model.lm_head, write=True):
        model.lm_head.weight.data.fill_(0.5)  # there is no generation yet
    assert bool((weights(model)["lm_head.weight"] == 0.5).all())
    optim = infinity.AdamW(model.parameters(), lr=1e-2)
    step(model, batch, optim)
    infinity.commit(model)
    expected = weights(model)
    with pytest.raises(infinity.ModelError, match="'lm_head.weight' of unit 'remainder' is frozen"):  # noqa: SIM117
        with infinity.gathered(model, write=True):
            model.lm_head.weight.data.zero_()
    assert_same(weights(model), expected)
    step(model, batch, optim)


def test_copies_that_do_not_fit_are_refused_with_the_number(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinity.access.gathering.available_device_bytes", lambda device: 1000)
    context = infinity.gathered(trained[0])
    with pytest.raises(infinity.PlanError, match="1000 B.* are free. Gather one module at a time"):
        context.__enter__()
    with pytest.raises(infinity.ReleasedParameterError):
        trained[0].lm_head.weight.norm()
    expected = weights(trained[0])
    for name, module in trained[0].named_modules():
        if name.endswith("norm"):
            with infinity.gathered(trained[0], module):
                assert torch.equal(module.weight.data, expected[f"{name}.weight"])
