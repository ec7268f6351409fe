"""Checkpoints in block FP8, in the layout in which they are published."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

BLOCK = (128, 128)
VOCABULARY = 128
SCALES = {"fp32": torch.float32, "bf16": torch.bfloat16, "e8m0": torch.float8_e8m0fnu}
LARGEST = 448.0
"""The largest number of e4m3."""


def qwen3() -> Any:
    """Return a model whose matrices have 64, 160, 192 and 576 rows, and 160, 192 and 576 columns."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=160,
        intermediate_size=576,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config).bfloat16()


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def spread(scales: torch.Tensor, shape: torch.Size, block: tuple[int, int] = BLOCK) -> torch.Tensor:
    """Return the scale of each element, fp32."""
    wide = scales.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return wide[: shape[0], : shape[1]]


def quantized(weight: torch.Tensor, kind: str, block: tuple[int, int] = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the e4m3 codes of a matrix, and the scales of its blocks."""
    rows, columns = (-(-side // size) for side, size in zip(weight.shape, block, strict=True))
    padded = torch.zeros(rows * block[0], columns * block[1])
    padded[: weight.shape[0], : weight.shape[1]] = weight
    scales = padded.view(rows, block[0], columns, block[1]).abs().amax((1, 3)).clamp(min=1e-12) / LARGEST
    if kind == "e8m0":
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    scales = scales.to(SCALES[kind])
    codes = (weight.float() / spread(scales, weight.shape, block)).clamp(-LARGEST, LARGEST)
    return codes.to(torch.float8_e4m3fn), scales


def write_fp8(model: Any, out: Path, kind: str = "fp32", block: tuple[int, int] = BLOCK) -> Path:
    """Save a model with all linear layers of its blocks in FP8; return its directory."""
    model.save_pretrained(out)
    tensors = load_file(out / "model.safetensors")
    for name in [name for name in tensors if "_proj.weight" in name]:
        tensors[name], tensors[f"{name}_scale_inv"] = quantized(tensors[name], kind, block)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    configure(
        out,
        quant_method="fp8",
        fmt="e4m3",
        weight_block_size=list(block),
        activation_scheme="dynamic",
        modules_to_not_convert=["lm_head"],
    )
    return out


def configure(path: Path, **changes: Any) -> None:
    """Change values of the quantization_config; None removes a value."""
    file = path / "config.json"
    values = json.loads(file.read_text())
    said = values.get("quantization_config", {}) | changes
    values["quantization_config"] = {key: value for key, value in said.items() if value is not None}
    file.write_text(json.dumps(values))


def changed(checkpoint: Path, out: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Write a copy of a checkpoint with changed tensors; return its directory."""
    out.mkdir()
    (out / "config.json").write_text((checkpoint / "config.json").read_text())
    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def decoded(checkpoint: Path, block: tuple[int, int] = BLOCK) -> dict[str, torch.Tensor]:
    """Return all weights, with FP8 decoded by its formula and rounded to bf16."""
    tensors = load_file(checkpoint / "model.safetensors")
    found = {name: value for name, value in tensors.items() if not name.endswith("_scale_inv")}
    for name, value in found.items():
        if value.dtype == torch.float8_e4m3fn:
            found[name] = (value.float() * spread(tensors[f"{name}_scale_inv"], value.shape, block)).bfloat16()
    return found


def plain_from(checkpoint: Path, model: Any, out: Path, block: tuple[int, int] = BLOCK) -> Path:
    """Save a model with the decoded weights in bf16; return its directory."""
    model.load_state_dict(decoded(checkpoint, block))
    model.save_pretrained(out)
    return out
