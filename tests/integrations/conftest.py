"""A small checkpoint on disk, and `infinity run` in this process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from infinity.config import load_config
from infinity.integrations.launcher import installed
from infinity.integrations.run import Run
from tests.models import llama

Launch = Callable[..., AbstractContextManager[Run]]


@pytest.fixture(autouse=True)
def _heard(caplog: pytest.LogCaptureFixture) -> None:
    """What infinity says to the user can be asserted."""
    caplog.set_level(logging.WARNING, "infinity")


@pytest.fixture(autouse=True)
def _no_precision_of_an_earlier_test() -> Iterator[None]:
    """accelerate keeps it for the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in fp32, as save_pretrained writes it."""
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("checkpoint")
    llama()[0].save_pretrained(directory)
    return directory


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """`with launch(weights=...):` what is in it runs as under `infinity run`, with states on NVMe and a model that
    evicts."""

    def start(*, resume: Path | None = None, **changes: Any) -> AbstractContextManager[Run]:
        config: dict[str, Any] = {
            "weights": "nvme",
            "optimizer": "nvme",
            "memory": {"device": "640KiB", "host": "96MiB"},
            "nvme": {"paths": [str(tmp_path / "swap")]},
            "commit_every": 1,
        }
        return installed(load_config(config | changes), resume)

    return start


@pytest.fixture
def swap(tmp_path: Path) -> dict[str, Any]:
    """All on NVMe, with little room: every step is committed."""
    return {
        "weights": "nvme",
        "optimizer": "nvme",
        "memory": {"device": "640KiB", "host": "96MiB"},
        "nvme": {"paths": [str(tmp_path / "swap")]},
        "commit_every": 1,
    }


@pytest.fixture
def rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 96, (32, 16), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]
