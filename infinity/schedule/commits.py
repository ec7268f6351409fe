"""When generations are made, and what goes into them beside the states.

[Note: when a commit is begun and when it is finished]
A training loop goes on after optim.step(): it steps its LR scheduler, counts, evaluates, takes the next batch. What a
resumed run must find is the state at the top of the loop: schedulers after their step, the data loader before it gives
the next batch. So a commit is begun when the step ends: RAM-held states are written, the fdatasync starts, the random
numbers and what can be iterated (loaders, samplers) are asked for their state. It is finished when the next training
forward begins (or the next step, a save, close, an explicit infinity.commit): everything else is asked, and the
manifest is written. A loop that does something else between, such as drawing random numbers after its evaluation, calls
infinity.commit(model) where its iteration ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from infinity.errors import ConfigError, InfinityError, ResumeError, SwapIOError
from infinity.io.engine import Transfer
from infinity.io.store import wait_all
from infinity.schedule import rng
from infinity.schedule.backing import Backing
from infinity.schedule.interrupt import interrupts_deferred
from infinity.state.plan import Plan
from infinity.state.records import Body, ModelRecord, OptimizerRecord

logger = logging.getLogger(__name__)


class Stateful(Protocol):
    """What can be tracked, as torch's schedulers, loaders and modules can."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class Checkpointed(Protocol):
    """An optimizer, as commits see it."""

    def names(self) -> set[str]: ...

    def checkpoint(self) -> OptimizerRecord: ...

    def take_up_hyperparameters(self) -> None: ...


class Commits:
    """The generations of a run. Life cycle of each: begin() → finish(); nothing is written in between.

    Attributes:
        tracked: by name, what was given to infinity.track.
        buffers: gives the model's persistent buffers.
        model: what a reader of the states must know of the model.
        resumed: the body of the generation this run began with.
    """

    def __init__(self, backing: Backing) -> None:
        self._backing = backing
        self._every = backing.plan.commit_every
        self._begun: int | None = None
        self._abandoned = False
        self._sync: Transfer | None = None
        self._early: dict[str, Any] = {}
        self.tracked: dict[str, Stateful] = {}
        self._optimizers: list[Checkpointed] = []
        self._taken: set[int] = set()
        self.buffers: Callable[[], dict[str, Any]] = dict
        self.model = ModelRecord(class_name="", config=None, generation_config=None, groups=[], parameters=[])
        self.resumed: Body | None = None

    def enter(self, optimizer: Checkpointed) -> OptimizerRecord | None:
        """Have an optimizer's state in every commit, in place of one that had the same parameters.

        Returns:
            In a resumed run, what its generation has of this one, the first time it is asked for; else None.

        Raises:
            ResumeError: the run had fewer optimizers.
        """
        names = optimizer.names()
        self._optimizers = [other for other in self._optimizers if not names & other.names()]
        index = len(self._optimizers)
        self._optimizers.append(optimizer)
        if self.resumed is None or index in self._taken:
            return None
        self._taken.add(index)
        return self.resumed_optimizer(optimizer)

    def resumed_optimizer(self, optimizer: Checkpointed) -> OptimizerRecord | None:
        """What the generation this run began with has of an optimizer; None in a run that was not resumed.

        Raises:
            ResumeError: it has none.
        """
        if self.resumed is None:
            return None
        index, saved = self._optimizers.index(optimizer), self.resumed.optimizers
        if index >= len(saved):
            raise ResumeError(f"the run that is resumed had {len(saved)} optimizers, and this is number {index + 1}")
        return saved[index]

    @property
    def optimizers(self) -> list[Checkpointed]:
        """In the order they were made."""
        return list(self._optimizers)

    def due(self, step: int) -> bool:
        """Whether optimizer step `step`, counted from 1, is committed."""
        return self._backing.generations is not None and step % self._every == 0

    @property
    def under_way(self) -> bool:
        return self._begun is not None

    @property
    def newest(self) -> int | None:
        """The step of the newest durable generation."""
        return None if self._backing.generations is None else self._backing.generations.newest

    def begin(self, step: int) -> None:
        """All states are those after `step`: bring those in RAM to the store and start making them durable.

        Once more for the same step, only the random numbers and iterables are asked again.

        Raises:
            SwapIOError: the device failed.
        """
        if self._begun != step:
            self._write_dirty()
            self._sync = self._backing.require_store().sync()
        self._early = {"rng": rng.snapshot(), "tracked": self._states(iterable=True)}
        self._begun = step

    def _write_dirty(self) -> None:
        generations, store = self._backing.generations, self._backing.require_store()
        if generations is None:
            raise AssertionError("a commit without generations")
        writes, moved = [], []
        try:
            for home in self._backing.homes():
                if home.dirty:
                    extent = home.stored()
                    slot = generations.destination(extent)
                    writes.append(store.write(extent, home.view(), io_class="states", slot=slot))
                    moved.append((home, slot))
        finally:
            wait_all(writes)
        for home, slot in moved:
            home.stored().slot, home.dirty = slot, False

    def finish(self, *, before_forward: bool = False) -> None:
        """Make the generation that was begun, if one was; when this returns it survives a power cut.

        Args:
            before_forward: a training forward follows at once.

        Raises:
            InfinityError: an fsync or a write failed, and with it this generation. The newest one before stays.
            ConfigError: what is tracked cannot be kept.
        """
        if self._begun is None:
            return
        with interrupts_deferred():
            step, self._begun = self._begun, None
            try:
                self._finish(step, before_forward)
            except SwapIOError as error:
                raise InfinityError(
                    f"generation {step} could not be made durable: {error.message} The newest that can be resumed is "
                    f"{self.newest if self.newest is not None else 'none'}."
                ) from error
            except TypeError as error:
                raise ConfigError(f"generation {step} could not be made: {error}") from error

    def _finish(self, step: int, before_forward: bool) -> None:
        generations = self._backing.generations
        if generations is None or self._sync is None:
            raise AssertionError("a commit that was not begun")
        body = Body(
            optimizers=[optimizer.checkpoint() for optimizer in self._optimizers],
            tracked=self._early["tracked"] | self._states(iterable=False),
            model=self.model,
            buffers=self.buffers(),
            rng=self._early["rng"],
            rng_before_forward=rng.snapshot() if before_forward else None,
        )
        sync, self._sync = self._sync, None
        sync.result()
        generations.make(step, facts_of(self._backing.plan), body.model_dump())

    def abandon(self) -> None:
        """Make no generation any more."""
        self._abandoned, self._begun = True, None

    def end(self, step: int) -> None:
        """The run ends well after `step`: make that a generation, if it is none."""
        if self._backing.generations is None or self._abandoned or step == (self.newest or 0):
            return
        self.begin(step)
        self.finish()

    def _states(self, *, iterable: bool) -> dict[str, Any]:
        return {
            name: item.state_dict() for name, item in self.tracked.items() if isinstance(item, Iterable) == iterable
        }


def facts_of(plan: Plan) -> dict[str, Any]:
    """What a store's states are, which a run that resumes it must agree on."""
    return {"master": plan.master, "moments": plan.moments, "stored": list(plan.stored)}
