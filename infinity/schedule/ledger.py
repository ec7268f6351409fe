"""The ledger: what is known of each unit now, and every transition between those states.

[Note: the life of a unit's weights]

    RELEASED ──start──▶ FETCHING ──finish──▶ RESIDENT ──evict──▶ RELEASED

A released parameter is a stride-0 NaN of its true shape and dtype; a resident one is a view of the unit's slot.
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
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from infinity.errors import InfinityError, ModelError, PlanError, SwapTimeoutError
from infinity.io.fork import in_forked_child, refuse_in_forked_child
from infinity.io.manifest import Manifest
from infinity.schedule import rng
from infinity.schedule.backing import Backing
from infinity.schedule.commits import Commits, Resumed
from infinity.schedule.device import Slot
from infinity.schedule.gradients import Gradients, GroupGradients, Place
from infinity.schedule.slots import Fetch, SlotPool, nan_placeholder, open_slots
from infinity.schedule.trace import Trace
from infinity.sizes import format_bytes
from infinity.state.records import Body, parse_body
from infinity.state.unit import Unit

logger = logging.getLogger(__name__)


class Residency(enum.Enum):
    RELEASED = "released"
    FETCHING = "fetching"
    RESIDENT = "resident"


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
    version: int = 0
    marks: dict[str, tuple[int, int]] = field(default_factory=dict)
    """For each parameter the (data pointer, version) infinity left it with."""


@dataclass
class Clock:
    """Cumulative times, in nanoseconds, of what the compute thread waited for or did besides computing."""

    fetch_wait_ns: int = 0
    gradient_ns: int = 0
    update_ns: int = 0


class Ledger:
    """Per-unit state machine. Every public method may be called from any thread.

    Invariant: `parameter.data` is the placeholder, or a view of the slot of a RESIDENT unit; nothing else.
    """

    def __init__(self, units: Sequence[Unit], parameters: Sequence[dict[str, nn.Parameter]], backing: Backing) -> None:
        self.backing = backing
        self.clock = Clock()
        self.steps = 0
        self.closed = False
        self.failed: InfinityError | None = None
        self._lock = threading.RLock()
        self.records = [UnitRecord(unit, named) for unit, named in zip(units, parameters, strict=True)]
        self.resident_at: dict[int, UnitRecord] = {}  # by the address of the slot
        self._slots: SlotPool = open_slots(backing)
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
            began = time.perf_counter_ns()
            self.gradients.of(place).land(place.spec, gradient, accumulate=accumulate)
            self.clock.gradient_ns += time.perf_counter_ns() - began

    def require(self, index: int) -> torch.Tensor:
        """The slot of unit `index`, uint8 on the device, with its weights in it."""
        with self._lock:
            record = self.records[index]
            if record.residency is not Residency.RESIDENT:
                self._bring(record)
            if record.slot is None:
                raise AssertionError(f"resident unit {record.unit.name} has no slot")
            return record.slot.tensor

    def end_backward(self) -> None:
        with self._lock:
            for record in self.records:
                record.held = False
            with self._spilling():
                self.gradients.backward_begins((), ())

    def reset(self) -> None:
        """Forget the uses and holds of a forward or backward that an exception ended."""
        with self._lock:
            for record in self.records:
                record.uses = 0
                record.held = False

    # -- what optim calls ---------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Bring everything to rest: no commit or fetch under way, gradients landed, parameters as infinity left them.

        Raises:
            SwapIOError: gradients were lost on their way to the store; after zero_grad the model can go on.
        """
        self.require_usable()
        self.require_untouched()
        with self._lock, self._committing():
            self.commits.take_up_hyperparameters(again=False)
            self.commits.step_begins()
            self.settle()
        with self._lock:
            self.end_backward()
            for record in self.records:
                if record.residency is Residency.FETCHING:
                    self._finish(record)
            with self._spilling():
                self.gradients.synchronize()
            self.backing.device.synchronize_uploads()

    def end_step(self, updated: Sequence[int]) -> None:
        """Units `updated` have new weights: what was saved of the old ones is void, copies on a GPU are stale."""
        with self._lock:
            for index in updated:
                record = self.records[index]
                record.version += 1
                if not self.backing.device.shares_memory and record.residency is Residency.RESIDENT:
                    self._evict(record)
            self._traces[True].close()
            self._training = True
            self.steps += 1
            if self.backing.store is not None:
                self.backing.store.step = self.steps
            self.commits.resumed = None
            if self.commits.due(self.steps):
                with self._committing():
                    self.commits.begin(self.steps)
            self._prefetch()

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
            yield
        except InfinityError as error:
            self.failed = self.failed or error
            raise

    def finish_commit(self) -> None:
        """Finish the commit under way, if there is one (Commits.finish).

        Raises:
            InfinityError: the generation does not exist, and the model refuses to go on.
        """
        with self._lock, self._committing():
            self.commits.finish()

    def commit(self) -> None:
        """Make a generation of the states as they are (Commits.commit). Raises as finish_commit."""
        with self._lock, self._committing():
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

    def resident_memory(self, index: int) -> torch.Tensor | None:
        """The slot of a unit when the update may work in it, else None."""
        record = self.records[index]
        if record.slot is None or not self.backing.device.shares_memory:
            return None
        return record.slot.tensor

    # -- checks -------------------------------------------------------------------------------------------------------

    def require_usable(self) -> None:
        """Raises ForkError in a forked child, the earlier error after a failed update, InfinityError once closed."""
        refuse_in_forked_child()
        if self.closed:
            raise InfinityError("this model was closed (infinity.close); load it again to go on")
        if self.failed is not None:
            raise InfinityError(f"the states are damaged by an earlier failure: {self.failed}") from self.failed

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
        if not record.unit.resident:
            self._trace.visit(record.unit.index)
        if record.residency is Residency.RELEASED:
            self._start_or_raise(record)
        self._prefetch()
        if record.residency is Residency.FETCHING:
            began = time.perf_counter_ns()
            self._finish(record)
            self.clock.fetch_wait_ns += time.perf_counter_ns() - began
        if record.slot is not None:
            record.slot.wait()

    def _start_or_raise(self, record: UnitRecord) -> None:
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
        while True:
            fetch = self._slots.start(self.backing.weights[record.unit.index])
            if fetch is not None:
                record.fetch, record.residency = fetch, Residency.FETCHING
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
            next_use = self._trace.next_use(record.unit.index)
            if next_use > farthest and not (record.slot is not None and record.slot.outstanding()):
                best, farthest = record, next_use
        return best

    def _prefetch(self) -> None:
        for record in self.records:
            if record.fetch is not None:
                record.fetch.advance()
        for distance, index in enumerate(self._trace.upcoming()):
            record = self.records[index]
            if record.residency is Residency.RELEASED and not self._start(record, distance):
                return

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
                record.fetch, record.residency = None, Residency.RELEASED
                raise
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
        slot, record.slot = record.slot, None
        record.residency = Residency.RELEASED
        with torch.inference_mode(False), torch.no_grad():
            self._hide(record)
        if slot is not None:
            del self.resident_at[slot.tensor.data_ptr()]
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
        with self._lock:
            self.closed = True
            try:
                if self.failed is None and not discard:
                    self.commits.end(self.steps, broken=broken or sys.exc_info()[0] is not None)
            finally:
                self.backing.close(discard=discard)
                self.failed = None  # its traceback holds the frames it passed, and with them the model
