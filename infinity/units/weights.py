"""One unit's weights on the device.

[Note: the life of a unit's weights]

    RELEASED ──begin_fetch──▶ FETCHING ──finish_fetch──▶ RESIDENT ──leave──▶ RELEASED
        ▲                        │ (it failed)            │    ▲
        ├────────────────────────┘            step decided│    │updated
        │                                                 ▼    │
        ├──────────────────────leave───────────────── UPDATING─┘   the update writes the new weights into the slot
        └──────────────────────leave───────────────── STALE        the update reads the slot, and writes elsewhere

The parameters of a RESIDENT unit are views of its slot, and the parameters of all other units are placeholders. A
FETCHING unit may be released only after its fetch is finished.

`version` counts the updates of the unit's weights. Each view that autograd saves for the backward is stored with the
version at that time.
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
from infinity.units.released_parameters import ordinary_tensors


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


class UnitWeights:
    """One unit's weights on the device: see [Note: the life of a unit's weights].

    Attributes:
        residency: state of the weights; only the transitions in the note change it.
        slot: device memory of the weights; None while RELEASED or FETCHING.
        fetch: fetch in flight; None unless FETCHING.
        uses: number of forwards of the unit that are in progress.
        held: whether the backward of the unit is among the backwards that were announced last.
        version: number of updates so far.
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
        """Wait until the weights are in their slot.

        Returns:
            The slot.

        Raises:
            SwapIOError: the disk failed. The unit is then RELEASED. If the disk did not answer before the deadline, the
                unit remains FETCHING.
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
        """Begin a decided update that uses the slot.

        Args:
            writes_slot: whether the update writes the new weights into the slot; otherwise the update only reads the
                slot.
        """
        self._to(Residency.UPDATING if writes_slot else Residency.STALE)
        self._views.hide()

    def updated(self) -> None:
        """Make the parameters views of the slot again, into which the update has written the new weights."""
        self._to(Residency.RESIDENT)
        self._views.show(self.require_slot())

    def release(self) -> Slot:
        """Give up the slot. The caller has checked that nothing uses the slot any more.

        Returns:
            The slot, which the caller frees.
        """
        slot = self.require_slot()
        if self.residency is Residency.RESIDENT:
            self._views.hide()
        self._to(Residency.RELEASED)
        self.slot = None
        slot.expect(0)
        return slot

    def bump(self) -> None:
        """Count a change of the weights, which invalidates the views that were saved for the backward."""
        self.version += 1

    def use(self) -> None:
        """Count a forward of the unit, which begins."""
        self.uses += 1

    def unuse(self) -> None:
        """Count the end of a forward of the unit, which may have ended with an exception."""
        self.uses = max(self.uses - 1, 0)

    def hold(self, held: bool) -> None:
        self.held = held

    def forget_uses(self) -> None:
        """Forget the uses by a forward or backward that an exception ended."""
        self.uses, self.held = 0, False

    def rest(self) -> None:
        """If the unit is not in use and nothing refers to its slot, end the use of the slot, and forbid reads of the
        parameters if the slot requires this."""
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
        """Return whether other tensors than the parameters refer to the slot, or autograd has saved a parameter
        itself."""
        return self.slot is not None and (self.slot.outstanding() or self._views.saved_by_autograd())

    def copy_down(self) -> WeightsCopy | None:
        """Start to copy the newest weights from the device to host memory, so that an update need not read the store.

        Returns:
            The copy; None when no slot has the newest weights, or when Slot.copy_down returns None.
        """
        return None if self.slot is None or self.residency is not Residency.RESIDENT else self.slot.copy_down()

    def host_memory(self) -> Lease | None:
        """Return the slot's host memory; None if the slot is not in host memory, or does not have the newest
        weights."""
        return None if self.slot is None or self.residency is Residency.STALE else self.slot.lease
