"""Parameters that transformers joins from tensors of a checkpoint, such as a stack of experts from a tensor for each
expert.

transformers joins the tensors while it loads a model, and writes the result to a scratch directory: for a mixture of
experts, that is a second copy of nearly the whole model. Instead, infinity keeps the names of the tensors, and joins
the tensors of some rows when the values of these rows are needed. Only joins whose rows are independent are kept in
this way; transformers makes all others.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.safetensors_reader import names_in, tensor_of
from infinity.errors import ModelError
from infinity.files import read_regular
from infinity.strict_parsers import parse_json

_LISTING_BYTES_MAX = 1 << 28


@dataclass(frozen=True)
class JoinedRows:
    """The tensors of a parameter whose rows are joined from several tensors.

    Attributes:
        names: for each part of a row, the names of its tensors in the files, one for each row.
        dim: dimension along which the parts of a row are joined.
    """

    names: Sequence[Sequence[str]]
    dim: int

    def read(self, files: Mapping[str, str], begin: int, end: int | None) -> torch.Tensor:
        """Return rows [begin, end) of the parameter.

        Args:
            files: file of each tensor, by the tensor's name.
            begin: first row.
            end: end of the rows; None: all rows from `begin` on.

        Raises:
            ModelError: a tensor cannot be read, or the tensors of different rows have different shapes.
        """
        rows: torch.Tensor | None = None
        first = zip(*(each[begin:end] for each in self.names), strict=True)
        for at, names in enumerate(first):
            parts = [tensor_of(files[name], name) for name in names]
            row = parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.dim)
            if rows is None:
                rows = row.new_empty(len(self.names[0][begin:end]), *row.shape)
            if row.shape != rows.shape[1:]:
                raise ModelError(
                    f"{files[names[0]]}: '{names[0]}' is {tuple(row.shape)}, and the tensors before it "
                    f"{tuple(rows.shape[1:])}"
                )
            for name, part in zip(names, parts, strict=True):
                if part.dtype != rows.dtype:
                    raise ModelError(
                        f"{files[name]}: '{name}' is {part.dtype}, and other experts of the layer are {rows.dtype}. "
                        "infinity joins experts of the same dtype. Save the model in one dtype."
                    )
            rows[at] = row
        if rows is None:
            raise ModelError("a parameter of no rows cannot be joined")
        return rows


@contextmanager
def joining_later(unread: Collection[str] = ()) -> Iterator[dict[str, JoinedRows]]:
    """Inside the `with` block, from_pretrained in this thread does not join tensors. Yields the parameters that it
    would have joined, by name.

    Args:
        unread: patterns of names of tensors that stay in their files. transformers would read them, convert them to the
            model's dtype, and drop them.
    """
    found: dict[str, JoinedRows] = {}
    try:
        from transformers.core_model_loading import WeightConverter, WeightTransform
    except ImportError:  # transformers 4 joins nothing
        yield found
        return
    convert, add, thread = WeightConverter.convert, WeightTransform.add_tensor, threading.get_ident()

    def add_named(self: Any, target_key: str, source_key: str, source_pattern: str, future: Any) -> None:
        if threading.get_ident() == thread and any(re.search(pattern, source_key) for pattern in unread):
            future = _nothing
        add(self, target_key, source_key, source_pattern, _Named(source_key, future) if callable(future) else future)

    def convert_later(self: Any, layer_name: str, **others: Any) -> Any:
        tensors = [self.collected_tensors.get(pattern, []) for pattern in self.source_patterns]
        dim = _dim_of_parts(self.operations)
        named = threading.get_ident() == thread and all(isinstance(each, _Named) for part in tensors for each in part)
        if dim is None or not named or len({len(part) for part in tensors}) != 1 or self.quantization_operation:
            return convert(self, layer_name, **others)
        found[layer_name] = JoinedRows([[each.name for each in part] for part in tensors], dim)
        self.collected_tensors.clear()
        others["loading_info"].missing_keys.discard(layer_name)
        return {}

    WeightTransform.add_tensor, WeightConverter.convert = add_named, convert_later
    try:
        yield found
    finally:
        WeightTransform.add_tensor, WeightConverter.convert = add, convert


def _nothing() -> torch.Tensor:
    """Return an empty tensor in place of a tensor that is not read."""
    return torch.empty(0)


class _Named:
    """Function that reads a tensor of a file, with the tensor's name."""

    def __init__(self, name: str, read: Any) -> None:
        self.name = name
        self._read = read

    def __call__(self) -> Any:
        return self._read()


def _dim_of_parts(operations: Sequence[Any]) -> int | None:
    """Return the dimension in a row along which these operations of transformers join the parts of the row; None if
    they do not stack rows of joined parts."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    stack, *join = operations
    if type(stack) is not MergeModulelist or stack.dim != 0 or len(join) > 1:
        return None
    if not join:
        return 0
    return join[0].dim - 1 if type(join[0]) is Concatenate and join[0].dim > 0 else None


def files_of(index: Mapping[str, Mapping[str, Any]], wanted: Sequence[JoinedRows]) -> dict[str, str]:
    """Return the files of tensors to join, by the tensors' names.

    Args:
        index: accelerate's index of the tensors' places. The tensors to join are in the same directory.
        wanted: the parameters to join.

    Raises:
        ModelError: a file cannot be read, or there is no file of a tensor.
    """
    names = {name for each in wanted for part in each.names for name in part}
    found: dict[str, str] = {}
    known = {Path(entry["safetensors_file"]) for entry in index.values() if entry.get("safetensors_file")}
    for directory in sorted({file.parent for file in known}):
        used = {file.name for file in known if file.parent == directory}
        for listing in sorted(directory.glob("*.safetensors.index*.json")):
            placed = _files_in(listing)
            if used <= {*placed.values()}:  # a directory may have several sets of files; transformers has read this one
                found |= {name: str(directory / placed[name]) for name in names & placed.keys()}
    for file in sorted(map(str, known)) if names - found.keys() else ():
        found |= dict.fromkeys(names.intersection(names_in(file)) - found.keys(), file)
    if names - found.keys():
        raise ModelError(f"there is no file with the tensor '{min(names - found.keys())}'; is the checkpoint complete?")
    return found


def _files_in(listing: Path) -> dict[str, str]:
    """Return the name of the file of each tensor, from an index of safetensors files. Raises ModelError."""
    try:
        values = parse_json(read_regular(listing, _LISTING_BYTES_MAX, follow=True).decode())
    except (OSError, ValueError) as error:
        raise ModelError(f"{listing}: cannot be read: {error}. Is the file complete?") from error
    placed = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(placed, dict) or any(
        not isinstance(name, str) or Path(name).name != name for name in placed.values()
    ):
        raise ModelError(f"{listing}: weight_map must have the name of a file beside it for each tensor")
    return placed
