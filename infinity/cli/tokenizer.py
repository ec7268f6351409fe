"""Loading the tokenizer of a model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from infinity.errors import ModelError
from infinity.quoting import raised

_FILES = ("tokenizer_config.json", "tokenizer.json")
TOKENIZER_FILE = re.compile(r"tokenizer|vocab|merges|spiece|sentencepiece|\.model$|\.tiktoken$|bpe", re.IGNORECASE)
"""Pattern of file names. Every tokenizer of transformers has at least one file whose name matches."""


def load_tokenizer(name: str, **options: Any) -> Any:
    """Load a tokenizer.

    Args:
        name: directory or hub id.
        options: further arguments for transformers' from_pretrained.

    Raises:
        ModelError: the model has no tokenizer, or the tokenizer cannot be loaded.
    """
    from transformers import AutoTokenizer

    absent = (
        f"'{name}' has no tokenizer: copy the tokenizer's files (tokenizer.json and the files next to it) into the "
        "model's directory, from the directory of its base model"
    )
    if Path(name).is_dir() and not any(TOKENIZER_FILE.search(entry.name) for entry in Path(name).iterdir()):
        raise ModelError(absent)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    except Exception as error:  # each kind of tokenizer raises errors of its own
        where = "" if Path(name).is_dir() else "there is no such directory, and from the Hugging Face hub: "
        raise ModelError(f"cannot load the tokenizer of '{name}': {where}{raised(error)}") from error
    # If the files are missing, transformers makes an empty tokenizer, which returns no tokens for any text.
    added = tokenizer.get_added_vocab()
    if sum(token not in added for token in tokenizer.get_vocab()) < 2:
        raise ModelError(absent)
    return tokenizer


def has_tokenizer(directory: Path) -> bool:
    """Return whether the directory has files of a tokenizer, as save_pretrained writes them."""
    return any((directory / name).is_file() for name in _FILES)
