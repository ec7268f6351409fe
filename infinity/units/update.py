"""One unit's update under way.

[Note: a step is a dataflow]

    gradients complete ──speculate──▶ SPECULATIVE ──step() agrees──▶ DECIDED ──computed──▶ APPLIED ──written──▶ FINISHED
                                           │                            ▲
    step() ────────────────────────────────┼────────────────────────────┘
                                           └─step() disagrees──▶ UNDONE
    backward begins ──▶ first states READ AHEAD (read_ahead.py), which an update that begins takes over

A speculative update expects that the step will neither clip nor skip, with the hyperparameters of now. It reads what is
current and writes beside it (tiers/destination.py). So it may be undone at any time, and whoever looks meanwhile sees
the values of before.

A decided update may overwrite. Whoever wants the unit waits for this unit alone. If its new weights go to memory, that
wait ends when they are computed: the update is applied, while what goes to the store may still be on its way there.
Once the update is finished, what was written counts, too.

Both end in the same bits as a step that waits for all of it, since it is the same jobs over the same bytes.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from infinity import _native
from infinity.io.arena import Lease
from infinity.io.engine import Transfer
from infinity.state.request import GroupUpdate
from infinity.tiers.destination import Destination, Written
from infinity.tiers.downloads import WeightsCopy
from infinity.tiers.home import Home

Milestone = Literal["computed", "weights", "written"]
"""Of an update: its new values are computed, so that those in memory are there and the gradients are free; new weights
are where they go; everything is."""


@dataclass(frozen=True)
class UpdateTransfer(Transfer):
    """The update of a unit's group under way."""

    future: _native.UpdateFuture

    @property
    def finite(self) -> bool:
        """After `result`: whether all new weights and moments were."""
        return self.future.finite

    @functools.cached_property
    def _futures(self) -> dict[Milestone, _native.IOFuture]:
        """Kept: each time it is asked for one, the native future makes another object."""
        return {"computed": self.future.computed, "weights": self.future.weights, "written": self.future}

    def until(self, milestone: Milestone) -> Transfer:
        """The part of it that ends there."""
        return Transfer(self._futures[milestone], self.unit, self.state, self.step, self.state_of)

    def done_until(self, milestone: Milestone) -> bool:
        """Whether that part has ended, well or not."""
        return self._futures[milestone].done()


class UpdateState(enum.Enum):
    SPECULATIVE = "speculative"
    DECIDED = "decided"
    APPLIED = "applied"
    FINISHED = "finished"
    UNDONE = "undone"


_NEXT = {
    UpdateState.SPECULATIVE: {UpdateState.DECIDED, UpdateState.UNDONE},
    UpdateState.DECIDED: {UpdateState.APPLIED},
    UpdateState.APPLIED: {UpdateState.FINISHED},
    UpdateState.FINISHED: set(),
    UpdateState.UNDONE: set(),
}

UnitRequest = Mapping[int, GroupUpdate]
"""What is wanted of a unit's groups, by their index."""

Destinations = Mapping[str, Destination]
"""Where the new values of a group's states go, by the name of the state."""


class UnitUpdate:
    """One unit's update under way ([Note: a step is a dataflow]).

    Attributes:
        wanted: of which groups what.
        destinations: where the new values go, by group.
        committed: the update writes what a generation needs.
        speculated: it began before the step was decided.
        uses_slot: it reads the current weights from the slot they were fetched to, or writes from there.
        moves_weights: they rest in other memory from the moment when the update is applied.
        transfers: by group.
        viewed: somebody holds views of the weights' memory, so that the new weights must go there.
        copy: of the current weights, from a device, while the update may read it or write from it.
        state: changed by `to` alone.
    """

    def __init__(
        self,
        name: str,
        wanted: UnitRequest,
        destinations: Mapping[int, Destinations],
        *,
        committed: bool,
        speculated: bool = False,
        uses_slot: bool = False,
        copy: WeightsCopy | None = None,
    ) -> None:
        self._name = name
        self.wanted = wanted
        self.destinations = destinations
        self.committed = committed
        self.speculated = speculated
        self.uses_slot = uses_slot
        self.moves_weights = speculated and any(each["weight"].moves for each in destinations.values())
        self.transfers: dict[int, UpdateTransfer] = {}
        self.viewed = False
        self.copy = copy
        self.state = UpdateState.SPECULATIVE if speculated else UpdateState.DECIDED

    def to(self, state: UpdateState) -> None:
        if state not in _NEXT[self.state]:
            raise AssertionError(f"the update of '{self._name}' cannot go from {self.state.value} to {state.value}")
        self.state = state

    @property
    def is_speculative(self) -> bool:
        return self.state is UpdateState.SPECULATIVE

    def until(self, milestone: Milestone) -> list[Transfer]:
        return [transfer.until(milestone) for transfer in self.transfers.values()]

    def reached(self, milestone: Milestone) -> bool:
        """Whether the milestone was reached, well or not."""
        return all(transfer.done_until(milestone) for transfer in self.transfers.values())

    def wait(self, milestone: Milestone) -> None:
        """Until the milestone is reached, well or not."""
        for transfer in self.until(milestone):
            transfer.wait()

    def reads_slot(self) -> bool:
        """Whether the update reads the weights from the slot they were fetched to, so that the slot must stay."""
        return self.speculated and self.uses_slot and not self.reached("computed")

    def writes_from_slot(self) -> bool:
        """Whether the update may write weights to the store from the slot they are used in."""
        return not self.is_speculative and self.uses_slot and not self.reached("weights")

    def release_copy(self, *, now: bool = False) -> bool:
        """Give back the copy of the weights, once the update is done with it, or now."""
        if self.copy is not None and (now or self.reached("computed" if self.is_speculative else "weights")):
            copy, self.copy = self.copy, None
            copy.release()
        return self.copy is None

    def keep_memory(self) -> None:
        """Somebody holds views of the weights' memory: the new weights must go there when they are applied."""
        self.viewed = True

    def each_destination(self) -> Iterator[Destination]:
        """Of all states of all groups."""
        for of_group in self.destinations.values():
            yield from of_group.values()

    def shadows(self) -> dict[Lease, Home]:
        """Memory with new values that no home has moved to, and the home of before: of weights, that of any group."""
        if not self.speculated:
            return {}
        moving = [each for each in self.each_destination() if each.moves]
        return {each.rests_in: each.home for each in moving if each.rests_in is not None}

    def written(self) -> Written:
        """The new weights that are on their way."""
        return {
            index: replace(self.destinations[index]["weight"], written=transfer.until("weights"))
            for index, transfer in self.transfers.items()
        }

    def require_well(self) -> None:
        """Raises SwapIOError when the update is known to have failed."""
        for transfer in self.transfers.values():
            if transfer.done() and transfer.future.failure() is not None:
                transfer.result()
