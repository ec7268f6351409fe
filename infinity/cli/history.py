"""The history of a run: figures of its steps, losses on held-out data, and samples of text that the model wrote."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch

from infinity.cli.progress import StepFacts

_WHOLE = {"step", "tokens", "read_bytes", "written_bytes"}


class EvaluationLoss(NamedTuple):
    """The loss on held-out data after a step.

    It is the mean over the tokens that contribute to the loss, or nan if the mean is not finite.
    """

    step: int
    loss: float


def best_of(evaluations: Sequence[EvaluationLoss]) -> EvaluationLoss | None:
    """Return the first evaluation with the lowest loss; None if no loss is finite."""
    finite = [each for each in evaluations if math.isfinite(each.loss)]
    return min(finite, key=lambda each: each.loss, default=None)


class GeneratedText(NamedTuple):
    """Text that the model generated for a prompt after a step."""

    step: int
    prompt: str
    text: str


@dataclass
class RunHistory:
    """The history of all steps of a run, including the steps before a resume.

    Each generation contains the history, so that a resumed run continues the history.
    """

    facts: list[StepFacts] = field(default_factory=list)
    evaluations: list[EvaluationLoss] = field(default_factory=list)
    samples: list[GeneratedText] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        names = [each.name for each in fields(StepFacts)]
        steps = [[getattr(fact, name) for name in names] for fact in self.facts]
        tables = {"steps": steps, "evaluations": self.evaluations}
        made: dict[str, Any] = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in tables.items()}
        return made | {"samples": [list(sample) for sample in self.samples]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        names = [each.name for each in fields(StepFacts)]
        for row in state["steps"].tolist():
            values = {name: int(value) if name in _WHOLE else value for name, value in zip(names, row, strict=True)}
            self.facts.append(StepFacts(**values))
        self.evaluations += [EvaluationLoss(int(step), loss) for step, loss in state["evaluations"].tolist()]
        self.samples += [GeneratedText(*each) for each in state["samples"]]
