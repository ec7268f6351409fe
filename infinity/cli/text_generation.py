"""Generation of text after a prompt by a model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from infinity.base import accelerator
from infinity.errors import ConfigError, InfinityError, ModelError
from infinity.quoting import raised


class TextGenerationError(ModelError):
    """transformers cannot generate text with this model, or with the settings in the model's generation_config.json."""


@dataclass(frozen=True)
class SamplingSettings:
    """Settings for random sampling of tokens by their probability.

    All other settings, such as top_p, have the values in the model's generation_config.json.

    Attributes:
        temperature: divisor of the logits, positive.
        seed: seed of torch's generator.
    """

    temperature: float
    seed: int = 0


def prompt_ids(tokenizer: Any, prompt: str, *, chat: bool, system: str | None = None) -> torch.Tensor:
    """Return the tokens of a prompt, int64 [1, tokens].

    Args:
        tokenizer: tokenizer of the model.
        prompt: text of the prompt.
        chat: whether to format the prompt as a user's message with the tokenizer's chat template. If so, the tokens end
            where the assistant's answer begins.
        system: system message before the prompt. It is used only if `chat` is true.

    Raises:
        ConfigError: the template refuses the prompt, or the prompt has no tokens.
    """
    if not chat:
        ids = list(tokenizer(prompt, verbose=False)["input_ids"])
        end = tokenizer.eos_token_id  # some tokenizers append an end token to every text
        ids = ids[:-1] if end is not None and len(ids) > 1 and ids[-1] == end else ids
    else:
        said = [] if system is None else [{"role": "system", "content": system}]
        said.append({"role": "user", "content": prompt})
        try:
            ids = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)["input_ids"]
        except Exception as error:  # a template is a program by the model's author, and may raise anything
            raise ConfigError(f"the model's chat template refuses the prompt: {raised(error)}") from error
    if not ids:
        raise ConfigError("the tokenizer returns no tokens for the prompt")
    return torch.tensor([ids])


def write(
    model: Any,
    ids: torch.Tensor,
    tokenizer: Any,
    most: int,
    drawing: SamplingSettings | None = None,
    *,
    streamer: Any = None,
    stop: Callable[[], bool] = lambda: False,
) -> list[int]:
    """Generate tokens after a prompt with `generate` of transformers, until an end token.

    Args:
        model: the model.
        ids: tokens of the prompt, [1, tokens].
        tokenizer: tokenizer of the model.
        most: maximum number of tokens.
        drawing: settings for sampling. None means that each token is the likeliest one, and that no random number is
            drawn.
        streamer: streamer of transformers that receives each token.
        stop: function that is called after each token, and returns whether to stop.

    Returns:
        The tokens after the prompt.

    Raises:
        TextGenerationError: transformers cannot generate with the model or its settings. All ranks raise the error,
            before the first token.
    """
    settings = copy.deepcopy(model.generation_config)
    settings.update(max_new_tokens=most, max_length=None, do_sample=drawing is not None, use_cache=True)
    # Generate one sequence, one token after the other, even if the model's own settings ask for a search.
    settings.update(num_beams=1, num_return_sequences=1, return_dict_in_generate=False)
    for name in ("penalty_alpha", "num_beam_groups", "prompt_lookup_num_tokens", "assistant_early_exit"):
        if getattr(settings, name, None):
            setattr(settings, name, None)
    if settings.pad_token_id is None:
        ends = settings.eos_token_id if settings.eos_token_id is not None else tokenizer.eos_token_id
        settings.pad_token_id = ends[0] if isinstance(ends, list) else ends
    if settings.eos_token_id is None:
        settings.eos_token_id = tokenizer.eos_token_id
    if drawing is None:
        settings.update(temperature=None, top_p=None, top_k=None)
    else:
        settings.temperature = drawing.temperature
        torch.manual_seed(drawing.seed % 2**64)
    try:
        found = model.generate(
            accelerator.bring(ids, model.device),
            attention_mask=torch.ones_like(ids, device=model.device),
            generation_config=settings,
            streamer=streamer,
            tokenizer=tokenizer,  # needed for stop_strings
            stopping_criteria=[_StoppingFunction(stop)],
        )
    except InfinityError:
        raise
    except (ValueError, TypeError, NotImplementedError) as error:
        # transformers raises this for settings that it refuses
        raise TextGenerationError(f"transformers cannot generate text with the model ({raised(error)})") from error
    written: list[int] = found[0, ids.shape[1] :].tolist()
    return written


class _StoppingFunction:
    """A stopping criterion of transformers that calls a function."""

    def __init__(self, stop: Callable[[], bool]) -> None:
        self._stop = stop

    def __call__(self, ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.full((ids.shape[0],), self._stop(), device=ids.device)
