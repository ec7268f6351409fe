"""Destination of the new values of a state during an update, and the transfer for which readers of these values wait.

[Note: where new values go]

    state is kept in     the update     is computed in   reads the current values from   writes a copy in the store
    RAM                  is decided     its home         its home                        if the step is committed
    RAM                  speculates     its shadow       its home                        if committed, the spare one
    the store            is decided     host memory *    the same, or the store          always
    the store            speculates     no memory        host memory *, or the store     always, the spare one

    * For weights only: the slot in which the weights are used, or their host copy from a device.

A shadow becomes the home when the update is applied (units/shadows.py). A copy in the store becomes current when the
update is finished. If an update of the fetched weights is in progress, the fetch reads the new weights from their
destination, once they are complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from infinity import _native
from infinity.io.arena import Lease
from infinity.io.engine import Transfer
from infinity.io.store import SwapStore
from infinity.tiers.home import Home


@dataclass(frozen=True)
class StateDestination:
    """Destination of the new values of one state of a group.

    A destination with only a home describes an unchanged state.

    Attributes:
        home: home of the state. The state has the same offset in `memory` and `source` as in the home's own lease.
        memory: memory that has the new values once they are computed; None when they exist only in the update's tiles.
        source: memory with the current values, when the new values are written to other memory or only to the store;
            None when the current values are read from `memory` or from the store.
        copy_index: copy in the store that the new values are written to; None when they are not written.
        written: transfer that completes when the new values are at their destination; None when no update is under way.
    """

    home: Home
    memory: Lease | None = None
    source: Lease | None = None
    copy_index: int | None = None
    written: Transfer | None = None

    @property
    def rests_in(self) -> Lease | None:
        """RAM that has the state once the update is applied; None when the state is kept in the store."""
        return (self.memory or self.home.lease) if self.home.in_memory else None

    @property
    def moves(self) -> bool:
        """Whether applying the update will move the state to other RAM; False once the update is applied."""
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
        """Return the state as a stream, which is the form that the update pipeline needs."""
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
        return None if lease is None else lease.view(self.home.start, self.home.nbytes)

    def finish(self) -> None:
        """Make the new values the current values, after all new values are written."""
        if self.copy_index is None:
            self.home.mark_changed()
        else:
            self.home.mark_written(self.copy_index)


Written = Mapping[int, StateDestination]
"""Destinations of the new weights of an update that is certain to be applied, by group index."""


def destination_of(home: Home, beside: Lease | None, copy_index: int | None, *, speculative: bool) -> StateDestination:
    """Return the row of [Note: where new values go] for one state.

    Args:
        home: home of the state.
        beside: memory beside the home. For a state in RAM this memory is the shadow; for a state in the store this
            memory also has the current values. None: there is no such memory.
        copy_index: copy in the store to write to; see the attribute of Destination.
        speculative: the update is speculative.
    """
    if not speculative:
        return StateDestination(home, home.lease or beside, copy_index=copy_index)
    if not home.in_memory:
        return StateDestination(home, source=beside, copy_index=copy_index)
    if beside is None:
        raise AssertionError("a speculative update of states in RAM would overwrite them")
    return StateDestination(home, beside, home.lease, copy_index)
