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

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infinity import _native
from infinity.checkpoint.safetensors_reader import names_in, stored_as, tensor_of
from infinity.errors import ModelError
from infinity.state.codec import BLOCK_NUMEL, NESTED_BLOCKS, Codec, decode, encoded_bytes, parts_of
from infinity.state.frozen_codecs import CheckpointEncoding
from infinity.strict import parse_json

_OF_THE_HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
_STATE = ".quant_state.bitsandbytes__"
_WEIGHT_FORMATS = ("row", "col32", "col_turing", "col_ampere")
_ONLY_NF4 = "infinity reads only nf4 of bitsandbytes' 4-bit types."
_IN_16_BITS = (
    "Give the model in bf16, fp16 or fp32; with frozen: nf4 or int8 in the swap config its frozen weights are stored "
    "in 4 or 8 bits."
)


# -- the config -------------------------------------------------------------------------------------------------------


def unquantized(model_class: Any, path: str, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return arguments with which `model_class.from_pretrained` builds a quantized model from plain layers.

    Args:
        model_class: a class with `from_pretrained`.
        path: a directory, or a hub id.
        kwargs: the caller's arguments for from_pretrained.

    Returns:
        `kwargs` itself, if the model is not quantized. Otherwise arguments with a config without quantization.

    Raises:
        ModelError: the model is quantized in a way that cannot be read.
    """
    given = kwargs.get("config")
    hub = {name: kwargs[name] for name in _OF_THE_HUB if name in kwargs}
    if not (quantization := _in_file(path if given is None else given, hub)):
        return kwargs
    _require_bitsandbytes(path, quantization)
    config, rest = given, dict(kwargs)
    if isinstance(given, str | Path) or given is None:
        config, rest = _read_config(model_class, path if given is None else str(given), hub, kwargs)
    return rest | {"config": without_quantization(config)}


def codec_text(path: str, config: Any) -> tuple[Codec, tuple[str, ...]] | None:
    """Return the codec of a quantized model's weights and the modules that are not quantized, both from its config.

    The result is None if the model is not quantized.

    Raises:
        ModelError: the model is quantized in a way that cannot be read.
    """
    if not (found := _in_file(config, {})):
        return None
    _require_bitsandbytes(path, found)
    skipped = tuple(found.get("llm_int8_skip_modules") or ())
    if not found.get("load_in_4bit"):
        return "int8_rows", skipped
    if found.get("bnb_4bit_quant_type", "fp4") != "nf4":  # fp4 is the default of bitsandbytes, too
        raise ModelError(f"'{path}' is quantized as fp4; {_ONLY_NF4} {_IN_16_BITS}")
    return "nf4" if found.get("bnb_4bit_use_double_quant") else "nf4_fp32", skipped


def _require_bitsandbytes(path: str, quantization: Mapping[str, Any]) -> None:
    """Raise ModelError if another method than bitsandbytes quantized the model."""
    method = quantization.get("quant_method")
    if method is None and (quantization.get("load_in_4bit") or quantization.get("load_in_8bit")):
        return  # transformers assumes bitsandbytes
    if (method := str(getattr(method, "value", method) or "a method without a name")) != "bitsandbytes":
        raise ModelError(
            f"'{path}' is quantized by {method} (quantization_config in its config.json); infinity reads only what "
            f"bitsandbytes quantized, as NF4 or LLM.int8. {_IN_16_BITS}"
        )


def _in_file(source: Any, hub: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return a model's quantization_config; None if the model is not quantized. `source` is the model's config, or the
    path of the config.
    """
    from transformers import PretrainedConfig

    values = source
    if isinstance(source, str | Path):
        try:
            values, _ = PretrainedConfig.get_config_dict(source, **hub)
        except Exception:  # from_pretrained raises a better error
            return None
    elif isinstance(source, PretrainedConfig):
        values = source.to_dict()
    for part in (values, values.get("text_config")):
        found = part.get("quantization_config") if isinstance(part, dict) else None
        if found:
            return found if isinstance(found, dict) else vars(found)
    return None


def _read_config(model_class: Any, path: str, hub: Mapping[str, Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the config that from_pretrained would read, and the remaining arguments for it."""
    from transformers import AutoConfig

    again = dict(hub) | {name: kwargs[name] for name in ("trust_remote_code", "code_revision") if name in kwargs}
    config_class = getattr(model_class, "config_class", None) or AutoConfig
    options = {name: value for name, value in kwargs.items() if name != "config"}
    config, rest = config_class.from_pretrained(path, return_unused_kwargs=True, **options)
    return config, rest | again


def without_quantization(config: Any) -> Any:
    """Return a copy of a config without its quantization."""
    config = copy.deepcopy(config)
    for part in (config, getattr(config, "text_config", None)):
        if part is not None:
            vars(part).pop("quantization_config", None)
    return config


# -- the files --------------------------------------------------------------------------------------------------------


def floating(tensor: torch.Tensor, name: str, path: str) -> torch.Tensor:
    """Return `tensor` if its dtype is a floating-point dtype of at least 16 bits. Raises ModelError otherwise."""
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        raise ModelError(
            f"'{path}' has '{name}' as {tensor.dtype}, but none of the tensors that bitsandbytes writes with "
            f"a quantized weight. {_IN_16_BITS}"
        )
    return tensor


class QuantizedWeights:
    """The quantized weights of a checkpoint.

    Args:
        files: the checkpoint's safetensors files.

    Raises:
        ModelError: a file cannot be read.
    """

    def __init__(self, files: Collection[str]) -> None:
        self._files = {name: file for file in sorted(files) for name in names_in(file)}
        self._states = {name.partition(_STATE)[0]: name for name in self._files if _STATE in name}

    @property
    def weights(self) -> list[str]:
        """Names of the quantized weights in the files."""
        rows = [name for name in self._files if _rows_of(name) in self._files]
        return sorted([*self._states, *rows])

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
            raise ModelError(f"{file}: '{weight}' is quantized as {kind}; {_ONLY_NF4} {_IN_16_BITS}")
        state = _QuantState.of(file, weight, self._tensor(state_name))
        if state.shape != tuple(shape):
            turned = (
                " A weight that the model stores as [in, out], as GPT-2 does, was transposed when it was quantized."
                if len(shape) == 2
                else ""
            )
            raise ModelError(
                f"{file}: '{weight}' is quantized with shape {state.shape}, and is {tuple(shape)} in the model."
                f"{turned if state.shape == tuple(shape)[::-1] else ''} {_IN_16_BITS}"
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
                f"{file}: '{weight}' is quantized with shape {found}, and is {tuple(shape)} in the model. {_IN_16_BITS}"
            )
        parts = {
            "codes": lambda: self._tensor(weight),
            "scales": lambda: self._tensor(_rows_of(weight)).float(),
        }
        return self._made("int8_rows", weight, shape, parts)

    def _made(
        self, codec: Codec, weight: str, shape: torch.Size, parts: Mapping[str, Callable[[], torch.Tensor]]
    ) -> CheckpointEncoding:
        """Return the encoded form. Raises ModelError if a part other than the codes does not have the size that the
        codec requires.
        """

        def bytes_of(part: str, nbytes: int) -> torch.Tensor:
            found = parts[part]().contiguous().reshape(-1).view(torch.uint8)
            if found.numel() != nbytes:
                raise self._misfit(weight, part)
            return found

        def read() -> torch.Tensor:
            data = torch.zeros(encoded_bytes(codec, shape), dtype=torch.uint8)
            for part, (begin, nbytes) in parts_of(codec, shape).items():
                data[begin : begin + nbytes] = bytes_of(part, nbytes)
            return data

        for part, (_, nbytes) in parts_of(codec, shape).items():
            if part != "codes":
                bytes_of(part, nbytes)
        return CheckpointEncoding(codec, read)

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
                f"NF4. {_IN_16_BITS}"
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
                f"{BLOCK_NUMEL} and multiples of it. {_IN_16_BITS}"
            )
        return state


def decoding(known: CheckpointEncoding, shape: torch.Size, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """Return a function that returns the decoded values of an encoded weight."""
    return lambda: decode(known.read(), known.codec, shape, dtype)


def require_unmerged(left: Sequence[str], converts: bool, path: str) -> None:
    """Refuse a model for which transformers joins several quantized weights into a single parameter.

    Args:
        left: quantized weights for which the model has no parameter.
        converts: whether transformers converted tensors of this checkpoint. If not, the model simply does not use the
            weights in `left`.
        path: path of the checkpoint, for messages.

    Raises:
        ModelError: transformers would join such weights; the message names one of the weights.
    """
    if left and converts:
        raise ModelError(
            f"in '{path}' the tensor '{left[0]}' is quantized, and transformers joins this tensor with others into a "
            f"larger parameter (such as the experts of a layer); infinity cannot join quantized weights. {_IN_16_BITS}"
        )


def _for_smaller_blocks(scales: torch.Tensor, blocksize: int, shape: torch.Size) -> torch.Tensor:
    """Repeat the scales of blocks of `blocksize` elements for blocks of BLOCK_NUMEL elements. `blocksize` is a multiple
    of BLOCK_NUMEL.
    """
    blocks = -(-shape.numel() // BLOCK_NUMEL)
    return scales.reshape(-1).repeat_interleave(blocksize // BLOCK_NUMEL)[:blocks]


def _rows_of(weight: str) -> str:
    """Return the tensor name of the scales of an int8 weight."""
    return f"{weight.removesuffix('weight')}SCB" if weight.endswith(".weight") else ""
