"""Host memory for the new weights of speculative updates, where weights rest in RAM.

While updates do not speculate this memory is lent to the update's staging, which reads states ahead with it.
"""

from __future__ import annotations

from infinity import _native
from infinity.base.interrupt import interrupts_deferred
from infinity.io.arena import Lease, Space


class Shadows:
    """Invariant: `free_bytes`, the bytes in use by updates and `lent_bytes` add up to what the plan has for shadows.

    Args:
        space: of the weights in RAM and their shadows. When an update is applied its shadow becomes the home of the
            weights, and their home of before a shadow, so the two are one space.
        nbytes: of the shadows.
        sizes: bytes of weights that shadows are needed for, in the order in which they are lent.
    """

    def __init__(self, space: Space, pipeline: _native.UpdatePipeline, nbytes: int, sizes: list[int]) -> None:
        self._space = space
        self._pipeline = pipeline
        self._sizes = sizes
        self._lent: list[Lease] = []
        self.free_bytes = nbytes

    def try_lease(self, nbytes: int) -> Lease | None:
        """Memory for new weights; None where there is none."""
        lease = self._space.try_lease(nbytes) if nbytes <= self.free_bytes else None
        if lease is not None:
            self.free_bytes -= lease.nbytes
        return lease

    def give_back(self, lease: Lease) -> None:
        self.free_bytes += lease.nbytes
        lease.release()

    @property
    def lent_bytes(self) -> int:
        """What the staging has."""
        return sum(lease.nbytes for lease in self._lent)

    def lend(self) -> None:
        """Updates do not speculate for now: the staging gets the free memory."""
        for nbytes in self._sizes:
            if not 0 < nbytes <= self.free_bytes:
                continue
            with interrupts_deferred():
                lease = self.try_lease(nbytes)
                if lease is not None:
                    self._pipeline.lend(lease.view())
                    self._lent.append(lease)

    def reclaim(self) -> None:
        """Updates speculate again. Nothing is read ahead into this memory, and nothing is to be computed in it; waits
        for writes from it."""
        with interrupts_deferred():
            while self._lent:
                lease = self._lent.pop()
                if self._pipeline.reclaim(lease.view()):  # else a device that was given up may still use it
                    self.give_back(lease)
