"""Shapes of public models, from their published configurations. Imports neither torch nor transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Shape:
    """A model as a plan sees it: how large its matrices are.

    Attributes:
        layers: blocks; of an encoder and a decoder each.
        hidden: width of what goes from block to block.
        intermediate: width inside the MLP.
        heads, kv_heads, head_width: of the attention.
        vocabulary: rows of the embedding.
        gated: the MLP has three matrices instead of two.
        tied: embedding and head are one matrix.
        bias: of the linear layers: all of them, those of queries, keys and values, those of the MLP, or none.
        positions: rows of an embedding of positions; 0: there is none.
        norm_bias: norms have a bias, too.
        norms: of a block, of the width `hidden`. head_norms: of queries and keys, of the width of a head.
        decoder: there is a decoder beside the encoder, of as many layers, with attention to the encoder's output.
        source: where the shape is published.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    vocabulary: int
    source: str
    kv_heads: int = 0
    head_width: int = 0
    gated: bool = False
    tied: bool = False
    bias: Literal["all", "qkv", "mlp", "none"] = "none"
    positions: int = 0
    norm_bias: bool = False
    norms: int = 2
    head_norms: bool = False
    head_bias: bool = False
    decoder: bool = False

    @property
    def query_width(self) -> int:
        return self.heads * (self.head_width or self.hidden // self.heads)

    @property
    def kv_width(self) -> int:
        return (self.kv_heads or self.heads) * (self.head_width or self.hidden // self.heads)


def _llama(layers: int, hidden: int, intermediate: int, heads: int, source: str) -> Shape:
    return Shape(layers, hidden, intermediate, heads, 128256, source, kv_heads=8, gated=True)


def _gpt(layers: int, hidden: int, heads: int, source: str, vocabulary: int = 51200, positions: int = 2048) -> Shape:
    return Shape(
        layers, hidden, 4 * hidden, heads, vocabulary, source, tied=True, bias="all", positions=positions,
        norm_bias=True,
    )  # fmt: skip


PRESETS: dict[str, Shape] = {
    "llama-3-8b": _llama(32, 4096, 14336, 32, "config.json of Meta-Llama-3-8B"),
    "llama-3-70b": _llama(80, 8192, 28672, 64, "config.json of Meta-Llama-3-70B"),
    "llama-3-405b": _llama(126, 16384, 53248, 128, "config.json of Llama-3.1-405B"),
    "qwen3-8b": Shape(
        36, 4096, 12288, 32, 151936, "config.json of Qwen3-8B", kv_heads=8, head_width=128, gated=True, head_norms=True
    ),
    "qwen3-32b": Shape(
        64, 5120, 25600, 64, 151936, "config.json of Qwen3-32B", kv_heads=8, head_width=128, gated=True, head_norms=True
    ),
    "gpt-j-6b": Shape(
        28, 4096, 16384, 16, 50400, "config.json of GPT-J-6B", bias="mlp", norm_bias=True, norms=1, head_bias=True
    ),
    "gpt-neox-20b": Shape(
        44, 6144, 24576, 64, 50432, "config.json of GPT-NeoX-20B", bias="all", norm_bias=True
    ),
    "turing-nlg-17b": _gpt(78, 4256, 28, "Turing-NLG, Microsoft Research, 2020", positions=1024),
    "megatron-8b": _gpt(72, 3072, 32, "Megatron-LM, arXiv 1909.08053, table 2", positions=1024),
    "mt-nlg-530b": _gpt(105, 20480, 128, "Megatron-Turing NLG 530B, arXiv 2201.11990"),
    "gpt-3-175b": _gpt(96, 12288, 96, "GPT-3, arXiv 2005.14165, table 2.1", vocabulary=50257),
    "mgpt-13b": _gpt(40, 5120, 40, "mGPT, arXiv 2204.07580", vocabulary=100000),
    "t5-11b": Shape(
        24, 1024, 65536, 128, 32128, "config.json of t5-11b", head_width=128, tied=True, decoder=True
    ),
    "dense-1t": _llama(142, 24576, 81920, 192, "no published model: a Llama of a trillion parameters"),
}  # fmt: skip
