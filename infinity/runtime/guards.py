"""What would pass placeholders on as if they were weights raises instead: state_dict, load_state_dict, deepcopy,
pickling."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from infinity.errors import ReleasedParameterError


def _refuse(what: str) -> NoReturn:
    raise ReleasedParameterError(
        f"{what} of an offloaded model would see placeholders: its weights are in the store. To write it, use "
        "infinity.save_pretrained(model, directory); to change or copy weights, do it before infinity.offload or "
        "load what "
        "save_pretrained wrote."
    )


class Guard:
    """A hook object that refuses to be copied or pickled, and so does the module that holds it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        _refuse("deepcopy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse("pickling")


class _StateDictGuard(Guard):
    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("state_dict()")


class _LoadGuard(Guard):
    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("load_state_dict()")


def guard(model: nn.Module) -> None:
    """Put the guards on every module that has parameters below it."""
    state_dict, load = _StateDictGuard(), _LoadGuard()
    for module in model.modules():
        if next(module.parameters(), None) is not None:
            module.register_state_dict_pre_hook(state_dict)
            module.register_load_state_dict_pre_hook(load)
