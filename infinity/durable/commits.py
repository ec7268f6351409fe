"""When generations are made, and what goes into them beside the states.

[Note: when a commit is begun and when it is finished]
A commit is begun when the step is decided. When the next training forward begins its body is frozen: what is tracked is
as the top of the loop has it (see tracked.py). Meanwhile the updates go on; when the last one is finished, the states
in RAM that no update wrote to the store are written, and the fdatasync starts. When that is done, too, the manifest is
written: the commit is finished, at the latest before anything of the next step is written. An explicit infinity.commit
and the end of a run finish it, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from infinity.base.interrupt import interrupts_deferred
from infinity.durable import rng
from infinity.durable.maker import Maker
from infinity.durable.optimizers import Optimizers
from infinity.durable.pace import Pace
from infinity.durable.records import Body, ModelRecord
from infinity.durable.resumed import Resumed
from infinity.durable.tracked import Noted, Stateful, Tracking
from infinity.errors import ConfigError, InfinityError, NotAvailableError, SwapIOError
from infinity.io import document
from infinity.io.engine import Transfer
from infinity.io.generations import Generations
from infinity.io.store import wait_all
from infinity.tiers.resources import Resources

logger = logging.getLogger(__name__)


class Commit:
    """A generation on its way: its body is frozen and its states are synced, in either order, each once.

    Attributes:
        body: what goes into the generation beside the states; None until it is frozen.
        sync: of the swap file, after all writes; None until all updates of the step are finished.
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
        """Whether finishing would wait for nothing but small files."""
        return self.body is not None and self.sync is not None and self.sync.done()


class Commits:
    """The generations of a run. Life cycle of each: begin() → forward_begins() → write_rest() → finish(); the two in
    the middle may come in either order or be left to finish(), which needs all updates of the step finished.

    Attributes:
        tracking: what was given to infinity.track.
        resumed: in a resumed run, before its first step.

    Args:
        maker: makes them.
        model: what a reader of the states must know of the model.
        buffers: gives the model's persistent buffers.
    """

    def __init__(
        self,
        resources: Resources,
        optimizers: Optimizers[Any],
        maker: Maker,
        model: ModelRecord,
        buffers: Callable[[], dict[str, Any]],
    ) -> None:
        self._resources = resources
        self._optimizers = optimizers
        self._model = model.model_dump()
        self._maker = maker
        self._pace = Pace(resources.plan.placement.commits, led=maker.led)
        self._commit: Commit | None = None
        self._owed = False
        self._touched = False  # states were written since the newest generation was begun, by no step
        self._waited = False  # a forward has begun since the commit was, and the loop was not at its top
        self._several_steps_an_item = False
        self._closing = False
        self.tracking = Tracking(optimizers.checkpoint, buffers)
        self.resumed: Resumed | None = None

    def track(self, objects: Sequence[Stateful], named: Mapping[str, Stateful]) -> None:
        """As infinity.track."""
        resumed = self.resumed
        self.tracking.take(objects, named, (lambda *_: None) if resumed is None else resumed.give_back)

    def resume(self, step: int, body: Body) -> None:
        """The run goes on from the generation of `step`."""
        self.resumed = Resumed(step, body)

    def step_done(self) -> None:
        """A step was done since: the run is past what it was resumed from."""
        self.resumed = None
        if len(self._optimizers) <= 1:  # one of several has used its own; zero_grad tells of the rest
            self.tracking.gradients_gone()

    # -- generations --------------------------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Whether optimizer step `step`, counted from 1, is committed."""
        return self._resources.generations is not None and (self._owed or self._pace.due(step))

    @property
    def under_way(self) -> bool:
        return self._commit is not None

    @property
    def newest(self) -> int | None:
        """The step of the newest durable generation."""
        return None if self._resources.generations is None else self._resources.generations.newest

    def begin(self, step: int) -> None:
        """All states will be those after `step`.

        Raises:
            ConfigError: what is tracked cannot be kept.
        """
        if self._commit is not None and self._commit.step == step:
            return
        self.tracking.step_ended()
        self._learn()
        self.begin_again(step)

    def pass_by(self) -> None:
        """The step that was done is not due."""
        if self._resources.generations is not None:
            self.tracking.step_passed()

    def begin_again(self, step: int) -> None:
        """As begin(), of a commit that gave way to a write, or of a step that was passed by. That is no step's end: the
        loop is where it was."""
        self._commit, self._owed, self._touched = Commit(step), False, False

    def _learn(self) -> None:
        """A commit waited for the loop's top, and the next step came before that."""
        if self._owed and self._waited and len(self._optimizers) == 1 and not self._several_steps_an_item:
            self._several_steps_an_item = True
            logger.warning(
                "the loop makes several optimizer steps for one item of the loader that it tracks: a run that resumes "
                "a generation from between them is not exact. Set commit_every to a multiple of the steps for an item, "
                "or to a large number and call infinity.commit(model) where an iteration ends"
            )
        self._waited = False

    def write_rest(self) -> None:
        """All updates of the step are finished: write what they did not, and start making it durable. Once.

        Raises:
            SwapIOError: the device failed.
        """
        if self._commit is not None and self._commit.sync is None:
            with self._pace.working():
                self._write_dirty()
            self._commit.synced(self._resources.require_store().sync())

    @property
    def frozen(self) -> bool:
        """Whether it is known what goes into the generation under way beside the states."""
        return self._commit is not None and self._commit.body is not None

    @property
    def ready(self) -> bool:
        """Whether finish() would wait for nothing but small files."""
        return self._commit is not None and self._commit.ready

    def _require_generations(self) -> Generations:
        if self._resources.generations is None:
            raise AssertionError("a commit without generations")
        return self._resources.generations

    def _write_dirty(self) -> None:
        generations, store = self._require_generations(), self._resources.require_store()
        writes, moved = [], []
        try:
            for home in self._resources.homes():
                if home.dirty:
                    extent = home.stored()
                    copy = generations.destination(extent)
                    writes.append(store.write(extent, home.view(), io_class="states", copy=copy))
                    moved.append((home, copy))
        finally:
            wait_all(writes)
        for home, copy in moved:
            home.written(copy)

    def forward_begins(self, graph: Callable[[], object] = lambda: None) -> None:
        """Freeze what the commit that was begun keeps of the loop, if that is at its top.

        A loop with a tracked loader is there once its loader was asked. Until then the commit waits: the forward may be
        one between a step and its scheduler's, and where several steps are made for an item, another step takes the
        commit's place. A loop of one optimizer that did so gets its commits frozen here, wherever it is.

        Args:
            graph: gives something while the forward's backward may come.
        """
        if self._commit is not None and not self.frozen:
            if self.tracking.has_data and not self.tracking.at_top and not self._several_steps_an_item:
                self._waited = True
            else:
                self._freeze(before_forward=True)
        self.tracking.forward_begins(graph)

    def write_begins(self) -> None:
        """Something other than a step is about to write: if the loop came to its top, the commit has the states of
        before. Where that is not known of all ranks, it gives way."""
        if self._commit is not None and not self.frozen and self.tracking.at_top and self._maker.decides_alone:
            self._freeze(before_forward=False)

    def _freeze(self, *, before_forward: bool) -> None:
        if self._commit is not None:
            with self._telling():
                self._commit.freeze(document.copy_of(self._body_now(before_forward=before_forward)))

    def rewind(self) -> None:
        """Before the first forward of a resumed run (Resumed.rewind)."""
        if self.resumed is not None:
            self.resumed.rewind()

    def step_begins(self) -> None:
        """Something will be written. A commit that a forward has frozen is finished; one that no forward has, gives
        way: another optimizer steps in the same iteration. All updates are finished.

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
        """Make the generation that was begun, if one was; when this returns it survives a power cut. All updates of
        its step are finished.

        Raises:
            InfinityError: an fsync or a write failed, and with it this generation. The newest one before stays.
            ConfigError: what is tracked cannot be kept.
        """
        if self._commit is None:
            return
        with interrupts_deferred(), self._telling():
            try:
                self.write_rest()
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
                f"generation {step} could not be made durable: {error.message} The newest that can be resumed is "
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

    # -- others who make them -----------------------------------------------------------------------------------------

    def told(self) -> list[int]:
        """As Maker.told."""
        return self._maker.told(self._pace)

    def heard(self, told: Sequence[Sequence[int]], following: int) -> None:
        """As Maker.heard."""
        self._maker.heard(told, self._pace, following)

    def agree(self, what: str, following: int) -> None:
        """As Maker.agree."""
        self._maker.agree(what, self._pace, following)

    def require_made(self, step: int) -> None:
        """As Maker.require_made."""
        self._maker.require_made(step)

    def retire_early(self) -> None:
        """As Maker.retire_early."""
        self._maker.retire_early()

    # -- what goes into them ------------------------------------------------------------------------------------------

    def _body_now(self, *, before_forward: bool) -> dict[str, Any]:
        """Args: before_forward: a training forward follows at once."""
        noted = self.tracking.note()
        body = {
            **noted.around,
            "tracked": noted.states,
            "model": self._model,
            "rng": noted.rng,
            "rng_before_forward": rng.snapshot() if before_forward else None,
            "unsure": self._why_unsure(noted),
        }
        return body if self.resumed is None else self._with_what_was_resumed(body, self.resumed)

    def _why_unsure(self, noted: Noted) -> str:
        """Why a run that resumes this may not be where its loop was; "" where it is."""
        if noted.gradients:
            return "gradients had come that no step had used"
        if noted.graphs:
            return "its loader was asked while an earlier forward pass still had its backward before it"
        if self.tracking.moved():
            return "what is tracked had changed between its loader's item and the forward pass"
        if self._closing:
            return "the model was closed, and where its loop was is not known"
        if noted.is_top:
            return ""
        return "its tracked loader was not asked since the step" if self.tracking.has_data else "it tracked no loader"

    @staticmethod
    def _with_what_was_resumed(body: dict[str, Any], resumed: Resumed) -> dict[str, Any]:
        """A generation that is made again before the first step of a resumed run keeps what this process has not taken
        up: a script that only changes weights makes no optimizer and tracks nothing."""
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
        """States were written between two steps: the newest generation of this step has the old ones."""
        self._touched = self.newest is not None

    @property
    def _made_before_writes(self) -> bool:
        """States were written since the generation of this step was made, and it cannot be made again."""
        return self._touched and not self._maker.makes_again

    def require_possible(self, step: int) -> None:
        """
        Raises:
            ConfigError: the run keeps no generations.
            NotAvailableError: the newest generation is of this step, and several ranks cannot make it again.
        """
        if self._resources.generations is None:
            why = self._resources.plan.placement.commits.reason or "commit_every: 0"
            raise ConfigError(f"this run keeps no generations ({why}); set commit_every: 1, or how many steps apart")
        if self._made_before_writes and step == self.newest:
            raise NotAvailableError(
                f"generation {step} was made before weights were written (infinity.gathered with write=True, or "
                "load_state_dict), and several ranks cannot make it again: take a step first"
            )

    def commit(self, step: int, *, closing: bool = False) -> None:
        """Make a generation of `step` now; the loop is at the end of an iteration. Raises as begin() and finish().

        Args:
            closing: the loop did not say so; the model is closed.
        """
        self._optimizers.take_up_hyperparameters(self.resumed, again=False)
        self.begin(step)
        self._closing = closing and not self.tracking.at_top
        self.tracking.iteration_ended()
        self.finish()

    def end(self, step: int, *, broken: bool) -> None:
        """The run ends after `step`: make that a generation, if it is none.

        Args:
            broken: the loop may have been left in the middle of an iteration: only what is known to be its top counts.
        """
        if self._resources.generations is None or (step == (self.newest or 0) and not self._touched):
            return
        if self._made_before_writes and step == self.newest:
            logger.warning(
                "weights were written after generation %d was made: it has those of before, and several ranks cannot "
                "make it again",
                step,
            )
            return
        if not self.under_way and self.tracking.at_top:
            self.begin_again(step)  # which was not due
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
            )


def facts_of(resources: Resources) -> dict[str, Any]:
    """What a store's states are, which a run that resumes it must agree on."""
    groups = [states for unit in resources.units for states in unit.states.values()]
    codecs = sorted({str(group.codec) for unit in resources.units for group, _ in unit.weights.encoded()})
    return {
        "master": sorted({states.master for states in groups}),
        "moments": sorted({states.moments for states in groups}),
        "stored": list(resources.plan.placement.form.stored),
        **({"frozen": codecs} if codecs else {}),
        **resources.facts,
    }
