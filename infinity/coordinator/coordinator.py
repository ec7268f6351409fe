"""The coordinator: steps, and what is under way between them: the commit, updates that overlap, gradients that land."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from infinity.base.interrupt import interruptible, whole
from infinity.base.timeline import Timeline
from infinity.coordinator.readers import Readers
from infinity.durable.commits import Commits
from infinity.errors import InfinityError, SwapIOError, SwapTimeoutError
from infinity.io.fork import in_forked_child, refuse_in_forked_child
from infinity.state.released import released_class
from infinity.state.request import GroupUpdate, is_clipped
from infinity.state.unit import Place, Unit
from infinity.tiers.resources import Resources
from infinity.units.arrivals import Arrivals
from infinity.units.gradients import Gradients, GroupGradients
from infinity.units.room import Residency, Residents, UnitRecord
from infinity.units.speculation import Guesses
from infinity.units.update import Milestone
from infinity.units.updates import UnitUpdate, Updates


class Coordinator:
    """Where runtime and optim meet. Every public method may be called from any thread, and Ctrl-C finds none half done
    (interrupt.py)."""

    def __init__(
        self, units: Sequence[Unit], parameters: Sequence[dict[str, nn.Parameter]], resources: Resources
    ) -> None:
        self.resources = resources
        self.timeline = Timeline()
        self.steps = 0
        self.closed = False
        self.failed: InfinityError | None = None
        self._lock = threading.RLock()
        groups = {}
        for unit in units:
            for index, states in resources.states[unit.index].items():
                group = unit.groups[index]
                groups[unit.index, index] = GroupGradients(
                    unit, group, states.gradient, states.spilled, resources.landing, resources.device, resources.pool
                )
        self.gradients = Gradients(groups, resources.landing, resources.device)
        self._staying = frozenset(unit.index for unit in units if unit.resident)
        self.arrivals = Arrivals(units)
        self.updates = Updates(units, resources, self.gradients)
        self.readers = Readers(units, parameters, self.acquire, self.release, self.locked)
        released = released_class(self.readers)
        self.residents = Residents(
            units, parameters, resources, self.updates, self.timeline, self._take_in, self._free_slot, released
        )
        self.guesses = Guesses(resources.plan.overlap)
        self.commits = Commits(resources)

    # -- what runtime calls -------------------------------------------------------------------------------------------

    @property
    def records(self) -> list[UnitRecord]:
        return self.residents.records

    def places(self) -> Iterator[tuple[nn.Parameter, Place]]:
        return self.residents.places()

    def _bring(self, record: UnitRecord) -> None:
        self.require_usable()
        self._carry_on()
        with self._timeouts():
            self.residents.bring(record)

    @whole
    def begin_forward(self, *, training: bool) -> None:
        """The outermost module of a forward is entered. Before a training forward the last step's commit is finished.
        Raises as `require_usable`, `require_untouched` and `finish_commit`."""
        self.require_usable()
        self.residents.require_untouched()
        if training:
            with self._lock, self._committing():
                self.commits.take_up_hyperparameters(again=False)
                self.commits.forward_begins()
                if self.guesses.mode == "off":
                    self.commits.finish()
            with self._lock:
                self._carry_on()
                self.commits.rewind()
        with self._lock:
            self.residents.training = training
            if not training:
                self.residents.end_iteration(training=False)

    @whole
    def acquire(self, index: int) -> None:
        """A forward that reads unit `index` begins: when this returns its parameters have their values."""
        with self._lock:
            record = self.records[index]
            record.uses += 1
            try:
                self._bring(record)
            except BaseException:
                record.uses -= 1
                raise

    @whole
    def release(self, index: int) -> None:
        """The forward ended, well or not."""
        with self._lock:
            record = self.records[index]
            record.uses = max(record.uses - 1, 0)

    @whole
    def hold(self, indices: Sequence[int]) -> None:
        """The backward of these units begins: bring them, keep them until that of other units begins."""
        with self._lock:
            self._carry_on()
            self.residents.hold(indices)
            with self._timeouts():
                self.gradients.backward_begins(indices, self._staying)
            for index in indices:
                self._bring(self.records[index])

    @contextmanager
    def locked(self) -> Iterator[Residents]:
        """The units, for changes of more than one thing."""
        with self._lock:
            yield self.residents

    @contextmanager
    def _timeouts(self) -> Iterator[None]:
        try:
            yield
        except SwapTimeoutError as error:
            self.failed = error  # the device was given up: nothing else will come from it
            raise

    @whole
    def land(self, place: Place, gradient: torch.Tensor, *, accumulate: bool) -> None:
        """Take a parameter's gradient to host memory (GroupGradients.land). Raises InfinityError once closed."""
        self._require_open()
        with self._lock, self._timeouts():
            self._take_in(place.unit.index)
            if place.unit.index in self.updates.guesses:
                self._undo(
                    "a gradient came for a unit whose update had begun",
                    "Give the optimizer accumulation_steps=, or run all backward passes but the last inside "
                    "model.no_sync().",
                )
            with self.timeline.stall("gradient", place.unit.name):
                self.gradients.of(place).land(place.spec, gradient, accumulate=accumulate)

    @whole
    def landed(self, place: Place) -> None:
        """A piece of a parameter's gradient came from backward and was taken."""
        with self._lock:
            if self.arrivals.came(place):
                self._guess(place.unit.index)

    @whole
    def begin_backward(self) -> None:
        """An outermost backward pass brings its first gradient."""
        with self._lock:
            self.arrivals.begin_pass()
            self._carry_on()
            self._read_ahead()

    @whole
    def drop_gradients(self, places: Iterable[Place]) -> None:
        """Forget gradients, and what was begun with them."""
        with self._lock:
            if self.updates.guesses:
                self._undo("the gradients were dropped without a step", "Set overlap: before_forward if that is usual.")
            for place in places:
                if place.group.trainable:
                    self.gradients.of(place).drop(place.spec.name)
            self.arrivals.forget()

    @whole
    def require(self, index: int) -> torch.Tensor:
        """The slot of unit `index`, uint8 on the device, with its weights in it."""
        with self._lock:
            record = self.records[index]
            if record.residency is not Residency.RESIDENT:
                self._bring(record)
            if record.slot is None:
                raise AssertionError(f"resident unit {record.unit.name} has no slot")
            record.slot.wait()  # the stream that asks may be another than the one it was brought for
            return record.slot.tensor

    @whole
    def end_backward(self, *, outermost: bool) -> None:
        """A backward pass is over, and with `outermost` all those it ran in."""
        with self._lock:
            if outermost:
                self.arrivals.end_pass()
            self.residents.hold(())
            with self._timeouts():
                self.gradients.backward_begins((), ())

    @whole
    def reset(self) -> None:
        """Forget the uses and holds of a forward or backward that an exception ended."""
        with self.locked() as residents:
            residents.forget_uses()

    # -- what optim calls ---------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Bring everything but early updates to rest: no other update, commit or fetch under way, gradients landed,
        parameters as infinity left them.

        Raises:
            SwapIOError: gradients were lost on their way to the store; after zero_grad the model can go on.
        """
        self.require_usable()
        self.readers.step_begins()
        self.residents.require_untouched()
        with self._lock, self._timeouts(), self.timeline.stall("gradient"):
            self.resources.device.idle_begins()
            self.gradients.synchronize()
        with self._lock, self._committing():
            self._land_updates()
            self.commits.take_up_hyperparameters(again=False)
            self.commits.step_begins()
            self.settle()
        with self._lock, self._timeouts():
            self.residents.hold(())
            self.residents.finish_fetches()
            self.resources.device.synchronize_uploads()

    def update(self, requests: Mapping[tuple[int, int], GroupUpdate]) -> None:
        """The step is decided: what is to be done to which (unit, group). Early updates that guessed it go on, others
        are undone, what is not under way begins. A unit's next use waits for its own update.

        Raises:
            InfinityError: the step was begun and not finished; every later call raises.
        """
        by_unit: dict[int, dict[int, GroupUpdate]] = {}
        for index, group_index in sorted(requests):
            by_unit.setdefault(index, {})[group_index] = requests[index, group_index]
        with self._lock:
            optimizer = self.commits.sole_optimizer
            wrong = {index for index, guess in self.updates.guesses.items() if guess.wanted != by_unit.get(index)}
            clipped = is_clipped(by_unit, 1.0 if optimizer is None else optimizer.guessed_scale)
            self.residents.end_iteration(training=True)
            committed = self.commits.due(self.steps + 1)
            try:
                updates = self.updates.decide(
                    by_unit, self.residents.order(), self.residents.slot_of, self.steps + 1, committed=committed
                )
            except SwapIOError as error:
                self.failed = self.failed or error
                raise
            except BaseException as error:
                self.failed = InfinityError(f"a step was begun and not finished: {error}")
                raise
            early = {update.unit.index for update in updates if update.place.speculative}
            self.guesses.step_decided(early, wrong, by_unit.keys(), clipped=clipped)
            with self._timeouts():
                for update in updates:
                    self.residents.update_decided(self.records[update.unit.index], update)

    def skip(self) -> None:
        """The step is decided: nothing changes."""
        with self._lock:
            self.residents.end_iteration(training=True)
            self._drop_guesses()

    def end_step(self) -> None:
        """The step is decided and its updates are under way, or done where nothing overlaps.

        Raises:
            SwapIOError: an update failed; the states are partly updated, and every later call raises.
        """
        with self._lock:
            self.arrivals.step_ended()
            self.residents.training = True
            self.steps += 1
            if self.resources.store is not None:
                self.resources.store.begin_step(self.steps)
            self.commits.resumed = None
            if self.guesses.mode == "off":
                self._land_updates()
            if self.commits.due(self.steps):
                with self._committing():
                    self.commits.begin(self.steps)
                self._advance_commit()
            self.timeline.end_step(self.steps)
            with self._timeouts():
                self.residents.prefetch()
            self.resources.device.idle_ends()

    # -- updates that overlap -----------------------------------------------------------------------------------------

    def _guess(self, index: int) -> None:
        """A unit's gradients are complete, as far as can be told: begin its update, if that seems worth while."""
        optimizer = self.commits.sole_optimizer
        if (
            optimizer is None
            or not self.guesses.worth_it
            or not self.arrivals.last_pass(optimizer.accumulation_steps)
            or not self.gradients.finite(index)
            or (self.commits.under_way and not self.commits.frozen)
        ):
            return
        self._carry_on()
        self._finish_commit()  # what the new generation names must not be written to before it is durable
        with self._committing():
            self.settle()
        if self.updates.can_guess(index):
            wanted = optimizer.guess(index)
            if wanted:
                slot = self.residents.slot_of(index)
                self.updates.guess(index, wanted, slot, self.steps + 1, committed=self.commits.due(self.steps + 1))

    def _read_ahead(self) -> None:
        """The last backward before the step begins: read what updates need that will not begin during it."""
        optimizer = self.commits.sole_optimizer
        if optimizer is None or self.guesses.mode == "off" or self.failed is not None or self.closed:
            return
        if self.arrivals.last_pass(optimizer.accumulation_steps):
            guesses = self.guesses.worth_it
            (self.updates.reclaim_shadows if guesses else self.updates.lend_shadows)()
            waiting = (each for each in self.residents.order() if not (guesses and self.updates.can_guess(each)))
            self.updates.read_ahead(waiting, self.steps + 1)

    def _undo(self, cause: str, advice: str) -> None:
        self.guesses.warn(cause, advice)
        self._drop_guesses()

    def _drop_guesses(self) -> None:
        self.guesses.dropped(len(self.updates.guesses))
        try:
            self.updates.undo(list(self.updates.guesses))
        except SwapIOError as error:
            self.failed = self.failed or error
            raise

    def _take_in(self, index: int) -> None:
        update = self.updates.decided.get(index)
        if update is not None and not update.taken_in:
            self._await_update(update, "computed", self.updates.take_in)

    def _free_slot(self, index: int) -> None:
        if index in self.updates.decided:
            self._await_update(self.updates.decided[index], "weights", self.updates.free_slot)

    def _land_update(self, index: int) -> None:
        if index in self.updates.decided:
            self._await_update(self.updates.decided[index], "written", self.updates.land)
            self._advance_commit()

    def _await_update(self, update: UnitUpdate, until: Milestone, then: Callable[[int], None]) -> None:
        try:
            with self.timeline.stall("update", update.unit.name):
                with interruptible():
                    update.wait(until)
                then(update.unit.index)
        except SwapIOError as error:
            self.failed = self.failed or error
            raise

    def _carry_on(self) -> None:
        """Land what is done, and carry on with a commit as far as possible without waiting."""
        for index in [index for index, update in self.updates.decided.items() if update.reached("written")]:
            self._land_update(index)
        self._advance_commit()

    def _land_updates(self) -> None:
        for index in list(self.updates.decided):
            self._land_update(index)

    @whole
    def fence(self) -> None:
        """Wait until the states are those after the last step. Raises InfinityError: an update or a commit failed."""
        self.require_usable()
        with self._lock:
            self._land_updates()

    def _advance_commit(self) -> None:
        """Carry on with a commit as far as possible without waiting."""
        if self.commits.under_way and not self.updates.decided:
            with self._committing():
                self.commits.written()
                if self.commits.ready:
                    self.commits.finish()

    def _finish_commit(self) -> None:
        if self.commits.under_way:
            self._land_updates()
            with self._committing():
                self.commits.finish()

    @contextmanager
    def _committing(self) -> Iterator[None]:
        """After a failure here the model refuses to go on: what was said to be durable is not."""
        try:
            with self.timeline.stall("commit"):
                yield
        except InfinityError as error:
            self.failed = self.failed or error
            raise

    @whole
    def finish_commit(self) -> None:
        """Finish the commit under way, if there is one (Commits.finish). Raises InfinityError: the generation does not
        exist, and the model refuses to go on."""
        with self._lock:
            self._finish_commit()

    @whole
    def commit(self) -> None:
        """Make a generation of the states as they are. Raises as finish_commit."""
        with self._lock, self._committing():
            self._come_to_rest()
            self.commits.commit(self.steps)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """States may be written to their destinations in this context. A commit whose loop was not at its top gives
        way, and is begun again. Raises as finish_commit."""
        self.require_usable()
        with self._lock:
            again = self.commits.under_way and not self.commits.frozen
            with self._committing():
                self._come_to_rest()
                self.commits.step_begins()
            try:
                yield
            finally:
                if again:
                    self.commits.begin(self.steps)

    def _come_to_rest(self) -> None:
        self._land_updates()
        self._drop_guesses()  # they write where others may write now
        self.updates.ahead.drop(but=())
        self.settle()

    def settle(self) -> None:
        """Something is about to be written: the generations that were given up for the one resumed go."""
        if self.resources.generations is not None:
            self.resources.generations.settle()

    # -- checks -------------------------------------------------------------------------------------------------------

    def require_usable(self) -> None:
        """Raises ForkError in a forked child, the earlier error after a failed update, InfinityError once closed."""
        refuse_in_forked_child()
        self._require_open()
        if self.failed is not None:
            raise InfinityError(f"the states are damaged by an earlier failure: {self.failed}") from self.failed
        try:
            self.updates.require_well()
        except SwapIOError as error:
            self.failed = error
            raise

    def _require_open(self) -> None:
        if self.closed:
            raise InfinityError("this model was closed (infinity.close); load it again to go on")

    # -- reading and closing ------------------------------------------------------------------------------------------

    @whole
    def close(self, *, discard: bool = False, broken: bool = False) -> None:
        """Commit what is not committed and release everything; the swap file is removed unless it has generations.
        Idempotent; does nothing in a forked child.

        While an exception is on its way only what is known to be the top of the loop is committed: a loop that stopped
        between its optimizer and its scheduler would give a generation that no uninterrupted run has.

        Args:
            discard: commit nothing and remove the generations, too.
            broken: the program was ended by an exception.

        Raises:
            InfinityError: the last generation could not be made. Everything is released all the same.
        """
        if self.closed or in_forked_child():
            return
        broken = broken or sys.exc_info()[0] is not None
        self.readers.forget_dead_forward()
        with self._lock:
            self.closed = True
            try:
                if self.failed is None and not discard:
                    self._drop_guesses()
                    self.updates.ahead.drop(but=())
                    self._land_updates()
                    self.commits.end(self.steps, broken=broken)
            finally:
                self.commits.tracking.forget()
                self.resources.close(discard=discard)
                self.failed = None  # its traceback holds the frames it passed, and with them the model
