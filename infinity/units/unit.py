"""One offloaded unit: whoever wants to know what a unit is doing asks here.

weights     where they are on the device (weights.py)
views       what the parameters are at this moment (parameters.py)
update      the update under way, None when there is none (update.py)
gradients   what has arrived, and where it waits (gradients.py)
homes       where all states rest (tiers/home.py)
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
from infinity.state.unit import Group
from infinity.tiers.destination import Written
from infinity.tiers.home import GroupStates, UnitHomes, WeightsHome
from infinity.tiers.slots import Slot
from infinity.units.gradients import UnitGradients
from infinity.units.health import Health
from infinity.units.parameters import ParameterViews
from infinity.units.shadows import Shadows
from infinity.units.update import Milestone, UnitUpdate, UpdateState
from infinity.units.weights import Residency, Weights


class OffloadedUnit:
    """See the table above.

    Invariant: a unit has at most one update under way, speculative or decided.

    Attributes:
        unit: the whole, as its slot holds it.
        local: what this rank keeps and updates of it: all, or its slice.
        shard: how `local` is cut.

    Args:
        health: is told when an update that was decided fails.
    """

    def __init__(
        self,
        shard: Shard,
        views: ParameterViews,
        homes: UnitHomes,
        gradients: UnitGradients,
        timeline: Timeline,
        health: Health,
        shadows: Shadows,
    ) -> None:
        self.unit = shard.unit
        self.local = shard.local
        self.shard = shard
        self.index = shard.unit.index
        self.name = shard.unit.name
        self.homes = homes
        self.gradients = gradients
        self.views = views
        self.weights = Weights(shard.unit, views, timeline)
        self.update: UnitUpdate | None = None
        self._timeline = timeline
        self._health = health
        self._shadows = shadows

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        return self.views.named

    @property
    def version(self) -> int:
        """Of its weights: it differs once they were changed."""
        return self.weights.version

    @property
    def storage(self) -> int | None:
        """Of the slot with its weights (`_cdata`); None without one."""
        return None if self.weights.slot is None else self.weights.slot.tensor.untyped_storage()._cdata

    @property
    def placeholders(self) -> Mapping[str, torch.Tensor]:
        """As ParameterViews.placeholders."""
        return self.views.placeholders

    @property
    def gathered(self) -> Collection[str]:
        """As ParameterViews.gathered."""
        return self.views.gathered

    def hide(self) -> None:
        """As ParameterViews.hide."""
        self.views.hide()

    def adopt(self, device: torch.device) -> None:
        """As ParameterViews.adopt."""
        self.views.adopt(device)

    def gather(self, values: Mapping[str, torch.Tensor]) -> None:
        """As ParameterViews.gather."""
        self.views.gather(values, self._viewed)

    def scatter(self, names: Collection[str]) -> None:
        """As ParameterViews.scatter."""
        self.views.scatter(names, self._viewed)

    @property
    def _viewed(self) -> Slot | None:
        """The slot that the parameters are views of."""
        return self.weights.slot if self.weights.residency is Residency.RESIDENT else None

    def own_value(self, name: str) -> torch.Tensor:
        """A view of the slot, which must be there: the value of a parameter, also while a copy of it is gathered."""
        return self.views.value_in(self.weights.require_slot(), name)

    def own_slice(self, group: int) -> torch.Tensor:
        """A view of the slot, which must be there: what this rank keeps of the weights of a group, uint8."""
        begin, end = self.shard.weight_range(group, self.shard.cut.index)
        return self.weights.require_slot().tensor[begin:end]

    # -- where its states rest ----------------------------------------------------------------------------------------

    @property
    def weights_home(self) -> WeightsHome:
        return self.homes.weights

    def states_of(self, group: int) -> GroupStates | None:
        """None where the group is frozen."""
        return self.homes.states.get(group)

    def trained(self) -> Iterator[tuple[int, Group, GroupStates]]:
        """The groups with optimizer states, by index, as far as this rank keeps them."""
        for index, states in self.homes.states.items():
            yield index, self.local.groups[index], states

    def replay_gradients(self) -> None:
        """As GroupGradients.replay."""
        for group in self.gradients.groups.values():
            group.replay()

    def forget_gradients(self) -> None:
        """As GroupGradients.forget."""
        for group in self.gradients.groups.values():
            group.forget()

    # -- the update under way -----------------------------------------------------------------------------------------

    @property
    def decided(self) -> UnitUpdate | None:
        """The update under way, unless it is speculative."""
        return None if self.update is None or self.update.is_speculative else self.update

    @property
    def speculative(self) -> UnitUpdate | None:
        """The update under way, if it is speculative."""
        return self.update if self.update is not None and self.update.is_speculative else None

    def begin_update(self, update: UnitUpdate) -> None:
        if self.update is not None:
            raise AssertionError(f"unit '{self.name}' has an update under way already")
        self.update = update

    def apply_update(self) -> None:
        """Wait until the decided update, if there is one, is computed: where its new weights are in memory they count
        from now on, and the gradients are not needed any more.

        Raises:
            SwapIOError: a transfer failed; the unit is partly new, partly old.
        """
        update = self.update
        if update is None or update.state is not UpdateState.DECIDED:
            return
        self._await(update, "computed")
        if update.state is not UpdateState.DECIDED:
            return  # a signal's handler that came during the wait has applied it: infinity.commit, say
        with interrupts_deferred():
            self._take_over(update)
            update.to(UpdateState.APPLIED)

    def await_slot(self) -> None:
        """Wait until the decided update, if there is one, does not use the slot of the weights. Raises as
        apply_update."""
        if self.decided is not None:
            self._await(self.decided, "weights")

    def finish_update(self) -> UnitUpdate | None:
        """Wait for the decided update: from now on its new values count in the store, too, and no update is under way.
        Returns it, or None when a signal's handler that came during the wait has done so. Raises as apply_update."""
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
        """The speculative update was canceled, and nothing of it is in flight: all is as before."""
        update = self.update
        if update is None:
            return
        update.to(UpdateState.UNDONE)
        self.update = None
        self._end(update)

    def _end(self, update: UnitUpdate) -> None:
        """Give back the memory that nothing rests in: of an update that was undone, or of weights that are viewed."""
        for lease in update.shadows():
            self._shadows.give_back(lease)
        update.release_copy(now=True)

    def _await(self, update: UnitUpdate, milestone: Milestone) -> None:
        with self._health.failing(SwapIOError), self._timeline.stall("update", self.name):
            if not update.reached(milestone):
                with interruptible():
                    update.wait(milestone)
            wait_all(update.until(milestone))

    def _take_over(self, update: UnitUpdate) -> None:
        """The memory with the new values is their home now. Weights that are viewed are copied home instead, and their
        part of the shadow goes when they are written."""
        weights = self.homes.weights
        for shadow, home in update.shadows().items():
            if home not in weights.groups:
                self._shadows.give_back(home.move(shadow))
            elif update.viewed and weights.lease is not None:
                weights.lease.view()[:] = shadow.view()
            else:
                self._shadows.give_back(weights.move(shadow))

    def weights_under_way(self) -> Written:
        """New weights of a decided update."""
        return {} if self.decided is None else self.decided.written()

    # -- what stands between the unit and its next use ----------------------------------------------------------------

    @property
    def at_rest(self) -> bool:
        """No decided update uses the slot of the weights."""
        return self.decided is None or self.decided.reached("weights")

    def reads_slot(self) -> bool:
        """Whether a speculative update reads the weights from the unit's slot, so that the slot must stay."""
        return self.update is not None and self.update.reads_slot()

    def writes_from_slot(self) -> bool:
        """Whether a decided update may write weights to the store from the slot they are used in."""
        return self.update is not None and self.update.writes_from_slot()

    def can_be_fetched(self) -> bool:
        """Weights in RAM wait for their update, which is applied when it is computed; a read from the store is chained
        to it."""
        if self.decided is None or self.homes.weights.lease is None:
            return True
        if self.decided.reached("computed"):
            self.apply_update()
            return True
        return False
