"""The callback that prints the held-out losses of a run, and after each evaluation samples of the model's text."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from infinity.cli.finetune_options import FinetuneOptions
from infinity.cli.history import EvaluationLoss, GeneratedText, RunHistory
from infinity.cli.model_limits import positions_of
from infinity.cli.progress import PlainProgress, RichProgress
from infinity.cli.text_generation import TextGenerationError, prompt_ids, write
from infinity.errors import ConfigError

_TOKENS = 64


def prompts_of(options: FinetuneOptions, model: Any, tokenizer: Any, *, chat: bool) -> dict[str, torch.Tensor]:
    """Return the tokens of each prompt of --sample, by prompt.

    Args:
        options: options of the run.
        model: the model.
        tokenizer: tokenizer of the model.
        chat: whether to format each prompt as a user's message with the tokenizer's chat template.

    Raises:
        ConfigError: the model has too few positions for a prompt and an answer.
    """
    most, positions = options.sample_tokens or _TOKENS, positions_of(model.config)
    prompts = {prompt: prompt_ids(tokenizer, prompt, chat=chat) for prompt in options.sample or ()}
    for ids in prompts.values():
        if positions is not None and ids.shape[1] + most > positions:
            raise ConfigError(
                f"--sample: {ids.shape[1]} tokens of the prompt and {most} tokens to write are more than the model's "
                f"{positions} positions"
            )
    return prompts


class EvaluationCallback(TrainerCallback):  # type: ignore[misc]
    """The callback for each evaluation.

    Args:
        prompts: result of prompts_of.
        most: maximum number of tokens of a sample, or None for the default.
        history: history to which evaluations and samples are added.
        progress: progress that shows the evaluations and samples.
        log: function that sends texts to trackers; None if no tracker shows texts.
        speaks: whether this process prints warnings for all ranks.
    """

    def __init__(
        self,
        prompts: dict[str, torch.Tensor],
        most: int | None,
        history: RunHistory,
        progress: PlainProgress | RichProgress,
        log: Callable[[dict[str, Any]], None] | None = None,
        *,
        speaks: bool,
    ) -> None:
        self._prompts = prompts
        self._most = most or _TOKENS
        self._history = history
        self._progress = progress
        self._log = log
        self._speaks = speaks

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **named: Any) -> None:
        # rounded to fp32, so that the loss is equal for any number of ranks
        step, loss = state.global_step, float(np.float32(metrics["eval_loss"]))
        found = EvaluationLoss(step, loss if math.isfinite(loss) else math.nan)
        self._history.evaluations.append(found)
        self._progress.say(f"step {step}: held-out loss {found.loss:.4f}")
        written = {}
        for number, (prompt, ids) in enumerate(self._prompts.items(), 1):
            text = self._written(named["model"], ids, named["processing_class"])
            written[f"eval_sample {number}"] = text
            self._history.samples.append(GeneratedText(step, prompt, text))
            self._progress.say(f"step {step}: {prompt!r} → {text!r}")
        if written and self._log is not None:
            self._log(written)

    def _written(self, model: Any, ids: torch.Tensor, tokenizer: Any) -> str:
        """Return the model's text for a prompt.

        Each token is the likeliest one, so that all ranks write the same text and no random number is drawn.
        """
        training = model.training
        model.eval()
        try:
            return str(tokenizer.decode(write(model, ids, tokenizer, self._most), skip_special_tokens=True))
        except TextGenerationError as error:
            if self._speaks:
                print(f"warning: --sample: {error}", file=sys.stderr, flush=True)
            return ""
        finally:
            model.train(training)
