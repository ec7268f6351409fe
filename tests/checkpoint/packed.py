"""Checkpoints whose weights have 4-bit codes, in the layouts in which they are published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM

from tests.checkpoint.fp8 import BLOCK, VOCABULARY, configure, quantized, qwen3, spread
from tests.native.test_packed_codecs import mxfp4_values, nvfp4_values, packed

BOUNDS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
"""Numbers halfway between the magnitudes of e2m1."""
LARGEST, LARGEST_SCALE = 6.0, 448.0
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def gpt_oss() -> Any:
    """Return a mixture of four experts, whose matrices are [64, 192] and [96, 64]."""
    torch.manual_seed(0)
    config = GptOssConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=VOCABULARY,
        sliding_window=8,
    )
    return GptOssForCausalLM(config).bfloat16()


def codes_of(scaled: torch.Tensor) -> torch.Tensor:
    """Return the nearest e2m1 codes, one in each byte."""
    return torch.bucketize(scaled.abs().contiguous(), BOUNDS).to(torch.uint8) | (scaled < 0).to(torch.uint8) << 3


def unpacked(codes: torch.Tensor) -> torch.Tensor:
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)


Parts = dict[str, torch.Tensor]
"""Tensors of a weight by the end of their names. The first is that of the codes."""


def _factor(weight: torch.Tensor) -> Parts:
    blocks = weight.float().view(weight.shape[0], -1, 16)
    most = blocks.abs().amax(-1)
    whole = most.max() / (LARGEST * LARGEST_SCALE)
    scales = (most / (LARGEST * whole)).clamp(2**-9, LARGEST_SCALE).to(torch.float8_e4m3fn)
    codes = codes_of((blocks / (scales.float() * whole)[..., None]).flatten(1))
    return {".weight": packed(codes), ".weight_scale": scales, ".weight_scale_2": whole}


def _divisor(weight: torch.Tensor) -> Parts:
    blocks = weight.float().view(weight.shape[0], -1, 16)
    most = blocks.abs().amax(-1)
    whole = LARGEST * LARGEST_SCALE / most.max()
    scales = (most / LARGEST * whole).clamp(2**-9, LARGEST_SCALE).to(torch.float8_e4m3fn)
    codes = codes_of((blocks / (scales.float() / whole)[..., None]).flatten(1))
    return {".weight_packed": packed(codes), ".weight_scale": scales, ".weight_global_scale": whole.view(1)}


def _integers(weight: torch.Tensor) -> Parts:
    blocks = weight.float().view(weight.shape[0], -1, 32)
    scales = (blocks.abs().amax(-1) / 7).bfloat16()
    codes = ((blocks / scales.float()[..., None]).round().clamp(-8, 7) + 8).to(torch.uint8).flatten(1)
    return {
        ".weight_packed": packed(codes).view(torch.int32),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor(weight.shape),
    }


def _rows(weight: torch.Tensor) -> Parts:
    scales = (weight.float().abs().amax(-1, keepdim=True) / LARGEST_SCALE).bfloat16()
    return {".weight": (weight.float() / scales.float()).to(torch.float8_e4m3fn), ".weight_scale": scales}


def _matrix(weight: torch.Tensor) -> Parts:
    scale = (weight.float().abs().max() / LARGEST_SCALE).view(1)
    return {".weight": (weight.float() / scale).to(torch.float8_e4m3fn), ".weight_scale": scale}


def _fp8_blocks(weight: torch.Tensor) -> Parts:
    codes, scales = quantized(weight, "bf16")
    return {".weight": codes, ".weight_scale": scales}


def _experts(weight: torch.Tensor) -> Parts:
    blocks = weight.float().transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = torch.ceil(torch.log2(blocks.abs().amax(-1) / LARGEST))
    codes = codes_of(blocks / torch.exp2(exponents)[..., None])
    return {"_blocks": packed(codes), "_scales": (exponents + 127).to(torch.uint8)}


def values_of(parts: Parts) -> torch.Tensor:
    """Return the weight in bf16, by the formula of its form."""
    codes, scales, *others = parts.values()
    if "_blocks" in parts:
        return mxfp4_values(unpacked(codes).flatten(-2), scales, torch.bfloat16).transpose(1, 2).contiguous()
    if codes.dtype == torch.float8_e4m3fn:
        of_blocks = scales.dim() == 2 and scales.shape[0] < codes.shape[0]
        return (codes.float() * (spread(scales, codes.shape) if of_blocks else scales.float())).bfloat16()
    if ".weight_shape" in parts:
        numbers = unpacked(codes.view(torch.uint8)).float() - 8
        return (numbers * scales.float().repeat_interleave(32, -1)).bfloat16()
    kind = "factor" if ".weight_scale_2" in parts else "divisor"
    return nvfp4_values(unpacked(codes), scales.view(torch.uint8), others[0].item(), kind, torch.bfloat16)


@dataclass(frozen=True)
class Form:
    """A form of checkpoints, and a model for it.

    Attributes:
        name: name of the form in errors.
        make: function that returns the model.
        parts: function that returns the tensors of a weight.
        ends: ends of the names of the tensors, by the part of the encoded form.
        codec: codecs of the model's weights.
        layer: name of an encoded parameter of the second layer.
        matrices: number of encoded parameters.
        config: the quantization_config.
        others: ends of the names of the other tensors of a weight.
    """

    name: str
    make: Any
    parts: Callable[[torch.Tensor], Parts]
    ends: dict[str, str]
    codec: frozenset[str]
    layer: str
    matrices: int
    config: dict[str, Any]
    others: tuple[str, ...] = ()

    def base(self, parameter: str) -> str:
        """Return what the names of a parameter's tensors begin with."""
        return parameter.removesuffix(".weight")

    def names(self, parameter: str) -> dict[str, str]:
        """Return the names of the tensors of a parameter, by the part of the encoded form."""
        return {part: self.base(parameter) + end for part, end in self.ends.items()}

    def is_encoded(self, parameter: str) -> bool:
        return parameter.endswith(("_proj.weight", "experts.gate_up_proj", "experts.down_proj")) and (
            (".experts." in parameter) == (self.make is gpt_oss)
        )

    def write(self, out: Path, model: Any = None) -> Path:
        """Save a model, by default that of `make`, in this form; return its directory."""
        (model or self.make()).save_pretrained(out)
        tensors = load_file(out / "model.safetensors")
        for name in [name for name in tensors if self.is_encoded(name)]:
            parts = self.parts(tensors.pop(name))
            tensors |= {self.base(name) + end: part.contiguous() for end, part in parts.items()}
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        configure(out, **self.config)
        return out

    def decoded(self, checkpoint: Path) -> dict[str, torch.Tensor]:
        """Return all weights in bf16, by the names of the parameters."""
        tensors = load_file(checkpoint / "model.safetensors")
        found: dict[str, torch.Tensor] = {}
        codes, weight = self.ends["codes"], "" if self.make is gpt_oss else ".weight"
        for name in list(tensors):
            base = name.removesuffix(codes)
            if base == name or not self.is_encoded(base + weight):
                continue
            found[base + weight] = values_of(
                {end: tensors.pop(base + end) for end in [*self.ends.values(), *self.others]}
            )
        return tensors | found

    def plain_from(self, checkpoint: Path, out: Path, model: Any = None) -> Path:
        """Save a model, by default that of `make`, with the decoded weights in bf16; return its directory."""
        model = model or self.make()
        model.load_state_dict(self.decoded(checkpoint))
        model.save_pretrained(out)
        return out


_QWEN: dict[str, Any] = {"make": qwen3, "layer": "model.layers.1.mlp.up_proj.weight", "matrices": 3 * 7}
_WEIGHTS = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}


def _of_compressed_tensors(form: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"format": form, "weights": weights, "targets": ["Linear"]}},
        "ignore": ["lm_head"],
        "sparsity_config": {},
        "transform_config": {},
    }


FORMS = {
    "modelopt": Form(
        "NVFP4",
        parts=_factor,
        ends={"codes": ".weight", "scales": ".weight_scale", "nested_scales": ".weight_scale_2"},
        codec=frozenset({"nvfp4:factor"}),
        config={
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "config_groups": {"group_0": {"weights": _WEIGHTS, "input_activations": _WEIGHTS, "targets": ["Linear"]}},
            "ignore": ["lm_head"],
            "producer": {"name": "modelopt", "version": "0.47.0"},
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        },
        **_QWEN,
    ),
    "compressed-tensors": Form(
        "NVFP4",
        parts=_divisor,
        ends={"codes": ".weight_packed", "scales": ".weight_scale", "nested_scales": ".weight_global_scale"},
        codec=frozenset({"nvfp4:divisor"}),
        config=_of_compressed_tensors(
            "nvfp4-pack-quantized",
            **_WEIGHTS,
            strategy="tensor_group",
            symmetric=True,
            scale_dtype="torch.float8_e4m3fn",
        ),
        **_QWEN,
    ),
    "integers": Form(
        "4-bit integers",
        parts=_integers,
        ends={"codes": ".weight_packed", "scales": ".weight_scale"},
        codec=frozenset({"int4_group:32:bf16"}),
        others=(".weight_shape",),
        config=_of_compressed_tensors(
            "pack-quantized", num_bits=4, type="int", group_size=32, strategy="group", symmetric=True, dynamic=False
        ),
        **_QWEN,
    ),
    "fp8 of rows": Form(
        "FP8",
        parts=_rows,
        ends={"codes": ".weight", "scales": ".weight_scale"},
        codec=frozenset({f"fp8_block:1x{columns}:bf16" for columns in (160, 192, 576)}),
        config=_of_compressed_tensors(
            "float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True, dynamic=False
        ),
        **_QWEN,
    ),
    "fp8 of blocks": Form(
        "FP8",
        parts=_fp8_blocks,
        ends={"codes": ".weight", "scales": ".weight_scale"},
        codec=frozenset({"fp8_block:128x128:bf16"}),
        config=_of_compressed_tensors(
            "float-quantized",
            num_bits=8,
            type="float",
            strategy="block",
            block_structure=list(BLOCK),
            symmetric=True,
            dynamic=False,
        ),
        **_QWEN,
    ),
    "fp8 of matrices": Form(
        "FP8",
        parts=_matrix,
        ends={"codes": ".weight", "scales": ".weight_scale"},
        codec=frozenset({f"fp8_block:{side}:fp32" for side in ("192x160", "64x160", "160x192", "576x160", "160x576")}),
        config=_of_compressed_tensors(
            "float-quantized", num_bits=8, type="float", strategy="tensor", symmetric=True, dynamic=False
        ),
        **_QWEN,
    ),
    "gpt-oss": Form(
        "MXFP4",
        make=gpt_oss,
        parts=_experts,
        ends={"codes": "_blocks", "scales": "_scales"},
        codec=frozenset({"mxfp4:64", "mxfp4:96"}),
        layer="model.layers.1.mlp.experts.gate_up_proj",
        matrices=3 * 2,
        config={
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        },
    ),
}
