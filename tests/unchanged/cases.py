"""Choice of scripts and dtypes. Full fine-tuning in fp32 runs in all long forms; other cases run in the share of
INFINITY_TESTS.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests import sampling
from tests.unchanged.scripts import SCRIPTS, Script

Case = tuple[Script, str]


def cases(*always: str, kept: str = "", others: Iterable[str] = SCRIPTS) -> pytest.MarkDecorator:
    """Return the parameters `script` and `dtype`.

    Args:
        always: scripts that run in fp32 in every long form.
        kept: reason why the scripts of `always` also run in `make test`, although they take long.
        others: scripts that run in the share of INFINITY_TESTS, as do the scripts of `always` in bf16.
    """
    names = dict.fromkeys((*always, *others))
    every: list[Case] = [(SCRIPTS[name], dtype) for dtype in ("float32", "bfloat16") for name in names]
    first = [case for case in every if case[0].name in always and case[1] == "float32"]
    mark = pytest.mark.long(kept=kept) if kept else pytest.mark.long()
    chosen: list[Any] = [pytest.param(*case, marks=mark) for case in first]
    chosen += sampling.some([case for case in every if case not in first])
    return pytest.mark.parametrize(("script", "dtype"), chosen, ids=str)


def tolerance(dtype: str) -> float:
    """Return the largest allowed difference of losses. In bf16 the losses differ, because only infinity has an fp32
    master of the weights.
    """
    return 1e-6 if dtype == "float32" else 2e-2
