"""What a device idles, by its own clock.

[Note: what a device's clock says] The host runs ahead of a device, so the time for which the host waits is not the time
for which the device idles. Two timed events on the compute stream, one before what may keep the device waiting and one
behind it, have no kernel between them: the time between them is time without work.
"""

from __future__ import annotations

from collections import deque

from infinity.base.accelerator import Accelerator, Event


class IdleClock:
    """Counts nothing where models compute in host memory: there the host's clock tells (timeline.py)."""

    def __init__(self, accelerator: Accelerator | None) -> None:
        self._accelerator = accelerator
        self._began: Event | None = None
        self._pairs: deque[tuple[Event, Event]] = deque()
        self._seconds = 0.0

    def begins(self) -> None:
        """What follows, until `ends`, may keep the device waiting. One that an exception left open is forgotten."""
        if self._accelerator is not None:
            self._began = self._accelerator.record(self._accelerator.current(), timed=True)

    def ends(self) -> None:
        if self._accelerator is not None and self._began is not None:
            self._pairs.append((self._began, self._accelerator.record(self._accelerator.current(), timed=True)))
            self._began = None
            self._take(self._accelerator)

    @property
    def seconds(self) -> float:
        """That the device has idled so far, as far as it has got ([Note: what a device's clock says])."""
        if self._accelerator is not None:
            self._take(self._accelerator)
        return self._seconds

    def _take(self, accelerator: Accelerator) -> None:
        """Of the pairs that the device has passed. The others stay."""
        while self._pairs and all(map(accelerator.reached, self._pairs[0])):
            began, ended = self._pairs.popleft()
            self._seconds += accelerator.seconds(began, ended)
