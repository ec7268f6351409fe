"""Buffers in host memory, the shadows: a speculative update writes the new values of weights and optimizer states in
RAM to these buffers.

While updates do not speculate, this memory is lent to the staging, which is the memory of the updates' tiles. States
are then read ahead into this memory.

[Note: homes and shadows trade places]
A shadow is one piece of memory for all values in RAM that an update of a unit changes. When the update is applied, the
parts of the shadow become homes, and the old homes become free. The memory of the old homes is one piece again, because
the homes of a unit are adjacent. Most units are blocks of the model and have the same size, so the next shadow fits
into this piece. A shadow gets the shortest free piece that is long enough, so it does not use a longer piece that was
the home of a head or an embedding. With units of other sizes, or with an optimizer that changes only some of the
states, the free memory can still be in pieces that are too short. If there is no piece for a unit's shadow, the unit
does not speculate, and its update begins when the step is decided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from infinity import _native
from infinity.base.interrupt import interrupts_deferred
from infinity.io.arena import ArenaRegion, Lease
from infinity.sizes import PAGE_BYTES, round_up
from infinity.tiers.home import StateHome, WeightsHome


class SpeculativeUpdateBuffers:
    """Memory for the shadows (buffers for new values) of all units.

    Invariant: the sum of `free_bytes`, `lent_bytes` and the bytes that updates use is the plan's number of bytes for
    shadows.

    Args:
        space: memory of the homes in RAM and of the shadows ([Note: homes and shadows trade places]).
        pipeline: pipeline of the updates, which uses the lent memory as staging.
        nbytes: bytes planned for shadows.
        sizes: sizes of the pieces that are lent, in this order: the weight bytes of the units that need shadows.
    """

    def __init__(self, space: ArenaRegion, pipeline: _native.UpdatePipeline, nbytes: int, sizes: list[int]) -> None:
        self._space = space
        self._pipeline = pipeline
        self._sizes = sizes
        self._lent: list[Lease] = []
        self.free_bytes = nbytes

    def try_shadow(self, weights: WeightsHome | None, states: Sequence[StateHome]) -> Mapping[StateHome, Lease] | None:
        """Return a shadow for weights and states in RAM: a lease for each home; None when there is not enough memory.

        The weights of all groups share one lease.

        Args:
            weights: weights of the unit; None when they are kept in the store.
            states: homes of the optimizer states.
        """
        nbytes = 0 if weights is None else weights.nbytes
        sizes = [round_up(each, PAGE_BYTES) for each in (nbytes, *(home.nbytes for home in states))]
        lease = self.try_lease(sum(sizes))
        if lease is None:
            return None
        new_weights, *others = lease.split(sizes)
        groups = () if weights is None else weights.groups
        return {**dict.fromkeys(groups, new_weights), **dict(zip(states, others, strict=True))}

    def try_lease(self, nbytes: int) -> Lease | None:
        """Return memory for new values; None when there is not enough memory."""
        lease = self._space.try_lease(nbytes, tightest=True) if nbytes <= self.free_bytes else None
        if lease is not None:
            self.free_bytes -= lease.nbytes
        return lease

    def give_back(self, lease: Lease) -> None:
        self.free_bytes += lease.nbytes
        lease.release()

    @property
    def lent_bytes(self) -> int:
        """Bytes that are lent to the staging."""
        return sum(lease.nbytes for lease in self._lent)

    def lend(self) -> None:
        """Lend the free memory to the staging, while updates do not speculate."""
        for nbytes in self._sizes:
            if not 0 < nbytes <= self.free_bytes:
                continue
            with interrupts_deferred():
                lease = self.try_lease(nbytes)
                if lease is not None:
                    self._pipeline.lend(lease.view())
                    self._lent.append(lease)

    def reclaim(self) -> None:
        """Take the lent memory back, after waiting for writes from this memory.

        The caller has ended all reads into this memory and all computations in it.
        """
        with interrupts_deferred():
            while self._lent:
                lease = self._lent.pop()
                if self._pipeline.reclaim(lease.view()):  # False: a disk that never answered may still use it
                    self.give_back(lease)
