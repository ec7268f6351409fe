"""Fixtures: a small checkpoint on disk, and `infinity run` in this process."""

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
from infinity.integrations.script_run import ScriptRun
from tests.models import llama

Launch = Callable[..., AbstractContextManager[ScriptRun]]


@pytest.fixture(autouse=True)
def _heard(caplog: pytest.LogCaptureFixture) -> None:
    """Capture infinity's warnings, so that tests can assert them."""
    caplog.set_level(logging.WARNING, "infinity")


@pytest.fixture(autouse=True)
def _no_precision_of_an_earlier_test() -> Iterator[None]:
    """Reset accelerate's state, which keeps an earlier test's precision for the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Llama in fp32, saved by save_pretrained."""
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("checkpoint")
    llama()[0].save_pretrained(directory)
    return directory


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Return a function that gives a context. The body of the context runs as under `infinity run`, with changes of the
    config.

    States are on NVMe, and the model is larger than the device memory.
    """

    def start(*, resume: Path | None = None, **changes: Any) -> AbstractContextManager[ScriptRun]:
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
    """Return a config with everything on NVMe and little memory, in which every step is committed."""
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
