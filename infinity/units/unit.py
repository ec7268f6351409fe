"""One offloaded unit: the object that has, or refers to, everything about a unit.

weights     whether and where the weights are on the device (weights.py)
views       current form of the parameters: placeholder, view of a slot or gathered copy (parameters.py)
update      update in progress; None when there is none (update.py)
gradients   gradients that have arrived, and their memory (gradients.py)
homes       where all states are kept between uses (tiers/home.py)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn

from infinity.base.interrupt import interruptible, interrupts_deferred
from infinity.base.timeline import Timeline
from infinity.errors import SwapIOError
from infinity.io.store import wait_all
from infinity.state.shard import Shard
from infinity.state.unit import FlatParameterGroup
from infinity.tiers.destination import Written
from infinity.tiers.home import GroupStateHomes, UnitHomes, WeightsHome
from infinity.tiers.slots import Slot
from infinity.units.gradients import UnitGradients
from infinity.units.health import ModelHealth
from infinity.units.parameters import ParameterViews
from infinity.units.speculative_update_buffers import SpeculativeUpdateBuffers
from infinity.units.update import Milestone, UnitUpdate, UpdateState
from infinity.units.weights import Residency, UnitWeights


class OffloadedUnit:
    """One offloaded unit. The table at the top of this file lists its parts.

    Invariant: a unit has at most one update in progress, which is speculative or decided.

    Attributes:
        full: the full unit, in the layout of its slot.
        local: part of the unit that this rank keeps and updates: the full unit, or this rank's slice.
        shard: division of the unit into the slices of the ranks.

    Args:
        health: object that records a failure of the model if a decided update fails.
    """

    def __init__(
        self,
        shard: Shard,
        views: ParameterViews,
        homes: UnitHomes,
        gradients: UnitGradients,
        timeline: Timeline,
        health: ModelHealth,
        shadows: SpeculativeUpdateBuffers,
    ) -> None:
        self.full = shard.full
        self.local = shard.local
        self.shard = shard
        self.index = shard.full.index
        self.name = shard.full.name
        self.homes = homes
        self.gradients = gradients
        self.views = views
        self.weights = UnitWeights(shard.full, views, timeline)
        self.update: UnitUpdate | None = None
        self._timeline = timeline
        self._health = health
        self._shadows = shadows

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        return self.views.named

    @property
    def version(self) -> int:
        """Version of the weights; each change of the weights changes the version."""
        return self.weights.version

    @property
    def storage(self) -> int | None:
        """Storage (`_cdata`) of the slot that has the weights; None without a slot."""
        return None if self.weights.slot is None else self.weights.slot.tensor.untyped_storage()._cdata

    @property
    def placeholders(self) -> Mapping[str, torch.Tensor]:
        """Placeholders of the released parameters (ParameterViews.placeholders)."""
        return self.views.placeholders

    @property
    def gathered(self) -> Collection[str]:
        """Names of the gathered parameters (ParameterViews.gathered)."""
        return self.views.gathered

    def hide(self) -> None:
        """See ParameterViews.hide."""
        self.views.hide()

    def adopt(self, device: torch.device) -> None:
        """See ParameterViews.adopt."""
        self.views.adopt(device)

    def gather(self, values: Mapping[str, torch.Tensor]) -> None:
        """See ParameterViews.gather."""
        self.views.gather(values, self._viewed)

    def scatter(self, names: Collection[str]) -> None:
        """See ParameterViews.scatter."""
        self.views.scatter(names, self._viewed)

    @property
    def _viewed(self) -> Slot | None:
        """Slot of which the parameters are views; None when they are not views of a slot."""
        return self.weights.slot if self.weights.residency is Residency.RESIDENT else None

    def own_value(self, name: str) -> torch.Tensor:
        """Return a view of one parameter's values in the unit's slot, even if the parameter's data is a gathered copy.

        The unit must have a slot.
        """
        return self.views.value_in(self.weights.require_slot(), name)

    def own_slice(self, group: int) -> torch.Tensor:
        """Return a view of this rank's slice of a group's weights in the unit's slot, uint8.

        The unit must have a slot.
        """
        begin, end = self.shard.weight_range(group, self.shard.cut.index)
        return self.weights.require_slot().tensor[begin:end]

    # -- where the unit's states are kept -----------------------------------------------------------------------------

    @property
    def weights_home(self) -> WeightsHome:
        return self.homes.weights

    def states_of(self, group: int) -> GroupStateHomes | None:
        """Return the optimizer states of a group; None for a frozen group."""
        return self.homes.states.get(group)

    def trained(self) -> Iterator[tuple[int, FlatParameterGroup, GroupStateHomes]]:
        """Yield (group index, this rank's part of the group, states) for each group that has optimizer states on this
        rank."""
        for index, states in self.homes.states.items():
            yield index, self.local.groups[index], states

    def replay_gradients(self) -> None:
        """Call GroupGradients.replay for every group."""
        for group in self.gradients.groups.values():
            group.replay()

    def forget_gradients(self) -> None:
        """Call GroupGradients.forget for every group."""
        for group in self.gradients.groups.values():
            group.forget()

    # -- the update under way -----------------------------------------------------------------------------------------

    @property
    def decided(self) -> UnitUpdate | None:
        """The update in progress if it is decided; otherwise None."""
        return None if self.update is None or self.update.is_speculative else self.update

    @property
    def speculative(self) -> UnitUpdate | None:
        """The update in progress if it is speculative; otherwise None."""
        return self.update if self.update is not None and self.update.is_speculative else None

    def begin_update(self, update: UnitUpdate) -> None:
        if self.update is not None:
            raise AssertionError(f"unit '{self.name}' has an unfinished update already")
        self.update = update

    def apply_update(self) -> None:
        """If there is a decided update, wait until it is computed, then apply it.

        After the update is applied, the new values in memory are valid, and the gradients are no longer needed.

        Raises:
            SwapIOError: a transfer failed. Some values of the unit are new, and some are old.
        """
        update = self.update
        if update is None or update.state is not UpdateState.DECIDED:
            return
        self._await(update, "computed")
        if update.state is not UpdateState.DECIDED:
            return  # a signal handler applied the update during the wait (for example through infinity.commit)
        with interrupts_deferred():
            self._take_over(update)
            update.to(UpdateState.APPLIED)

    def await_slot(self) -> None:
        """If there is a decided update, wait until it no longer uses the slot of the weights.

        Raises:
            SwapIOError: a transfer failed. Some values of the unit are new, and some are old.
        """
        if self.decided is not None:
            self._await(self.decided, "weights")

    def finish_update(self) -> UnitUpdate | None:
        """Wait until the new values of the decided update are written, then finish the update.

        After the update is finished, its new values are valid in the store, too, and the unit has no update in
        progress.

        Returns:
            The finished update; None when a signal handler finished the update during the wait.

        Raises:
            SwapIOError: a transfer failed. Some values of the unit are new, and some are old.
        """
        update = self.decided
        if update is None:
            raise AssertionError(f"unit '{self.name}' has no decided update")
        self.apply_update()
        self._await(update, "written")
        if update.state is not UpdateState.APPLIED:
            return None
        with interrupts_deferred():
            for index in update.transfers:
                for destination in update.destinations[index].values():
                    destination.finish()
            self._end(update)
            update.to(UpdateState.FINISHED)
            self.update = None
        return update

    def undo_update(self) -> None:
        """If there is a speculative update, discard it and restore the state before the update.

        The caller has canceled the update and has waited for its transfers.
        """
        update = self.update
        if update is None:
            return
        update.to(UpdateState.UNDONE)
        self.update = None
        self._end(update)

    def _end(self, update: UnitUpdate) -> None:
        """Give back the shadow memory that has not become a home: all of it after an undone update, and the part of
        viewed weights after a finished update."""
        for lease in update.shadows():
            self._shadows.give_back(lease)
        update.release_weights_copy(now=True)

    def _await(self, update: UnitUpdate, milestone: Milestone) -> None:
        with self._health.failing(SwapIOError), self._timeline.stall("update", self.name):
            if not update.reached(milestone):
                with interruptible():
                    update.wait(milestone)
            wait_all(update.until(milestone))

    def _take_over(self, update: UnitUpdate) -> None:
        """Make the memory with the new values the home of the values.

        If views of the old weights exist, the home of the weights does not move, and the new weights are copied to the
        old memory. The part of the shadow with the new weights is given back after the weights are written to the
        store. Weights that all ranks share have been copied before (UnitUpdate.publication).
        """
        weights = self.homes.weights
        for shadow, home in update.shadows().items():
            if home not in weights.groups:
                self._shadows.give_back(home.move(shadow))
            elif weights.shared:
                continue
            elif update.viewed and weights.lease is not None:
                weights.lease.view()[:] = shadow.view()
            else:
                self._shadows.give_back(weights.move(shadow))

    def weights_under_way(self, milestone: Milestone = "weights") -> Written:
        """Return the new weights of the decided update, by group (UnitUpdate.written); empty without a decided
        update."""
        return {} if self.decided is None else self.decided.written(milestone)

    # -- reasons why the next use of the unit must wait ---------------------------------------------------------------

    @property
    def at_rest(self) -> bool:
        """Whether no decided update uses the slot of the weights."""
        return self.decided is None or self.decided.reached("weights")

    def reads_slot(self) -> bool:
        """Return whether a speculative update reads the weights from the unit's slot. If so, the slot must be kept."""
        return self.update is not None and self.update.reads_slot()

    def writes_from_slot(self) -> bool:
        """Return whether a decided update may still write weights from the unit's slot to the store."""
        return self.update is not None and self.update.writes_from_slot()

    def can_be_fetched(self) -> bool:
        """Return whether a fetch can begin now.

        If the weights are in RAM, a fetch must wait for their update. This call applies the update if the update is
        computed. A fetch from the store need not wait, because the engine starts the read when the update has written
        the weights.
        """
        if self.decided is None or self.homes.weights.lease is None:
            return True
        if self.decided.reached("computed"):
            self.apply_update()
            return True
        return False
