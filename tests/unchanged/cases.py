"""Which script runs in which dtype: Trainer and SFT in fp32 always, others in the share that INFINITY_TESTS says."""

from __future__ import annotations

import pytest

from tests import sampling
from tests.unchanged.scripts import SCRIPTS, Script

Case = tuple[Script, str]

_ALL: list[Case] = [(script, dtype) for dtype in ("float32", "bfloat16") for script in SCRIPTS.values()]


def cases(*always: str) -> pytest.MarkDecorator:
    """Parameters `script` and `dtype`; these scripts run in fp32 in every run of the tests."""
    chosen = [(SCRIPTS[name], "float32") for name in always]
    chosen += sampling.some([case for case in _ALL if case not in chosen])
    return pytest.mark.parametrize(("script", "dtype"), chosen, ids=str)


def tolerance(dtype: str) -> float:
    """How far losses may be apart. Weights in bf16 have an fp32 master here, and none in plain torch."""
    return 1e-6 if dtype == "float32" else 2e-2
