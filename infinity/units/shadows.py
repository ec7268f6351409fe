"""Host memory for the new values of speculative updates, where weights or optimizer states rest in RAM.

While updates do not speculate this memory is lent to the update's staging, which reads states ahead with it.

[Note: homes and shadows trade places]
A shadow is one piece of memory for all that an update changes of a unit in RAM. When the update is applied the
shadow's parts become homes, and the homes of before are free: one piece again, because the homes of a unit lie side by
side. Units are mostly of one size, the blocks of a model, so the next shadow fits where a home was. It goes there, and
not into the longer piece that a head or an embedding left: a shadow takes the shortest piece that it fits. All the same
units of other sizes, or an optimizer that changes only some of the states, can leave free memory in pieces that are too
short. The unit whose shadow does not fit does not speculate then, and its update comes with the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from infinity import _native
from infinity.base.interrupt import interrupts_deferred
from infinity.io.arena import Lease, Space
from infinity.sizes import PAGE_BYTES, round_up
from infinity.tiers.home import Home, WeightsHome


class Shadows:
    """Invariant: `free_bytes`, the bytes in use by updates and `lent_bytes` add up to what the plan has for shadows.

    Args:
        space: of the homes in RAM and the shadows ([Note: homes and shadows trade places]).
        nbytes: of the shadows.
        sizes: of the pieces that are lent, in their order: bytes of weights that shadows are needed for.
    """

    def __init__(self, space: Space, pipeline: _native.UpdatePipeline, nbytes: int, sizes: list[int]) -> None:
        self._space = space
        self._pipeline = pipeline
        self._sizes = sizes
        self._lent: list[Lease] = []
        self.free_bytes = nbytes

    def try_shadow(self, weights: WeightsHome | None, states: Sequence[Home]) -> Mapping[Home, Lease] | None:
        """A shadow of weights and of these states in RAM, by home; None where there is no memory for it. The weights of
        all groups have one lease.

        Args:
            weights: None where they rest in the store.
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
        """Memory for new values; None where there is none."""
        lease = self._space.try_lease(nbytes, tightest=True) if nbytes <= self.free_bytes else None
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
