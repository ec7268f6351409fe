"""Published configurations of public models, by name. transformers builds the models from these configurations.

This module imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelPreset:
    """The configuration of a public model, without weights.

    Attributes:
        kind: `model_type` of transformers.
        source: publication that contains the configuration.
        values: values of its configuration.
    """

    kind: str
    source: str
    values: Mapping[str, int | bool]


def _llama(kind: str, layers: int, hidden: int, inner: int, heads: int, words: int, source: str) -> ModelPreset:
    """Return a preset of a Llama with eight heads of width 128 for keys and values."""
    values = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner, "vocab_size": words}
    values |= {"num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128}
    return ModelPreset(kind, source, values | {"tie_word_embeddings": False})


def _gpt(layers: int, hidden: int, heads: int, source: str, words: int = 51200, positions: int = 2048) -> ModelPreset:
    values = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": positions, "vocab_size": words}
    return ModelPreset("gpt2", source, values)


_GPT_J = {"n_layer": 28, "n_embd": 4096, "n_head": 16, "rotary_dim": 64, "vocab_size": 50400}
_NEOX = {"num_hidden_layers": 44, "hidden_size": 6144, "intermediate_size": 24576, "num_attention_heads": 64}
PRESETS: dict[str, ModelPreset] = {
    "llama-3-8b": _llama("llama", 32, 4096, 14336, 32, 128256, "config.json of Meta-Llama-3-8B"),
    "llama-3-70b": _llama("llama", 80, 8192, 28672, 64, 128256, "config.json of Meta-Llama-3-70B"),
    "llama-3-405b": _llama("llama", 126, 16384, 53248, 128, 128256, "config.json of Llama-3.1-405B"),
    "qwen3-8b": _llama("qwen3", 36, 4096, 12288, 32, 151936, "config.json of Qwen3-8B"),
    "qwen3-32b": _llama("qwen3", 64, 5120, 25600, 64, 151936, "config.json of Qwen3-32B"),
    "gpt-j-6b": ModelPreset("gptj", "config.json of GPT-J-6B", _GPT_J | {"tie_word_embeddings": False}),
    "gpt-neox-20b": ModelPreset("gpt_neox", "config.json of GPT-NeoX-20B", _NEOX | {"vocab_size": 50432}),
    "turing-nlg-17b": _gpt(78, 4256, 28, "Turing-NLG, Microsoft Research, 2020", positions=1024),
    "megatron-8b": _gpt(72, 3072, 32, "Megatron-LM, arXiv 1909.08053, table 2", positions=1024),
    "mt-nlg-530b": _gpt(105, 20480, 128, "Megatron-Turing NLG 530B, arXiv 2201.11990"),
    "gpt-3-175b": _gpt(96, 12288, 96, "GPT-3, arXiv 2005.14165, table 2.1", words=50257),
    "mgpt-13b": _gpt(40, 5120, 40, "mGPT, arXiv 2204.07580", words=100000),
    "dense-1t": _llama("llama", 142, 24576, 81920, 192, 128256, "no published model: a Llama of a trillion parameters"),
}
