"""Checkpoints in FP8.

[Note: fp8 files]
| `quant_method` | scale for each | tensor with the scales, beside `X.weight`, float8_e4m3fn [rows, columns] |
|---|---|---|
| fp8, as DeepSeek and Qwen publish it | block | `X.weight_scale_inv` [rows of blocks, columns of blocks] |
| fp8 without weight_block_size, as Mistral publishes it | matrix | `X.weight_scale_inv` [] |
| compressed-tensors (`float-quantized`) | block, row or matrix | `X.weight_scale`: as above, [rows, 1] or [1] |

A weight is its code times the scale. Scales are fp32, bf16 or e8m0. The size of a block is `weight_block_size` of the
config, and the last blocks of both directions may be incomplete. The size cannot be computed from the two shapes: 576
rows with 5 rows of scales have blocks of 128 rows, and not of 115.2. transformers 5.23 computes it from the shapes when
it decodes such a checkpoint, and then fails for 576 rows, and decodes a matrix of 192 rows with wrong scales. So
infinity reads the bytes of the file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from infinity.checkpoint.merged_experts import JoinedRows
from infinity.checkpoint.quantized_files import IN_16_BITS, ConfigKeys, encoding_of, is_skipped, join, stored_in
from infinity.errors import ModelError
from infinity.state.codec import Codec, ScaleTypeName, fp8_block
from infinity.state.frozen_codecs import CheckpointEncoding

_SCALES = ("_scale_inv", "_scale")
_SCALE_TYPES: dict[str, ScaleTypeName] = {"F32": "fp32", "BF16": "bf16", "F8_E8M0": "e8m0"}
_BLOCK_MAX = 1 << 16


@dataclass(frozen=True)
class Fp8Layout:
    """The scales of FP8 weights.

    Attributes:
        scale: end of the name of the tensor with the scales, after the name of the weight.
        types: types of the scales, by the dtype of the tensor, as safetensors names it.
        strategy: what has a scale: a block of rows and columns, a row ("channel"), or the matrix ("tensor").
        block: rows and columns of a block; only used with the strategy "block".
    """

    scale: str
    types: Mapping[str, ScaleTypeName]
    strategy: Literal["block", "channel", "tensor"]
    block: tuple[int, int] = (1, 1)

    def block_of(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the rows and columns with a scale in common, in a matrix of this shape."""
        sizes = {"block": self.block, "channel": (1, columns), "tensor": (rows, columns)}
        return sizes[self.strategy]

    def grids(self, rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes that the scales of a matrix may have."""
        if self.strategy == "tensor":
            return (1,), (), (1, 1)
        if self.strategy == "channel":
            return (rows, 1), (rows,)
        return ((-(-rows // self.block[0]), -(-columns // self.block[1])),)

    def codec_of(self, name: str, shape: torch.Size, keys: ConfigKeys, scales: ScaleTypeName = "fp32") -> Codec | None:
        """Return the codec of a quantized parameter.

        Args:
            name: name of the parameter.
            shape: shape of the parameter.
            keys: the config, for errors.
            scales: type of the scales, if the config has it; otherwise the largest type.

        Raises:
            ModelError: the parameter is a stack whose experts cannot be joined.
        """
        if len(shape) not in (2, 3) or not shape.numel():
            return None
        rows = shape[-2] // (2 if name.endswith("gate_up_proj") else 1)  # a file has both parts
        block = self.block_of(rows, shape[-1])
        if len(shape) == 3 and rows % block[0]:
            raise keys.unreadable("weight_block_size", list(block), f"experts of {rows} rows in bf16")
        return fp8_block(block, scales)

    def weights(self, files: Collection[str], keys: ConfigKeys) -> Fp8Weights:
        """Return the quantized weights in safetensors files.

        Raises:
            ModelError: a file cannot be read, or no tensor is FP8.
        """
        found = Fp8Weights(files, self)
        if not found.names:
            raise keys.absent("FP8")
        return found


def block_size(keys: ConfigKeys, key: str, size: Any) -> tuple[int, int]:
    """Return the rows and columns of a block, which are the value of `key`. Raises ModelError."""
    whole = isinstance(size, list | tuple) and len(size) == 2 and all(type(side) is int for side in size)
    if not whole or not all(0 < side <= _BLOCK_MAX for side in size):
        raise keys.unreadable(key, size, "two positive numbers")
    return size[0], size[1]


class Fp8Config:
    """A quantization_config of FP8. Without weight_block_size, each matrix has one scale.

    Args:
        path: the model, for errors.
        values: the quantization_config.

    Raises:
        ModelError: the model is quantized in a way that cannot be read.
    """

    renamed: Mapping[str, str] = {}

    def __init__(self, path: str, values: Mapping[str, Any]) -> None:
        self._keys = ConfigKeys(path, "fp8", values)
        size = values.get("weight_block_size")
        in_bytes = values.get("scale_fmt") == "ue8m0"
        types = _SCALE_TYPES | ({"U8": "e8m0"} if in_bytes else {})
        if size is None:
            self._layout = Fp8Layout("_scale_inv", types, "tensor")
        else:
            block = block_size(self._keys, "weight_block_size", size)
            self._layout = Fp8Layout("_scale_inv", types, "block", block)
        self._keys.require("fmt", (None, "e4m3", "float8_e4m3fn"), "e4m3")
        self._keys.require("expert_dtype", (None, "fp8"), "fp8")
        self._skipped = self._keys.names("modules_to_not_convert", "ignored_layers")
        self._scales: ScaleTypeName = "e8m0" if in_bytes else "fp32"

    def codec_of(self, name: str, shape: torch.Size) -> Codec | None:
        """See QuantizationMethod."""
        if is_skipped(name, self._skipped):
            return None
        return self._layout.codec_of(name, shape, self._keys, self._scales)

    def weights(self, files: Collection[str]) -> Fp8Weights:
        """Return the quantized weights in safetensors files. Raises ModelError."""
        return self._layout.weights(files, self._keys)


class Fp8Weights:
    """The FP8 weights of a checkpoint.

    Args:
        files: the checkpoint's safetensors files.
        layout: the scales of the weights.

    Attributes:
        names: names of the FP8 weights in the files.

    Raises:
        ModelError: a file cannot be read.
    """

    def __init__(self, files: Collection[str], layout: Fp8Layout) -> None:
        self._found = stored_in(files)
        self.names = frozenset(name for name, stored in self._found.items() if _is_fp8(stored.dtype))
        self._layout = layout

    def encoded_form(self, weight: str, shape: torch.Size) -> CheckpointEncoding | None:
        """Return the encoded form of a weight; None if the weight is not FP8.

        Args:
            weight: name of the weight in the files.
            shape: shape of the weight in the model.

        Raises:
            ModelError: the weight is FP8 in a way that cannot be read, or its scales do not fit the weight, the config
                or the model.
        """
        if weight not in self.names:
            return None
        file, dtype, found = self._found[weight]
        if dtype != "F8_E4M3":
            raise ModelError(f"{file}: '{weight}' is {dtype.lower()}; infinity reads e4m3 only. {IN_16_BITS}")
        if found != tuple(shape) or len(found) != 2 or not shape.numel():
            raise ModelError(
                f"{file}: '{weight}' is FP8 with shape {found}, and is {tuple(shape)} in the model; infinity reads "
                f"matrices. {IN_16_BITS}"
            )
        block = self._layout.block_of(*shape)
        if max(block) > _BLOCK_MAX:
            raise ModelError(
                f"{file}: '{weight}' has one scale for {block[0]} x {block[1]} weights; infinity reads at most "
                f"{_BLOCK_MAX} rows and columns with one scale. {IN_16_BITS}"
            )
        codec = fp8_block(block, self._scale_type(weight, shape[0], shape[1]))
        parts = {
            part: partial(self._found[name].read, name)
            for part, name in {"codes": weight, "scales": weight + self._layout.scale}.items()
        }
        return encoding_of(codec, shape, parts, lambda part: self._misfit(weight, part))

    def joined_form(self, joined: JoinedRows, shape: torch.Size) -> CheckpointEncoding | None:
        """See QuantizedWeights."""
        return join(self, self._found, joined, shape, self._layout.block[0])

    def _scale_type(self, weight: str, rows: int, columns: int) -> ScaleTypeName:
        """Return the type of a weight's scales. Raises ModelError if there are no scales, or others than expected."""
        layout, scale = self._layout, weight + self._layout.scale
        each = {"block": "each block", "channel": "each row", "tensor": "the matrix"}[layout.strategy]
        if scale not in self._found:
            others = [name for end in _SCALES if (name := weight + end) in self._found]
            there = f" It has '{others[0]}', which the config.json does not say." if others else ""
            raise ModelError(
                f"{self._found[weight].file}: '{weight}' is FP8, and there is no '{scale}' with a scale for "
                f"{each}.{there} {IN_16_BITS}"
            )
        file, dtype, grid = self._found[scale]
        if dtype not in layout.types:
            raise ModelError(
                f"{file}: '{scale}' is {dtype}; infinity reads scales in fp32, bf16 or e8m0 (scale_fmt: ue8m0). "
                f"{IN_16_BITS}"
            )
        wanted = layout.grids(rows, columns)
        if grid not in wanted:
            size = f" of {layout.block[0]} x {layout.block[1]}" if layout.strategy == "block" else ""
            raise ModelError(
                f"{file}: '{scale}' has shape {grid}; the config.json has a scale for {each}{size}, so for a weight of "
                f"{(rows, columns)} it must be {wanted[0]}. {IN_16_BITS}"
            )
        return layout.types[dtype]

    def _misfit(self, weight: str, part: str) -> ModelError:
        return ModelError(
            f"{self._found[weight].file}: '{weight}' is FP8, and its {part} do not have the size that its shape needs; "
            "was the file changed?"
        )


def _is_fp8(dtype: str) -> bool:
    """Return whether safetensors' name of a dtype is a form of FP8. e8m0 is a form of scales only."""
    return dtype.startswith("F8_") and dtype != "F8_E8M0"
