"""Commits: the times at which generations are made, and the values that generations keep in addition to the states.

[Note: when a commit is begun and when it is finished]
A commit is begun when the step is decided. The body of a generation is the values that it keeps in addition to the
states. The top of the loop is the beginning of an iteration of the training loop. When the next training forward
begins, the body is frozen, with the states that the tracked objects had at the top of the loop (see
tracked_objects.py). Meanwhile, the updates of the step continue. After the last update has finished, the commit writes
the states in RAM that no update wrote to the store, and starts the fdatasync. When the fdatasync is done, the manifest
is written and the commit is finished. The commit is finished at the latest before the next step writes anything. A call
of infinity.commit and the end of the run also finish the commit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from infinity.base.interrupt import interrupts_deferred
from infinity.durable import rng
from infinity.durable.commit_pace import CommitSchedule
from infinity.durable.generation_body import GenerationBody, ModelRecord
from infinity.durable.generation_maker import GenerationMaker
from infinity.durable.registered_optimizers import RegisteredOptimizers
from infinity.durable.resumed_generation import ResumedGeneration
from infinity.durable.tracked_objects import LoopState, Stateful, TrackedObjects
from infinity.errors import ConfigError, InfinityError, NotAvailableError, SwapIOError
from infinity.io import document
from infinity.io.engine import BackgroundWork, Transfer
from infinity.io.generations import Generations
from infinity.io.store import wait_all
from infinity.tiers.resources import ModelResources

logger = logging.getLogger(__name__)


class Commit:
    """A generation that is being made. Its body is frozen, and its states are synced, in any order.

    Attributes:
        body: values that the generation keeps in addition to the states; None until the body is frozen.
        sync: fdatasync of the swap files after all writes; None until all updates of the step are finished.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.body: dict[str, Any] | None = None
        self.sync: Transfer | None = None

    def freeze(self, body: dict[str, Any]) -> None:
        if self.body is not None:
            raise AssertionError(f"generation {self.step} was frozen already")
        self.body = body

    def synced(self, sync: Transfer) -> None:
        if self.sync is not None:
            raise AssertionError(f"generation {self.step} was synced already")
        self.sync = sync

    @property
    def ready(self) -> bool:
        """Whether finishing the commit would only have to write small files."""
        return self.body is not None and self.sync is not None and self.sync.done()


class Commits:
    """The generations of a run.

    Life cycle of each generation: begin() → forward_begins() → write_remaining() → finish(). forward_begins() and
    write_remaining() may be called in any order, or not at all, because finish() does the work of a missing call.
    Before finish(), all updates of the step must be finished.

    Attributes:
        tracking: the objects that were passed to infinity.track.
        resumed: the generation from which the run was resumed; None after the first step, or if the run was not
            resumed.

    Args:
        resources: the plan, the store, the units and the generations.
        optimizers: optimizers of the model.
        maker: object that makes the generations.
        model: facts about the model that a reader of the states needs.
        buffers: function that returns the model's persistent buffers.
    """

    def __init__(
        self,
        resources: ModelResources,
        optimizers: RegisteredOptimizers[Any],
        maker: GenerationMaker,
        model: ModelRecord,
        buffers: Callable[[], dict[str, Any]],
    ) -> None:
        self._resources = resources
        self._optimizers = optimizers
        self._model = model.model_dump()
        self._maker = maker
        self._pace = CommitSchedule(resources.plan.placement.commits, agreed=maker.agrees_on_pace)
        self._commit: Commit | None = None
        self._owed = False
        self._touched = False  # states were written outside of a step after the newest generation was begun
        self._waited = False  # after the commit was begun, a forward began before the loop reached its top
        self._several_steps_an_item = False
        self._closing = False
        self.tracking = TrackedObjects(optimizers.checkpoint, buffers)
        self.resumed: ResumedGeneration | None = None

    def track(self, objects: Sequence[Stateful], named: Mapping[str, Stateful]) -> None:
        """Track objects. The arguments are the same as for infinity.track."""
        resumed = self.resumed
        self.tracking.take(objects, named, (lambda *_: None) if resumed is None else resumed.give_back)

    def resume(self, step: int, body: GenerationBody) -> None:
        """Record that the run is resumed from the generation of `step`."""
        self.resumed = ResumedGeneration(step, body)

    def step_done(self) -> None:
        """Record that a step was done. The run has then left the generation from which it was resumed."""
        self.resumed = None
        # With several optimizers, a step uses the gradients of only one. The other gradients end with zero_grad.
        if len(self._optimizers) <= 1:
            self.tracking.gradients_gone()

    # -- generations --------------------------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Return whether optimizer step `step`, counted from 1, is committed."""
        return self._resources.generations is not None and (self._owed or self._pace.due(step))

    @property
    def under_way(self) -> bool:
        return self._commit is not None

    @property
    def newest(self) -> int | None:
        """The step of the newest durable generation; None if there is no durable generation."""
        return None if self._resources.generations is None else self._resources.generations.newest

    def begin(self, step: int) -> None:
        """Begin the generation of `step`, whose states are the states after this step.

        Raises:
            ConfigError: the state of a tracked object cannot be kept.
        """
        if self._commit is not None and self._commit.step == step:
            return
        self.tracking.step_ended()
        self._learn()
        self.begin_again(step)

    def skip_commit(self) -> None:
        """Record that the step that was just done is not committed."""
        if self._resources.generations is not None:
            self.tracking.step_passed()

    def begin_again(self, step: int) -> None:
        """Begin the generation of `step` when no step has just ended.

        This is for a commit that was dropped before a write, and for a step that was not committed. The loop is still
        at the same place, so the states of the tracked objects are not recorded again.
        """
        self._commit, self._owed, self._touched = Commit(step), False, False

    def _learn(self) -> None:
        """Notice a loop that makes several steps for one item of its loader.

        In such a loop, the next step begins while a commit waits for the top of the loop.
        """
        if self._owed and self._waited and len(self._optimizers) == 1 and not self._several_steps_an_item:
            self._several_steps_an_item = True
            logger.warning(
                "the loop makes several optimizer steps for one item of the loader that it tracks: a run that resumes "
                "from a generation between these steps is not exact. Set commit_every to a multiple of the steps per "
                "item, or to a large number and call infinity.commit(model) at the end of an iteration"
            )
        self._waited = False

    def write_remaining(self) -> None:
        """Write the states that no update of the step has written, and start the fdatasync.

        All updates of the step must be finished. Only the first call has an effect.

        Raises:
            SwapIOError: the device failed.
        """
        if self._commit is not None and self._commit.sync is None:
            with self._pace.working():
                self._write_dirty()
            self._commit.synced(self._resources.require_store().sync())

    @property
    def frozen(self) -> bool:
        """Whether the body of the current commit is frozen."""
        return self._commit is not None and self._commit.body is not None

    @property
    def ready(self) -> bool:
        """Whether finish() would only have to write small files."""
        return self._commit is not None and self._commit.ready

    def _require_generations(self) -> Generations:
        if self._resources.generations is None:
            raise AssertionError("a commit without generations")
        return self._resources.generations

    def _write_dirty(self) -> None:
        generations = self._require_generations()
        writes: list[BackgroundWork] = []
        moved = []
        try:
            for home in self._resources.homes():
                if home.dirty:
                    copy = generations.copy_to_write(home.stored())
                    moved.append((home, copy))
                    writes.append(home.save(self._resources, copy))
        finally:
            wait_all(writes)
        for home, copy in moved:
            home.mark_written(copy)

    def forward_begins(self, graph: Callable[[], object] = lambda: None) -> None:
        """Freeze the body of the current commit if the loop is at its top.

        With a tracked loader, the loop is at its top after it has asked the loader for the next item. Until then the
        commit waits, because this forward may run between a step and its scheduler's step. If the loop makes several
        steps for one item, the next step drops the waiting commit, and its own commit takes the place. If this happens
        in a loop with one optimizer, all later commits are frozen at the next forward, even if the loop is not at its
        top.

        Args:
            graph: function that returns an object as long as the backward of this forward may still run, and None
                afterwards.
        """
        if self._commit is not None and not self.frozen:
            if self.tracking.has_data and not self.tracking.at_top and not self._several_steps_an_item:
                self._waited = True
            else:
                self._freeze(before_forward=True)
        self.tracking.forward_begins(graph)

    def write_begins(self) -> None:
        """Prepare for a write outside of a step.

        If the loop has reached its top, the commit is frozen with the values before the write. With several ranks this
        process does not know whether the loops of all ranks have reached their tops, so the commit is dropped later
        (step_begins).
        """
        if self._commit is not None and not self.frozen and self.tracking.at_top and self._maker.decides_alone:
            self._freeze(before_forward=False)

    def _freeze(self, *, before_forward: bool) -> None:
        if self._commit is not None:
            with self._telling():
                self._commit.freeze(document.copy_of(self._body_now(before_forward=before_forward)))

    def rewind(self) -> None:
        """Restore the states of the random number generators before the first forward of a resumed run
        (ResumedGeneration.rewind)."""
        if self.resumed is not None:
            self.resumed.rewind()

    def step_begins(self) -> None:
        """Prepare for a write to the states. All updates must be finished.

        A frozen commit is finished. A commit that is not frozen is dropped, because another optimizer makes a step in
        the same iteration. In place of the dropped commit, the next step is committed.

        Raises:
            InfinityError: the commit failed.
        """
        if self.frozen:
            self.finish()
        if self._commit is None:
            return
        sync = self._commit.sync
        self._commit, self._owed = None, True
        if sync is not None:
            sync.result()

    def finish(self) -> None:
        """If there is a current commit, finish it. When this method returns, the generation survives a power cut.

        All updates of the step must be finished.

        Raises:
            InfinityError: an fsync or a write failed, and this generation does not exist. The newest earlier generation
                still exists.
            ConfigError: the state of a tracked object cannot be kept.
        """
        if self._commit is None:
            return
        with interrupts_deferred(), self._telling():
            try:
                self.write_remaining()
                with self._pace.working():
                    self._finish(self._commit)
                self._pace.finished(self._commit.step)
            finally:
                self._commit = None

    @contextmanager
    def _telling(self) -> Iterator[None]:
        step = None if self._commit is None else self._commit.step
        try:
            yield
        except SwapIOError as error:
            raise InfinityError(
                f"generation {step} could not be made durable: {error.message} The newest resumable generation is "
                f"{self.newest if self.newest is not None else 'none'}."
            ) from error
        except TypeError as error:
            raise ConfigError(f"generation {step} could not be made: {error}") from error

    def _finish(self, commit: Commit) -> None:
        if commit.sync is None:
            raise AssertionError("a commit that was not begun")
        body = commit.body if commit.body is not None else self._body_now(before_forward=False)
        commit.sync.result()
        self._maker.make(self._require_generations(), commit.step, facts_of(self._resources), body)

    # -- other ranks --------------------------------------------------------------------------------------------------

    def payload(self) -> list[int]:
        """Return this rank's report to the other ranks; see GenerationMaker.payload."""
        return self._maker.payload(self._pace)

    def receive(self, told: Sequence[Sequence[int]], following: int) -> None:
        """Process the reports of all ranks; see GenerationMaker.receive."""
        self._maker.receive(told, self._pace, following)

    def agree(self, what: str, following: int) -> None:
        """Send this rank's report, and process all reports; see GenerationMaker.agree."""
        self._maker.agree(what, self._pace, following)

    def require_made(self, step: int) -> None:
        """Check that all ranks have made generation `step`; see GenerationMaker.require_made."""
        self._maker.require_made(step)

    def retire_early(self) -> None:
        """Remove older generations before a step; see GenerationMaker.retire_early."""
        self._maker.retire_early()

    # -- the body -----------------------------------------------------------------------------------------------------

    def _body_now(self, *, before_forward: bool) -> dict[str, Any]:
        """Return the body of a generation that is made at the current place in the loop.

        Args:
            before_forward: whether a training forward begins immediately after this call.
        """
        noted = self.tracking.note()
        body = {
            **noted.around,
            "tracked": noted.states,
            "model": self._model,
            "rng": noted.rng,
            "rng_before_forward": rng.snapshot() if before_forward else None,
            "unsure": self._why_unsure(noted),
        }
        return body if self.resumed is None else self._with_resumed_values(body, self.resumed)

    def _why_unsure(self, noted: LoopState) -> str:
        """Return why a run resumed from this generation may continue at another place in its loop.

        Return "" if the run continues exactly.
        """
        if noted.gradients:
            return "there were gradients that no step had used"
        if noted.graphs:
            return "its loader was asked for an item between an earlier forward pass and the backward of that pass"
        if self.tracking.moved():
            return "a tracked object had changed between the loader's item and the forward pass"
        if self._closing:
            return "the model was closed, and the position of its loop is not known"
        if noted.is_top:
            return ""
        return "its tracked loader gave no item after the step" if self.tracking.has_data else "it tracked no loader"

    @staticmethod
    def _with_resumed_values(body: dict[str, Any], resumed: ResumedGeneration) -> dict[str, Any]:
        """Return a body with values from the resumed generation for all objects that this process has not restored.

        Before the first step of a resumed run, its generation may be made again. For example, a script may only change
        weights, without making an optimizer and without tracking objects.
        """
        there = resumed.body.model_dump()
        mine = body["optimizers"]
        kept = {name: resumed.body.tracked[name] for name in resumed.unclaimed}
        return body | {
            "optimizers": mine + there["optimizers"][len(mine) :],
            "tracked": body["tracked"] | kept,
            "rng": resumed.body.rng,
            "rng_before_forward": resumed.body.rng_before_forward,
            "unsure": resumed.body.unsure,
        }

    def touched(self) -> None:
        """Record that states were written between two steps, so that the newest generation has old states."""
        self._touched = self.newest is not None

    @property
    def _made_before_writes(self) -> bool:
        """Whether states were written after the generation of this step was made, and this generation cannot be made
        again."""
        return self._touched and not self._maker.makes_again

    def require_possible(self, step: int) -> None:
        """Check that a generation of `step` can be made now.

        Raises:
            ConfigError: the run keeps no generations.
            NotAvailableError: the generation of this step already exists, and several ranks cannot make a generation
                again.
        """
        if self._resources.generations is None:
            why = self._resources.plan.placement.commits.reason or "commit_every: 0"
            raise ConfigError(
                f"this run keeps no generations ({why}); set commit_every: 1, or another number of steps between "
                "generations"
            )
        if self._made_before_writes and step == self.newest:
            raise NotAvailableError(
                f"generation {step} was made before weights were written (infinity.gathered with write=True, or "
                "load_state_dict), and a run of several ranks cannot make it again: take a step first"
            )

    def commit(self, step: int, *, closing: bool = False) -> None:
        """Make a generation of `step` now.

        The loop must be at the end of an iteration. Raises the errors of begin() and finish().

        Args:
            step: the last step that was done.
            closing: whether the generation is made because the model is being closed, and not by a call of
                infinity.commit.
        """
        self._optimizers.restore_hyperparameters(self.resumed, again=False)
        self.begin(step)
        self._closing = closing and not self.tracking.at_top
        self.tracking.iteration_ended()
        self.finish()

    def end(self, step: int, *, broken: bool) -> None:
        """End the run after `step`. If this step has no generation, make one.

        Args:
            step: the last step that was done.
            broken: whether the loop may have ended in the middle of an iteration. If so, the step is committed only if
                the loop is known to be at its top.
        """
        if self._resources.generations is None or (step == (self.newest or 0) and not self._touched):
            return
        if self._made_before_writes and step == self.newest:
            logger.warning(
                "weights were written after generation %d was made: the generation has the weights from before, and a "
                "run of several ranks cannot make it again",
                step,
            )
            return
        if not self.under_way and self.tracking.at_top:
            self.begin_again(step)  # this step was not committed
        if self.under_way and (self.frozen or self.tracking.has_item):
            self.finish()
        elif not broken:
            self.commit(step, closing=True)
        elif self.under_way and (self.frozen or self.tracking.at_top):
            self.finish()
        else:
            logger.warning(
                "the loop was left by an exception: step %d is not committed, the newest generation is %s",
                step,
                self.newest if self.newest is not None else "none",
                extra={"step_to_repeat": step},  # `infinity run` prints a longer message in place of this one
            )


def facts_of(resources: ModelResources) -> dict[str, Any]:
    """Return the facts about the states in a store. A run that resumes from the store must have the same facts."""
    groups = [states for unit in resources.units for states in unit.states.values()]
    codecs = sorted({str(group.codec) for unit in resources.units for group, _ in unit.weights.encoded()})
    return {
        "master": sorted({states.master for states in groups}),
        "moments": sorted({states.moments for states in groups}),
        "stored": list(resources.plan.placement.form.stored),
        **({"frozen": codecs} if codecs else {}),
        **resources.facts,
    }
