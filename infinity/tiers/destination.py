"""The place to which an update writes the new values of a state, and the transfer for which readers of the new values
wait.

[Note: where new values go]

    home of      the update     new values are   current values are read       a copy in the store is written
    the state                   computed in      from
    RAM          is decided     the home         the home                      if the step is committed
    RAM          speculates     the shadow       the home                      if the step is committed: the spare copy
    the store    is decided     host memory *    host memory *, or the store   always
    the store    speculates     no memory        host memory *, or the store   always: the spare copy

    * Only for weights: the slot in which the weights are used, or the copy of a device's weights in host memory.

A shadow becomes the home of the state when the update is applied (units/speculative_update_buffers.py). A copy in the
store becomes the current copy when the update is finished. A fetch of weights whose update is in progress reads the new
weights from their destination, as soon as the new weights are complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from infinity import _native
from infinity.io.arena import Lease
from infinity.io.engine import Transfer
from infinity.io.store import SwapStore
from infinity.tiers.home import StateHome


@dataclass(frozen=True)
class StateDestination:
    """Destination of the new values of one state of a group.

    If all attributes except `home` are None, the update does not change the state.

    Attributes:
        home: home of the state, which knows the offset of the state in `memory` and `source` (StateHome.view_in).
        memory: memory for the new values; None when the new values exist only in the update's tiles and in the store.
        source: memory with the current values, if it is different from `memory`; None when the current values are read
            from `memory` or from the store.
        copy_index: copy in the store to which the new values are written; None when nothing is written to the store.
        written: transfer that completes when the new values are at their destination; None when no update is under way.
    """

    home: StateHome
    memory: Lease | None = None
    source: Lease | None = None
    copy_index: int | None = None
    written: Transfer | None = None

    @property
    def rests_in(self) -> Lease | None:
        """RAM in which the state is kept after the update is applied; None when the state is kept in the store."""
        return (self.memory or self.home.lease) if self.home.in_memory else None

    @property
    def moves(self) -> bool:
        """Whether the home of the state will move to other RAM when the update is applied; False after that."""
        return self.rests_in is not self.home.lease

    @property
    def elsewhere(self) -> bool:
        """Whether new values are written to a different place than the current values."""
        if self.source is not None:
            return True
        return self.copy_index is not None and (
            self.home.in_memory or self.copy_index != self.home.stored().newest_copy
        )

    def stream(self, store: SwapStore | None) -> _native.StateStream:
        """Return the description of the state that the native update needs."""
        memory, source = self._view(self.memory), self._view(self.source)
        if self.copy_index is None:
            return _native.StateStream(memory=memory, source=source)
        if store is None:
            raise AssertionError("a copy without a store")
        extent = self.home.stored()
        return _native.StateStream(
            memory=memory,
            file=store.file,
            offset=extent.offset,
            write_offset=extent.offsets[self.copy_index],
            source=source,
        )

    def _view(self, lease: Lease | None) -> memoryview | None:
        return None if lease is None else self.home.view_in(lease)

    def finish(self) -> None:
        """Make the new values the current values, after all new values are written."""
        if self.copy_index is None:
            self.home.mark_changed()
        else:
            self.home.mark_written(self.copy_index)


Written = Mapping[int, StateDestination]
"""Destinations of the new weights of an update that is certain to be applied, by group index."""


def destination_of(
    home: StateHome, beside: Lease | None, copy_index: int | None, *, speculative: bool
) -> StateDestination:
    """Return the destination of one state, according to the table in [Note: where new values go].

    Args:
        home: home of the state.
        beside: memory other than the home. For a state in RAM this is the shadow. For a state in the store this is
            memory that has the current values and gets the new values. None: there is no such memory.
        copy_index: copy in the store to write to; see StateDestination.copy_index.
        speculative: whether the update is speculative.
    """
    if not speculative:
        return StateDestination(home, home.lease or beside, copy_index=copy_index)
    if not home.in_memory:
        return StateDestination(home, source=beside, copy_index=copy_index)
    if beside is None:
        raise AssertionError("a speculative update of states in RAM would overwrite them")
    return StateDestination(home, beside, home.lease, copy_index)
