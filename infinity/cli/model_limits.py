"""Checks that the data are within the model's limits: the length of a sequence, and the size of the vocabulary."""

from __future__ import annotations

from typing import Any

from infinity.checkpoint.load_pretrained import load_config_of
from infinity.errors import ConfigError, ModelError


def require_fit(model: str, sequence_length: int, largest_token: int, **options: Any) -> None:
    """Check that the data are within the limits in the model's config. This check comes before the model is loaded.

    Args:
        model: directory or hub id of the model.
        sequence_length: tokens of a sequence.
        largest_token: largest token in the data.
        options: further arguments for transformers' from_pretrained.

    Raises:
        ConfigError: the sequences are longer than the model's maximum.
        ModelError: the data has tokens that the model's vocabulary does not have.
    """
    config = load_config_of(model, **options)
    text, positions = config.get_text_config(), positions_of(config)
    if positions is not None and sequence_length > positions:
        raise ConfigError(
            f"--sequence-length is {sequence_length}, but '{model}' has only {positions} positions "
            "(max_position_embeddings in its config.json): give a smaller --sequence-length. A model with rotary "
            "positions can learn more positions: write the larger number into its config.json."
        )
    vocabulary = getattr(text, "vocab_size", None)
    if isinstance(vocabulary, int):
        require_vocabulary(vocabulary, largest_token)


def positions_of(config: Any) -> int | None:
    """Return the maximum length of a sequence in tokens; None if the config does not have a maximum."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) else None


def require_vocabulary(vocabulary: int, largest_token: int) -> None:
    """Check that the model has an embedding for each token of the data.

    Args:
        vocabulary: number of the model's embeddings.
        largest_token: largest token in the data.

    Raises:
        ModelError: the data has a token for which the model has no embedding.
    """
    if largest_token >= vocabulary:
        raise ModelError(
            f"the tokenizer produces token {largest_token}, but the model's vocabulary has {vocabulary} tokens; is it "
            "the model's own tokenizer? Give the model with its own tokenizer"
        )
