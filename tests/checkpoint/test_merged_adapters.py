"""A merged model has the bits of PEFT's merge_and_unload on the same values in memory."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import infinity
from infinity.checkpoint import merged_adapters
from infinity.checkpoint.merged_adapters import computing_merged, require_mergeable, save_merged
from infinity.errors import NotAvailableError
from tests.conftest import Offload
from tests.models import Batch, gpt2, llama, mixtral, tied_llama

small = partial(llama, 2)
MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, Batch]], dict[str, Any]]] = {
    "llama": (small, {}),
    "rslora and alpha": (small, {"use_rslora": True, "lora_alpha": 3}),
    "a trained head": (small, {"modules_to_save": ["lm_head"]}),
    "adapters of embedding and head": (small, {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    "tied llama": (partial(small, tie_word_embeddings=True), {}),
    "gpt2, whose weights are transposed": (gpt2, {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
    "mixtral, whose experts are one parameter": (mixtral, {}),
}


def with_adapters(make: Callable[[], tuple[Any, Batch]], place: Path, dtype: torch.dtype, **of_lora: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    model, batch = make()
    model.save_pretrained(place / "base")
    model = AutoModelForCausalLM.from_pretrained(place / "base", dtype=dtype)
    torch.manual_seed(1)
    config = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    return get_peft_model(model, LoraConfig(**(config | of_lora)), autocast_adapter_dtype=False), batch


def same_values(one: Any, other: Any) -> bool:
    mine, others = one.state_dict(), other.state_dict()
    return mine.keys() == others.keys() and all(torch.equal(mine[name], others[name]) for name in mine)


@pytest.mark.covering(strength=1, most=5)
@pytest.mark.parametrize("frozen", ["bf16", "nf4", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", MODELS)
def test_the_bits_are_those_of_peft(
    name: str, dtype: torch.dtype, frozen: str, offload: Offload, tmp_path: Path
) -> None:
    make, of_lora = MODELS[name]
    model, batch = with_adapters(make, tmp_path, dtype, **of_lora)
    plain = copy.deepcopy(model)
    model = offload(model, weights="nvme", optimizer="nvme", frozen=frozen)
    save_merged(model, tmp_path / "merged")
    with infinity.gathered(model):  # what rests encoded has the values that it decodes to
        plain.load_state_dict(model.state_dict())
    plain.merge_and_unload().save_pretrained(tmp_path / "plain")
    found, expected = (AutoModelForCausalLM.from_pretrained(tmp_path / each) for each in ("merged", "plain"))
    assert found.dtype == dtype
    assert same_values(found, expected)
    if name.startswith("mixtral"):
        return  # what PEFT makes of experts does not compute while the model is offloaded
    with torch.no_grad(), computing_merged(model.eval()):
        logits = model(**batch).logits
    with torch.no_grad():
        assert torch.equal(found(**batch).logits, logits)
        assert not torch.equal(model(**batch).logits, logits), "adapters beside their base round otherwise"


def test_a_merged_model_is_written_in_shards_and_trains_on(offload: Offload, tmp_path: Path) -> None:
    model, batch = with_adapters(llama, tmp_path, torch.bfloat16)
    model = offload(model)
    save_merged(model, tmp_path / "merged", max_shard_size="100KB")
    assert len(list((tmp_path / "merged").glob("model-*.safetensors"))) > 2
    model(**batch).loss.backward()
    save_merged(model, tmp_path / "again")
    assert same_values(*(AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("merged", "again")))


def test_one_unit_is_in_memory_at_a_time(offload: Offload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The merged weights of a unit are gone before those of the next one are made."""
    model = offload(with_adapters(llama, tmp_path, torch.bfloat16)[0])
    alive, most, made = 0, 0, 0
    inner = merged_adapters._weight_of

    def counted(layer: Any) -> torch.Tensor:
        nonlocal alive, most, made
        weight = inner(layer)
        alive, made = alive + 1, made + 1
        most = max(most, alive)

        def gone() -> None:
            nonlocal alive
            alive -= 1

        weakref.finalize(weight, gone)
        return weight

    monkeypatch.setattr(merged_adapters, "_weight_of", counted)
    save_merged(model, tmp_path / "merged")
    layers = len(model.get_base_model().model.layers)
    assert made == 7 * layers
    assert most == 7


@pytest.mark.parametrize(
    ("make", "config", "says"),
    [
        (llama, {"use_dora": True}, "use_dora"),
        (gpt2, {"target_modules": ["c_attn"], "lora_bias": True}, "lora_bias"),
        (tied_llama, {"target_modules": ["lm_head"]}, "adapters of 'lm_head', whose weight is tied"),
        (tied_llama, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "weight is tied"),
        (llama, {"trainable_token_indices": [1]}, "TrainableTokensWrapper"),
        (llama, {"layer_replication": [(0, 2), (1, 3)]}, "layer_replication"),
    ],
)
def test_what_cannot_be_merged_is_an_error_before_training(
    make: Callable[[], tuple[Any, Batch]], config: dict[str, Any], says: str, tmp_path: Path
) -> None:
    model, _ = with_adapters(make, tmp_path, torch.bfloat16, **config)
    with pytest.raises(NotAvailableError, match=says):
        require_mergeable(model)


def test_adapters_that_are_merged_already_are_not_merged_again(tmp_path: Path) -> None:
    model, _ = with_adapters(llama, tmp_path, torch.bfloat16)
    model.merge_adapter()
    with pytest.raises(NotAvailableError, match=r"is merged into the weights already: call model.unmerge_adapter\(\)"):
        require_mergeable(model)
    model.unmerge_adapter()
    require_mergeable(model)


def test_other_adapters_and_several_sets_are_refused(tmp_path: Path) -> None:
    from peft import IA3Config, LoraConfig, get_peft_model

    model, _ = with_adapters(llama, tmp_path, torch.bfloat16)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(NotAvailableError, match="2 sets of adapters"):
        require_mergeable(model)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with pytest.raises(NotAvailableError, match="IA3"):
        require_mergeable(get_peft_model(base, IA3Config(task_type="CAUSAL_LM")))


def test_a_layer_in_tiles_is_refused(offload: Offload, tmp_path: Path) -> None:
    model, _ = with_adapters(llama, tmp_path, torch.bfloat16)
    infinity.tile(model.get_base_model().model.layers[0].mlp.up_proj.base_layer, 2)
    with pytest.raises(NotAvailableError, match="runs in tiles"):
        require_mergeable(model)
