"""The ledger: what is known of each unit now, and every transition between those states.

[Note: the life of a unit's weights]

    RELEASED ──start──▶ FETCHING ──finish──▶ RESIDENT ──evict──▶ RELEASED
                                                │ step              ▲
                                                └─────▶ UPDATING ───┘ or back to RESIDENT, when its update is done

An UPDATING unit's slot is where its update works, or reads; its parameters are placeholders, as those of a released
one. A released parameter is a stride-0 NaN of its true shape and dtype; a resident one is a view of the unit's slot.
After its forward a unit is
only evictable: it goes when room is needed, the one with the farthest next use first. A unit is evictable when no
forward runs in it (`uses`), no backward was announced for it (`held`), and nothing but its parameters refers to the
slot: autograd may hold views it unpacked, and recomputation keeps detached ones.

`version` counts the updates of a unit's weights. What was saved for backward names the version it saw.
"""

from __future__ import annotations

import enum
import gc
import logging
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from infinity.errors import InfinityError, ModelError, PlanError, SwapIOError, SwapTimeoutError
from infinity.io.arena import Lease
from infinity.io.fork import in_forked_child, refuse_in_forked_child
from infinity.io.manifest import Manifest
from infinity.schedule import rng
from infinity.schedule.arrivals import Arrivals
from infinity.schedule.backing import Backing
from infinity.schedule.commits import Commits, Resumed
from infinity.schedule.device import HostSlot, Slot
from infinity.schedule.gradients import Gradients, GroupGradients, Place
from infinity.schedule.guesses import Guesses
from infinity.schedule.slots import Fetch, SlotPool, nan_placeholder, open_slots
from infinity.schedule.timeline import Timeline
from infinity.schedule.trace import Trace
from infinity.schedule.update import GroupUpdate
from infinity.schedule.updates import UnitRequest, UnitUpdate, Updates
from infinity.sizes import format_bytes
from infinity.state.records import Body, parse_body
from infinity.state.unit import Unit

logger = logging.getLogger(__name__)


class Residency(enum.Enum):
    RELEASED = "released"
    FETCHING = "fetching"
    RESIDENT = "resident"
    UPDATING = "updating"


@dataclass(eq=False)
class UnitRecord:
    """One unit's line in the ledger."""

    unit: Unit
    parameters: dict[str, nn.Parameter]
    placeholders: dict[str, torch.Tensor] = field(default_factory=dict)
    residency: Residency = Residency.RELEASED
    fetch: Fetch | None = None
    slot: Slot | None = None
    uses: int = 0
    held: bool = False
    stale: bool = False
    """UPDATING, and the new weights will not be in the slot."""
    version: int = 0
    marks: dict[str, tuple[int, int]] = field(default_factory=dict)
    """For each parameter the (data pointer, version) infinity left it with."""


class Ledger:
    """Per-unit state machine. Every public method may be called from any thread.

    Invariant: `parameter.data` is the placeholder, or a view of the slot of a RESIDENT unit; nothing else.
    """

    def __init__(self, units: Sequence[Unit], parameters: Sequence[dict[str, nn.Parameter]], backing: Backing) -> None:
        self.backing = backing
        self.timeline = Timeline()
        self.steps = 0
        self.closed = False
        self.failed: InfinityError | None = None
        self._lock = threading.RLock()
        self.records = [UnitRecord(unit, named) for unit, named in zip(units, parameters, strict=True)]
        self.resident_at: dict[int, UnitRecord] = {}  # by the address of the slot
        self._slots: SlotPool = open_slots(backing)
        self._viewed: list[Slot] = []  # given up, and somebody still holds views of them
        forward = [unit.index for unit in units if not unit.resident]
        self._traces = {True: Trace(forward + forward[::-1]), False: Trace(forward)}
        self._training = True
        groups = {}
        for record in self.records:
            for index, states in backing.states[record.unit.index].items():
                group = record.unit.groups[index]
                groups[record.unit.index, index] = GroupGradients(
                    record.unit, group, states.gradient, states.spilled, backing.landing, backing.device, backing.pool
                )
        self.gradients = Gradients(groups, backing.landing, backing.device)
        self._staying = frozenset(unit.index for unit in units if unit.resident)
        self.arrivals = Arrivals(units)
        self.updates = Updates(units, backing, self.gradients, self._updatable_slot)
        self.guesses = Guesses(backing.plan.overlap)
        self.commits = Commits(backing)
        self._rng_before_forward: dict[str, Any] | None = None
        self.hooks: list[RemovableHandle] = []  # on parameters

    # -- what runtime calls -------------------------------------------------------------------------------------------

    def adopt(self, record: UnitRecord) -> None:
        """Take over parameters whose values are at home now: from here on they are placeholders."""
        device = self.backing.device.device
        for name, parameter in record.parameters.items():
            record.placeholders[name] = nan_placeholder(parameter.shape, parameter.dtype, device)
        self._hide(record)

    def begin_forward(self, *, training: bool) -> None:
        """The outermost module of a forward is entered. Before a training forward the last step's commit is finished.

        Raises:
            ForkError, ModelError: see `require_usable` and `require_untouched`.
            InfinityError: the commit failed.
        """
        self.require_usable()
        self.require_untouched()
        if training:
            with self._lock, self._committing():
                self.commits.take_up_hyperparameters(again=False)
                self.commits.forward_begins()
                if self.guesses.mode == "off":
                    self.commits.finish()
            with self._lock:
                self._advance_commit()
            self._rewind()
        with self._lock:
            self._training = training
            if not training:
                self._traces[False].close()

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

    def release(self, index: int) -> None:
        """The forward ended, well or not."""
        with self._lock:
            record = self.records[index]
            record.uses = max(record.uses - 1, 0)

    def hold(self, indices: Sequence[int]) -> None:
        """The backward of these units begins: bring them, keep them until that of other units begins."""
        with self._lock:
            self._advance_commit()
            for record in self.records:
                record.held = record.unit.index in indices
            with self._spilling():
                self.gradients.backward_begins(indices, self._staying)
            for index in indices:
                self._bring(self.records[index])

    @contextmanager
    def _spilling(self) -> Iterator[None]:
        try:
            yield
        except SwapTimeoutError as error:
            self.failed = error  # the device was given up: nothing else will come from it
            raise

    def land(self, place: Place, gradient: torch.Tensor, *, accumulate: bool) -> None:
        """Take a parameter's gradient to host memory (GroupGradients.land)."""
        with self._lock, self._spilling():
            if place.unit.index in self.updates.decided:
                with self.timeline.stall("update", place.unit.name):
                    self._land_update(place.unit.index)
            if place.unit.index in self.updates.guesses:
                self._undo(
                    "a gradient came for a unit whose update had begun",
                    "Give the optimizer accumulation_steps=, or run all backward passes but the last inside "
                    "model.no_sync().",
                )
            with self.timeline.stall("gradient", place.unit.name):
                self.gradients.of(place).land(place.spec, gradient, accumulate=accumulate)

    def landed(self, place: Place) -> None:
        """A piece of a parameter's gradient came from backward and was taken."""
        with self._lock:
            if self.arrivals.came(place):
                self._guess(place.unit.index)

    def begin_backward(self) -> None:
        """An outermost backward pass brings its first gradient."""
        with self._lock:
            self.arrivals.begin_pass()

    def drop_gradients(self, places: Iterable[Place]) -> None:
        """Forget gradients, and what was begun with them."""
        with self._lock:
            if self.updates.guesses:
                self._undo("the gradients were dropped without a step", "Set overlap: before_forward if that is usual.")
            for place in places:
                if place.group.trainable:
                    self.gradients.of(place).drop(place.spec.name)
            self.arrivals.forget()

    def require(self, index: int) -> torch.Tensor:
        """The slot of unit `index`, uint8 on the device, with its weights in it."""
        with self._lock:
            record = self.records[index]
            if record.residency is not Residency.RESIDENT:
                self._bring(record)
            if record.slot is None:
                raise AssertionError(f"resident unit {record.unit.name} has no slot")
            return record.slot.tensor

    def end_backward(self, *, outermost: bool) -> None:
        """A backward pass is over, and with `outermost` all those it ran in."""
        with self._lock:
            if outermost:
                self.arrivals.end_pass()
            self._let_go()
            with self._spilling():
                self.gradients.backward_begins((), ())

    def _let_go(self) -> None:
        for record in self.records:
            record.held = False

    def reset(self) -> None:
        """Forget the uses and holds of a forward or backward that an exception ended."""
        with self._lock:
            for record in self.records:
                record.uses = 0
                record.held = False

    # -- what optim calls ---------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Bring everything but early updates to rest: no other update, commit or fetch under way, gradients landed,
        parameters as infinity left them.

        Raises:
            SwapIOError: gradients were lost on their way to the store; after zero_grad the model can go on.
        """
        self.require_usable()
        self.require_untouched()
        with self._lock, self._spilling(), self.timeline.stall("gradient"):
            self.gradients.synchronize()
        with self._lock, self._committing():
            self._land_updates()
            self.commits.take_up_hyperparameters(again=False)
            self.commits.step_begins()
            self.settle()
        with self._lock:
            self._let_go()
            for record in self.records:
                if record.residency is Residency.FETCHING:
                    self._finish(record)
            self.backing.device.synchronize_uploads()

    def update(self, requests: Mapping[tuple[int, int], GroupUpdate]) -> None:
        """The step is decided: what is to be done to which (unit, group). Early updates that guessed it go on; the
        others are undone, and what is not under way begins. Units wait for their own update when they are used next.

        Raises:
            InfinityError: the step was begun and not finished; every later call raises.
        """
        by_unit: dict[int, dict[int, GroupUpdate]] = {}
        for index, group_index in sorted(requests):
            by_unit.setdefault(index, {})[group_index] = requests[index, group_index]
        with self._lock:
            self._count(by_unit)
            self._traces[True].close()
            order = sorted(range(len(self.records)), key=self._traces[True].next_use)
            committed = self.commits.due(self.steps + 1)
            try:
                updates = self.updates.decide(by_unit, order, self.steps + 1, committed=committed)
            except SwapIOError as error:
                self.failed = self.failed or error
                raise
            except BaseException as error:
                self.failed = InfinityError(f"a step was begun and not finished: {error}")
                raise
            for update in updates:
                self._await(self.records[update.unit.index], update)

    def skip(self) -> None:
        """The step is decided: nothing changes."""
        with self._lock:
            self._traces[True].close()
            if self.updates.guesses:
                self.guesses.counts.undone += len(self.updates.guesses)
                self._drop_guesses()

    def end_step(self) -> None:
        """The step is decided and its updates are under way, or done where nothing overlaps.

        Raises:
            SwapIOError: an update failed; the states are partly updated, and every later call raises.
        """
        with self._lock:
            self.arrivals.step_ended()
            self._training = True
            self.steps += 1
            if self.backing.store is not None:
                self.backing.store.step = self.steps
            self.commits.resumed = None
            if self.guesses.mode == "off":
                self._land_updates()
            if self.commits.due(self.steps):
                with self._committing():
                    self.commits.begin(self.steps)
                self._advance_commit()
            self.timeline.end_step(self.steps)
            self._prefetch()

    def _count(self, requests: Mapping[int, UnitRequest]) -> None:
        """What the guesses of this step came to, and what a guess would have come to."""
        guesses, counts = self.updates.guesses, self.guesses.counts
        wrong = [index for index, guess in guesses.items() if guess.wanted != requests.get(index)]
        scale = self._guessed_scale()
        clipped = any(group.grad_scale != scale for request in requests.values() for group in request.values())
        self.guesses.step_decided(right=not wrong and not clipped)
        counts.undone += len(wrong)
        counts.early += len(guesses) - len(wrong)
        counts.late += len(requests.keys() - guesses.keys()) + len(requests.keys() & set(wrong))
        if wrong and not clipped:
            self.guesses.warn(
                "the hyperparameters at step() were not those of the backward pass",
                "Change them after step(), as torch's schedulers do, or set overlap: before_forward.",
            )

    def _guessed_scale(self) -> float:
        optimizer = self.commits.sole_optimizer
        return 1.0 if optimizer is None else optimizer.guessed_scale

    # -- updates that overlap -----------------------------------------------------------------------------------------

    def _guess(self, index: int) -> None:
        """A unit's gradients are complete, as far as can be told: begin its update, if that seems worth while."""
        optimizer = self.commits.sole_optimizer
        if (
            optimizer is None
            or not self.guesses.worth_it
            or not self.arrivals.last_pass(optimizer.accumulation_steps)
            or not self.backing.device.shares_memory
            or not self.gradients.finite(index)
            or (self.commits.under_way and not self.commits.frozen)
        ):
            return
        self._finish_commit()  # what the new generation names must not be written to before it is durable
        with self._committing():
            self.settle()
        if self.updates.can_guess(index):
            wanted = optimizer.guess(index)
            if wanted:
                self.updates.guess(index, wanted, self.steps + 1, committed=self.commits.due(self.steps + 1))

    def _undo(self, cause: str, advice: str) -> None:
        self.guesses.counts.undone += len(self.updates.guesses)
        self.guesses.warn(cause, advice)
        self._drop_guesses()

    def _drop_guesses(self) -> None:
        try:
            self.updates.undo(list(self.updates.guesses))
        except SwapIOError as error:
            self.failed = self.failed or error
            raise

    def _await(self, record: UnitRecord, update: UnitUpdate) -> None:
        """A unit's update is decided: its weights of before are void, and the slot stays only where the update uses
        it."""
        record.version += 1
        if record.residency is not Residency.RESIDENT or record.slot is None:
            return
        moves = update.place.shadow is not None
        update.viewed = moves and record.slot.outstanding()
        if moves or not self.backing.device.shares_memory:
            self._evict(record)
            return
        with torch.inference_mode(False), torch.no_grad():
            self._hide(record)
        record.residency, record.stale = Residency.UPDATING, update.place.speculative

    def _settle(self, record: UnitRecord) -> None:
        """Before a unit is used: its update must be done, this one only."""
        if record.unit.index in self.updates.decided:
            with self.timeline.stall("update", record.unit.name):
                self._land_update(record.unit.index)
        if record.residency is not Residency.UPDATING or record.slot is None:
            return
        if record.stale:
            self._vacate(record)
        else:
            record.residency = Residency.RESIDENT
            with torch.inference_mode(False), torch.no_grad():
                self._show(record, record.slot)

    def _land_update(self, index: int) -> None:
        if index not in self.updates.decided:
            return
        try:
            self.updates.land(index)
        except SwapIOError as error:
            self.failed = self.failed or error
            raise
        self._advance_commit()

    def _land_updates(self) -> None:
        for index in list(self.updates.decided):
            self._land_update(index)

    def fence(self) -> None:
        """Wait until the states are those after the last step.

        Raises:
            InfinityError: an update or a commit failed.
        """
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

    def _rewind(self) -> None:
        """Before the first forward of a resumed run: whatever was drawn to get here was not drawn there."""
        if self._rng_before_forward is not None:
            states, self._rng_before_forward = self._rng_before_forward, None
            rng.restore(states)
        if self.commits.resumed is not None and self.commits.resumed.unclaimed:
            unclaimed = ", ".join(sorted(self.commits.resumed.unclaimed))
            self.commits.resumed.unclaimed = set()
            logger.warning("the run that is resumed tracked %s, and nothing has taken their state back", unclaimed)

    @contextmanager
    def _committing(self) -> Iterator[None]:
        """After a failure here the model refuses to go on: what was said to be durable is not."""
        try:
            with self.timeline.stall("commit"):
                yield
        except InfinityError as error:
            self.failed = self.failed or error
            raise

    def finish_commit(self) -> None:
        """Finish the commit under way, if there is one (Commits.finish).

        Raises:
            InfinityError: the generation does not exist, and the model refuses to go on.
        """
        with self._lock:
            self._finish_commit()

    def commit(self) -> None:
        """Make a generation of the states as they are (Commits.commit). Raises as finish_commit."""
        with self._lock, self._committing():
            self._land_updates()
            self.settle()
            self.commits.commit(self.steps)

    def settle(self) -> None:
        """Something is about to be written: the generations that were given up for the one resumed go."""
        if self.backing.generations is not None:
            self.backing.generations.settle()

    def resume_at(self, manifest: Manifest) -> Body:
        """The states are those of a generation: go on from its step, with its random numbers. Returns its body."""
        self.steps = manifest.step
        if self.backing.store is not None:
            self.backing.store.step = self.steps
        body = parse_body(manifest.body, f"generation {manifest.step}")
        self.commits.resumed = Resumed(manifest.step, body)
        rng.restore(body.rng)
        self._rng_before_forward = body.rng_before_forward
        return body

    def _updatable_slot(self, index: int) -> Lease | None:
        """The host memory a unit's weights were fetched to, when they are used there; else None."""
        slot = self.records[index].slot
        return slot.lease if isinstance(slot, HostSlot) else None

    # -- checks -------------------------------------------------------------------------------------------------------

    def require_usable(self) -> None:
        """Raises ForkError in a forked child, the earlier error after a failed update, InfinityError once closed."""
        refuse_in_forked_child()
        if self.closed:
            raise InfinityError("this model was closed (infinity.close); load it again to go on")
        if self.failed is not None:
            raise InfinityError(f"the states are damaged by an earlier failure: {self.failed}") from self.failed
        try:
            self.updates.require_well()
        except SwapIOError as error:
            self.failed = error
            raise

    def require_untouched(self) -> None:
        """Raises ModelError when a parameter was replaced, converted, modified in place or unfrozen behind our back."""
        for record in self.records:
            for name, parameter in record.parameters.items():
                if (parameter.data_ptr(), parameter._version) != record.marks[name]:
                    raise ModelError(
                        f"parameter '{name}' of unit '{record.unit.name}' was changed outside infinity (.to(), "
                        f".half(), "
                        ".data, load_state_dict or an in-place operation); the change would be lost. Do it before "
                        "infinity.offload, or on the saved model."
                    )

    # -- transitions --------------------------------------------------------------------------------------------------

    @property
    def _trace(self) -> Trace:
        return self._traces[self._training]

    def _bring(self, record: UnitRecord) -> None:
        self.require_usable()
        self._advance_commit()
        if not record.unit.resident:
            self._trace.visit(record.unit.index)
        self._settle(record)
        if record.residency is Residency.RELEASED:
            with self.timeline.stall("room", record.unit.name):
                self._start_or_raise(record)
        self._prefetch()
        if record.residency is Residency.FETCHING:
            with self.timeline.stall("fetch", record.unit.name):
                self._finish(record)
        if record.slot is not None:
            record.slot.wait()

    def _start_or_raise(self, record: UnitRecord) -> None:
        if self._start(record, None):
            return
        self.updates.wait_for_readers()
        if self._start(record, None):
            return
        gc.collect()  # views of slots may hang in reference cycles
        if self._start(record, None):
            return
        used = [other for other in self.records if other.residency is not Residency.RELEASED]
        busy = [other.unit for other in used if self._takes_room(other)]
        needed = record.unit.weight_bytes + sum(unit.weight_bytes for unit in busy)
        raise PlanError(
            f"no device memory for unit '{record.unit.name}' ({format_bytes(record.unit.weight_bytes)}): the units "
            f"in use "
            f"({', '.join(unit.name for unit in busy)}) take the {format_bytes(self.backing.plan.slot_bytes)} "
            f"planned for "
            f"weights. Raise memory.device to {format_bytes(2 * needed)}."
        )

    def _start(self, record: UnitRecord, distance: int | None) -> bool:
        """Begin a fetch, evicting what is used later than `distance` visits from now (anything, when None)."""
        for slot in [slot for slot in self._viewed if not slot.outstanding()]:
            self._viewed.remove(slot)
            self._slots.free(slot)
        while True:
            index = record.unit.index
            fetch = self._slots.start(self.backing.weights[index], self.updates.decided.get(index))
            if fetch is not None:
                record.fetch, record.residency = fetch, Residency.FETCHING
                self.timeline.begin("fetch", record.unit.name)
                return True
            victim = self._victim(distance)
            if victim is None:
                return False
            self._evict(victim)

    def _takes_room(self, record: UnitRecord) -> bool:
        return self._slots.counts(self.backing.weights[record.unit.index])

    def _victim(self, distance: int | None) -> UnitRecord | None:
        best, farthest = None, -1 if distance is None else distance
        for record in self.records:
            if record.residency is Residency.RELEASED or record.uses or record.held or record.unit.resident:
                continue
            if not self._takes_room(record):
                continue
            if record.residency is Residency.FETCHING and distance is not None:
                continue  # a prefetch makes room for what is needed now, not for another prefetch
            if self.updates.reads_slot(record.unit.index) or (distance is not None and not self._at_rest(record)):
                continue
            next_use = self._trace.next_use(record.unit.index)
            if next_use > farthest and not (record.slot is not None and record.slot.outstanding()):
                best, farthest = record, next_use
        return best

    def _at_rest(self, record: UnitRecord) -> bool:
        """Whether no update uses the slot of a unit."""
        decided = self.updates.decided.get(record.unit.index)
        return decided is None or decided.done()

    def _prefetch(self) -> None:
        for record in self.records:
            if record.fetch is not None:
                record.fetch.advance()
        for distance, index in enumerate(self._trace.upcoming()):
            record = self.records[index]
            if record.residency is not Residency.RELEASED or not self._can_fetch(record):
                continue
            if not self._start(record, distance):
                return

    def _can_fetch(self, record: UnitRecord) -> bool:
        """Weights in RAM wait for their update; a read from the store is chained to it."""
        decided = self.updates.decided.get(record.unit.index)
        if decided is None or self.backing.weights[record.unit.index].lease is None:
            return True
        if decided.done():
            self._land_update(record.unit.index)
            return True
        return False

    def _finish(self, record: UnitRecord) -> None:
        if record.fetch is None:
            raise AssertionError(f"unit {record.unit.name} is fetching nothing")
        with torch.inference_mode(False), torch.no_grad():
            try:
                slot = record.fetch.finish()
            except SwapTimeoutError as error:
                self.failed = error  # the device was given up: nothing else will come from it
                raise
            except Exception:  # not Ctrl-C: then the fetch goes on and is finished by whoever comes next
                self.timeline.end("fetch", record.unit.name)
                record.fetch, record.residency = None, Residency.RELEASED
                raise
            self.timeline.end("fetch", record.unit.name)
            record.fetch, record.slot, record.residency = None, slot, Residency.RESIDENT
            self.resident_at[slot.tensor.data_ptr()] = record
            try:
                self._show(record, slot)
            except BaseException:  # Ctrl-C between two parameters: all of them, or none
                self._evict(record)
                raise

    def _show(self, record: UnitRecord, slot: Slot) -> None:
        for group in record.unit.groups:
            for spec in group.specs:
                start, end = group.byte_range(spec)
                parameter = record.parameters[spec.name]
                parameter.data = slot.tensor[start:end].view(group.dtype).view(spec.shape)
                record.marks[spec.name] = (parameter.data_ptr(), parameter._version)
        slot.expect()

    def _hide(self, record: UnitRecord) -> None:
        for name, parameter in record.parameters.items():
            parameter.data = record.placeholders[name]
            record.marks[name] = (parameter.data_ptr(), parameter._version)

    def _evict(self, record: UnitRecord) -> None:
        if record.residency is Residency.FETCHING:
            self._finish(record)
        if record.residency is Residency.UPDATING:
            self._land_update(record.unit.index)
        with torch.inference_mode(False), torch.no_grad():
            self._hide(record)
        self._vacate(record)

    def _vacate(self, record: UnitRecord) -> None:
        """Give up the slot of a unit whose parameters are placeholders."""
        slot, record.slot = record.slot, None
        record.residency, record.stale = Residency.RELEASED, False
        if slot is None:
            return
        del self.resident_at[slot.tensor.data_ptr()]
        slot.expect_none()
        if slot.outstanding():
            self._viewed.append(slot)
        else:
            self._slots.free(slot)

    # -- reading and closing ------------------------------------------------------------------------------------------

    def places(self) -> Iterator[tuple[nn.Parameter, Place]]:
        for record in self.records:
            for index, group in enumerate(record.unit.groups):
                for spec in group.specs:
                    yield record.parameters[spec.name], Place(record.unit, index, spec)

    def close(self, *, discard: bool = False, broken: bool = False) -> None:
        """Commit what is not committed and release everything; the swap file is removed unless it has generations.

        While an exception is on its way only what is known to be the top of the loop is committed: the loop may have
        stopped between its optimizer and its scheduler, and a generation of that would not be one of a run that never
        stopped. Idempotent; does nothing in a forked child.

        Args:
            discard: commit nothing and remove the generations, too.
            broken: the program was ended by an exception.

        Raises:
            InfinityError: the last generation could not be made. Everything is released all the same.
        """
        if self.closed or in_forked_child():
            return
        broken = broken or sys.exc_info()[0] is not None
        with self._lock:
            self.closed = True
            try:
                if self.failed is None and not discard:
                    self._drop_guesses()
                    self._land_updates()
                    self.commits.end(self.steps, broken=broken)
            finally:
                self.backing.close(discard=discard)
                self.failed = None  # its traceback holds the frames it passed, and with them the model
