"""Checkpoints whose weights have codes of 4 bits, two in a byte: NVFP4 as Model Optimizer of NVIDIA and as
compressed-tensors (LLM Compressor) write it, groups of integers of compressed-tensors, and MXFP4 as in gpt-oss.

[Note: packed files]
| `quant_method` | codes, uint8 | scales | global scale, fp32 |
|---|---|---|---|
| modelopt | `X.weight` [rows, columns / 2] | `X.weight_scale`, e4m3 [rows, columns / 16] | `X.weight_scale_2`, factor |
| compressed-tensors | `X.weight_packed`, the same | the same | `X.weight_global_scale`, divisor |
| mxfp4 | `X_blocks` [experts, columns, rows / 32, 16] | `X_scales`, uint8 [experts, columns, rows / 32] | |

The weight in the model is `X.weight` [rows, columns], or in gpt-oss `X` [experts, rows, columns], whose matrices are
stored transposed. A byte has the codes of two neighbouring elements, the first in its lower half. Groups of integers
(`pack-quantized`) have eight codes in each int32 of `X.weight_packed`, scales in the dtype of the model
[rows, columns / group], and the shape of the weight in `X.weight_shape`.

The two kinds of global scale are told apart by the config and by the names of the tensors, which must agree: the values
of a wrong kind would be finite, and wrong by a factor of a million. transformers 5.23 does not load NVFP4 of Model
Optimizer, and reads weights of compressed-tensors with that library only. Other differences are in the tests
(tests/native/test_packed_codecs.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch

from infinity.checkpoint.fp8_files import Fp8Layout, block_size
from infinity.checkpoint.merged_experts import JoinedRows
from infinity.checkpoint.quantized_files import (
    IN_16_BITS,
    ConfigKeys,
    QuantizedWeights,
    encoding_of,
    is_named,
    join,
    stored_in,
)
from infinity.errors import ModelError
from infinity.state.codec import MXFP4_BLOCK, NVFP4_BLOCK, Codec, ScaleTypeName, int4_group, mxfp4_transposed, nvfp4
from infinity.state.frozen_codecs import CheckpointEncoding

Patterns = tuple[re.Pattern[str] | str, ...]
_PLAIN = ("BF16", "F16", "F32", "F64")
_SIDE_MAX = 1 << 20


@dataclass(frozen=True)
class _Layout:
    """The tensors of a weight in the files.

    Attributes:
        form: name of the form, for errors.
        codec_for: function that returns the codec, from the shape of a weight and the dtype of its scales.
        block: number of elements that share a scale; 0: the elements of a row.
        codes: end of the name of the tensor with the codes, and its dtype, as safetensors names it.
        scales: the same for the scales, and the dtypes that they may have.
        global_scale: end of the name of the global scale; empty: there is none.
        shape: end of the name of the tensor with the shape; empty: there is none.
        transposed: whether a weight is a stack of matrices that are stored transposed.
        foreign: ends of the names of tensors that such a weight cannot have, and the reasons.
    """

    form: str
    codec_for: Callable[[torch.Size, str], Codec]
    block: int
    codes: tuple[str, str]
    scales: tuple[str, tuple[str, ...]]
    global_scale: str = ""
    shape: str = ""
    transposed: bool = False
    foreign: tuple[tuple[str, str], ...] = ()

    def codec(self, shape: torch.Size, scales_dtype: str = "") -> Codec | None:
        """Return the codec of a weight; None if the form cannot have a weight of this shape."""
        if len(shape) not in self._dims() or not shape.numel():
            return None
        side = shape[-2 if self.transposed else -1]
        if side % 16 or side % (self.block or side) or side > _SIDE_MAX:
            return None
        return self.codec_for(shape, scales_dtype or self.scales[1][0])

    def codec_of(self, name: str, shape: torch.Size, keys: ConfigKeys) -> Codec | None:
        """Return the codec of a quantized parameter. Raises ModelError for a stack of experts that cannot be joined."""
        if self.global_scale:
            keys.require_unmerged(name, shape)
        return self.codec(shape)

    def weights(self, files: Collection[str], keys: ConfigKeys) -> PackedWeights:
        """Return the quantized weights in safetensors files.

        Raises:
            ModelError: a file cannot be read, or no tensor is in this form.
        """
        found = PackedWeights(files, self)
        if not found.names:
            raise keys.absent(self.form)
        found.require_one_form()
        return found

    def _dims(self) -> tuple[int, ...]:
        """Return the numbers of dimensions of weights. Matrices without a global scale may be joined to a stack."""
        return (3,) if self.transposed else (2,) if self.global_scale else (2, 3)

    def shapes(self, shape: torch.Size) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of the codes and scales of a weight."""
        if self.transposed:
            scales = (shape[0], shape[2], shape[1] // self.block)
            return (*scales, self.block // 2), scales
        in_item = 8 if self.codes[1] == "I32" else 2
        return (shape[0], shape[1] // in_item), (shape[0], shape[1] // (self.block or shape[1]))


_CHANGED = "with this tensor the values that the layer uses differ from those of the weight"
_TWICE = "a weight cannot be in two forms"
_SCALE_TYPES: dict[str, ScaleTypeName] = {"BF16": "bf16", "F32": "fp32"}
_MODELOPT = _Layout(
    form="NVFP4",
    codec_for=lambda shape, scales: nvfp4("factor"),
    block=NVFP4_BLOCK,
    codes=(".weight", "U8"),
    scales=(".weight_scale", ("F8_E4M3",)),
    global_scale=".weight_scale_2",
    foreign=(
        (".weight_global_scale", "this is a global scale of compressed-tensors, and the config.json names modelopt"),
        (".pre_quant_scale", _CHANGED),
        (".svdquant_lora_a", _CHANGED),
    ),
)
_COMPRESSED = _Layout(
    form="NVFP4",
    codec_for=lambda shape, scales: nvfp4("divisor"),
    block=NVFP4_BLOCK,
    codes=(".weight_packed", "U8"),
    scales=(".weight_scale", ("F8_E4M3",)),
    global_scale=".weight_global_scale",
    foreign=(
        (".weight_scale_2", "this is a global scale of modelopt, and the config.json names compressed-tensors"),
        (".weight", _TWICE),
        (".weight_zero_point", _CHANGED),
        (".weight_g_idx", _CHANGED),
    ),
)
_INTEGERS = replace(
    _COMPRESSED,
    form="4-bit integers",
    codec_for=lambda shape, scales: int4_group(shape[-1], _SCALE_TYPES[scales]),
    block=0,
    codes=(".weight_packed", "I32"),
    scales=(".weight_scale", tuple(_SCALE_TYPES)),
    global_scale="",
    shape=".weight_shape",
)
_GPT_OSS = _Layout(
    form="MXFP4",
    codec_for=lambda shape, scales: mxfp4_transposed(shape[-2]),
    block=MXFP4_BLOCK,
    codes=("_blocks", "U8"),
    scales=("_scales", ("U8",)),
    transposed=True,
    foreign=(("", _TWICE),),
)


def _integers(group: int) -> _Layout:
    """Return the layout of integers with a scale for `group` elements; 0: for each row."""
    if not group:
        return _INTEGERS
    return replace(_INTEGERS, block=group, codec_for=lambda shape, scales: int4_group(group, _SCALE_TYPES[scales]))


class ModelOptConfig:
    """A quantization_config of Model Optimizer. The arguments and errors are the same as for Fp8Config."""

    renamed: Mapping[str, str] = {}

    def __init__(self, path: str, values: Mapping[str, Any]) -> None:
        self._keys = ConfigKeys(path, "modelopt", values)
        self._keys.require("quant_algo", ("NVFP4", "W4A16_NVFP4"), "NVFP4")
        _require_nvfp4(self._keys)
        self._targets = _targets(self._keys)
        self._kept = _patterns(self._keys, "ignore", self._keys.names("ignore"))

    def codec_of(self, name: str, shape: torch.Size) -> Codec | None:
        """See QuantizationMethod."""
        if not _is_quantized(name, self._targets, self._kept):
            return None
        return _MODELOPT.codec_of(name, shape, self._keys)

    def weights(self, files: Collection[str]) -> PackedWeights:
        """Return the quantized weights in safetensors files. Raises ModelError."""
        return _MODELOPT.weights(files, self._keys)


class CompressedTensorsConfig:
    """A quantization_config of compressed-tensors. The arguments and errors are the same as for Fp8Config."""

    renamed: Mapping[str, str] = {r"\.weight_packed$": ".weight"}

    def __init__(self, path: str, values: Mapping[str, Any]) -> None:
        self._keys = ConfigKeys(path, "compressed-tensors", values)
        forms: dict[str, Callable[[ConfigKeys], _Layout | Fp8Layout]] = {
            "nvfp4-pack-quantized": _nvfp4_of,
            "pack-quantized": _integers_of,
            "float-quantized": _fp8_of,
        }
        self._keys.require("format", tuple(forms), " or ".join(forms))
        self._keys.require("quantization_status", (None, "compressed", "frozen"), "compressed or frozen")
        sparsity = self._keys.get("sparsity_config") or {"format": "dense"}
        if not isinstance(sparsity, dict) or sparsity.get("format") != "dense":
            raise self._keys.unreadable("sparsity_config", sparsity, "weights without it")
        if transform := self._keys.get("transform_config"):
            raise self._keys.unreadable("transform_config", transform, "weights without it")
        self._layout = forms[self._keys.get("format")](self._keys)
        self._targets = _targets(self._keys)
        self._kept = _patterns(self._keys, "ignore", self._keys.names("ignore"))

    def codec_of(self, name: str, shape: torch.Size) -> Codec | None:
        """See QuantizationMethod."""
        if not _is_quantized(name, self._targets, self._kept):
            return None
        return self._layout.codec_of(name, shape, self._keys)

    def weights(self, files: Collection[str]) -> QuantizedWeights:
        """Return the quantized weights in safetensors files. Raises ModelError."""
        return self._layout.weights(files, self._keys)


class Mxfp4Config:
    """A quantization_config of MXFP4. The arguments and errors are the same as for Fp8Config."""

    renamed: Mapping[str, str] = {
        r"\.experts\.gate_up_proj_blocks$": ".experts.gate_up_proj",
        r"\.experts\.down_proj_blocks$": ".experts.down_proj",
    }

    def __init__(self, path: str, values: Mapping[str, Any]) -> None:
        self._keys = ConfigKeys(path, "mxfp4", values)

    def codec_of(self, name: str, shape: torch.Size) -> Codec | None:
        """See QuantizationMethod."""
        return _GPT_OSS.codec(shape) if name.endswith((".experts.gate_up_proj", ".experts.down_proj")) else None

    def weights(self, files: Collection[str]) -> PackedWeights:
        """Return the quantized weights in safetensors files. Raises ModelError."""
        return _GPT_OSS.weights(files, self._keys)


def _groups(keys: ConfigKeys) -> dict[str, dict[str, Any]]:
    """Return the groups of weights of a config. Raises ModelError if there are none."""
    groups = keys.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise keys.unreadable("config_groups", groups, "groups of weights")
    for name, group in groups.items():
        if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
            raise keys.unreadable(f"config_groups.{name}", group, "groups of weights")
        if group.get("format") not in (None, keys.get("format")):
            raise keys.unreadable(f"config_groups.{name}.format", group["format"], f"{keys.get('format')}")
    return groups


def _nvfp4_of(keys: ConfigKeys) -> _Layout:
    """Return the layout of compressed-tensors' NVFP4. Raises ModelError."""
    _require_nvfp4(keys)
    return _COMPRESSED


def _require_nvfp4(keys: ConfigKeys) -> None:
    """Raise ModelError if a group is none of 4-bit floating-point weights with a scale for 16 elements."""
    for name, group in _groups(keys).items():
        if not _has(group["weights"], num_bits=4, type="float", group_size=NVFP4_BLOCK):
            raise keys.unreadable(
                f"config_groups.{name}.weights",
                group["weights"],
                "4-bit floating-point weights with a scale for 16 elements",
            )


def _integers_of(keys: ConfigKeys) -> _Layout:
    """Return the layout of 4-bit integers, whose groups must have the same size. Raises ModelError."""
    sizes: set[int] = set()
    for name, group in _groups(keys).items():
        weights = group["weights"]
        size = 0 if weights.get("strategy") == "channel" else weights.get("group_size")
        whole = (
            type(size) is int
            and 0 <= size <= _SIDE_MAX
            and size % 16 == 0
            and (size > 0) != (weights.get("strategy") == "channel")
        )
        sizes.add(size if whole else -1)
        ordered = weights.get("actorder") not in (None, False, "weight", "static")  # the columns are permuted
        if not whole or len(sizes) > 1 or ordered or not _has(weights, num_bits=4, type="int"):
            raise keys.unreadable(
                f"config_groups.{name}.weights",
                weights,
                "symmetric 4-bit integers with a scale for a row, or for a multiple of 16 elements, the same in all "
                "groups, without actorder: group",
            )
    return _integers(*sizes)


def _fp8_of(keys: ConfigKeys) -> Fp8Layout:
    """Return the layout of FP8, whose groups must have the same strategy. Raises ModelError."""
    found: set[tuple[str, tuple[int, int]]] = set()
    for name, group in _groups(keys).items():
        key, weights = f"config_groups.{name}.weights", group["weights"]
        strategy = weights.get("strategy")
        block = (1, 1)
        if strategy == "block":
            block = block_size(keys, f"{key}.block_structure", weights.get("block_structure"))
        found.add((strategy, block))
        known = strategy in ("block", "channel", "tensor") and _has(weights, num_bits=8, type="float")
        if not known or len(found) > 1:
            raise keys.unreadable(
                key, weights, "8-bit floating-point weights with a scale for a block, a row (channel) or the matrix"
            )
    ((strategy, block),) = found
    return Fp8Layout("_scale", _SCALE_TYPES, strategy, block)  # type: ignore[arg-type]


def _has(weights: Mapping[str, Any], **known: Any) -> bool:
    """Return whether weights are symmetric and static, and have these values."""
    return (
        weights.get("symmetric", True) is True
        and not weights.get("dynamic")
        and known.items() <= {key: weights.get(key) for key in known}.items()
    )


def _targets(keys: ConfigKeys) -> Patterns:
    """Return the names of the modules that are quantized. "Linear" stands for all linear layers. Raises ModelError."""
    targets: list[str] = []
    for name, group in _groups(keys).items():
        targets += keys.list_of_names(f"config_groups.{name}.targets", group.get("targets", ["Linear"]))
    return _patterns(keys, "config_groups", targets)


def _patterns(keys: ConfigKeys, key: str, names: Iterable[str]) -> Patterns:
    """Return names of modules as patterns with `*`, and as regular expressions after "re:".

    Raises:
        ModelError: a regular expression is invalid.
    """
    found: list[re.Pattern[str] | str] = []
    for name in names:
        try:
            found.append(re.compile(name.removeprefix("re:")) if name.startswith("re:") else name)
        except re.error as error:
            raise keys.unreadable(key, name, f"regular expressions ({error})") from error
    return tuple(found)


def _is_quantized(parameter: str, targets: Patterns, kept: Patterns) -> bool:
    """Return whether a config quantizes a parameter: the weight of a linear layer, or a stack of matrices."""
    return ("Linear" in targets or is_named(parameter, lambda module: _matches(module, targets))) and not is_named(
        parameter, lambda module: _matches(module, kept)
    )


def _matches(module: str, patterns: Patterns) -> bool:
    return any(
        fnmatchcase(module, each) if isinstance(each, str) else each.match(module) is not None for each in patterns
    )


class PackedWeights:
    """The weights of a checkpoint that have 4-bit codes.

    Args:
        files: the checkpoint's safetensors files.
        layout: the tensors of a weight.

    Attributes:
        names: names of the tensors with codes.

    Raises:
        ModelError: a file cannot be read.
    """

    def __init__(self, files: Collection[str], layout: _Layout) -> None:
        self._found = stored_in(files)
        self._layout = layout
        self.names = frozenset(
            name
            for name, stored in self._found.items()
            if name.endswith(layout.codes[0]) and stored.dtype not in _PLAIN
        )

    def require_one_form(self) -> None:
        """Raise ModelError if a weight has tensors of another form, too."""
        for weight in sorted(self.names):
            name = weight.removesuffix(self._layout.codes[0])
            for end, why in self._layout.foreign:
                if name + end in self._found:
                    raise ModelError(
                        f"{self._found[weight].file}: '{weight}' is {self._layout.form}, and there is '{name}{end}': "
                        f"{why}. {IN_16_BITS}"
                    )

    def encoded_form(self, weight: str, shape: torch.Size) -> CheckpointEncoding | None:
        """Return the encoded form of a weight; None if the weight is not quantized.

        Args:
            weight: name of the tensor with the codes.
            shape: shape of the weight in the model.

        Raises:
            ModelError: the weight is quantized in a way that cannot be read, or its tensors do not fit each other, the
                config or the model.
        """
        layout = self._layout
        if weight not in self._found or self._found[weight].dtype in _PLAIN:
            return None
        file, dtype, found = self._found[weight]
        if (end := layout.codes[0]) != weight[-len(end) :] or dtype != layout.codes[1]:
            raise ModelError(
                f"{file}: '{weight}' is {dtype}; infinity reads {layout.form}, with codes in tensors of "
                f"{layout.codes[1]} whose names end with '{end}'. {IN_16_BITS}"
            )
        name = weight.removesuffix(end)
        names = {"codes": weight, "scales": name + layout.scales[0]}
        scales_dtype = self._found[names["scales"]].dtype if names["scales"] in self._found else ""
        codec = layout.codec(shape, scales_dtype if scales_dtype in layout.scales[1] else "")
        if codec is None or found != layout.shapes(shape)[0]:
            raise ModelError(
                f"{file}: '{weight}' is {layout.form} with shape {found}, and is {tuple(shape)} in the model; a "
                f"byte has two codes, and {layout.block or 'those of a row'} have a scale. {IN_16_BITS}"
            )
        self._require(weight, names["scales"], layout.scales[1], layout.shapes(shape)[1])
        if layout.global_scale:
            names["nested_scales"] = name + layout.global_scale
            self._require(weight, names["nested_scales"], ("F32",), (1,), ())
            self._require_usable(names["nested_scales"])
        if layout.shape:
            self._require_shape(weight, name + layout.shape, shape)
        parts = {part: partial(self._found[tensor].read, tensor) for part, tensor in names.items()}
        return encoding_of(codec, shape, parts, lambda part: self._misfit(weight, names[part]))

    def joined_form(self, joined: JoinedRows, shape: torch.Size) -> CheckpointEncoding | None:
        """See QuantizedWeights. Matrices that each have a global scale cannot be joined."""
        return None if self._layout.global_scale else join(self, self._found, joined, shape)

    def _require(self, weight: str, name: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
        """Require a tensor of a weight. Raises ModelError."""
        if name not in self._found:
            raise ModelError(
                f"{self._found[weight].file}: '{weight}' is {self._layout.form}, and there is no '{name}'; is the "
                "checkpoint complete?"
            )
        stored = self._found[name]
        if stored.dtype not in dtypes or stored.shape not in shapes:
            raise ModelError(
                f"{stored.file}: '{name}' is {stored.dtype} with shape {stored.shape}; for '{weight}' in "
                f"{self._layout.form} it must be {' or '.join(dtypes)} with shape {shapes[0]}. {IN_16_BITS}"
            )

    def _require_usable(self, name: str) -> None:
        """Raise ModelError if a global scale is not a positive number."""
        value = float(self._found[name].read(name).reshape(-1)[0])
        if not 0 < value < math.inf:
            raise ModelError(
                f"{self._found[name].file}: '{name}' is {value}, and must be positive; was the file changed?"
            )

    def _require_shape(self, weight: str, name: str, shape: torch.Size) -> None:
        """Raise ModelError if a tensor with the shape of a weight is missing, or names another shape."""
        self._require(weight, name, ("I64", "I32"), (len(shape),))
        value = self._found[name].read(name).tolist()
        if value != list(shape):
            raise ModelError(
                f"{self._found[name].file}: '{name}' is {value}, and '{weight}' is {tuple(shape)} in the model; does "
                "the config.json belong to the files?"
            )

    def _misfit(self, weight: str, name: str) -> ModelError:
        return ModelError(
            f"{self._found[weight].file}: '{weight}' is {self._layout.form}, and '{name}' does not have the size that "
            "its shape needs; was the file changed?"
        )
