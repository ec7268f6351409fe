"""The optimizers of a model, whose hyperparameters and progress every commit keeps."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

from infinity.durable.records import OptimizerRecord
from infinity.durable.resumed import Resumed
from infinity.errors import ModelError


class Checkpointed(Protocol):
    """An optimizer, as commits see it."""

    def names(self) -> set[str]: ...

    def checkpoint(self) -> OptimizerRecord: ...

    def take_up(self, saved: OptimizerRecord) -> None: ...

    def take_up_hyperparameters(self, saved: OptimizerRecord) -> None: ...


T = TypeVar("T", bound=Checkpointed)


class Optimizers(Generic[T]):
    """In the order in which they were made."""

    def __init__(self) -> None:
        self._entered: list[T] = []

    def __len__(self) -> int:
        return len(self._entered)

    def enter(self, optimizer: T, resumed: Resumed | None) -> None:
        """Have an optimizer's state in every commit, in place of those that had any of its parameters. In a resumed
        run the optimizer takes up what the generation has of it.

        Raises:
            ResumeError: the optimizer does not fit that; it has not entered.
        """
        before = self._entered
        self._entered = [other for other in before if not optimizer.names() & other.names()]
        try:
            saved = None if resumed is None else resumed.optimizer(len(self._entered))
            if saved is not None:
                optimizer.take_up(saved)
        except BaseException:
            self._entered = before
            raise
        self._entered.append(optimizer)

    @property
    def sole(self) -> T | None:
        """The optimizer, where there is one only."""
        return self._entered[0] if len(self._entered) == 1 else None

    def require_entered(self, optimizer: object) -> None:
        """Raises ModelError when another optimizer took the place of this one."""
        if not any(other is optimizer for other in self._entered):
            raise ModelError(
                "another optimizer was made on parameters of this one and took its place: it would not be in the "
                "commits. Use one optimizer for each parameter."
            )

    def require_apart(self, optimizer: object, names: set[str]) -> None:
        """Raises ModelError when another optimizer has some of these parameters, which this one is to get. One that is
        being made has not entered, and takes the place of the others then."""
        if not any(other is optimizer for other in self._entered):
            return
        for other in self._entered:
            shared = names & other.names() if other is not optimizer else set()
            if shared:
                raise ModelError(
                    f"parameter '{min(shared)}' belongs to another optimizer. Use one optimizer for each parameter."
                )

    def take_up_hyperparameters(self, resumed: Resumed | None, *, again: bool) -> None:
        """In a resumed run: learning rates and the like as they were.

        Args:
            again: also those that were given back before; else only optimizers that have never been.
        """
        if resumed is None:
            return
        for index, optimizer in enumerate(self._entered):
            saved = resumed.optimizer(index)
            if saved is not None and (again or id(optimizer) not in resumed.with_hyperparameters):
                optimizer.take_up_hyperparameters(saved)
                resumed.with_hyperparameters.add(id(optimizer))

    def checkpoint(self) -> list[dict[str, Any]]:
        return [optimizer.checkpoint().model_dump() for optimizer in self._entered]
