"""The layers that `--lora` adapts in mixtures of experts, as PEFT understands their names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infinity.cli.adapter_targets import targets
from infinity.errors import ConfigError
from tests.models import llama
from tests.runtime.test_experts import make

MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "every layer": ("Qwen3Moe", {}),
    "a dense layer among them": ("Qwen3Moe", {"mlp_only_layers": [0]}),
    "a gated shared expert": ("Qwen2Moe", {}),
    "a dense layer and a shared expert": ("DeepseekV3", {}),
    "biases": ("GptOss", {}),
}


def adapted(model: Any, *, experts: bool) -> set[str]:
    """Return the names of the modules and parameters to which PEFT adds adapters."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    torch.manual_seed(0)
    lora = get_peft_model(model, LoraConfig(r=2, **targets(model, experts=experts)))
    return {
        f"{name}.{getattr(module, 'parameter_name', '')}"
        for name, module in lora.named_modules()
        if isinstance(module, BaseTunerLayer)
    }


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_mixture_has_adapters_of_attention_and_of_experts_if_asked(mixture: str, experts: bool) -> None:
    name, options = MIXTURES[mixture]
    found = adapted(make(name, **options)[0], experts=experts)
    others = {each for each in found if ".self_attn." not in each}
    assert len(found) > len(others)
    stacks = {each.rpartition(".")[2] for each in others}
    assert stacks == ({"gate_up_proj", "down_proj"} if experts else set())
    assert all(".experts" in each for each in others)


def test_a_model_without_experts_has_none_to_adapt() -> None:
    with pytest.raises(ConfigError, match="--lora-experts: the model has no stacks of experts"):
        targets(llama()[0], experts=True)
    assert targets(llama()[0], experts=False) == {"target_modules": "all-linear"}
