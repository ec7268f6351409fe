"""The portable copy of a generation: what is in its directory, by what names.

model*.safetensors, config.json …     weights and persistent buffers, as from_pretrained reads them
optimizer/optimizer*.safetensors      fp32, of the parameters' shapes: "<parameter>.<moment>" by torch's names for
                                      what the optimizer keeps, "<parameter>.master" for weights that are not fp32;
                                      "<parameter>.<moment>.scales" for moments that were int8 (state/int8.py)
optimizer/optimizer.safetensors.index.json    where each is; classes, hyperparameters and steps of the optimizers
training-state.infinity               what else a run needs to go on: the manifest without places (io/manifest.py)
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from infinity.errors import ManifestError, ResumeError
from infinity.io import document
from infinity.io.manifest import Manifest
from infinity.io.schema import validated
from infinity.state.records import parse_body

OPTIMIZER = "optimizer"
"""The folder of the optimizer's tensors, and the stem of their files."""

STATE_NAME = "training-state.infinity"
_KIND = "training state"
_STORED = {"sum": "exp_avg_sq", "momentum_buffer": "exp_avg"}


def stored_name(moment: str) -> str:
    """The store's name of what torch's optimizers call `moment`."""
    return _STORED.get(moment, moment)


def master_name(parameter: str) -> str:
    return f"{parameter}.master"


def moment_name(parameter: str, moment: str) -> str:
    return f"{parameter}.{moment}"


def scales_name(parameter: str, moment: str) -> str:
    return f"{parameter}.{moment}.scales"


def write_training_state(directory: Path, manifest: Manifest) -> None:
    """Raises OSError."""
    placeless = dict(manifest) | {"extents": [], "sums": None}
    del placeless["store"]
    (directory / STATE_NAME).write_bytes(b"".join(document.write(_KIND, placeless)))


class Portable:
    """A portable copy, for reading.

    Raises:
        ResumeError: the directory is not one, or is damaged; names the file.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        path = directory / STATE_NAME
        if not path.is_file():
            raise ResumeError(
                f"{directory} is no portable copy of a run (there is no {STATE_NAME}); make one with `infinity "
                "checkpoint export`, or load it as a model, without its training state"
            )
        self.manifest = validated(Manifest, document.read(path, _KIND), path)
        self.body = parse_body(self.manifest.body, path)
        self._files = _weight_map(directory / OPTIMIZER / f"{OPTIMIZER}.safetensors.index.json")

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name among the optimizer's."""
        return name in self._files

    def state(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """One of the optimizer's tensors, fp32; its pages are read from the file when they are used.

        Raises:
            ResumeError: it is missing, of another shape or dtype, or its file is damaged.
        """
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
        """A weight by its name in the files, as state().

        Raises:
            ResumeError: it is missing, or its file is damaged.
        """
        if self._shards is None:
            return _tensor(self.directory / "model.safetensors", name)
        if name not in self._shards:
            raise ResumeError(f"{self.directory} has no weight '{name}': the copy is incomplete, export the run again")
        return _tensor(self.directory / self._shards[name], name)

    @functools.cached_property
    def _shards(self) -> dict[str, str] | None:
        """The file of each weight; None where there is one file."""
        index = self.directory / "model.safetensors.index.json"
        return _weight_map(index) if index.exists() else None


def _tensor(path: Path, name: str) -> torch.Tensor:
    from safetensors import SafetensorError, safe_open

    try:
        # Opened per tensor, so that its pages leave with the mapping.
        with safe_open(path, framework="pt", device="cpu") as file:
            value: torch.Tensor = file.get_tensor(name)
            return value
    except (OSError, SafetensorError) as error:
        raise ResumeError(f"{path}: '{name}' cannot be read: {error}. Export the run again.") from error


def _weight_map(path: Path) -> dict[str, str]:
    try:
        index: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise ManifestError(path, f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ManifestError(path, f"is not valid JSON: {error}") from error
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not all(isinstance(f, str) and Path(f).name == f for f in files.values()):
        raise ManifestError(path, "has no weight_map that names files beside it")
    return files
