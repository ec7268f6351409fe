"""The registered optimizers of a model: every commit keeps their hyperparameters and progress."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

from infinity.durable.generation_body import OptimizerRecord
from infinity.durable.resumed_generation import ResumedGeneration
from infinity.errors import ModelError


class CommittedOptimizer(Protocol):
    """Interface through which commits read and restore an optimizer."""

    def names(self) -> set[str]: ...

    def checkpoint(self) -> OptimizerRecord: ...

    def restore_progress(self, saved: OptimizerRecord) -> None: ...

    def restore_hyperparameters(self, saved: OptimizerRecord) -> None: ...


T = TypeVar("T", bound=CommittedOptimizer)


class RegisteredOptimizers(Generic[T]):
    """The registered optimizers of a model, in the order of their creation."""

    def __init__(self) -> None:
        self._entered: list[T] = []

    def __len__(self) -> int:
        return len(self._entered)

    def enter(self, optimizer: T, resumed: ResumedGeneration | None) -> None:
        """Register an optimizer, so that every commit keeps its state.

        The new optimizer replaces registered optimizers that have any of its parameters. In a resumed run, the new
        optimizer gets its state from the generation.

        Raises:
            ResumeError: the saved state does not fit the optimizer. The optimizer is not registered.
        """
        before = self._entered
        self._entered = [other for other in before if not optimizer.names() & other.names()]
        try:
            saved = None if resumed is None else resumed.optimizer(len(self._entered))
            if saved is not None:
                optimizer.restore_progress(saved)
        except BaseException:
            self._entered = before
            raise
        self._entered.append(optimizer)

    @property
    def sole(self) -> T | None:
        """The optimizer, if there is exactly one; otherwise None."""
        return self._entered[0] if len(self._entered) == 1 else None

    def require_entered(self, optimizer: object) -> None:
        """Raise ModelError if another optimizer has replaced `optimizer`."""
        if not any(other is optimizer for other in self._entered):
            raise ModelError(
                "another optimizer was made for parameters of this optimizer and replaced it: the states of this "
                "optimizer would be missing from the commits. Use one optimizer for each parameter."
            )

    def require_disjoint(self, optimizer: object, names: set[str]) -> None:
        """Raise ModelError if another optimizer has any of the parameters in `names`, which will be added to
        `optimizer`.

        Nothing is checked for an optimizer whose constructor is still running. It is not registered yet, and will
        replace the other optimizers when it is registered.
        """
        if not any(other is optimizer for other in self._entered):
            return
        for other in self._entered:
            shared = names & other.names() if other is not optimizer else set()
            if shared:
                raise ModelError(
                    f"parameter '{min(shared)}' belongs to another optimizer. Use one optimizer for each parameter."
                )

    def restore_hyperparameters(self, resumed: ResumedGeneration | None, *, again: bool) -> None:
        """Restore learning rates and other hyperparameters in a resumed run.

        Args:
            resumed: the generation that the run was resumed from; None: nothing is restored.
            again: whether all optimizers are restored; False: only the optimizers that were not restored yet.
        """
        if resumed is None:
            return
        for index, optimizer in enumerate(self._entered):
            saved = resumed.optimizer(index)
            if saved is not None and (again or id(optimizer) not in resumed.with_hyperparameters):
                optimizer.restore_hyperparameters(saved)
                resumed.with_hyperparameters.add(id(optimizer))

    def checkpoint(self) -> list[dict[str, Any]]:
        return [optimizer.checkpoint().model_dump() for optimizer in self._entered]
