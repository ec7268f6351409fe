"""Common parts of the readers of quantized checkpoints. Each method of quantization has a reader of its own.

| file | checkpoints |
|---|---|
| bitsandbytes_files.py | NF4 and LLM.int8 of bitsandbytes |
| fp8_files.py | FP8 with a scale for each block, row or matrix |
| packed_files.py | NVFP4, MXFP4 and groups of 4-bit integers |

quantization_config.py chooses the reader.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from infinity.checkpoint.merged_experts import JoinedRows
from infinity.checkpoint.safetensors_reader import rows_in, stored_tensors
from infinity.errors import ModelError
from infinity.state.codec import Codec, decode, encoded_bytes, parts_of
from infinity.state.frozen_codecs import CheckpointEncoding

IN_16_BITS = (
    "Give the model in bf16, fp16 or fp32; with frozen: nf4 or int8 in the swap config its frozen weights are stored "
    "in 4 or 8 bits."
)


class QuantizedWeights(Protocol):
    """The quantized weights of a checkpoint."""

    @property
    def names(self) -> Set[str]:
        """Names of the quantized weights in the files."""

    def joined_form(self, joined: JoinedRows, shape: torch.Size) -> CheckpointEncoding | None:
        """Return the encoded form of a stack that is joined from matrices; None if this is not possible, or if the
        matrices are not quantized.

        Args:
            joined: names of the matrices.
            shape: shape of the stack in the model.

        Raises:
            ModelError: a matrix is quantized in a way that cannot be read, or the matrices do not fit each other or the
                model.
        """

    def encoded_form(self, weight: str, shape: torch.Size) -> CheckpointEncoding | None:
        """Return the encoded form of a weight; None if the weight is not quantized.

        Args:
            weight: name of the weight in the files.
            shape: shape of the weight in the model.

        Raises:
            ModelError: the weight is quantized in a way that cannot be read, or the weight's tensors do not fit each
                other or the model.
        """


class QuantizationMethod(Protocol):
    """The quantization_config of a checkpoint that infinity reads."""

    @property
    def renamed(self) -> Mapping[str, str]:
        """Patterns of names of quantized weights in the files, and what replaces them in the names of parameters. The
        form is that of the argument `key_mapping` of from_pretrained.
        """

    def codec_of(self, name: str, shape: torch.Size) -> Codec | None:
        """Return the codec that a parameter has according to the config; None if it is not quantized.

        Args:
            name: name of the parameter: the weight of a linear layer in a block of the model, or a stack of matrices
                there.
            shape: shape of the parameter.

        Raises:
            ModelError: the model is quantized in a way that cannot be read.
        """

    def weights(self, files: Collection[str]) -> QuantizedWeights:
        """Return the quantized weights in safetensors files. Raises ModelError."""


class StoredTensor(NamedTuple):
    """Place and form of a tensor in a file. The dtype has the name that safetensors uses."""

    file: str
    dtype: str
    shape: tuple[int, ...]

    def read(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Return rows [begin, end) of the tensor, whose name is `name`; with end=None, all from `begin` on. Raises
        ModelError."""
        return rows_in(self.file, name, begin, end)


def stored_in(files: Iterable[str]) -> dict[str, StoredTensor]:
    """Return the tensors of safetensors files, by name. Raises ModelError."""
    return {
        name: StoredTensor(file, *stored) for file in sorted(files) for name, stored in stored_tensors(file).items()
    }


class ConfigKeys:
    """The values of a quantization_config, and errors that name a key.

    Args:
        path: the model, for errors.
        method: the method of quantization, for errors.
        values: the quantization_config.
    """

    def __init__(self, path: str, method: str, values: Mapping[str, Any]) -> None:
        self._path = path
        self._method = method
        self._values = values

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def require(self, key: str, known: Collection[Any], wanted: str) -> None:
        """Raise ModelError if the value of `key` is none of `known`. `wanted` names the known values."""
        if self.get(key) not in known:
            raise self.unreadable(key, self.get(key), wanted)

    def names(self, *keys: str) -> tuple[str, ...]:
        """Return the list of names of the first of `keys` that has a value. Raises ModelError if it is no such list."""
        key = next((key for key in keys if self.get(key)), keys[0])
        return self.list_of_names(key, self.get(key))

    def list_of_names(self, key: str, value: Any) -> tuple[str, ...]:
        """Return a value that is a list of names, or empty. Raises ModelError, which names `key`."""
        found = (value,) if isinstance(value, str) and value else value or ()
        if not isinstance(found, list | tuple) or not all(isinstance(name, str) for name in found):
            raise self.unreadable(key, found, "a list of names")
        return tuple(found)

    def unreadable(self, key: str, value: Any, wanted: str) -> ModelError:
        said = f"{' '.join(key.split()):.80}: {value!r:.400}"
        return ModelError(
            f"'{self._path}' is quantized by {self._method} with {said} (quantization_config in its "
            f"config.json); infinity reads {wanted}. {IN_16_BITS}"
        )

    def require_unmerged(self, name: str, shape: torch.Size) -> None:
        """Raise ModelError if a quantized parameter is a stack of experts."""
        if len(shape) > 2:
            require_unmerged([name], self._path)

    def absent(self, what: str) -> ModelError:
        """Return the error for files that have no tensors of this method."""
        return ModelError(
            f"'{self._path}' is quantized by {self._method} according to its config.json, and no tensor of its files "
            f"is {what}; does the config.json belong to the files?"
        )


_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Matrices of an expert in files, by the name of the stack in the model."""


def is_named(parameter: str, test: Callable[[str], bool]) -> bool:
    """Return whether a config names the module of a parameter.

    A config has the names of the files: a stack of experts in the model is a module for each matrix of each expert in
    the files. The first expert is tested for all. A text model may have its names from a model of text and images.

    Args:
        parameter: name of the parameter.
        test: function that returns whether the config names a module.

    Raises:
        ModelError: the config names one matrix of an expert, and not another.
    """
    module = parameter.removesuffix(".weight")
    bank, _, stack = module.rpartition(".")
    parts = _PARTS.get(stack, ()) if bank.endswith("experts") else ()
    modules = [f"{bank}.0.{part}" for part in parts] or [module]
    named = {test(each) or test(each.replace("model.", "model.language_model.", 1)) for each in modules}
    if len(named) > 1:
        raise ModelError(
            f"the quantization_config names one of the matrices of '{parameter}', and not the other. infinity reads "
            f"experts whose matrices all have the same form. {IN_16_BITS}"
        )
    return named.pop()


def is_skipped(name: str, skipped: Collection[str]) -> bool:
    """Return whether a config excludes the module of a parameter, by complete words of its name or by a regular
    expression for its beginning."""

    def excluded(module: str) -> bool:
        return any(f".{part}." in f".{module}." or _begins(module, part) for part in skipped)

    return is_named(name, excluded)


def _begins(module: str, pattern: str) -> bool:
    with suppress(re.error):  # a name that is no expression
        return re.match(rf"(?:{pattern.removeprefix('re:')})(?=\.|$)", module) is not None
    return False


def encoding_of(
    codec: Codec,
    shape: torch.Size,
    parts: Mapping[str, Callable[[int, int | None], torch.Tensor]],
    misfit: Callable[[str], ModelError],
    *,
    sizes_known: bool = True,
) -> CheckpointEncoding:
    """Return the encoded form of a weight.

    Args:
        codec: the form.
        shape: shape of the weight.
        parts: functions that read rows [begin, end) of the parts of the form, by name; with end=None, all from `begin`
            on.
        misfit: function that returns the error for a part that does not have the size that the codec requires.
        sizes_known: whether the caller has compared the sizes of all parts with the header of their file; False: the
            parts other than the codes are read to compare them.

    Raises:
        ModelError: a part other than the codes does not have its size. The codes are read later, and then raise.
    """

    def bytes_of(part: str, nbytes: int, begin: int, end: int | None) -> torch.Tensor:
        found = parts[part](begin, end).contiguous().reshape(-1).view(torch.uint8)
        if found.numel() != nbytes:
            raise misfit(part)
        return found

    def read(begin: int, end: int | None) -> torch.Tensor:
        size = shape if end is None else torch.Size([end - begin, *shape[1:]])
        data = torch.zeros(encoded_bytes(codec, size), dtype=torch.uint8)
        for part, (at, nbytes) in parts_of(codec, size).items():
            data[at : at + nbytes] = bytes_of(part, nbytes, begin, end)
        return data

    def rows(begin: int, end: int) -> CheckpointEncoding:
        return CheckpointEncoding(codec, partial(read, begin, end))

    for part, (_, nbytes) in parts_of(codec, shape).items() if not sizes_known else ():
        if part != "codes":
            bytes_of(part, nbytes, 0, None)
    return CheckpointEncoding(codec, partial(read, 0, None), rows if len(shape) > 2 else None)


def join(
    weights: QuantizedWeights,
    found: Mapping[str, StoredTensor],
    joined: JoinedRows,
    shape: torch.Size,
    rows_of_block: int = 1,
) -> CheckpointEncoding | None:
    """Return the encoded form of a stack of experts; None if no matrix of an expert is quantized.

    Args:
        weights: the quantized weights.
        found: the tensors of the files, by name.
        joined: names of the matrices. The rows of their tensors in the files are those of the matrices.
        shape: shape of the stack in the model.
        rows_of_block: rows that have a scale in common.

    Raises:
        ModelError: as QuantizedWeights.joined_form.
    """
    rows = list(zip(*joined.names, strict=True))
    if not any(name in weights.names for row in rows for name in row):
        return None
    sizes = [torch.Size((*found[name].shape[:1], shape[-1])) for name in rows[0]]
    forms = [[weights.encoded_form(name, size) for name, size in zip(row, sizes, strict=True)] for row in rows]
    made = [known for row in forms for known in row]
    names = [name for row in rows for name in row]
    codecs = [(name, known and known.codec) for name, known in zip(names, made, strict=True)]
    kinds = Counter(codec for _, codec in codecs)
    ((usual, _),) = kinds.most_common(1)
    first = next((name for name, codec in codecs if codec != usual), rows[0][0])
    if joined.dim or len(kinds) > 1 or any(size[0] % rows_of_block for size in sizes):
        rule = f", with a multiple of {rows_of_block} rows" if rows_of_block > 1 else ""
        raise ModelError(
            f"{found[first].file}: '{first}' is one of the experts of a layer, of which some are quantized, and which "
            f"the model has in one parameter. infinity joins experts if all have the same form and shape{rule}. "
            f"{IN_16_BITS}"
        )
    if shape[:-1] != (len(rows), sum(size[0] for size in sizes)):
        raise ModelError(
            f"{found[first].file}: '{first}' is one of {len(rows)} experts, and the model has {tuple(shape)} for all "
            f"of them; does the config.json belong to the files? {IN_16_BITS}"
        )
    return _stacked([[known for known in row if known] for row in forms], sizes, shape)


def _stacked(
    matrices: Sequence[Sequence[CheckpointEncoding]], sizes: Sequence[torch.Size], shape: torch.Size
) -> CheckpointEncoding:
    """Return the encoded form of a stack of matrices.

    Args:
        matrices: for each matrix of the stack, the encoded forms of its parts, which are one below the other. Each part
            of the form of the stack (state/codec.py) must be that of the matrices, one after the other.
        sizes: shapes of the parts of a matrix.
        shape: shape of the stack.
    """
    codec = matrices[0][0].codec

    def read(begin: int, end: int) -> torch.Tensor:
        whole = torch.Size([end - begin, *shape[1:]])
        data = torch.zeros(encoded_bytes(codec, whole), dtype=torch.uint8)
        ends = {part: at for part, (at, _) in parts_of(codec, whole).items()}
        for matrix in matrices[begin:end]:
            for known, size in zip(matrix, sizes, strict=True):
                found = known.read()
                for part, (at, nbytes) in parts_of(codec, size).items():
                    data[ends[part] : ends[part] + nbytes] = found[at : at + nbytes]
                    ends[part] += nbytes
        return data

    def rows(begin: int, end: int) -> CheckpointEncoding:
        return CheckpointEncoding(codec, partial(read, begin, end))

    return CheckpointEncoding(codec, partial(read, 0, len(matrices)), rows)


class EncodedValues(NamedTuple):
    """Decoded values of an encoded weight, in `dtype`."""

    known: CheckpointEncoding
    shape: torch.Size
    dtype: torch.dtype

    def rows(self, begin: int, end: int | None) -> torch.Tensor:
        """Return rows [begin, end); with end=None, all rows from `begin` on."""
        if self.known.rows is None:
            return decode(self.known.read(), self.known.codec, self.shape, self.dtype)[begin:end]
        end = self.shape[0] if end is None else end
        size = torch.Size([end - begin, *self.shape[1:]])
        return decode(self.known.rows(begin, end).read(), self.known.codec, size, self.dtype)


def require_unmerged(left: Sequence[str], path: str) -> None:
    """Refuse a model for which transformers joins several quantized weights into a single parameter.

    Args:
        left: quantized weights that would be joined.
        path: path of the checkpoint, for messages.

    Raises:
        ModelError: there are such weights; the message names one.
    """
    if left:
        raise ModelError(
            f"in '{path}' the tensor '{left[0]}' is quantized, and transformers joins this tensor with others into a "
            f"larger parameter (such as the experts of a layer); infinity cannot join quantized weights of this form. "
            f"{IN_16_BITS}"
        )


def floating(tensor: torch.Tensor, name: str, path: str) -> torch.Tensor:
    """Return `tensor` if its dtype is a floating-point dtype of at least 16 bits. Raises ModelError otherwise."""
    if not tensor.is_floating_point():
        raise ModelError(
            f"'{path}' has '{name}' as {tensor.dtype}, but none of the tensors that bitsandbytes writes with "
            f"a quantized weight. {IN_16_BITS}"
        )
    if tensor.dtype.itemsize < 2:
        raise ModelError(
            f"'{path}' has '{name}' as {tensor.dtype}, but no quantization_config in its config.json says how such a "
            f"tensor is decoded. {IN_16_BITS}"
        )
    return tensor
