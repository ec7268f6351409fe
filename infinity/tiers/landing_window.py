"""Gradients that are kept in the store: the window of RAM in which they land, and their transfers to and from the
store.

[Note: the life of a group's spilled gradients]

    EMPTY ──load──▶ HERE ──begin_spill──▶ LEAVING ──finish_spill──▶ AWAY ──announce──▶ COMING ──load──▶ HERE

A Spill is the spilled gradients of one group. It has a lease of the window while it is HERE, LEAVING or COMING, and no
lease while it is EMPTY or AWAY. To make room, the window first waits for the oldest writes. After that it writes the
spill that has been HERE longest to the store. In this way there is always room for one group. Gradients in the store
belong to no generation, and are not used after the run ends.

If a transfer fails, the group's gradients are lost. Every later use raises the same error, until the gradients are
dropped (zero_grad). If a disk does not answer before a deadline, it may still read or write the memory later, so the
lease of this memory is never given back.
"""

from __future__ import annotations

import enum

from infinity import _native
from infinity.errors import SwapIOError, SwapTimeoutError
from infinity.io.arena import ArenaRegion, Lease
from infinity.io.engine import Transfer
from infinity.io.store import Extent, SwapStore
from infinity.tiers.downloads import GroupGradientDownload


class _SpillState(enum.Enum):
    EMPTY = "nowhere"
    HERE = "in the window"
    LEAVING = "being written"
    AWAY = "in the store"
    COMING = "being read"


class LandingWindow:
    """Memory in which spilled gradients land.

    Invariant: `_here` has the spills that are HERE or COMING, and `_leaving` has the spills that are LEAVING. In both
    the oldest spill is first.
    """

    def __init__(self, space: ArenaRegion, store: SwapStore) -> None:
        self.space = space
        self.store = store
        self._here: list[SpilledGradients] = []
        self._leaving: list[SpilledGradients] = []

    def make_room(self, nbytes: int) -> Lease:
        """Return a lease of the window. If there is no room, wait until enough other gradients have left the window.

        Raises:
            SwapIOError: a write of other gradients, which had to make room, failed.
        """
        while True:
            lease = self.space.try_lease(nbytes)
            if lease is not None:
                return lease
            if self._leaving:
                self._leaving[0].finish_spill()
            elif self._here:
                self._here[0].begin_spill()
            else:
                raise AssertionError(f"a landing window of {self.space.nbytes} bytes has no room for {nbytes}")

    def enter(self, spill: SpilledGradients, *, leaving: bool) -> None:
        self.forget(spill)
        (self._leaving if leaving else self._here).append(spill)

    def forget(self, spill: SpilledGradients) -> None:
        for spills in (self._here, self._leaving):
            if spill in spills:
                spills.remove(spill)

    def clear(self) -> None:
        """Write all gradients to the store, and wait for the writes.

        Raises:
            SwapIOError: a transfer failed; all other transfers have ended.
        """
        failure: SwapIOError | None = None
        while self._here or self._leaving:
            try:
                if self._here:
                    self._here[0].begin_spill()
                else:
                    self._leaving[0].finish_spill()
            except SwapTimeoutError:
                raise
            except SwapIOError as error:
                failure = failure or error
        if failure is not None:
            raise failure


class SpilledGradients:
    """Spilled gradients of one group: their place in the store, and their part of the window.

    Args:
        extent: place in the store.
        landing: the window.
        down: download from a device, which must be complete before a write to the store; None when gradients come from
            the CPU.
    """

    def __init__(self, extent: Extent, landing: LandingWindow, down: GroupGradientDownload | None) -> None:
        self._extent = extent
        self._landing = landing
        self._down = down
        self._used_bytes = extent.nbytes
        self._where = _SpillState.EMPTY
        self._lease: Lease | None = None
        self._transfer: Transfer | None = None
        self._stored_bytes = 0
        self._failure: SwapIOError | None = None

    @property
    def nbytes(self) -> int:
        return self._extent.nbytes

    def use(self, nbytes: int) -> None:
        """Set how many bytes of the memory that `load` returns are in use.

        Only these bytes are written to the store.
        """
        self._used_bytes = nbytes

    def announce(self) -> None:
        """Start to read the gradients from the store if the window has room, because `load` will follow soon."""
        if self._where is _SpillState.AWAY and self._failure is None:
            lease = self._landing.space.try_lease(self.nbytes)
            if lease is not None:
                self._read(lease)

    def load(self) -> memoryview:
        """Return the group's part of the window, with the group's last gradients. If the group has no gradients, the
        contents are undefined.

        Raises:
            SwapIOError: a transfer of these gradients failed, or a write of other gradients, which had to make room,
                failed.
        """
        self._require_whole()
        if self._where is _SpillState.EMPTY:
            self._lease = self._landing.make_room(self.nbytes)
            self._move(_SpillState.HERE)
        elif self._where is _SpillState.AWAY:
            self._read(self._landing.make_room(self.nbytes))
        if self._where in (_SpillState.COMING, _SpillState.LEAVING):
            self._wait()
            self._move(_SpillState.HERE)
        if self._lease is None:
            raise AssertionError("gradients in the window without a lease")
        return self._lease.view()

    def begin_spill(self) -> None:
        """Start to write the gradients in the window to the store.

        If the gradients are still being read from the store, this method waits for the read and writes nothing.

        Raises:
            SwapIOError: the read in progress failed.
        """
        if self._where is _SpillState.COMING:
            self._wait()
            self._release(_SpillState.AWAY)
        elif self._where is _SpillState.HERE and self._lease is not None:
            landings = [] if self._down is None else self._down.landing_futures()
            self._stored_bytes = self._used_bytes
            view, landed = self._lease.view(0, self._stored_bytes), landings[-1] if landings else None
            self._transfer = self._landing.store.write(self._extent, view, io_class="states", after=landed)
            self._move(_SpillState.LEAVING)

    def finish_spill(self) -> None:
        """Wait until the write in progress is complete, then give the lease back.

        Raises:
            SwapIOError: the write failed.
        """
        if self._where is _SpillState.LEAVING:
            self._wait()
            self._release(_SpillState.AWAY)

    def forget(self) -> None:
        """Forget the gradients."""
        try:
            if self._where in (_SpillState.COMING, _SpillState.LEAVING):
                self._wait()
        except SwapTimeoutError:
            raise
        except SwapIOError:
            pass  # these gradients are no longer needed
        self._release(_SpillState.EMPTY)
        self._failure = None

    def stream(self) -> _native.StateStream:
        """Write the gradients to the store, and return the description of the gradients that the native update needs.

        Raises:
            SwapIOError: the gradients were lost.
        """
        self.begin_spill()
        self.finish_spill()
        self._require_whole()
        return _native.StateStream(file=self._landing.store.file, offset=self._extent.offset)

    def _require_whole(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _read(self, lease: Lease) -> None:
        self._lease = lease
        view = lease.view(0, self._stored_bytes)
        self._transfer = self._landing.store.read(self._extent, view, io_class="states")
        self._move(_SpillState.COMING)

    def _wait(self) -> None:
        """Wait for the transfer in progress. If Ctrl-C ends the wait, the state of the spill is unchanged."""
        if self._transfer is None:
            return
        try:
            self._transfer.result()
        except SwapTimeoutError as error:
            self._failure, self._lease, self._transfer = error, None, None
            self._release(_SpillState.EMPTY)
            raise
        except SwapIOError as error:
            self._failure = error
            self._release(_SpillState.EMPTY)
            raise
        self._transfer = None

    def _move(self, where: _SpillState) -> None:
        self._where = where
        self._landing.enter(self, leaving=where is _SpillState.LEAVING)

    def _release(self, where: _SpillState) -> None:
        lease, self._lease, self._transfer, self._where = self._lease, None, None, where
        self._landing.forget(self)
        if lease is not None:
            lease.release()
