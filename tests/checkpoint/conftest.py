"""Runs to export, and their copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import infinity
from tests.checkpoint.runs import stored
from tests.models import llama

Config = Callable[..., dict[str, Any]]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A swap config with generations; `name` is its directory, `tiers` is where weights and optimizer are."""

    def make(name: str, tiers: tuple[str, str] = ("nvme", "nvme"), **overrides: Any) -> dict[str, Any]:
        nvme = {"paths": [str(tmp_path / name)]} | overrides.pop("nvme", {})
        places = {"weights": tiers[0], "optimizer": tiers[1], "activations": "keep", "nvme": nvme}
        return places | {"memory": {"device": "64MiB", "host": "512MiB"}, "commit_every": 1} | overrides

    return make


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    """Models to close at the end."""
    models: list[Any] = []
    yield models
    for model in models:
        infinity.close(model)


@pytest.fixture
def run(config: Config, tmp_path: Path) -> Path:
    """The swap directory of a run."""
    model, batch = llama(layers=2)
    return stored(tmp_path, batch, model.bfloat16(), config("swap", keep=2))


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    infinity.export_checkpoint(run, tmp_path / "copy", max_shard_size="100KB")
    return tmp_path / "copy"
