"""What would pass placeholders on as if they were weights raises instead: state_dict, load_state_dict, deepcopy,
pickling. In infinity.gathered the first two work."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from infinity.errors import ReleasedParameterError
from infinity.state.released import ReleasedParameter


def _refuse(what: str) -> NoReturn:
    raise ReleasedParameterError(
        f"{what} of an offloaded model would see placeholders: its weights are in the store. To write it, use "
        "infinity.save_pretrained(model, directory); to read or change weights use infinity.state_dict(model) or "
        "`with infinity.gathered(model, module):`. A copy of the model is made before infinity.offload, or is "
        "another plain model: in infinity.gathered, give it model.state_dict()."
    )


class Guard:
    """A hook object that refuses to be copied or pickled, and so does the module that holds it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        _refuse("deepcopy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse("pickling")


class _GatheredOnly(Guard):
    def __init__(self, what: str) -> None:
        self._what = what

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if any(isinstance(parameter, ReleasedParameter) for parameter in module.parameters()):
            _refuse(self._what)


def guard(model: nn.Module) -> None:
    """Put the guards on every module that has parameters below it."""
    state_dict, load = _GatheredOnly("state_dict()"), _GatheredOnly("load_state_dict()")
    for module in model.modules():
        if next(module.parameters(), None) is not None:
            module.register_state_dict_pre_hook(state_dict)
            module.register_load_state_dict_pre_hook(load)
