"""What every call of the façade needs, and the calls that make a step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, TypeVar

import torch

from infinity.base.interrupt import interrupts_deferred, whole
from infinity.coordinator.parts import Parts
from infinity.errors import (
    InfinityError,
    PeerError,
    SwapIOError,
    SwapTimeoutError,
)
from infinity.state.request import GroupUpdate
from infinity.state.unit import Place

P = ParamSpec("P")
R = TypeVar("R")


Facade = TypeVar("Facade", bound="Stepping")


def transition(
    method: Callable[Concatenate[Facade, P], R],
) -> Callable[Concatenate[Facade, P], R]:
    """A method that any thread may call, and that Ctrl-C finds not begun or done, but where it is `interruptible`."""

    @functools.wraps(method)
    def run(self: Facade, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return whole(run)


class Stepping(Parts):
    """The lock, and one optimizer step: begin_step, then update or skip, then end_step."""

    @contextmanager
    def locked(self) -> Iterator[None]:
        """For changes of more than one thing by those who are above."""
        with self._lock:
            yield

    def require_usable(self) -> None:
        """Raises ForkError in a forked child, the earlier error after a failed update, InfinityError once closed."""
        self.health.require_usable()
        with self._lock, self.health.failing(SwapIOError):  # others change the updates under way
            self.updates.require_well()

    def _close_if_nobody_reads(self) -> None:
        if self.readers.nobody:
            self.room.close_all()

    # -- step ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """One step: begin_step, then update or skip, then end_step. Ctrl-C is delivered behind it."""
        with interrupts_deferred(), self.timeline.stall("step"):
            yield

    @transition
    def begin_step(self, facts: Mapping[str, object], skip: str) -> str:
        """Bring everything but speculative updates to rest: no other update, commit or fetch under way, gradients
        landed, parameters as infinity left them. Where there are several ranks, all know of the gradients of all.

        Args:
            facts: what is to be the same on all ranks, by what to call it; JSON.
            skip: why this rank wants the step to change nothing; "" where it does not.

        Returns:
            Why the step is to change nothing, by this rank or another; "" where none wants that.

        Raises:
            SwapIOError: gradients were lost on their way to the store; after zero_grad the model can go on.
            PeerError: the ranks do not take the same step, or one of them failed.
        """
        self.require_usable()
        self.readers.step_begins()
        self._close_if_nobody_reads()
        self.room.require_untouched()
        with self.health.failing(SwapTimeoutError, PeerError), self.timeline.stall("gradient"):
            self.resources.idle.begins()
            self.gradients.synchronize()
        self._rest_for_step()
        self.gradients.drop_cleared(self.places)
        with self.health.failing(PeerError), self.timeline.stall("gradient"):
            decided = self.gradients.decide({**facts, "the step": self.steps + 1}, skip, self.commits.told())
        with self.progress.committing():
            self.commits.heard(decided.told, self.steps + 1)
            self.progress.settle()
        self._show(self.gradients.elsewhere)
        return decided.skip

    def _show(self, names: Set[str]) -> None:
        """Parameters that have a gradient on any rank have one here."""
        if not names:
            return
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, place in self.places():
                if place.group.trainable and place.spec.name in names and parameter.grad is None:
                    parameter.grad = self.handle(parameter, place)

    def _rest_for_step(self) -> None:
        with self.progress.committing():
            self.progress.finish_updates()
            self.optimizers.take_up_hyperparameters(self.commits.resumed, again=False)
        self.progress.make_way()
        with self.health.failing(SwapTimeoutError, PeerError):
            self.room.hold(())
            self.room.finish_fetches()
            self.resources.synchronize_uploads()

    @transition
    def gradient_norm(self, places: Iterable[Place]) -> tuple[float, str]:
        """Of landed gradients: the sum of squares, and the first name whose part is not finite ('' when all are)."""
        self.gradients.synchronize()
        return self.gradients.sum_squares(places)

    @transition
    def update(self, requests: Mapping[tuple[int, int], GroupUpdate]) -> None:
        """The step is decided: what is to be done to which (unit, group). Speculative updates that were right go on,
        others are undone, what is not under way begins. A unit's next use waits for its own update.

        Raises:
            InfinityError: the step was begun and not finished; every later call raises.
        """
        by_unit: dict[int, dict[int, GroupUpdate]] = {}
        for index, group_index in sorted(requests):
            by_unit.setdefault(index, {})[group_index] = requests[index, group_index]
        everywhere = [self.units[index] for index in by_unit]
        mine = {index: self.shards[index].localize(wanted) for index, wanted in by_unit.items()}
        by_unit = {index: wanted for index, wanted in mine.items() if wanted}
        wrong = self._speculator.wrong(by_unit)
        self.room.end_iteration()
        with self._failing_for_good():
            begun = self.updates.decide(
                by_unit, self.room.order(), self.steps + 1, committed=self.commits.due(self.steps + 1)
            )
        self.masters.forget()
        self._speculator.step_decided(begun, wrong, by_unit, self.optimizers.sole)
        with self.health.failing(SwapTimeoutError, PeerError):
            self.room.updates_decided(begun, everywhere)

    @contextmanager
    def _failing_for_good(self) -> Iterator[None]:
        """Whatever leaves this context leaves a step that was begun and not finished."""
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
        """The step is decided: nothing changes."""
        self.room.end_iteration()
        self._speculator.drop()

    @transition
    def end_step(self) -> None:
        """The step is decided and its updates are under way, or done where nothing overlaps.

        Raises:
            SwapIOError: an update failed; the states are partly updated, and every later call raises.
        """
        self.passes.step_ended()
        self.room.begin_pass(training=True)
        self.at_step(self.steps + 1)
        self.commits.step_done()
        if self.speculation.mode == "off":
            self.progress.finish_updates()
        self.progress.begin_commit(self.steps)
        self.timeline.end_step(self.steps)
        with self.health.failing(SwapTimeoutError, PeerError):
            self.room.prefetch()
        self.resources.idle.ends()

    def at_step(self, step: int, run: str = "") -> None:
        """The states are those after this optimizer step. Args: run: which they come from, if not from here."""
        self.steps = step
        self.copied_from = (run, step) if run else self.copied_from
        if self.resources.store is not None:
            self.resources.store.begin_step(step)
