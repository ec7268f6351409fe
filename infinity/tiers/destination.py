"""Where an update puts the new values of a state, and what whoever reads them waits for.

[Note: where new values go]

    the state rests in   the update     is computed in   reads the current values from   writes a copy in the store
    RAM                  is decided     its home         its home                        if the step is committed
    RAM                  speculates     its shadow       its home                        if committed, the spare one
    the store            is decided     host memory *    the same, or the store          always
    the store            speculates     no memory        host memory *, or the store     always, the spare one

    * Of weights alone: the slot that they are used in, or a copy of them that came down from a device.

A shadow is the home from the moment when the update is applied (units/shadows.py). A copy in the store counts when the
update is finished. A fetch of weights that are under way reads them from where they go, once they are there.
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
class Destination:
    """Where the new values of one state of a group go. Of a home alone: nowhere, the state stays as it rests there.

    Attributes:
        home: of the state. The memory below has the state where the home's own lease has it.
        memory: has the new values once they are computed; None: they pass through the tiles of the update.
        source: has the current values, where the new ones go to other memory or to the store alone; None: they are read
            from `memory`, or from the store.
        copy: in the store, that the new values are written to; None: they are not written.
        written: when the new values are where they go; None: they are not under way.
    """

    home: Home
    memory: Lease | None = None
    source: Lease | None = None
    copy: int | None = None
    written: Transfer | None = None

    @property
    def rests_in(self) -> Lease | None:
        """The RAM that has the state once the update is applied; None where it rests in the store."""
        return (self.memory or self.home.lease) if self.home.in_memory else None

    @property
    def moves(self) -> bool:
        """Whether the state rests in other RAM once the update is applied, and does not yet."""
        return self.rests_in is not self.home.lease

    @property
    def elsewhere(self) -> bool:
        """Whether something is written to another place than it is read from."""
        if self.source is not None:
            return True
        return self.copy is not None and (self.home.in_memory or self.copy != self.home.stored().copy)

    def stream(self, store: SwapStore | None) -> _native.StateStream:
        """The state as the pipeline takes it."""
        memory, source = self._view(self.memory), self._view(self.source)
        if self.copy is None:
            return _native.StateStream(memory=memory, source=source)
        if store is None:
            raise AssertionError("a copy without a store")
        extent = self.home.stored()
        return _native.StateStream(
            memory=memory,
            file=store.file,
            offset=extent.offset,
            write_offset=extent.offsets[self.copy],
            source=source,
        )

    def _view(self, lease: Lease | None) -> memoryview | None:
        return None if lease is None else lease.view(self.home.start, self.home.nbytes)

    def finish(self) -> None:
        """All is written: from now on the new values are the ones that count."""
        if self.copy is None:
            self.home.changed()
        else:
            self.home.written(self.copy)


Written = Mapping[int, Destination]
"""Where the new weights of groups go, by index, that a decided update makes."""


def destination(home: Home, beside: Lease | None, copy: int | None, *, speculative: bool) -> Destination:
    """The row of [Note: where new values go] for one state.

    Args:
        beside: memory for the state beside its home: a shadow where it rests in RAM, and where it rests in the store
            memory that has the current values, too.
        copy: that is written: as the attribute.
    """
    if not speculative:
        return Destination(home, home.lease or beside, copy=copy)
    if not home.in_memory:
        return Destination(home, source=beside, copy=copy)
    if beside is None:
        raise AssertionError("a speculative update of what rests in RAM would overwrite it")
    return Destination(home, beside, home.lease, copy)
