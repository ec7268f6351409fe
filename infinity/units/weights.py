"""One unit's weights on the device.

[Note: the life of a unit's weights]

    RELEASED ──begin_fetch──▶ FETCHING ──finish_fetch──▶ RESIDENT ──leave──▶ RELEASED
        ▲                        │ (it failed)            │    ▲
        ├────────────────────────┘            step decided│    │updated
        │                                                 ▼    │
        ├──────────────────────leave───────────────── UPDATING─┘   the update writes the new weights into the slot
        └──────────────────────leave───────────────── STALE        the update reads the slot, and writes elsewhere

The parameters of a RESIDENT unit are views of its slot; those of every other unit are placeholders. A unit that is
FETCHING may leave too, once its fetch is finished.

`version` counts the updates of the unit's weights. What was saved for backward names the version it saw.
"""

from __future__ import annotations

import enum

from infinity.base.interrupt import interruptible
from infinity.base.timeline import Timeline
from infinity.errors import SwapTimeoutError
from infinity.io.arena import Lease
from infinity.state.unit import Unit
from infinity.tiers.downloads import WeightsCopy
from infinity.tiers.slots import Fetch, Slot
from infinity.units.parameters import ParameterViews
from infinity.units.released import ordinary_tensors


class Residency(enum.Enum):
    RELEASED = "released"
    FETCHING = "fetching"
    RESIDENT = "resident"
    UPDATING = "updating"
    STALE = "stale"


_NEXT = {
    Residency.RELEASED: {Residency.FETCHING},
    Residency.FETCHING: {Residency.RESIDENT, Residency.RELEASED},
    Residency.RESIDENT: {Residency.RELEASED, Residency.UPDATING, Residency.STALE},
    Residency.UPDATING: {Residency.RESIDENT, Residency.RELEASED},
    Residency.STALE: {Residency.RELEASED},
}


class Weights:
    """See [Note: the life of a unit's weights].

    Attributes:
        residency: changed by the transitions alone.
        slot: the device memory they occupy; None while RELEASED or FETCHING.
        fetch: None unless FETCHING.
        uses: forwards that run in the unit.
        held: its backward was announced, and that of other units was not.
        version: updates so far.
    """

    def __init__(self, unit: Unit, views: ParameterViews, timeline: Timeline) -> None:
        self._name = unit.name
        self._views = views
        self._timeline = timeline
        self.residency = Residency.RELEASED
        self.slot: Slot | None = None
        self.fetch: Fetch | None = None
        self.uses = 0
        self.held = False
        self.version = 0

    def _to(self, residency: Residency) -> None:
        if residency not in _NEXT[self.residency]:
            raise AssertionError(f"unit '{self._name}' cannot go from {self.residency.value} to {residency.value}")
        self.residency = residency

    def begin_fetch(self, fetch: Fetch) -> None:
        self._to(Residency.FETCHING)
        self.fetch = fetch
        self._timeline.begin("fetch", self._name)

    def finish_fetch(self) -> Slot:
        """Wait until the weights are there. Returns their slot.

        Raises:
            SwapIOError: the device failed; the unit is RELEASED, or FETCHING for ever where the device was given up.
        """
        if self.fetch is None:
            raise AssertionError(f"unit '{self._name}' is fetching nothing")
        with interruptible():
            self.fetch.wait()
        with ordinary_tensors():
            try:
                slot = self.fetch.finish()
            except SwapTimeoutError:
                raise
            except Exception:
                self._timeline.end("fetch", self._name)
                self._to(Residency.RELEASED)
                self.fetch = None
                raise
        self._timeline.end("fetch", self._name)
        self._to(Residency.RESIDENT)
        self.fetch, self.slot = None, slot
        self._views.show(slot)
        return slot

    def begin_update(self, *, writes_slot: bool) -> None:
        """A decided update works in the slot, or reads it only."""
        self._to(Residency.UPDATING if writes_slot else Residency.STALE)
        self._views.hide()

    def updated(self) -> None:
        """The new weights are in the slot."""
        self._to(Residency.RESIDENT)
        self._views.show(self.require_slot())

    def leave(self) -> Slot:
        """Give the slot up, which nobody works in. Returns it, for whoever frees it."""
        slot = self.require_slot()
        if self.residency is Residency.RESIDENT:
            self._views.hide()
        self._to(Residency.RELEASED)
        self.slot = None
        slot.expect(0)
        return slot

    def bump(self) -> None:
        """The weights are others than before: what was saved for backward is void."""
        self.version += 1

    def use(self) -> None:
        """A forward begins in the unit."""
        self.uses += 1

    def unuse(self) -> None:
        """A forward ended, well or not."""
        self.uses = max(self.uses - 1, 0)

    def hold(self, held: bool) -> None:
        self.held = held

    def forget_uses(self) -> None:
        """Of a forward or backward that an exception ended."""
        self.uses, self.held = 0, False

    def rest(self) -> None:
        """Nobody uses the weights until they are brought again, if that can be told."""
        rests = self.residency is Residency.RESIDENT and not self.in_use and not self.referred_to()
        if rests and self.require_slot().rest():
            self._views.close()

    @property
    def in_use(self) -> bool:
        return self.uses > 0 or self.held

    def require_slot(self) -> Slot:
        if self.slot is None:
            raise AssertionError(f"unit '{self._name}' is {self.residency.value} and has no slot")
        return self.slot

    def referred_to(self) -> bool:
        """Whether anything but the parameters refers to the slot, or autograd saved parameters themselves."""
        return self.slot is not None and (self.slot.outstanding() or self._views.saved_by_autograd())

    def copy_down(self) -> WeightsCopy | None:
        """Host memory with the newest weights, for an update that would read them from the store; None where there is
        none."""
        return None if self.slot is None or self.residency is not Residency.RESIDENT else self.slot.copy_down()

    def host_memory(self) -> Lease | None:
        """The host memory of the slot, where it is used there and has the newest weights; else None."""
        return None if self.slot is None or self.residency is Residency.STALE else self.slot.lease
