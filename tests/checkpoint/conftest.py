"""Runs to export, and their exported copies."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from tests.checkpoint.runs import stored
from tests.models import llama

Config = Callable[..., dict[str, Any]]


def config_in(directory: Path) -> Config:
    def make(name: str, tiers: tuple[str, str] = ("nvme", "nvme"), **overrides: Any) -> dict[str, Any]:
        nvme = {"paths": [str(directory / name)]} | overrides.pop("nvme", {})
        places = {"weights": tiers[0], "optimizer": tiers[1], "activations": "keep", "nvme": nvme}
        return places | {"memory": {"device": "64MiB", "host": "512MiB"}, "commit_every": 1} | overrides

    return make


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Return a function that makes a swap config with generations. `name` is the name of the swap directory, and
    `tiers` names the tiers that the config uses.
    """
    return config_in(tmp_path)


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    """Provide a list. At the end of the test, the models in this list are closed."""
    models: list[Any] = []
    yield models
    for model in models:
        infinity.close(model)


def make_run(directory: Path) -> Path:
    """Make a run in the directory `swap`, and the run's export in the directory `copy`."""
    torch.manual_seed(0)
    model, batch = llama(layers=2)
    run = stored(directory, batch, model.bfloat16(), config_in(directory)("swap", keep=2))
    infinity.export_checkpoint(run, directory / "copy", max_shard_size="100KB")
    return directory


@pytest.fixture(scope="session")
def of_cpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that was computed on the CPU, and its export. Tests use copies of the run and of the export."""
    return make_run(tmp_path_factory.mktemp("of_cpu"))


@pytest.fixture
def made(request: pytest.FixtureRequest, computes_on: object, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run and its export, made on the device of this test."""
    if computes_on is None:
        return request.getfixturevalue("of_cpu")  # type: ignore[no-any-return]
    return make_run(tmp_path_factory.mktemp("of_device"))


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """Return the swap directory of a run."""
    return Path(shutil.copytree(made / "swap", tmp_path / "swap"))


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    """Return the export of a run."""
    return Path(shutil.copytree(made / "copy", tmp_path / "copy"))
