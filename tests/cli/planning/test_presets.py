"""Presets have the sizes that are published, and cost nothing to import."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from infinity.cli.planning.presets import PRESETS
from infinity.cli.planning.skeleton import skeleton
from infinity.state.discover import discover

BILLIONS = {
    "llama-3-8b": 8.03, "llama-3-70b": 70.6, "llama-3-405b": 405.9, "qwen3-8b": 8.19, "qwen3-32b": 32.8,
    "gpt-j-6b": 6.05, "gpt-neox-20b": 20.6, "turing-nlg-17b": 17.2, "megatron-8b": 8.3, "mt-nlg-530b": 530,
    "gpt-3-175b": 175, "mgpt-13b": 13.1, "t5-11b": 11.3, "dense-1t": 1040,
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_as_many_parameters_as_its_publication_says(name: str) -> None:
    model = skeleton(PRESETS[name], torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(BILLIONS[name] * 1e9, rel=0.01)


LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
QWEN = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
}  # fmt: skip
GPTJ = {"model_type": "gptj", "n_embd": 4096, "n_layer": 28, "n_head": 16, "vocab_size": 50400}
NEOX = {
    "model_type": "gpt_neox", "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 44,
    "num_attention_heads": 64, "vocab_size": 50432, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "given"), [("llama-3-8b", LLAMA), ("qwen3-8b", QWEN), ("gpt-j-6b", GPTJ), ("gpt-neox-20b", NEOX)]
)
def test_a_preset_is_cut_into_units_as_the_model_of_transformers(name: str, given: dict[str, object]) -> None:
    with torch.device("meta"):
        real = AutoModelForCausalLM.from_config(AutoConfig.for_model(**given), dtype=torch.bfloat16)
    sizes = [
        sorted((unit.numel, unit.weight_bytes, unit.stays) for unit in discover(model).units)
        for model in (real, skeleton(PRESETS[name], torch.bfloat16))
    ]
    assert sizes[0] == sizes[1]


def test_presets_import_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, infinity.cli.planning.presets as p; "
        "assert p.PRESETS; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
