"""One unit's update in progress.

[Note: a step is a dataflow]

    gradients complete ──speculate──▶ SPECULATIVE ──step() agrees──▶ DECIDED ──computed──▶ APPLIED ──written──▶ FINISHED
                                           │                            ▲
    step() ────────────────────────────────┼────────────────────────────┘
                                           └─step() disagrees──▶ UNDONE
    backward begins ──▶ first states READ AHEAD (read_ahead.py), which the update takes over when it begins

A speculative update assumes that the step will neither clip nor skip, and that the hyperparameters will not change. It
reads the current values and writes the new values to other memory and to other copies in the store
(tiers/destination.py). So a speculative update may be undone at any time, and until the step is decided every reader
sees the old values.

A decided update may overwrite the old values. A caller that needs the unit waits only for the update of this unit. If
the new weights are kept in memory, the caller waits until they are computed. The update is then applied, while its
writes to the store may still be in flight. After the update is finished, the values in the store are valid, too.

Speculative and decided updates do the same computations on the same values as a step that waits for every update, so
the results have the same bits.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from infinity import _native
from infinity.io.arena import Lease
from infinity.io.engine import BackgroundWork, Transfer
from infinity.state.update_request import GroupUpdate
from infinity.tiers.destination import StateDestination, Written
from infinity.tiers.downloads import WeightsCopy
from infinity.tiers.home import StateHome

Milestone = Literal["computed", "weights", "written"]
"""Milestone of an update.

computed    the new values are computed: new values in memory are complete, and the gradients are no longer needed
weights     the new weights are complete at their destination
written     all new values are complete at their destination
"""


@dataclass(frozen=True)
class UpdateTransfer(Transfer):
    """The update of one group of a unit, in progress."""

    future: _native.UpdateFuture

    @property
    def finite(self) -> bool:
        """Whether all new weights and moments are finite; valid after `result`."""
        return self.future.finite

    @functools.cached_property
    def _futures(self) -> dict[Milestone, _native.IOFuture]:
        """Future of each milestone. The dict is cached, because the native attribute makes a new object at each
        access."""
        return {"computed": self.future.computed, "weights": self.future.weights, "written": self.future}

    def until(self, milestone: Milestone) -> Transfer:
        """Return the transfer up to a milestone."""
        return Transfer(self._futures[milestone], self.unit, self.state, self.step, self.state_of)

    def done_until(self, milestone: Milestone) -> bool:
        """Return whether the transfer has reached a milestone or has failed."""
        return self._futures[milestone].done()

    def landing(self, milestone: Milestone) -> Transfer:
        """Return the transfer of the new weights to RAM or to the store, up to a milestone."""
        return self.until(milestone)


class GroupTransfer(Protocol):
    """The update of one group of a unit, in progress: UpdateTransfer, or ResidentTransfer (resident_update.py)."""

    @property
    def step(self) -> int: ...

    @property
    def finite(self) -> bool: ...

    @property
    def has_failed(self) -> bool: ...

    def until(self, milestone: Milestone) -> BackgroundWork: ...

    def done_until(self, milestone: Milestone) -> bool: ...

    def landing(self, milestone: Milestone) -> Transfer | None:
        """Return the transfer of the new weights to RAM or to the store, up to a milestone; None if they stay on the
        device."""

    def result(self) -> None: ...


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
"""Requested updates of a unit, by group index."""

Destinations = Mapping[str, StateDestination]
"""Destinations of the new values of a group, by the name of the state."""


class UnitUpdate:
    """One unit's update in progress ([Note: a step is a dataflow]).

    Attributes:
        wanted: requested update of each group, by group index.
        destinations: destinations of the new values, by group.
        committed: whether the update writes all states that a generation needs.
        speculated: whether the update began before the step was decided.
        uses_slot: whether the update reads the current weights from the unit's slot, or writes from the slot to the
            store.
        moves_weights: whether applying the update moves the weights to other memory.
        transfers: the native updates in progress, by group.
        viewed: whether views of the weights' memory exist, so that the new weights must be copied to this memory.
        weights_copy: copy in host memory of the current weights of a device; None when there is no copy, or when the
            copy is released.
        publication: work that makes the new weights of a decided update current for all ranks, and ends after the new
            weights are computed; None if no other rank uses this rank's weights.
        state: state of the update; only `to` changes it.
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
        weights_copy: WeightsCopy | None = None,
    ) -> None:
        self._name = name
        self.wanted = wanted
        self.destinations = destinations
        self.committed = committed
        self.speculated = speculated
        self.uses_slot = uses_slot
        self.moves_weights = speculated and any(each["weight"].moves for each in destinations.values())
        self.transfers: dict[int, GroupTransfer] = {}
        self.viewed = False
        self.weights_copy = weights_copy
        self.publication: BackgroundWork | None = None
        self.state = UpdateState.SPECULATIVE if speculated else UpdateState.DECIDED

    def end_after(self, publication: BackgroundWork | None) -> None:
        """Make every milestone of the update wait for its publication, too."""
        self.publication = publication

    def to(self, state: UpdateState) -> None:
        if state not in _NEXT[self.state]:
            raise AssertionError(f"the update of '{self._name}' cannot go from {self.state.value} to {state.value}")
        self.state = state

    @property
    def is_speculative(self) -> bool:
        return self.state is UpdateState.SPECULATIVE

    def until(self, milestone: Milestone) -> list[BackgroundWork]:
        works = [transfer.until(milestone) for transfer in self.transfers.values()]
        return works if self.publication is None else [*works, self.publication]

    @property
    def native_transfers(self) -> dict[int, UpdateTransfer]:
        """The transfers of the native pipeline, by group; empty for a unit that the device updates."""
        return {index: each for index, each in self.transfers.items() if isinstance(each, UpdateTransfer)}

    def reached(self, milestone: Milestone) -> bool:
        """Return whether the update has reached a milestone or has failed."""
        published = self.publication is None or self.publication.done()
        return published and all(transfer.done_until(milestone) for transfer in self.transfers.values())

    def wait(self, milestone: Milestone) -> None:
        """Wait until the update reaches a milestone or fails."""
        for transfer in self.until(milestone):
            transfer.wait()

    def reads_slot(self) -> bool:
        """Return whether the update still reads the weights from the unit's slot. If so, the slot must be kept."""
        return self.speculated and self.uses_slot and not self.reached("computed")

    def writes_from_slot(self) -> bool:
        """Return whether the update may still write weights from the unit's slot to the store."""
        return not self.is_speculative and self.uses_slot and not self.reached("weights")

    def release_weights_copy(self, *, now: bool = False) -> bool:
        """Release the copy of the weights if the update no longer uses this copy.

        Args:
            now: whether to release the copy even if the update has not finished reading it.

        Returns:
            Whether no copy is left.
        """
        if self.weights_copy is not None and (now or self.reached("computed" if self.is_speculative else "weights")):
            copy, self.weights_copy = self.weights_copy, None
            copy.release()
        return self.weights_copy is None

    def keep_memory(self) -> None:
        """Record that views of the weights' memory exist. The new weights will then be copied to this memory."""
        self.viewed = True

    def each_destination(self) -> Iterator[StateDestination]:
        """Yield the destinations of all states of all groups."""
        for of_group in self.destinations.values():
            yield from of_group.values()

    def shadows(self) -> dict[Lease, StateHome]:
        """Return the pieces of shadow memory that are not homes yet, each with the home that will move to the piece.

        The weights of all groups are in one piece. Its value in the dict is the home of only one of these groups.
        """
        if not self.speculated:
            return {}
        moving = [each for each in self.each_destination() if each.moves]
        return {each.rests_in: each.home for each in moving if each.rests_in is not None}

    def written(self, milestone: Milestone = "weights") -> Written:
        """Return the destinations of the new weights, by group. Each destination has the transfer that completes the
        weights; with "computed", the weights in memory."""
        return {
            index: replace(self.destinations[index]["weight"], written=landing)
            for index, transfer in self.transfers.items()
            if (landing := transfer.landing(milestone)) is not None
        }

    def require_well(self) -> None:
        """Raise an error if a transfer of the update has failed. Does not wait.

        Raises:
            SwapIOError: a transfer failed.
        """
        for transfer in self.transfers.values():
            if transfer.has_failed:
                transfer.result()
