"""Checkpoints quantized by bitsandbytes, and bitsandbytes' decoding of the quantized weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "nf4_fp32": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "int8_rows": {"load_in_8bit": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
}
"""Settings of bitsandbytes, by the codec with which infinity reads the weights."""


def quantize(base: Path, out: Path, kind: str, **saved: Any) -> Path:
    """Save a model that transformers loaded with bitsandbytes; return its directory."""
    config = BitsAndBytesConfig(**QUANTIZATIONS[kind], bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=config, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    model.save_pretrained(out, **saved)
    return out


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in checkpoint.glob("*.safetensors") for name, value in load_file(file).items()}


def decoded_by_bitsandbytes(
    tensors: dict[str, torch.Tensor], name: str, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor | None:
    """Return a quantized weight decoded; None when it is not quantized."""
    from bitsandbytes import functional
    from bitsandbytes.functional import QuantState

    if (rows := tensors.get(f"{name.removesuffix('weight')}SCB")) is not None:
        return functional.int8_vectorwise_dequant(tensors[name], rows).to(dtype)
    beside = {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
    if not beside:
        return None
    state = QuantState.from_dict(beside, device=torch.device("cpu"))
    state.dtype = dtype
    decoded: torch.Tensor = functional.dequantize_4bit(tensors[name], state)
    return decoded


def plain_from(checkpoint: Path, base: Path, out: Path) -> Path:
    """Save the model with weights that bitsandbytes decoded, all in bf16; return its directory."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    tensors = tensors_of(checkpoint)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            decoded = decoded_by_bitsandbytes(tensors, name)
            parameter.copy_(tensors[name] if decoded is None else decoded)
    model.save_pretrained(out)
    return out
