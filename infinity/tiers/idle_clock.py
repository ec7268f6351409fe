"""Idle time of a device, measured by the device's own clock.

[Note: what a device's clock says] The host runs ahead of a device, so the host's waiting time differs from the device's
idle time. The idle time is therefore measured with two timed events on the compute stream, before and after a wait that
may keep the device idle. No kernel is queued between the two events, so the device has no work between them.
"""

from __future__ import annotations

from collections import deque

from infinity.base.accelerator import Accelerator, Event


class IdleClock:
    """Clock of a device's idle time.

    For a model that computes on the CPU, this clock counts nothing, because the host's clock is sufficient
    (base/timeline.py).
    """

    def __init__(self, accelerator: Accelerator | None) -> None:
        self._accelerator = accelerator
        self._began: Event | None = None
        self._pairs: deque[tuple[Event, Event]] = deque()
        self._seconds = 0.0

    def begins(self) -> None:
        """Begin a wait that may keep the device idle; `ends` ends this wait. If an exception prevented the call of
        `ends` for an earlier wait, the earlier wait is not counted."""
        if self._accelerator is not None:
            self._began = self._accelerator.record(self._accelerator.current(), timed=True)

    def ends(self) -> None:
        if self._accelerator is not None and self._began is not None:
            self._pairs.append((self._began, self._accelerator.record(self._accelerator.current(), timed=True)))
            self._began = None
            self._take(self._accelerator)

    @property
    def seconds(self) -> float:
        """Idle seconds of the device up to the last event that the device has reached ([Note: what a device's clock
        says])."""
        if self._accelerator is not None:
            self._take(self._accelerator)
        return self._seconds

    def _take(self, accelerator: Accelerator) -> None:
        """Add the waits that the device has completed."""
        while self._pairs and all(map(accelerator.reached, self._pairs[0])):
            began, ended = self._pairs.popleft()
            self._seconds += accelerator.seconds(began, ended)
