"""Fixtures of the GPU tests: the device, which is simulated if there is no GPU, and deterministic arithmetic."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.sim.fixtures import Simulate, simulate
from tests.sim.queues import EAGER

__all__ = ["simulate"]

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads the variable at its first use


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def gpu(simulate: Simulate) -> torch.device:
    """Return the GPU; without a GPU the CPU, with models that use a device's code path.

    Without a GPU, `pytest -m gpu` thus still runs the code of the tests. Request this fixture before `offload`, so that
    the models are closed when the simulation ends.
    """
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    simulate(EAGER)
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
