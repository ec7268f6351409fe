"""When generations are made, and what goes into them beside the states.

[Note: when a commit is begun and when it is finished]
A commit is begun when the step is decided. When the next training forward begins its body is frozen: what is tracked is
as the top of the loop has it (see tracking.py). Meanwhile the updates go on; when the last one has landed, what is in
RAM and was not written with them is written, and the fdatasync starts. When that is done, too, the manifest is written:
the commit is finished, at the latest before anything of the next step is written. An explicit infinity.commit and the
end of a run finish it, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from infinity.base.interrupt import interrupts_deferred
from infinity.durable import rng
from infinity.durable.tracked import Stateful, Tracking, is_data
from infinity.errors import ConfigError, InfinityError, ModelError, ResumeError, SwapIOError
from infinity.io import document
from infinity.io.engine import Transfer
from infinity.io.store import wait_all
from infinity.state.records import Body, ModelRecord, OptimizerRecord
from infinity.state.request import GroupUpdate
from infinity.tiers.resources import Resources

logger = logging.getLogger(__name__)


class Checkpointed(Protocol):
    """An optimizer, as commits see it."""

    def names(self) -> set[str]: ...

    def checkpoint(self) -> OptimizerRecord: ...

    def take_up(self, saved: OptimizerRecord) -> None: ...

    def take_up_hyperparameters(self, saved: OptimizerRecord) -> None: ...

    @property
    def accumulation_steps(self) -> int | None:
        """Backward passes before a step; None: as many as the last time."""

    @property
    def guessed_scale(self) -> float:
        """What the gradients will be multiplied by, unless the step clips."""

    def guess(self, unit: int) -> dict[int, GroupUpdate]:
        """What the next step will want of a unit's groups, as far as is known now."""


class Resumed:
    """The generation a run began with, while no step has been done since."""

    def __init__(self, step: int, body: Body) -> None:
        self.step = step
        self.body = body
        self.unclaimed = set(body.tracked)
        self.rewound = False
        self.with_hyperparameters: set[int] = set()

    def give_back(self, name: str, item: Stateful) -> None:
        """An object's state.

        Raises:
            ResumeError: the run did not track it, or its state does not fit.
        """
        if name not in self.body.tracked:
            there = ", ".join(f"'{key}'" for key in self.body.tracked) or "nothing"
            raise ResumeError(f"the run that is resumed did not track '{name}'; it tracked {there}")
        try:
            item.load_state_dict(self.body.tracked[name])
            if is_data(item):
                item.state_dict()  # torchdata's loaders find their place now, and draw for it, not when they are asked
        except Exception as error:
            raise ResumeError(f"the state of '{name}' in the run that is resumed does not fit: {error}") from error
        self.unclaimed.discard(name)

    def optimizer(self, index: int) -> OptimizerRecord | None:
        """None for an optimizer the run had not made yet."""
        return self.body.optimizers[index] if index < len(self.body.optimizers) else None


class Commits:
    """The generations of a run. Life cycle of each: begin() → forward_begins() → written() → finish(); the two in the
    middle may come in either order or be left to finish(), which needs all updates of the step landed.

    Attributes:
        tracking: what was given to infinity.track.
        buffers: gives the model's persistent buffers.
        resumed: in a resumed run, before its first step.
    """

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self._every = resources.plan.commit_every
        self._begun: int | None = None
        self._owed = False
        self._touched = False  # states were written since the newest generation was begun, by no step
        self._sync: Transfer | None = None
        self._body: dict[str, Any] | None = None
        self.tracking = Tracking(self._around)
        self._optimizers: list[Checkpointed] = []
        self.buffers: Callable[[], dict[str, Any]] = dict
        self._model: dict[str, Any] = {}
        self.resumed: Resumed | None = None

    def describe(self, model: ModelRecord) -> None:
        """What a reader of the states must know of the model."""
        self._model = model.model_dump()

    # -- optimizers ---------------------------------------------------------------------------------------------------

    def enter(self, optimizer: Checkpointed) -> None:
        """Have an optimizer's state in every commit, in place of those that had any of its parameters. In a resumed
        run it takes up what the generation has of it.

        Raises:
            ResumeError: the optimizer does not fit that; it has not entered.
        """
        before = self._optimizers
        self._optimizers = [other for other in before if not optimizer.names() & other.names()]
        try:
            saved = None if self.resumed is None else self.resumed.optimizer(len(self._optimizers))
            if saved is not None:
                optimizer.take_up(saved)
        except BaseException:
            self._optimizers = before
            raise
        self._optimizers.append(optimizer)

    @property
    def sole_optimizer(self) -> Checkpointed | None:
        """The optimizer, where there is one only."""
        return self._optimizers[0] if len(self._optimizers) == 1 else None

    def require_entered(self, optimizer: Checkpointed) -> None:
        """Raises ModelError when another optimizer took the place of this one."""
        if not any(other is optimizer for other in self._optimizers):
            raise ModelError(
                "another optimizer was made on parameters of this one and took its place: it would not be in the "
                "commits. Use one optimizer for each parameter."
            )

    def require_apart(self, optimizer: object, names: set[str]) -> None:
        """Raises ModelError when another optimizer has some of these parameters, which this one is to get."""
        for other in self._optimizers:
            shared = names & other.names() if other is not optimizer else set()
            if shared:
                raise ModelError(
                    f"parameter '{min(shared)}' belongs to another optimizer. Use one optimizer for each parameter."
                )

    def take_up_hyperparameters(self, *, again: bool) -> None:
        """In a resumed run: learning rates and the like as they were.

        Args:
            again: also those that were given back before; else only optimizers that have never been.
        """
        if self.resumed is None:
            return
        for index, optimizer in enumerate(self._optimizers):
            saved = self.resumed.optimizer(index)
            if saved is not None and (again or id(optimizer) not in self.resumed.with_hyperparameters):
                optimizer.take_up_hyperparameters(saved)
                self.resumed.with_hyperparameters.add(id(optimizer))

    # -- generations --------------------------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Whether optimizer step `step`, counted from 1, is committed."""
        return self._resources.generations is not None and (self._owed or step % self._every == 0)

    @property
    def under_way(self) -> bool:
        return self._begun is not None

    @property
    def newest(self) -> int | None:
        """The step of the newest durable generation."""
        return None if self._resources.generations is None else self._resources.generations.newest

    def begin(self, step: int) -> None:
        """All states will be those after `step`.

        Raises:
            ConfigError: what is tracked cannot be kept.
        """
        if self._begun == step:
            return
        self.tracking.step_ended()
        self._begun, self._owed, self._touched = step, False, False
        self._sync = self._body = None

    def written(self) -> None:
        """All updates of the step have landed: write what they did not, and start making it durable. Once.

        Raises:
            SwapIOError: the device failed.
        """
        if self._begun is not None and self._sync is None:
            self._write_dirty()
            self._sync = self._resources.require_store().sync()

    @property
    def frozen(self) -> bool:
        """Whether it is known what goes into the generation under way beside the states."""
        return self._body is not None

    @property
    def ready(self) -> bool:
        """Whether finish() would wait for nothing but small files."""
        return self.frozen and self._sync is not None and self._sync.done()

    def _write_dirty(self) -> None:
        generations, store = self._resources.generations, self._resources.require_store()
        if generations is None:
            raise AssertionError("a commit without generations")
        writes, moved = [], []
        try:
            for home in self._resources.homes():
                if home.dirty:
                    extent = home.stored()
                    slot = generations.destination(extent)
                    writes.append(store.write(extent, home.view(), io_class="states", slot=slot))
                    moved.append((home, slot))
        finally:
            wait_all(writes)
        for home, slot in moved:
            home.stored().slot, home.dirty = slot, False

    def forward_begins(self) -> None:
        """The loop is at its top: freeze what the commit that was begun keeps of it.

        Where several optimizers step in turn the loop is only known to be at its top when its loader was asked: until
        then the commit waits, and another step takes its place.
        """
        waits = len(self._optimizers) > 1 and self.tracking.has_data and not self.tracking.at_top
        if self.under_way and not self.frozen and not waits:
            with self._telling():
                self._body = document.copy_of(self._body_now(before_forward=True))
        self.tracking.forward_begins()

    def rewind(self) -> None:
        """Before the first forward of a resumed run: whatever was drawn to get here was not drawn there."""
        if self.resumed is None or self.resumed.rewound:
            return
        self.resumed.rewound = True
        if self.resumed.body.rng_before_forward is not None:
            rng.restore(self.resumed.body.rng_before_forward)
        if self.resumed.unclaimed:
            unclaimed = ", ".join(sorted(self.resumed.unclaimed))
            logger.warning("the run that is resumed tracked %s, and nothing has taken their state back", unclaimed)

    def step_begins(self) -> None:
        """Something will be written. A commit that a forward has frozen is finished; one that no forward has, gives
        way: another optimizer steps in the same iteration. All updates have landed.

        Raises:
            InfinityError: the commit failed.
        """
        if self.frozen:
            self.finish()
        if self._begun is None:
            return
        sync, self._sync = self._sync, None
        self._begun, self._owed = None, True
        if sync is not None:
            sync.result()

    def finish(self) -> None:
        """Make the generation that was begun, if one was; when this returns it survives a power cut. All updates of
        its step have landed.

        Raises:
            InfinityError: an fsync or a write failed, and with it this generation. The newest one before stays.
            ConfigError: what is tracked cannot be kept.
        """
        if self._begun is None:
            return
        with interrupts_deferred(), self._telling():
            try:
                self.written()
                self._finish(self._begun)
            finally:
                self._begun = self._body = self._sync = None

    @contextmanager
    def _telling(self) -> Iterator[None]:
        step = self._begun
        try:
            yield
        except SwapIOError as error:
            raise InfinityError(
                f"generation {step} could not be made durable: {error.message} The newest that can be resumed is "
                f"{self.newest if self.newest is not None else 'none'}."
            ) from error
        except TypeError as error:
            raise ConfigError(f"generation {step} could not be made: {error}") from error

    def _finish(self, step: int) -> None:
        generations = self._resources.generations
        if generations is None or self._sync is None:
            raise AssertionError("a commit that was not begun")
        body = self._body if self._body is not None else self._body_now(before_forward=False)
        self._sync.result()
        generations.make(step, facts_of(self._resources), body)

    def _body_now(self, *, before_forward: bool) -> dict[str, Any]:
        """Args: before_forward: a training forward follows at once."""
        noted = self.tracking.note()
        body = {
            **noted.around,
            "tracked": noted.states,
            "model": self._model,
            "rng": noted.rng,
            "rng_before_forward": rng.snapshot() if before_forward else None,
        }
        return body if self.resumed is None else self._with_what_was_resumed(body, self.resumed)

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
        }

    def _around(self) -> dict[str, Any]:
        optimizers = [optimizer.checkpoint().model_dump() for optimizer in self._optimizers]
        return {"optimizers": optimizers, "buffers": self.buffers()}

    def touched(self) -> None:
        """States were written between two steps: the newest generation of this step has the old ones."""
        self._touched = self.newest is not None

    def commit(self, step: int) -> None:
        """Make a generation of `step` now; the loop is at the end of an iteration. Raises as begin() and finish()."""
        self.take_up_hyperparameters(again=False)
        self.begin(step)
        self.tracking.iteration_ended()
        self.finish()

    def end(self, step: int, *, broken: bool) -> None:
        """The run ends after `step`: make that a generation, if it is none.

        Args:
            broken: the loop may have been left in the middle of an iteration: only what is known to be its top counts.
        """
        if self._resources.generations is None or (step == (self.newest or 0) and not self._touched):
            return
        if not broken:
            self.commit(step)
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
    groups = [states for of_unit in resources.states for states in of_unit.values()]
    return {
        "master": sorted({states.master for states in groups}),
        "moments": sorted({states.moments for states in groups}),
        "stored": list(resources.plan.stored),
    }
