"""What `state_dict()` says instead of gigabytes: where a state is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from infinity.errors import ReleasedParameterError


@dataclass(frozen=True)
class StateHandle:
    """Names one optimizer state of one parameter in the store.

    Attributes:
        parameter, state: fully qualified name, and torch's name of the state.
        step: the optimizer step after which it was taken.
    """

    parameter: str
    state: str
    step: int

    def __deepcopy__(self, memo: dict[int, Any]) -> StateHandle:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ReleasedParameterError(
            f"the state_dict of an optimizer on offloaded parameters holds handles ({self.state} of "
            f"'{self.parameter}' is in the swap store), so saving it would lose the states. With commit_every they are "
            "in the run's generations (infinity.resume), and `infinity checkpoint export` copies them."
        )
