"""Fixtures that several files use."""

from __future__ import annotations

from typing import Any

import pytest

import infinity
from tests.models import llama
from tests.runtime.gathering import PLACES, TIGHT, Trained, step


@pytest.fixture(params=["nvme, generations", "host"])
def trained(request: pytest.FixtureRequest, offload: Any) -> Trained:
    """Return a bf16 Llama that was trained for two steps."""
    model, batch = llama()
    model = offload(model.bfloat16().train(), memory=TIGHT, **PLACES[request.param])
    optim = infinity.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        step(model, batch, optim)
    return model, batch, optim
