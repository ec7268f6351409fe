"""The portable copy of a generation: the files in its directory, and their reader.

model*.safetensors, config.json …     weights and persistent buffers, as from_pretrained reads them
optimizer/optimizer*.safetensors      optimizer states in fp32 with the parameters' shapes: "<parameter>.<moment>" with
                                      torch's names of the moments, "<parameter>.master" for weights that are not fp32;
                                      "<parameter>.<moment>.scales" for moments that were int8 (state/int8.py)
optimizer/optimizer.safetensors.index.json    the file of each tensor; optimizer classes, hyperparameters and steps
training-state.infinity               all other data that a run needs: the manifest without extents (io/manifest.py).
                                      The manifest lists tiles (state/layer_tiles.py); the files above have none
SHA256SUMS                            checksums of these files for `sha256sum --check`; older copies have none
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from infinity import files
from infinity.access.ingest import IngestedMoment
from infinity.checkpoint.generation import MASTER
from infinity.checkpoint.safetensors_reader import tensor_of
from infinity.checkpoint.safetensors_writer import index_name
from infinity.durable.generation_body import parse_body
from infinity.errors import ManifestError, ResumeError
from infinity.io import document
from infinity.io.manifest import Manifest
from infinity.io.schema import Name, validated
from infinity.state.int8 import blocks_of
from infinity.state.layer_tiles import places_of
from infinity.state.moments import STORED_AS, Moment

logger = logging.getLogger(__name__)

OPTIMIZER = "optimizer"
"""Name of the folder that contains the optimizer's tensors, and the stem of the file names in this folder."""

STATE_NAME = "training-state.infinity"
SUMS_NAME = "SHA256SUMS"
_KIND = "training state"
_INDEX_BYTES_MAX = 64 << 20
_INDEX_CONTAINERS_MAX, _INDEX_VALUES_MAX = 500_000, 4_000_000  # parsed JSON takes many times the memory of its text
_HASHED_BYTES = 4 << 20
_THREADS_MAX = 4
_SUM = re.compile(r"([0-9a-f]{64})  (\S.*)")


def tensor_name(parameter: str, state: str) -> str:
    """Return the tensor name of a parameter's state. `state` is MASTER (generation.py), or torch's name of a moment."""
    return f"{parameter}.{state}"


def scales_name(moment: str) -> str:
    """Return the tensor name of a moment's scales. `moment` is the tensor name of the moment."""
    return f"{moment}.scales"


def training_state(manifest: Manifest) -> bytes:
    """Return the contents of the training state's file. Raises ManifestError."""
    placeless = dict(manifest) | {"extents": [], "sums": None}
    del placeless["store"], placeless["life"]
    try:
        return b"".join(document.write(_KIND, placeless))
    except TypeError as error:  # a manifest that was readable can be too large or too deep to write
        raise ManifestError(f"generation {manifest.step}", f"cannot be copied: {error}") from error


def write_checksums(directory: Path) -> None:
    """Write the checksums of all files in the directory. Raises OSError."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    lines = [f"{digest}  {path.relative_to(directory).as_posix()}\n" for path, digest in _digests(paths)]
    (directory / SUMS_NAME).write_text("".join(lines), encoding="utf-8")


def _digests(paths: Sequence[Path]) -> Iterable[tuple[Path, str]]:
    """Yield the SHA-256 of each file. Several files are read at the same time. Raises OSError."""
    with ThreadPoolExecutor(min(_THREADS_MAX, os.cpu_count() or 1)) as pool:
        yield from zip(paths, pool.map(_digest, paths), strict=True)


def _digest(path: Path) -> str:
    digest, buffer = hashlib.sha256(), bytearray(_HASHED_BYTES)
    with files.opened(path, follow=True) as (descriptor, nbytes):
        at = 0
        while at < nbytes:
            read = os.preadv(descriptor, [buffer], at)
            if not read:
                break  # the file was truncated meanwhile
            digest.update(memoryview(buffer)[: min(read, nbytes - at)])
            at += read
    return digest.hexdigest()


class PortableCopy:
    """A portable copy, open for reading.

    Attributes:
        manifest: the manifest of the generation, without extents.

    Raises:
        ResumeError: the directory is not a portable copy, or is damaged; the message names the file.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        path = directory / STATE_NAME
        if not os.path.lexists(path):
            raise ResumeError(
                f"{directory} is not a portable copy of a run (there is no {STATE_NAME}); make a copy with `infinity "
                "checkpoint export`, or load the directory as a model, without the training state"
            )
        self.manifest = validated(Manifest, document.read(path, _KIND, follow=True), path)
        self.body = parse_body(self.manifest.body, path)
        self._files = _weight_map(directory / OPTIMIZER / index_name(OPTIMIZER))
        self._shapes = self.body.model.shapes()
        self._places = places_of(self._shapes)
        self._begun = self.body.begun()

    @classmethod
    def verified(cls, directory: str | Path) -> PortableCopy:
        """Open a portable copy after reading all of it and comparing it with its checksums.

        If the copy has no checksums, a warning is logged.

        Raises:
            ResumeError: as for the constructor; or a file is damaged or missing, or has no checksum; the message names
                the file.
        """
        copy = cls(Path(directory).expanduser())
        copy._verify()
        return copy

    def _verify(self) -> None:
        path = self.directory / SUMS_NAME
        if not os.path.lexists(path):
            logger.warning(
                "%s has no %s, because an older infinity exported it: its files are not checked for damage",
                self.directory, SUMS_NAME,
            )  # fmt: skip
            return
        sums = _read_sums(path)
        for name in sums:
            if not os.path.lexists(self.directory / name):
                raise ResumeError(f"{self.directory / name} is missing: {SUMS_NAME} names it. Export the run again.")
        for name in self._used():
            if name not in sums:
                raise ResumeError(
                    f"{path} has no checksum of {name}: the list of checksums was changed or truncated. Export the "
                    "run again."
                )
        there = [self.directory / name for name in sums]
        try:
            for file, digest in _digests(there):
                if digest != sums[file.relative_to(self.directory).as_posix()]:
                    raise ResumeError(
                        f"{file} is damaged: its checksum is not the one in {SUMS_NAME}. Copy the file again, or "
                        f"export the run again. If you changed the file on purpose, remove its line from {SUMS_NAME}."
                    )
        except OSError as error:
            raise ResumeError(
                f"{error.filename} is named by {SUMS_NAME} and cannot be read: {error.strerror}. Export the run again."
            ) from error
        logger.info("%s: %d files have their checksums", self.directory, len(there))

    def _used(self) -> Iterable[str]:
        """Yield the files that a run needs to continue, by their names in the copy."""
        yield STATE_NAME
        yield f"{OPTIMIZER}/{index_name(OPTIMIZER)}"
        yield from (f"{OPTIMIZER}/{name}" for name in sorted(set(self._files.values())))
        if self._shards is None:
            yield "model.safetensors"
        else:
            yield index_name("model")
            yield from sorted(set(self._shards.values()))

    def master(self, name: str) -> torch.Tensor | None:
        """Return the fp32 master of a parameter; None if the weight is the master.

        The tensor is memory-mapped: a page of the file is read when the page is used.

        Raises:
            ResumeError: the tensor has another shape or dtype, or its file is damaged.
        """
        place = self._places[name]
        tensor = tensor_name(place.whole, MASTER)
        return self._part(name, self._state(tensor, place.shape)) if tensor in self._files else None

    def moment(self, name: str, state: Moment) -> IngestedMoment | None:
        """Return a moment of a parameter, memory-mapped like master(); None if the moment does not exist yet.

        Raises:
            ResumeError: the tensor is missing, has another shape or dtype, or its file is damaged.
        """
        moment = next((each for each in self._begun.get(name, ()) if STORED_AS.get(each) == state), None)
        if moment is None:
            return None
        place = self._places[name]
        tensor, scales = tensor_name(place.whole, moment), None
        if scales_name(tensor) in self._files:
            first, numel = blocks_of(place.first), blocks_of(math.prod(self._shapes[name]))
            scales = self._state(scales_name(tensor), [blocks_of(math.prod(place.shape))])[first : first + numel]
        return IngestedMoment(self._part(name, self._state(tensor, place.shape)), scales)

    def _part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor in the files that belongs to a parameter: a complete parameter, or the rows of a
        tile.
        """
        first, shape = self._places[name].first, self._shapes[name]
        return whole.view(-1)[first : first + math.prod(shape)].view(shape)

    def _state(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Return a tensor of the optimizer, by its name in the files."""
        folder = self.directory / OPTIMIZER
        if name not in self._files:
            raise ResumeError(f"{folder} has no tensor '{name}': the copy is incomplete, export the run again")
        path = folder / self._files[name]
        value = _tensor(path, name)
        if list(value.shape) != list(shape) or value.dtype != torch.float32:
            raise ResumeError(
                f"{path}: '{name}' is {value.dtype} {tuple(value.shape)}, and fp32 {tuple(shape)} is needed"
            )
        return value

    def weight(self, name: str) -> torch.Tensor:
        """Return the weight of a parameter, memory-mapped like master(). The weight must have the same name and shape
        in the files as in the model.

        Raises:
            ResumeError: the weight is missing, or its file is damaged.
        """
        place = self._places[name]
        file = "model.safetensors" if self._shards is None else self._shards.get(place.whole)
        if file is None:
            raise ResumeError(f"{self.directory} has no weight '{name}': the copy is incomplete, export the run again")
        whole = _tensor(self.directory / file, place.whole)
        return whole if place.whole == name else whole[place.begin : place.end]

    @functools.cached_property
    def _shards(self) -> dict[str, str] | None:
        """The file of each weight; None if all weights are in one file."""
        index = self.directory / index_name("model")
        return _weight_map(index) if os.path.lexists(index) else None


def _tensor(path: Path, name: str) -> torch.Tensor:
    return tensor_of(path, name, failure=ResumeError, then="Export the run again.")


class _IndexFile(BaseModel):
    """The fields of an index file that infinity uses."""

    model_config = ConfigDict(strict=True)

    weight_map: dict[Name, Annotated[str, Field(pattern=r"\A[A-Za-z0-9_-][A-Za-z0-9._-]*\.safetensors\z")]]


def _bytes_of(path: Path) -> bytes:
    """Return the contents of a small file. Raises ManifestError."""
    try:
        return files.read_regular(path, _INDEX_BYTES_MAX, follow=True)
    except OSError as error:
        raise ManifestError(path, f"cannot be read: {error.strerror}") from error


def _weight_map(path: Path) -> dict[str, str]:
    text = _bytes_of(path)
    if text.count(b"[") + text.count(b"{") > _INDEX_CONTAINERS_MAX or text.count(b",") > _INDEX_VALUES_MAX:
        raise ManifestError(path, "is larger than the index of any model")
    try:
        index: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ManifestError(path, f"is not valid JSON: {error}") from error
    return validated(_IndexFile, index, path).weight_map


def _read_sums(path: Path) -> dict[str, str]:
    """Return the checksum of each file. Raises ManifestError."""
    try:
        *lines, rest = _bytes_of(path).decode().split("\n")
    except UnicodeDecodeError as error:
        raise ManifestError(path, f"is damaged: {error}") from error
    if not lines or rest:
        raise ManifestError(path, "is damaged: it was truncated")
    sums: dict[str, str] = {}
    for line in lines:
        match = _SUM.fullmatch(line)
        if match is None or match[2] in sums or Path(match[2]).is_absolute() or ".." in Path(match[2]).parts:
            raise ManifestError(path, f"is damaged: it has the line {line[:200]!r}")
        sums[match[2]] = match[1]
    return sums
