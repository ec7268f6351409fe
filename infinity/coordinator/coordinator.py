"""One offloaded model: the façade that hooks, optimizers and use-cases call.

The coordinator makes no decisions: it takes the lock, and calls the parts below in the right order.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from infinity import _native
from infinity.base.accelerator import Accelerator
from infinity.base.fork import in_forked_child
from infinity.base.heap import HeapTrimmer
from infinity.base.interrupt import interrupts_deferred, uninterruptible
from infinity.base.timeline import Timeline
from infinity.coordinator.counters import ModelCounters
from infinity.coordinator.gradient_handle import GradientHandle
from infinity.coordinator.masters_before_write import MastersBeforeWrite
from infinity.coordinator.readers import ParameterReaders
from infinity.coordinator.transition import transition
from infinity.durable import rng
from infinity.durable.commits import Commits, facts_of
from infinity.durable.generation_body import GenerationBody
from infinity.durable.registered_optimizers import CommittedOptimizer, RegisteredOptimizers
from infinity.durable.tracked_objects import Stateful
from infinity.errors import (
    InfinityError,
    PeerError,
    ReleasedParameterError,
    SwapIOError,
    SwapTimeoutError,
)
from infinity.io.arena import ArenaRegion
from infinity.io.engine import Transfer
from infinity.io.generations import Generations
from infinity.io.store import Extent
from infinity.plan.plan import Plan
from infinity.sharded.rank_dependent_parts import (
    open_broadcast,
    open_fetch_rules,
    open_gradients,
    open_landing_queue,
    open_pool,
)
from infinity.state.codec import Codec, encode
from infinity.state.shard import Shard
from infinity.state.unit import ParameterPlace, Unit
from infinity.state.update_request import GroupUpdate
from infinity.tiers import state_parts
from infinity.tiers.activations import MovedTensor
from infinity.tiers.home import StateHome
from infinity.tiers.resources import ModelResources
from infinity.units.arrivals import BackwardPasses
from infinity.units.fetcher import Fetcher
from infinity.units.gradients import UnitGradients, groups_of
from infinity.units.health import ModelHealth
from infinity.units.parameters import ParameterViews
from infinity.units.pump import UpdatePump
from infinity.units.released_parameters import ParameterLender, released_class, way_out
from infinity.units.resident_gradients import ResidentSums
from infinity.units.speculation_choice import SpeculationChoice, StepPredictor, TimedSpeculationChoice
from infinity.units.speculative_update_buffers import SpeculativeUpdateBuffers
from infinity.units.speculative_updates import SpeculativeUpdates
from infinity.units.unit import OffloadedUnit
from infinity.units.update_queue import UpdateQueue
from infinity.units.weights import Residency

logger = logging.getLogger(__name__)


class CoordinatedOptimizer(CommittedOptimizer, StepPredictor, Protocol):
    """Optimizer with all methods that the coordinator calls."""


class Coordinator(ParameterLender):
    """One offloaded model: its parts, opened in the order of their dependencies.

    Every public method may be called from any thread. Signals such as Ctrl-C are deferred until the method ends
    (base/interrupt.py). The methods in the section "states, for use-cases" are an exception: their callers hold the
    lock (`locked`, `gathering`), or have exclusive use of the model, for example while the model is being opened.

    Attributes:
        units: the units, in the order of their indices.
        steps: number of completed optimizer steps.
        rewritten: names of parameters whose values were changed, other than by a step, after the model was filled.
        saved_wide: names of parameters that the script had in fp32. For these parameters, save_pretrained writes the
            masters instead of the weights.
        saved_from: for frozen parameters that the script had in fp32, functions that return the values for
            save_pretrained.
        masters: old masters of the weights that the script changed since the last step.
        keeps_room: whether frozen parameters keep space for their optimizer states, so that these parameters can be
            unfrozen later.
        copied_from: if this run began with the states of another run, the other run's id and its step; otherwise None.
        readers: threads and contexts that may read parameters now.
        staying: indices of the units that stay on the device while the model runs.
        unit_at: function that returns the unit whose slot is in a given storage (Fetcher.unit_at).
    """

    def __init__(
        self,
        units: Sequence[Unit],
        parameters: Sequence[dict[str, nn.Parameter]],
        resources: ModelResources,
        optimizers: RegisteredOptimizers[CoordinatedOptimizer],
        commits: Commits,
    ) -> None:
        self.resources = resources
        self.timeline = Timeline()
        self.world = resources.world
        self.health = ModelHealth(self.world)
        # these errors mean that a disk or a rank no longer answers
        self._failing_if_cut_off = self.health.failing(SwapTimeoutError, PeerError)
        self.readers = ParameterReaders()
        self.optimizers = optimizers
        self.commits = commits
        self.steps = 0
        self.keeps_room = False
        self.rewritten: set[str] = set()
        self.saved_wide: frozenset[str] = frozenset()
        self.saved_from: Mapping[str, Callable[[], torch.Tensor]] = {}
        self.masters = MastersBeforeWrite()
        self.copied_from: tuple[str, int] | None = None
        self._lock = threading.RLock()
        self.heap = HeapTrimmer(resources.plan.budgets.limits.ram)
        self._owners = {
            id(parameter): (unit.index, name)
            for unit, named in zip(units, parameters, strict=True)
            for name, parameter in named.items()
        }
        self.staying = frozenset(unit.index for unit in units if unit.stays)
        shards = [resources.plan.peers.cut.of(unit) for unit in units]
        released, shadows = released_class(self), _open_shadows(shards, resources)
        sums = ResidentSums(None if resources.device is None else resources.device.scratch)
        queue = open_landing_queue(resources)
        gradients = [UnitGradients(each.full, groups_of(each.local, resources, sums, queue)) for each in shards]
        self.units = [
            OffloadedUnit(
                each, ParameterViews(each.full, named, released), homes, of_unit, self.timeline, self.health, shadows
            )
            for each, named, homes, of_unit in zip(shards, parameters, resources.units, gradients, strict=True)
        ]
        self.shards = shards
        self.passes = BackwardPasses([each.arrivals for each in gradients])
        self.update_queue = UpdateQueue(resources, shadows)
        timed = None if resources.device is None else TimedSpeculationChoice()
        self.speculation_choice = SpeculationChoice(resources.plan.placement.updates.overlap, timed)
        pool, fetches = open_pool(resources, shards), open_fetch_rules(resources)
        self.fetcher = Fetcher(self.units, resources, self.update_queue, self.timeline, pool, fetches)
        self.unit_at = self.fetcher.unit_at
        self.pump = UpdatePump(resources, self.update_queue, commits, self.health, self.timeline)
        self._speculative_updates = SpeculativeUpdates(
            self.speculation_choice, self.update_queue, self.passes, commits, self.pump, self.units, shards
        )
        self.gradients = open_gradients(resources, shards, gradients, self._speculative_updates.before_landing)

    @property
    def plan(self) -> Plan:
        return self.resources.plan

    @property
    def closed(self) -> bool:
        return self.health.closed

    @property
    def accelerator(self) -> Accelerator | None:
        """Accelerator of the model; None when the model computes in host memory."""
        return None if self.resources.device is None else self.resources.device.accelerator

    @property
    def torch_device(self) -> torch.device:
        """Device on which the model computes."""
        return self.resources.torch_device

    @property
    def passing(self) -> bool:
        """Whether a forward or a backward is under way."""
        return self.readers.passing

    def give_masters(self, names: Iterable[str]) -> None:
        """Mark parameters as set by load_state_dict (MastersBeforeWrite.give)."""
        self.masters.give(names)

    def supersede(self) -> None:
        """Record that the model is being offloaded again (ModelHealth.supersede)."""
        self.health.supersede()

    def watch_readers(self, end_if_dead: Callable[[], None]) -> None:
        """Register a function that ends interrupted calls of another kind (ParameterReaders.watch)."""
        self.readers.watch(end_if_dead)

    def require_open(self) -> None:
        """Check that the model is not closed (ModelHealth.require_open)."""
        self.health.require_open()

    def fail(self, error: InfinityError) -> None:
        """Record a failure, after which every call raises an error (ModelHealth.fail)."""
        self.health.fail(error)

    def native_logs(self) -> tuple[_native.IOEngine, _native.UpdatePipeline]:
        """Return the recorder of transfers and the recorder of update tiles."""
        return self.resources.engine, self.resources.pipeline

    def extents(self) -> Iterator[Extent]:
        """Return the extents of all states in the store (ModelResources.extents)."""
        return self.resources.extents()

    def counters(self) -> ModelCounters:
        """Return the counters since the model was offloaded."""
        return ModelCounters(
            io=self.resources.engine.counters(),
            updates=self.resources.pipeline.counters(),
            stalled_ns=self.timeline.stalled_ns(),
            idle_s=self.resources.idle.seconds,
            speculation=replace(self.speculation_choice.counts),
            committed=self.commits.newest,
            arena_bytes=self.resources.arena.nbytes,
            engine=self.resources.engine.name,
        )

    def keep_room(self) -> None:
        """Keep space for the optimizer states of parameters that will be frozen, so that they can be unfrozen later."""
        self.keeps_room = True

    def why_not_reoffload(self) -> str:
        """Return why the model cannot be offloaded again without losing values; "" if it can be offloaded again."""
        with self._lock:
            if self.health.closed:
                return "it was closed"
            if not self.readers.nobody:
                return "its weights are being read: leave infinity.gathered, or let the forward end, first"
            if self.steps or self.copied_from is not None or self.commits.newest is not None:
                return "it was trained, or resumed from a run"
            if len(self.optimizers):
                return "an optimizer was made for it"
            if any(self.gradients.has(place) for _, place in self.places() if place.group.trainable):
                return "it has gradients: step, or call zero_grad(), first"
            return ""

    def save_wide(self, names: Iterable[str], frozen: Mapping[str, Callable[[], torch.Tensor]]) -> None:
        """Make save_pretrained write the masters of these parameters, which the script had in fp32.

        Args:
            names: names of the parameters.
            frozen: for other parameters that the script had in fp32, functions that return their values.
        """
        if all(shard.whole for shard in self.shards):  # otherwise a rank has only a part of each master
            self.saved_wide, self.saved_from = frozenset(names), frozen

    def rewrote(self, index: int, names: Iterable[str]) -> None:
        """Record that parameters of a unit got new values, other than by a step, after the model was filled."""
        self.rewritten.update(names)
        self.fetcher.weights_changed(self.units[index])  # tensors saved for backward have the old values
        self.commits.touched()

    def places(self) -> Iterator[tuple[nn.Parameter, ParameterPlace]]:
        for unit in self.units:
            for index, group in enumerate(unit.full.groups):
                for spec in group.specs:
                    yield unit.parameters[spec.name], ParameterPlace(unit.full, index, spec)

    def handle(self, parameter: nn.Parameter, place: ParameterPlace) -> GradientHandle:
        """Return the object to put into `parameter.grad` for a gradient that has landed."""
        return GradientHandle(parameter, weakref.ref(self), place)

    @uninterruptible
    def gradient_value(self, place: ParameterPlace) -> torch.Tensor:
        """Return a copy in RAM of a landed gradient, in the dtype of the gradient's buffer.

        Raises:
            NotAvailableError: there are several ranks, and this rank has only a slice of the gradient.
            DeviceError: the gradient was lost on the way from the device.
            SwapIOError: the gradient was lost on the way to or from the store.
        """
        with self._lock:
            self.health.require_open()
            self.units[place.unit.index].apply_update()  # the update reads the gradients that are copied to RAM here
            return self.gradients.value(place)

    def name_of(self, parameter: nn.Parameter) -> str:
        return self._owners[id(parameter)][1]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Return a context that holds the lock, for callers that make several changes."""
        with self._lock:
            yield

    def require_usable(self) -> None:
        """Check that the model can be used in this process.

        Raises:
            ForkError: this process is a forked child.
            SwapIOError: an update under way has failed.
            InfinityError: the model is closed, or an earlier update failed.
            PeerError: another rank failed.
        """
        self.health.require_usable()
        with self._lock, self.health.failing(SwapIOError):  # other threads change the list of updates under way
            self.update_queue.require_well()

    def _close_if_nobody_reads(self) -> None:
        if self.readers.nobody:
            self.fetcher.close_all()

    # -- step ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Return a context for one step: begin_step, then update or skip, then end_step.

        Ctrl-C is deferred until the context ends.
        """
        with interrupts_deferred(), self.timeline.stall("step"):
            yield

    @transition
    def begin_step(self, facts: Mapping[str, object], skip: str) -> str:
        """Prepare for a step, and agree on the step with the other ranks.

        On return, all gradients have landed and no update, commit or fetch is under way, except speculative updates.
        The method checks that no parameter was changed outside infinity. Every rank then knows which parameters have a
        gradient on any rank.

        Args:
            facts: JSON values that must be the same on all ranks. The keys name the values in error messages.
            skip: reason why this rank wants the step to change nothing; "" without a reason.

        Returns:
            Reason why the step must change nothing, from this or another rank; "" when no rank has a reason.

        Raises:
            SwapIOError: gradients were lost on their way to the store; the model is usable again after zero_grad.
            PeerError: the ranks do not take the same step, or a rank failed.
        """
        self.require_usable()
        self.readers.step_begins()
        self._close_if_nobody_reads()
        self.fetcher.require_untouched()
        with self._failing_if_cut_off, self.timeline.stall("gradient"):
            self.resources.idle.begins()
            self.gradients.synchronize()
        self._rest_for_step()
        self.gradients.drop_cleared(self.places)
        with self.health.failing(PeerError), self.timeline.stall("gradient"):
            decided = self.gradients.decide({**facts, "the step": self.steps + 1}, skip, self.commits.payload())
        with self.pump.committing():
            self.commits.receive(decided.payloads, self.steps + 1)
            self.pump.finish_recovery()
        self._show(self.gradients.elsewhere)
        return decided.skip

    def _show(self, names: Set[str]) -> None:
        """Set `.grad` of the parameters that have a gradient on any rank."""
        if not names:
            return
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, place in self.places():
                if place.group.trainable and place.spec.name in names and parameter.grad is None:
                    parameter.grad = self.handle(parameter, place)

    def _rest_for_step(self) -> None:
        with self.pump.committing():
            self.pump.finish_updates()
            self.optimizers.restore_hyperparameters(self.commits.resumed, again=False)
        self.pump.make_way()
        with self._failing_if_cut_off:
            self.fetcher.hold(())
            self.fetcher.finish_fetches()
            self.resources.synchronize_uploads()

    @transition
    def gradient_sum_squares(self, places: Iterable[ParameterPlace]) -> tuple[float, str]:
        """Return the sum of squares of landed gradients, and the first non-finite gradient's name ("" if none)."""
        self.gradients.synchronize()
        return self.gradients.sum_squares(places)

    def gradient_is_zero(self, place: ParameterPlace) -> bool:
        """Return whether a parameter has a gradient that arrived as zeros without memory."""
        return place.spec.name in self.gradients.of(place).zeros

    @transition
    def update(self, requests: Mapping[tuple[int, int], GroupUpdate]) -> None:
        """Begin the updates of a decided step.

        Speculative updates that match the step continue; all other speculative updates are undone. All missing updates
        begin. A later use of a unit waits for that unit's update only.

        Args:
            requests: requested update of each (unit index, group index).

        Raises:
            InfinityError: the step was begun and not finished; every later call raises.
        """
        by_unit: dict[int, dict[int, GroupUpdate]] = {}
        for index, group_index in sorted(requests):
            by_unit.setdefault(index, {})[group_index] = requests[index, group_index]
        everywhere = [self.units[index] for index in by_unit]
        mine = {index: self.shards[index].localize(wanted) for index, wanted in by_unit.items()}
        by_unit = {index: wanted for index, wanted in mine.items() if wanted}
        wrong = self._speculative_updates.wrong(by_unit)
        self.fetcher.end_iteration()
        with self._failing_for_good():
            begun = self.update_queue.decide(
                by_unit, self.fetcher.order(), self.steps + 1, committed=self.commits.due(self.steps + 1)
            )
        self.masters.forget()
        self._speculative_updates.step_decided(begun, wrong, by_unit, self.optimizers.sole)
        with self._failing_if_cut_off:
            self.fetcher.updates_decided(begun, everywhere)

    @contextmanager
    def _failing_for_good(self) -> Iterator[None]:
        """Return a context in which any exception is recorded as a failure of the model: the step was not finished."""
        try:
            yield
        except SwapIOError as error:
            self.health.fail(error)
            raise
        except BaseException as error:
            self.health.fail(InfinityError(f"a step was begun and not finished: {error}"))
            raise

    @transition
    def skip(self) -> None:
        """End a step that changes nothing, and undo speculative updates."""
        self.fetcher.end_iteration()
        self._speculative_updates.drop()

    @transition
    def end_step(self) -> None:
        """End a step whose updates are under way. With `overlap: off`, wait for all updates.

        Raises:
            SwapIOError: an update failed; the states are partly updated, and every later call raises.
        """
        self.passes.step_ended()
        self.fetcher.begin_pass(training=True)
        self.at_step(self.steps + 1)
        self.commits.step_done()
        if self.speculation_choice.mode == "off":
            self.pump.finish_updates()
        self.pump.begin_commit(self.steps)
        self.timeline.end_step(self.steps)
        with self._failing_if_cut_off:
            self.fetcher.prefetch()
        self.resources.idle.ends()

    def at_step(self, step: int, run: str = "") -> None:
        """Record that the current states are the states after optimizer step `step`.

        Args:
            step: number of completed steps.
            run: id of the run that made the states; "" for this run.
        """
        self.steps = step
        self.copied_from = (run, step) if run else self.copied_from
        if self.resources.store is not None:
            self.resources.store.begin_step(step)

    # -- forward ------------------------------------------------------------------------------------------------------

    @transition
    def begin_root_forward(self, *, training: bool, graph: Callable[[], object] = lambda: None) -> None:
        """Begin a forward of the outermost module.

        Before a training forward, the values of the tracked objects are recorded for the last step's commit, if the
        training loop is known to be at the beginning of an iteration. Raises the errors of `require_usable`,
        `Fetcher.require_untouched` and `finish_commit`.

        Args:
            training: whether the forward is a training forward; otherwise it is an evaluation.
            graph: function that returns None once the tensors that the forward saved for backward are freed, and an
                object before.
        """
        self.require_usable()
        self.readers.forget_dead_others()
        self.fetcher.require_untouched()
        if training:
            self._freeze_commit(graph)
            self.pump.advance()
            self.commits.rewind()
        else:
            self.commits.tracking.evaluated()
        self.fetcher.begin_pass(training=training)

    def _freeze_commit(self, graph: Callable[[], object]) -> None:
        with self.pump.committing():
            self.optimizers.restore_hyperparameters(self.commits.resumed, again=False)
            self.commits.forward_begins(graph)
            if self.speculation_choice.mode == "off" and self.commits.frozen:
                self.commits.finish()

    @transition
    def begin_use(self, index: int) -> None:
        """Begin a forward that reads unit `index`: on return the unit's parameters have their values."""
        unit = self.units[index]
        unit.weights.use()
        try:
            self._fetch(unit)
        except BaseException:
            unit.weights.unuse()
            raise

    def _fetch(self, unit: OffloadedUnit) -> None:
        self.require_usable()
        self.pump.advance()
        self.heap.check()
        with self._failing_if_cut_off:
            self.fetcher.fetch(unit)

    @transition
    def expect(self, indices: Iterable[int], among: Collection[int]) -> None:
        """Fetch these units next, ahead of their uses, and none of the other units in `among` (VisitTrace.expect)."""
        self.fetcher.expect(indices, among)

    @transition
    def end_use(self, index: int) -> None:
        """End a forward that reads unit `index`, after the forward returned or raised."""
        self.fetcher.unuse(self.units[index])

    @transition
    def forget_uses(self) -> None:
        """Stop keeping units for a forward or backward that an exception ended."""
        self.fetcher.forget_uses()
        self.passes.interrupted()

    @transition
    def begin_reading(self, end_if_dead: Callable[[], None]) -> None:
        """Allow reads of parameters, because a forward begins. For the argument see ParameterReaders.begin_reading."""
        self.readers.begin_reading(end_if_dead)

    @transition
    def end_reading(self) -> None:
        self.readers.end_reading()
        try:
            if self.resources.activations is not None and not self.health.closed:
                with self._failing_if_cut_off:
                    self.resources.activations.end_forward()
        finally:
            self._close_if_nobody_reads()

    @property
    def moves_activations(self) -> bool:
        """Whether tensors that a forward keeps for its backward may rest in RAM or on NVMe (`keep_activation`)."""
        return self.resources.activations is not None

    @transition
    def keep_activation(self, tensor: torch.Tensor) -> MovedTensor | None:
        """Keep a tensor that autograd saves in the tier of activations. Return None if the tensor stays where it is.

        Raises:
            SwapIOError: a disk has no room for the tensor.
        """
        tier = self.resources.activations
        if tier is None or self.health.closed:
            return None
        with self._failing_if_cut_off, self.timeline.stall("activation"):
            return tier.keep(tensor)

    @transition
    def activation(self, moved: MovedTensor) -> torch.Tensor:
        """Return a tensor that `keep_activation` moved, for this thread's stream.

        Raises:
            InfinityError: the model is closed.
            SwapIOError: the tensor was lost.
        """
        self.health.require_open()
        tier = self.resources.activations
        if tier is None:
            raise AssertionError("a moved tensor without its tier")
        with self._failing_if_cut_off, self.timeline.stall("activation"):
            return tier.back(moved)

    @transition
    def module_call_ended(self) -> None:
        """Forbid reads of all parameters after a call of a module, unless a pass or a context may still read
        parameters.

        The module may have been called outside any forward.
        """
        self._close_if_nobody_reads()

    @transition
    def forget_dead(self) -> None:
        """End the calls that an exception interrupted before they could end themselves.

        This method is called before gathering, before a step and before the model is closed. No forward may be in
        progress when it is called.
        """
        self.readers.forget_dead()

    # -- backward -----------------------------------------------------------------------------------------------------

    @transition
    def begin_backward(self, *, spanning: int = 0) -> None:
        """Begin an outermost backward pass. The caller calls this method just before the pass produces its first
        gradient.

        Args:
            spanning: number of micro-batches, if all micro-batches go through a unit before the next unit
                (`micro_batch_passed`). Several passes of autograd then count as one spanning pass. 0: an ordinary pass.
        """
        self.readers.backward_begins()
        self.gradients.drop_cleared(self.places)
        self.passes.begin(spanning=spanning)
        self.gradients.begin_pass()
        self.pump.advance()
        if self.health.failure is None and not self.health.closed:
            self._speculative_updates.backward_begins(self.fetcher.order, self.optimizers.sole, self.steps + 1)

    @transition
    def begin_units_backward(self, indices: Sequence[int]) -> None:
        """Fetch units for their backward, and keep the units until the backward of other units begins."""
        self.readers.backward_begins()
        self.pump.advance()
        left = self.fetcher.hold(indices)
        with self._failing_if_cut_off:
            if self.resources.activations is not None and not self.health.closed:
                self.resources.activations.advance()
            if not self.passes.spanning:
                self.gradients.backward_left(left)
                self._completed(self.gradients.take_completed())
            self.gradients.backward_begins(indices, self.staying)
        for index in indices:
            self._fetch(self.units[index])

    def weights_view(self, index: int) -> torch.Tensor:
        """Return a view of the slot of unit `index` with the unit's weights, uint8 on the device.

        The view keeps the slot alive.
        """
        unit = self.units[index]
        with self._lock:
            if unit.weights.residency is not Residency.RESIDENT:
                self._require_absent(unit)
            slot = unit.weights.require_slot()
            slot.wait()  # the current stream may differ from the stream for which the unit was fetched
            return slot.tensor.view(-1)

    @transition
    def _require_absent(self, unit: OffloadedUnit) -> None:
        self._fetch(unit)

    @transition
    def set_gradient(self, place: ParameterPlace, gradient: torch.Tensor, *, accumulate: bool) -> None:
        """Land a parameter's gradient that was set by hand (GroupGradients.land).

        Raises:
            InfinityError: the model is closed.
            NotAvailableError: there are several ranks, and the other ranks would not know about the gradient.
        """
        self.gradients.require_settable(place)
        self._set_by_hand(place)
        self._land(place, gradient, accumulate=accumulate)

    def _set_by_hand(self, place: ParameterPlace) -> None:
        """Undo speculation that used this gradient, because the gradient is now set, changed or cleared by hand."""
        if self.units[place.unit.index].speculative is not None:
            self._undo_speculation("a gradient was set, changed or cleared by hand")

    def _undo_speculation(self, cause: str) -> None:
        self._speculative_updates.undo(cause, "Set overlap: before_forward if this happens often.")

    @transition
    def land_gradient(
        self,
        parameter: nn.Parameter,
        place: ParameterPlace,
        gradient: torch.Tensor,
        handle: GradientHandle,
        *,
        accumulate: bool,
    ) -> None:
        """Land a piece of a parameter's gradient that comes from backward, and set the parameter's `.grad` to `handle`.

        In an ordinary pass, the unit's gradients count as complete after as many pieces as in the pass before. Complete
        gradients are sent from the device. The unit's update may begin once its gradients are complete on all ranks.
        Raises the errors of GroupGradients.land.
        """
        index = place.unit.index
        self._land(place, gradient, accumulate=accumulate)
        # set before the update begins, because the update covers the parameters with a handle
        parameter.grad = handle.renewed()
        if self.units[index].gradients.arrivals.came(place.spec.name) and not self.passes.spanning:
            with self._failing_if_cut_off:
                self._completed(self.gradients.complete(index))

    def _land(self, place: ParameterPlace, gradient: torch.Tensor, *, accumulate: bool) -> None:
        self.health.require_open()
        unit = self.units[place.unit.index]
        self.commits.tracking.gradients_came()
        with self._failing_if_cut_off:
            self.gradients.before_landing(unit.index)
            with self.timeline.stall("gradient", unit.name):
                more = self.passes.spanning > 1
                self.gradients.of(place).land(place.spec, gradient, accumulate=accumulate, more=more)

    @transition
    def micro_batch_passed(self, indices: Sequence[int], *, complete: Collection[int]) -> None:
        """End the backward of one micro-batch through these units, in a spanning pass (see begin_backward).

        Args:
            indices: units that the micro-batch has passed.
            complete: units among `indices` that now have the gradients of all micro-batches.
        """
        with self._failing_if_cut_off:
            self._completed(self.gradients.micro_batch_passed(indices, complete))

    def _completed(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._speculative_updates.gradients_complete(self.units[index], self.optimizers.sole, self.steps + 1)

    @transition
    def end_backward(self, *, outermost: bool) -> None:
        """End a backward pass.

        Args:
            outermost: whether the pass was outside of all other backward passes.
        """
        left = self.fetcher.hold(())
        with self._failing_if_cut_off:
            if not self.passes.spanning:
                self.gradients.backward_left(left)
            if outermost:
                self.gradients.pass_ended()
                self._show(self.gradients.elsewhere)
            self._completed(self.gradients.take_completed())
        if outermost:
            self.passes.end()
        self.gradients.send()
        with self._failing_if_cut_off:
            self.gradients.backward_begins((), ())
        if outermost:
            self.readers.backward_ends()
            self._close_if_nobody_reads()

    @transition
    def has_gradient(self, place: ParameterPlace) -> bool:
        return self.gradients.has(place)

    @transition
    def drop_gradient(self, place: ParameterPlace) -> None:
        """Forget a gradient that no step will use."""
        if self.gradients.has(place):
            self._set_by_hand(place)
        self.gradients.of(place).drop(place.spec.name)

    @transition
    def zero_grad(self, parameters: Iterable[tuple[nn.Parameter, ParameterPlace]]) -> None:
        """Forget gradients, set `.grad` to None, and undo speculative updates."""
        if self.update_queue.speculative:
            self._undo_speculation("the gradients were dropped without a step")
        with torch._C.DisableTorchFunctionSubclass():  # a released parameter would answer each .grad in Python
            for parameter, place in parameters:
                if place.group.trainable:
                    self.gradients.of(place).drop(place.spec.name)
                parameter.grad = None
        self.passes.forget()
        if not any(group.present for unit in self.units for group in unit.gradients.groups.values()):
            self.commits.tracking.gradients_gone()

    @property
    def run(self) -> str:
        """Id of the run (the run id of the store); "" without a store."""
        return "" if self.resources.store is None else self.resources.store.run

    def is_at(self, run: str, step: int) -> bool:
        """Return whether the states belong to a run after a step, or are an unchanged copy of such states."""
        return step == self.steps and (run == self.run or (run, step) == self.copied_from)

    # -- optimizers and commits ---------------------------------------------------------------------------------------

    def track(self, objects: Sequence[Stateful], named: Mapping[str, Stateful]) -> int:
        """Keep the state of these objects in every generation (infinity.track)."""
        drawn = rng.snapshot()
        resumed = self.commits.resumed
        self.commits.track(objects, named)
        self.restore_hyperparameters()
        # The methods of tracked objects may draw random numbers. Tracking and resuming must not change a run's numbers.
        rng.restore(drawn if resumed is None else resumed.body.rng)
        return self.steps

    @transition
    def enter(self, optimizer: CoordinatedOptimizer) -> None:
        """Register an optimizer, so that every commit keeps its state (RegisteredOptimizers.enter)."""
        self.optimizers.enter(optimizer, self.commits.resumed)

    @transition
    def restore_hyperparameters(self) -> None:
        """Restore the hyperparameters of a resumed run again, for example learning rates."""
        self.optimizers.restore_hyperparameters(self.commits.resumed, again=True)

    @transition
    def require_disjoint(self, optimizer: object, names: set[str]) -> None:
        """Check that no other optimizer has some of these parameters (RegisteredOptimizers.require_disjoint)."""
        self.optimizers.require_disjoint(optimizer, names)

    @transition
    def require_entered(self, optimizer: object) -> None:
        """Check that no other optimizer has replaced this one (RegisteredOptimizers.require_entered)."""
        self.optimizers.require_entered(optimizer)

    @transition
    def accumulating(self) -> AbstractContextManager[None]:
        """Return a context for backward passes that are not the last pass before a step."""
        self.require_usable()
        return self.passes.accumulating()

    @transition
    def finish_updates(self) -> None:
        """Wait until the updates of the last step are finished.

        Raises:
            InfinityError: an update or a commit failed.
        """
        self.require_usable()
        self.pump.finish_updates()

    @transition
    def finish_commit(self) -> None:
        """Finish the commit under way, if there is one (Commits.finish).

        Raises:
            InfinityError: the generation was not made, and the model refuses further calls.
        """
        self.pump.finish_commit()

    @transition
    def commit(self) -> None:
        """Make a generation of the current states. Raises the errors of finish_commit and Commits.require_possible."""
        self.commits.require_possible(self.steps)
        self._commit()

    def share_buffers(self, buffers: Mapping[str, torch.Tensor], *, fresh: bool) -> None:
        """Set the buffers of a new run to the buffers of rank 0. All ranks call this.

        Args:
            buffers: the buffers, by name.
            fresh: whether the run is new. If not, the buffers come from a generation, and this method does nothing.
        """
        if fresh:
            broadcast = open_broadcast(self.world)
            broadcast.take("comparing buffers", buffers)
            broadcast.say()

    @transition
    def end_iteration(self) -> None:
        """End an iteration of the loop. If a commit is under way on any rank, finish it on all ranks.

        All ranks call this. Raises the errors of finish_commit.
        """
        if any(self.world.tell("the end of an iteration", self.commits.under_way)):
            self._commit(begun_only=True)

    def _commit(self, *, begun_only: bool = False) -> None:
        with self.pump.committing():
            self._wait_until_idle()
            self.pump.finish_recovery()
            if self.commits.under_way or not begun_only:  # otherwise this rank has already made the generation
                self.commits.commit(self.steps)
            self.commits.agree("committing", self.steps + 1)
            self.commits.require_made(self.steps)

    def _wait_until_idle(self) -> None:
        self.pump.finish_updates()
        self._speculative_updates.drop()  # speculative updates write to places that a commit may write to
        self.update_queue.ahead.drop(but=())

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Return a context in which states may be written to their destinations. All ranks call this.

        If the training loop has reached the beginning of an iteration since the step, a commit under way is finished
        before the context. Otherwise the commit is withdrawn, and begun again after the context. Raises the errors of
        finish_commit.
        """
        self.require_usable()
        with self._lock:
            self._wait_until_idle()
            with self.pump.committing():
                self.commits.write_begins()
            gave_way = self.pump.make_way()
            self.commits.agree("writing weights", self.steps + 1)  # the writes reuse places of older generations
            try:
                yield
            finally:
                if gave_way:
                    self.commits.begin_again(self.steps)

    @transition
    def require_untouched(self) -> None:
        """Check that no script changed a parameter outside infinity, if nothing may read parameters now.

        Raises the errors of Fetcher.require_untouched. During a pass and in infinity.gathered, nothing is checked,
        because the script may then change the values of parameters.
        """
        if self.readers.nobody:
            self.fetcher.require_untouched()

    @transition
    def set_to_itself(self, place: ParameterPlace) -> None:
        """Record that torch has set a parameter to itself (ParameterViews.set_to_itself)."""
        self.units[place.unit.index].views.set_to_itself(place.spec.name)

    # -- reading parameters -------------------------------------------------------------------------------------------

    @contextmanager
    def taking(self, indices: Iterable[int]) -> Iterator[None]:
        """Return a context in which these units have their values and are not evicted."""
        taken: list[int] = []
        try:
            self._take(indices, taken)
            yield
        finally:
            self._give_back(taken)

    @transition
    def _take(self, indices: Iterable[int], taken: list[int]) -> None:
        """Begin to use units. The index of each unit that is now in use is appended to `taken`, even if a later unit
        raises an error."""
        for index in indices:
            self.begin_use(index)
            taken.append(index)

    @transition
    def _give_back(self, taken: list[int]) -> None:
        while taken:
            self.end_use(taken.pop())
        self._close_if_nobody_reads()

    @contextmanager
    def gathering(self, *, grads: bool = False) -> Iterator[None]:
        """Return a context in which parameters of every unit may be read (ParameterReaders.gathering)."""
        try:
            with self.readers.gathering(grads=grads):
                yield
        finally:
            self.module_call_ended()

    @contextmanager
    def lend(self, parameters: Sequence[nn.Parameter], use: str) -> Iterator[None]:
        """Return a context in which these parameters have their values (released_parameters.py: ParameterLender)."""
        indices = list(dict.fromkeys(self._owners[id(parameter)][0] for parameter in parameters))
        if not self.readers.may_read:
            raise ReleasedParameterError(
                f"{use} uses parameter '{self.name_of(parameters[0])}' outside the model's forward, while the values "
                f"of unit '{self.units[indices[0]].name}' are in the store. {way_out(use)}"
            )
        with self.taking(indices):
            yield

    def copy_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return a copy of a parameter's values in RAM (ParameterLender.copy_of), even while no pass is under way."""
        self.forget_dead()
        with torch.no_grad(), self.gathering(), self.taking([self._owners[id(parameter)][0]]):
            return parameter.detach().to("cpu", copy=True)

    # -- states, for use-cases ----------------------------------------------------------------------------------------

    @property
    def transfers(self) -> ArenaRegion:
        """Memory for fetched weights. While the model is filled, before the first fetch, the units pass through it."""
        return self.resources.transfers

    def idle_memory(self) -> memoryview:
        """Return memory that no update uses before the first step."""
        return self.resources.staging.view()

    @property
    def generations(self) -> Generations | None:
        """Generations of the run; None when the run keeps no generations."""
        return self.resources.generations

    @property
    def directories(self) -> list[Path]:
        """Directories of the store; empty without a store."""
        store = self.resources.store
        return [] if store is None else [directory.path for directory in store.directories]

    def facts(self) -> dict[str, Any]:
        """Return the facts about the states that must be equal in a run that resumes them (commits.facts_of)."""
        return facts_of(self.resources)

    def adopt(self) -> None:
        """Adopt the states in the store: read the states that are kept in RAM, and make the parameters placeholders.

        Raises:
            SwapIOError: a read failed.
        """
        self.resources.read_homes()
        self.fetcher.adopt()

    def filled(self) -> None:
        """Record that all states have their first values. Other ranks may use this rank's weights from now on."""
        self.fetcher.filled()

    def resume(self, step: int, run: str, body: GenerationBody) -> None:
        """Continue a run from one of its generations. The model already has the states of the generation."""
        self.at_step(step, run)
        self.commits.resume(step, body)

    def read_part(self, home: StateHome, begin: int, nbytes: int) -> torch.Tensor:
        """Return a range of bytes of a state at home (state_parts.read_part)."""
        return state_parts.read_part(self.resources, home, begin, nbytes)

    def write_parts(self, home: StateHome, new: Mapping[int, torch.Tensor]) -> None:
        """Write ranges of bytes to a state at home (state_parts.write_parts)."""
        state_parts.write_parts(self.resources, home, new)

    def write_home(
        self, home: StateHome, data: memoryview, *, at: int = 0, io_class: _native.IOClassName = "weights"
    ) -> Transfer:
        """Start to write a state to its home in the store, from byte offset `at` on."""
        return self.resources.require_store().write(home.stored(), data, at=at, io_class=io_class)

    def encode(self, name: str, values: torch.Tensor, codec: Codec, into: memoryview) -> None:
        """Encode the values of a frozen parameter (codec.encode)."""
        encode(name, values, codec, into, self.resources.pool)

    def synchronize_uploads(self) -> None:
        """Wait for the uploads in flight (ModelResources.synchronize_uploads)."""
        self.resources.synchronize_uploads()

    def residual_after_write(
        self, name: str, old: torch.Tensor, new: torch.Tensor, residual: torch.Tensor, given: torch.Tensor
    ) -> torch.Tensor:
        """Return the residual of changed weights (MastersBeforeWrite.after_write)."""
        return self.masters.after_write(name, old, new, residual, given)

    def write_ended(self) -> None:
        """Forget which parameters load_state_dict set, after a write (MastersBeforeWrite.written)."""
        self.masters.written()

    # -- the end ------------------------------------------------------------------------------------------------------

    @uninterruptible
    def close(self, *, discard: bool = False, broken: bool = False) -> None:
        """Commit the uncommitted states, and release all resources. The swap file is removed unless it has generations.

        Idempotent; does nothing in a forked child.

        If an exception ends the program, states are committed only if the training loop is known to be at the beginning
        of an iteration. Otherwise a loop that stopped between optimizer.step() and scheduler.step() would commit a
        state that no uninterrupted run reaches.

        Args:
            discard: commit nothing, and remove the generations, too. Several ranks remove their generations only after
                every rank has called this method.
            broken: whether an exception ended the program.

        Raises:
            InfinityError: the last generation could not be made. All resources are released nevertheless.
            PeerError: with `discard`, another rank does not call this method; the generations are not removed.
        """
        if self.health.closed or in_forked_child():
            return
        broken = broken or sys.exc_info()[0] is not None
        if broken:
            self.world.fail(sys.exc_info()[1] or getattr(sys, "last_value", None) or SystemExit())
        self.readers.forget_dead()
        alone = self._missing_rank() if discard else None
        if alone is not None:
            logger.warning("the generations stay in the swap directory, because not all ranks remove them: %s", alone)
        failed = self.health.failure is not None
        with self._lock:
            self.health.close()
            try:
                if not failed and not discard:
                    self._commit_the_end(broken=broken)
            finally:
                self.commits.tracking.forget()
                self.resources.close(discard=discard and alone is None)
                self.health.forget()
            if not failed and self.fetcher.release_all():
                self.resources.give_back()
        if alone is not None and not broken and not failed:
            raise alone

    def _missing_rank(self) -> PeerError | None:
        """Return the error of a rank that does not join; None when all ranks are about to remove their generations."""
        try:
            self.world.tell("closing the model with discard=True", None)
        except PeerError as error:
            return error
        return None

    def _commit_the_end(self, *, broken: bool) -> None:
        self._speculative_updates.drop()
        self.update_queue.ahead.drop(but=())
        self.pump.finish_updates()
        self.commits.end(self.steps, broken=broken)


def _open_shadows(shards: Sequence[Shard], resources: ModelResources) -> SpeculativeUpdateBuffers:
    in_ram = [shards[index].local for index in sorted(resources.plan.placement.weights.in_ram)]
    sizes = [unit.home_bytes for unit in in_ram if unit.trained_whole]
    return SpeculativeUpdateBuffers(resources.resting, resources.pipeline, resources.plan.budgets.shadow_bytes, sizes)
