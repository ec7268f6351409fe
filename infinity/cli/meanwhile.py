"""What a run does between its steps besides training: it is evaluated, writes samples, and is saved for use."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch

from infinity.cli.evaluation import Evaluated, Evaluation
from infinity.cli.limits import positions_of
from infinity.cli.loggers import Loggers
from infinity.cli.marked import Owner
from infinity.cli.progress import StepFacts
from infinity.cli.reading import Data
from infinity.cli.saved_steps import SavedSteps
from infinity.cli.world import World
from infinity.cli.writing import WritingError, prompt_ids, write
from infinity.errors import ConfigError

_SAMPLE_TOKENS = 64
_WHOLE = {"step", "tokens", "read_bytes", "written_bytes"}


class Sample(NamedTuple):
    """What the model wrote after a step, when it was given a prompt."""

    step: int
    prompt: str
    text: str


@dataclass
class History:
    """What is known of all steps of a run, those before a resume included; generations keep it."""

    facts: list[StepFacts] = field(default_factory=list)
    evaluations: list[Evaluated] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def written(self, step: int) -> dict[str, str]:
        """What the model wrote after a step, by the prompt."""
        return {sample.prompt: sample.text for sample in self.samples if sample.step == step}

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
        for step, loss in state["evaluations"].tolist() if "evaluations" in state else ():
            self.evaluations.append(Evaluated(int(step), loss))
        self.samples += [Sample(*each) for each in state.get("samples", ())]


class Meanwhile:
    """What is due after a step.

    Args:
        options: of the run.
        last: its last step.
        owner: of the directories beside the output; None on other ranks than the first.

    Raises:
        ConfigError: the model cannot take a prompt of --sample.
    """

    def __init__(
        self,
        model: Any,
        data: Data,
        tokenizer: Any,
        options: argparse.Namespace,
        world: World,
        last: int,
        history: History,
        owner: Owner | None,
    ) -> None:
        self._history = history
        self._tokenizer = tokenizer
        self._most = options.sample_tokens or _SAMPLE_TOKENS
        self._prompts: dict[str, torch.Tensor] = {}
        for prompt in options.sample or ():
            ids, positions = prompt_ids(tokenizer, prompt, chat=data.has_chats), positions_of(model.config)
            if positions is not None and ids.shape[1] + self._most > positions:
                raise ConfigError(
                    f"--sample: {ids.shape[1]} tokens of the prompt and {self._most} to write are more than the "
                    f"model's {positions} positions"
                )
            self._prompts[prompt] = ids
        self._evaluation = (
            None
            if data.held_out is None
            else Evaluation(data.held_out, options.batch_size, options.eval_steps, last, world)
        )
        self.saved = SavedSteps(options, tokenizer, last, world, owner)
        self._world = world

    def due(self, step: int) -> bool:
        """Whether `after` has something to do."""
        evaluated = self._evaluation is not None and self._evaluation.due(step)
        return evaluated or self.saved.due(step, self._history.evaluations)

    def after(self, model: Any, step: int, say: Callable[[str], None], loggers: Loggers) -> None:
        """The step is done. All ranks call. What an interruption has prevented is done when the run goes on.

        Raises:
            SwapIOError, PeerError: as a forward pass.
        """
        history = self._history
        is_new = not (history.evaluations and history.evaluations[-1].step == step)
        if self._evaluation is not None and self._evaluation.due(step) and is_new:
            found = Evaluated(step, self._evaluation.loss_of(model))
            history.evaluations.append(found)
            say(f"step {step}: held-out loss {found.loss:.4f}")
            written = {prompt: self._written(model, ids) for prompt, ids in self._prompts.items()}
            for prompt, text in written.items():
                history.samples.append(Sample(step, prompt, text))
                say(f"step {step}: {prompt!r} → {text!r}")
            loggers.evaluated(found, written)
        if self.saved.due(step, history.evaluations) and (line := self.saved.save(model, step, history.evaluations)):
            say(line)

    def _written(self, model: Any, ids: torch.Tensor) -> str:
        """The likeliest tokens, so that all ranks have the same, and no random number is drawn."""
        training = model.training
        model.eval()
        try:
            return str(self._tokenizer.decode(write(model, ids, self._tokenizer, self._most), skip_special_tokens=True))
        except WritingError as error:
            if self._world.speaks:
                print(f"warning: --sample: {error}", file=sys.stderr, flush=True)
            return ""
        finally:
            model.train(training)
