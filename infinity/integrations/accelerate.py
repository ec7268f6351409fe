"""accelerate: models that are only evaluated, and what it saves and loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from infinity.integrations.patches import Patches
from infinity.integrations.run import Run
from infinity.runtime.deferred import is_deferred


def replace_preparing(run: Run, patches: Patches) -> None:
    """From now on a model that is prepared for evaluation is a reference, and one that autocast would copy is
    converted."""
    from accelerate import Accelerator

    patches.wrap(Accelerator, "__init__", _init(run))
    patches.wrap(Accelerator, "prepare_model", _prepare_model(run))


def _init(run: Run) -> Callable[..., None]:
    def init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        run.computes_in(self.mixed_precision)

    return init


def _prepare_model(run: Run) -> Callable[..., Any]:
    def prepare(original: Callable[..., Any], self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        evaluated = kwargs.get("evaluation_mode", args[1] if len(args) > 1 else False)
        if evaluated and is_deferred(model) and model not in run.trained:
            run.references.add(model)
        return original(self, model, *args, **kwargs)

    return prepare
