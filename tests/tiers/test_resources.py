"""What exists once per model: made whole, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import infinity
from infinity import _native


def test_threads_that_cannot_be_started_are_an_error_with_the_fix(
    swap_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Resource temporarily unavailable")

    with monkeypatch.context() as patched:
        patched.setattr(_native, "ThreadPool", refuse)
        with pytest.raises(infinity.ConfigError, match="2 threads cannot be started .Resource.*Lower update.threads"):
            infinity.offload(nn.Linear(8, 8), swap_config())
    infinity.close(infinity.offload(nn.Linear(8, 8), swap_config()))
