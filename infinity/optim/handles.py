"""Handles that `state_dict()` returns in place of the states, and checks of the argument of `load_state_dict()`."""

from __future__ import annotations

import reprlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from infinity.errors import ConfigError


@dataclass(frozen=True)
class StateHandle:
    """Name of one optimizer state of one parameter in the store.

    A handle is pickled as a mapping with its attributes. Processes without infinity and `torch.load(weights_only=True)`
    can read this mapping. The handle only names the state, which stays in the run's store.

    Attributes:
        parameter, state: fully qualified name of the parameter, and torch's name of the state.
        step: the parameter's optimizer step after which the handle was made.
        run: the id of the store, which a resumed run keeps; "" if all states are in RAM.
    """

    parameter: str
    state: str
    step: int
    run: str = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> StateHandle:
        return self

    def __copy__(self) -> StateHandle:
        return self

    def __reduce__(self) -> tuple[type[OrderedDict[str, Any]], tuple[list[tuple[str, Any]]]]:
        return OrderedDict, (list(asdict(self).items()),)

    @staticmethod
    def read(saved: Any) -> Any:
        """Return the handle if `saved` is the mapping of a pickled handle. Return any other value unchanged."""
        names = {field.name for field in fields(StateHandle)}
        return StateHandle(**saved) if isinstance(saved, Mapping) and saved.keys() == names else saved


def parts_of(state_dict: Any, sizes: Sequence[int]) -> tuple[list[Mapping[str, Any]], Mapping[Any, Mapping[str, Any]]]:
    """Return the param groups and the states of an optimizer's state_dict.

    Args:
        state_dict: the argument of the optimizer's load_state_dict.
        sizes: number of parameters in each param group of that optimizer.

    Raises:
        ConfigError: the argument is no state_dict of an optimizer, or its param groups differ in size.
    """
    if not isinstance(state_dict, Mapping):
        raise ConfigError(f"{reprlib.repr(state_dict)} is not a state_dict of an optimizer")
    groups, states = state_dict.get("param_groups"), state_dict.get("state")
    if not isinstance(groups, list | tuple) or not all(_is_group(group) for group in groups):
        raise ConfigError("this is not a state_dict of an optimizer: its 'param_groups' are not a list of param groups")
    if not isinstance(states, Mapping) or not all(isinstance(state, Mapping) for state in states.values()):
        raise ConfigError("this is not a state_dict of an optimizer: its 'state' is not one dict for each parameter")
    found = [len(group["params"]) for group in groups]
    if found != list(sizes):
        raise ConfigError(
            f"the state_dict is of an optimizer whose param groups have {_counts(found)} parameters; the groups of "
            f"this optimizer have {_counts(sizes)}. Make the same groups."
        )
    return list(groups), states


def _is_group(group: Any) -> bool:
    """Return whether this is a param group whose "params" are numbers or names of parameters."""
    if not isinstance(group, Mapping) or not isinstance(group.get("params"), list | tuple):
        return False
    return all(isinstance(key, int | str) for key in group["params"])


def _counts(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes)) or "no"
