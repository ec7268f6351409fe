"""Limits of the model: the length of a sequence, and the tokens of its vocabulary."""

from __future__ import annotations

from typing import Any

from infinity.checkpoint.load import load_config_of
from infinity.errors import ConfigError, ModelError


def require_fit(model: str, sequence_length: int, largest_token: int, **options: Any) -> None:
    """Check the data against the model's config, before the model is loaded.

    Args:
        options: of transformers' from_pretrained.

    Raises:
        ConfigError: the sequences are longer than the model's positions.
        ModelError: its vocabulary does not have the data's tokens.
    """
    config = load_config_of(model, **options)
    text, positions = config.get_text_config(), positions_of(config)
    if positions is not None and sequence_length > positions:
        raise ConfigError(
            f"--sequence-length is {sequence_length}, and '{model}' has {positions} positions "
            "(max_position_embeddings in its config.json): give a smaller --sequence-length. A model with rotary "
            "positions can learn more of them: write the larger number into its config.json."
        )
    vocabulary = getattr(text, "vocab_size", None)
    if isinstance(vocabulary, int):
        require_vocabulary(vocabulary, largest_token)


def positions_of(config: Any) -> int | None:
    """How long a sequence may be; None where the config does not say it."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) else None


def require_vocabulary(vocabulary: int, largest_token: int) -> None:
    """Raises ModelError where a token of the data is not among the model's `vocabulary` embeddings."""
    if largest_token >= vocabulary:
        raise ModelError(
            f"the tokenizer gives token {largest_token}, the model's vocabulary has {vocabulary}; are they a pair? "
            "Give the model with its own tokenizer"
        )
