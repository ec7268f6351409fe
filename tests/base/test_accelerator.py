"""Which device is meant, and which there is."""

from __future__ import annotations

import pytest
import torch

from infinity.base.accelerator import resolve
from infinity.errors import ConfigError


def test_cuda_without_an_index_is_the_gpu_that_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert resolve("cuda") == torch.device("cuda", 3)
    assert resolve(torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert resolve(None) == torch.device("cuda", 3)


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    for device in ("cuda", "cuda:1", "mps"):
        with pytest.raises(ConfigError, match=f"device {device}: .* Leave device= out"):
            resolve(device)
    assert resolve("cpu:0") == resolve(None) == torch.device("cpu")
