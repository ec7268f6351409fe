"""The generation from which a run was resumed.

[Note: when the random numbers are restored]
A resumed run restores the states of the random number generators three times, because numbers are drawn in between that
the original run did not draw at this place.
1. When the model has been loaded (`continue_from` in access/resuming.py): the states at the top of the loop. Loading
   may have drawn numbers.
2. At the end of infinity.track (`Coordinator.track`): the same states again. The script may have drawn numbers after it
   loaded the model, and the methods of the tracked objects may draw numbers, too.
3. Before the first training forward (`ResumedGeneration.rewind`): the states when the next forward of the original run
   began. Between the top of the loop and this forward, the resumed loop may have drawn other numbers than the original
   loop; for example, a new iterator of a loader draws a seed. If infinity.commit made the generation, no next forward
   had begun, and nothing is restored here.
"""

from __future__ import annotations

import logging

from infinity.durable import rng
from infinity.durable.generation_body import GenerationBody, OptimizerRecord
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
