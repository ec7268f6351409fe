"""Checkpoints that bitsandbytes quantized: their 4- and 8-bit weights are used without conversion.

[Note: what the files have]
The model is built from plain linear layers, as if it were not quantized, and without bitsandbytes. A weight is encoded
if the file has additional tensors for this weight:

| tensor | NF4 | LLM.int8 |
|---|---|---|
| `X.weight` | two codes in a byte | int8 [rows, columns] |
| `X.weight.absmax` | a scale for each block: fp32, or uint8 where scales are nested | |
| `X.weight.quant_map` | the values of the 16 codes | |
| `X.weight.nested_absmax`, `X.weight.nested_quant_map` | the same for nested scales | |
| `X.weight.quant_state.bitsandbytes__nf4` | JSON in bytes: block size, shape, nested offset | |
| `X.SCB` | | fp32 [rows], 127 times the scales |
| `X.weight_format` | | 0: row by row |

The codes are not changed. The scales are not changed if their blocks have the sizes that state/codec.py uses. For other
block sizes, the scales are computed in fp32 as bitsandbytes computes them, and repeated for smaller blocks. In both
cases, the decoded weights are the same as with bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from infinity import _native
from infinity.checkpoint.merged_experts import JoinedRows
from infinity.checkpoint.quantized_files import IN_16_BITS, encoding_of, is_skipped
from infinity.checkpoint.safetensors_reader import names_in, stored_as, tensor_of
from infinity.errors import ModelError
from infinity.state.codec import BLOCK_NUMEL, NESTED_BLOCKS, Codec
from infinity.state.frozen_codecs import CheckpointEncoding
from infinity.strict_parsers import parse_json

_STATE = ".quant_state.bitsandbytes__"
_WEIGHT_FORMATS = ("row", "col32", "col_turing", "col_ampere")
_ONLY_NF4 = "infinity reads only nf4 of bitsandbytes' 4-bit types."


class BitsandbytesConfig:
    """A quantization_config of bitsandbytes.

    Args:
        path: the model, for errors.
        values: the quantization_config.
    """

    renamed: Mapping[str, str] = {}

    def __init__(self, path: str, values: Mapping[str, Any]) -> None:
        self._path = path
        self._values = values

    def codec_of(self, name: str, shape: torch.Size) -> Codec | None:
        """See QuantizationMethod."""
        values = self._values
        if len(shape) != 2 or is_skipped(name, values.get("llm_int8_skip_modules") or ()):
            return None
        if not values.get("load_in_4bit"):
            return "int8_rows"
        if values.get("bnb_4bit_quant_type", "fp4") != "nf4":  # fp4 is the default of bitsandbytes, too
            raise ModelError(f"'{self._path}' is quantized as fp4; {_ONLY_NF4} {IN_16_BITS}")
        return "nf4" if values.get("bnb_4bit_use_double_quant") else "nf4_fp32"

    def weights(self, files: Collection[str]) -> BitsandbytesWeights:
        """Return the quantized weights in safetensors files. Raises ModelError."""
        return BitsandbytesWeights(files)


class BitsandbytesWeights:
    """The weights of a checkpoint that bitsandbytes quantized.

    Args:
        files: the checkpoint's safetensors files.

    Attributes:
        names: names of the quantized weights in the files.

    Raises:
        ModelError: a file cannot be read.
    """

    def __init__(self, files: Collection[str]) -> None:
        self._files = {name: file for file in sorted(files) for name in names_in(file)}
        self._states = {name.partition(_STATE)[0]: name for name in self._files if _STATE in name}
        self.names = self._states.keys() | {name for name in self._files if _rows_of(name) in self._files}

    def encoded_form(self, weight: str, shape: torch.Size) -> CheckpointEncoding | None:
        """Return the encoded form of a weight; None if the weight is not quantized.

        Args:
            weight: name of the weight in the files.
            shape: shape of the weight in the model.

        Raises:
            ModelError: the weight is quantized in a way that cannot be read, or the weight's tensors do not fit each
                other or the model.
        """
        if weight in self._states:
            return self._nf4(weight, shape)
        if weight in self._files and _rows_of(weight) in self._files:
            return self._int8(weight, shape)
        return None

    def _nf4(self, weight: str, shape: torch.Size) -> CheckpointEncoding:
        file, state_name = self._files[weight], self._states[weight]
        kind = state_name.partition(_STATE)[2]
        if kind != "nf4":
            raise ModelError(f"{file}: '{weight}' is quantized as {kind}; {_ONLY_NF4} {IN_16_BITS}")
        state = _QuantState.of(file, weight, self._tensor(state_name))
        if state.shape != tuple(shape):
            turned = (
                " A weight that the model stores as [in, out], as GPT-2 does, was transposed when it was quantized."
                if len(shape) == 2
                else ""
            )
            raise ModelError(
                f"{file}: '{weight}' is quantized with shape {state.shape}, and is {tuple(shape)} in the model."
                f"{turned if state.shape == tuple(shape)[::-1] else ''} {IN_16_BITS}"
            )
        self._require_nf4_map(weight)
        nested = f"{weight}.nested_absmax" in self._files
        same = state.blocksize == BLOCK_NUMEL and state.nested_blocksize == NESTED_BLOCKS
        if nested and same and self._is_map(f"{weight}.nested_quant_map", _native.NESTED_MAP):
            parts = {
                "codes": lambda: self._tensor(weight),
                "scales": lambda: self._tensor(f"{weight}.absmax"),
                "nested_scales": lambda: self._tensor(f"{weight}.nested_absmax").float(),
                "offset": lambda: torch.tensor([state.nested_offset], dtype=torch.float32),
            }
            return self._made("nf4", weight, shape, parts)
        scales = (lambda: self._unnested(weight, state)) if nested else (lambda: self._plain_scales(file, weight))
        parts = {
            "codes": lambda: self._tensor(weight),
            "scales": lambda: _for_smaller_blocks(scales().float(), state.blocksize, shape),
        }
        return self._made("nf4_fp32", weight, shape, parts)

    def _plain_scales(self, file: str, weight: str) -> torch.Tensor:
        scales = self._tensor(f"{weight}.absmax")
        if not scales.is_floating_point():
            raise ModelError(
                f"{file}: the scales of '{weight}' are quantized, and {weight}.nested_absmax, which decodes them, is "
                "missing: the checkpoint is damaged. Download it again."
            )
        return scales

    def _unnested(self, weight: str, state: _QuantState) -> torch.Tensor:
        """Return the decoded nested scales of a weight, rounded as bitsandbytes rounds them."""
        codes = self._tensor(f"{weight}.absmax").reshape(-1)
        nested = self._tensor(f"{weight}.nested_absmax").float().reshape(-1)
        known = self._tensor(f"{weight}.nested_quant_map").float()
        if nested.numel() * state.nested_blocksize < codes.numel() or codes.dtype != torch.uint8:
            raise self._misfit(weight, f"{weight}.nested_absmax")
        scales = known[codes.int()] * nested.repeat_interleave(state.nested_blocksize)[: codes.numel()]
        return scales + torch.tensor(state.nested_offset, dtype=torch.float32)

    def _int8(self, weight: str, shape: torch.Size) -> CheckpointEncoding:
        file = self._files[weight]
        form = f"{weight}_format"
        if form in self._files and (number := int(self._tensor(form).reshape(-1)[0])) != 0:
            named = _WEIGHT_FORMATS[number] if 0 <= number < len(_WEIGHT_FORMATS) else str(number)
            raise ModelError(
                f"{file}: '{weight}' has its int8 values in the order {named}; infinity reads them row by row only. "
                "Load the model with a newer bitsandbytes and save it again, or give it in bf16, fp16 or fp32."
            )
        found = stored_as(file, weight)[1]
        if found != tuple(shape):
            raise ModelError(
                f"{file}: '{weight}' is quantized with shape {found}, and is {tuple(shape)} in the model. {IN_16_BITS}"
            )
        parts = {
            "codes": lambda: self._tensor(weight),
            "scales": lambda: self._tensor(_rows_of(weight)).float(),
        }
        return self._made("int8_rows", weight, shape, parts)

    def _made(
        self, codec: Codec, weight: str, shape: torch.Size, parts: Mapping[str, Callable[[], torch.Tensor]]
    ) -> CheckpointEncoding:
        of_rows = {part: lambda begin, end, read=read: read()[begin:end] for part, read in parts.items()}
        return encoding_of(codec, shape, of_rows, lambda part: self._misfit(weight, part), sizes_known=False)

    def joined_form(self, joined: JoinedRows, shape: torch.Size) -> CheckpointEncoding | None:
        """Return None: weights of bitsandbytes are not joined."""
        return None

    def _tensor(self, name: str) -> torch.Tensor:
        if name not in self._files:
            beside = next(iter(self._files.values()), "the checkpoint")
            raise ModelError(
                f"{beside}: there is no '{name}', which a quantized weight needs; is the checkpoint complete?"
            )
        return tensor_of(self._files[name], name)

    def _is_map(self, name: str, known: Collection[float]) -> bool:
        return self._tensor(name).float().tolist() == list(known)

    def _require_nf4_map(self, weight: str) -> None:
        if not self._is_map(f"{weight}.quant_map", _native.NF4_MAP):
            raise ModelError(
                f"{self._files[weight]}: the 4-bit codes of '{weight}' have other values (quant_map) than those of "
                f"NF4. {IN_16_BITS}"
            )

    def _misfit(self, weight: str, part: str) -> ModelError:
        return ModelError(
            f"{self._files[weight]}: '{weight}' is quantized, and its {part.removeprefix(f'{weight}.')} does not have "
            "the size that its shape needs; is the file damaged?"
        )


@dataclass(frozen=True)
class _QuantState:
    """The values that bitsandbytes records about a 4-bit weight."""

    shape: tuple[int, ...]
    blocksize: int
    nested_blocksize: int
    nested_offset: float

    @classmethod
    def of(cls, file: str, weight: str, packed: torch.Tensor) -> _QuantState:
        """Parse the recorded values. `packed` is JSON in bytes. Raises ModelError."""
        try:
            values = parse_json(bytes(packed.reshape(-1).tolist()).decode())
            state = cls(
                tuple(int(size) for size in values["shape"]),
                int(values["blocksize"]),
                int(values.get("nested_blocksize", NESTED_BLOCKS)),
                float(values.get("nested_offset", 0.0)),
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ModelError(
                f"{file}: the quantization state that bitsandbytes wrote for '{weight}' cannot be read: {error!r}"
            ) from None
        if state.blocksize <= 0 or state.blocksize % BLOCK_NUMEL or state.nested_blocksize <= 0:
            raise ModelError(
                f"{file}: '{weight}' is quantized in blocks of {state.blocksize}; infinity reads blocks of "
                f"{BLOCK_NUMEL} and multiples of it. {IN_16_BITS}"
            )
        return state


def _for_smaller_blocks(scales: torch.Tensor, blocksize: int, shape: torch.Size) -> torch.Tensor:
    """Repeat the scales of blocks of `blocksize` elements for blocks of BLOCK_NUMEL elements. `blocksize` is a multiple
    of BLOCK_NUMEL.
    """
    blocks = -(-shape.numel() // BLOCK_NUMEL)
    return scales.reshape(-1).repeat_interleave(blocksize // BLOCK_NUMEL)[:blocks]


def _rows_of(weight: str) -> str:
    """Return the tensor name of the scales of an int8 weight."""
    return f"{weight.removesuffix('weight')}SCB" if weight.endswith(".weight") else ""
