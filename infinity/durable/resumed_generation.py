"""The generation from which a run was resumed."""

from __future__ import annotations

import logging

from infinity.durable import rng
from infinity.durable.records import GenerationBody, OptimizerRecord
from infinity.durable.tracked_objects import Stateful, is_data
from infinity.errors import ResumeError, printable

logger = logging.getLogger(__name__)


class ResumedGeneration:
    """The generation from which a run was resumed. This object is used until the first step is done."""

    def __init__(self, step: int, body: GenerationBody) -> None:
        self.step = step
        self.body = body
        self.unclaimed = set(body.tracked)
        self._rewound = False
        self.with_hyperparameters: set[int] = set()

    def give_back(self, name: str, item: Stateful) -> None:
        """Restore the state of a tracked object.

        Raises:
            ResumeError: the run did not track an object of this name, or the saved state does not fit the object.
        """
        if name not in self.body.tracked:
            there = ", ".join(f"'{key}'" for key in self.body.tracked) or "nothing"
            raise ResumeError(f"the run that is resumed did not track '{name}'; it tracked {there}")
        try:
            item.load_state_dict(self.body.tracked[name])
            if is_data(item):
                item.state_dict()  # torchdata's loaders seek and draw numbers in this call
        except Exception as error:
            raise ResumeError(f"the state of '{name}' in the run that is resumed does not fit: {error}") from error
        self.unclaimed.discard(name)

    def optimizer(self, index: int) -> OptimizerRecord | None:
        """Return the record of the optimizer at `index`; None if the run had not yet made an optimizer with this
        index."""
        return self.body.optimizers[index] if index < len(self.body.optimizers) else None

    def rewind(self) -> None:
        """Restore the random numbers before the first forward. Calls after the first have no effect.

        While this process loaded the model, it drew random numbers that the original run did not draw at this place.
        """
        if self._rewound:
            return
        self._rewound = True
        if self.body.unsure:
            logger.warning(
                "the run resumes from step %d, but its loop may have been elsewhere: %s. Work that a loop does between "
                "a step and the next forward may be repeated or skipped. Give infinity.track a loader with a "
                "state_dict, or call infinity.commit(model) at the end of an iteration",
                self.step,
                printable(self.body.unsure),
            )
        if self.body.rng_before_forward is not None:
            rng.restore(self.body.rng_before_forward)
        if self.unclaimed:
            unclaimed = ", ".join(sorted(self.unclaimed))
            logger.warning(
                "the run that is resumed tracked %s, and nothing has restored the state of these objects", unclaimed
            )
