"""Preparations for quick imports, in the processes that pytest starts and in the fork server (tests/processes.py).

Import this module before all other modules that take long to import. It has two effects:

* Python collects no garbage until `gc.enable()`. Imports and pytest's collection make many objects and hardly any
  garbage, and each full collection visits all objects.
* bitsandbytes compiles nothing. While bitsandbytes is imported, it calls torch.compile, which imports torch's inductor
  for seconds. bitsandbytes also has no C code for some weights, such as a weight with an odd number of values: for such
  weights it would compile torch code, for each of the first sizes and dtypes again, in most of a minute.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

gc.disable()

import torch  # noqa: E402


def _uncompiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return function


_compile = torch.compile
torch.compile = _uncompiled  # type: ignore[assignment]
try:
    with suppress(ImportError):
        import bitsandbytes  # noqa: F401
finally:
    torch.compile = _compile
