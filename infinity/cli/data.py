"""Text to packed sequences of tokens, in bounded memory: tokens are spilled to a file as they come."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from infinity.errors import ConfigError

logger = logging.getLogger(__name__)

_TOKENIZE_CHARS = 1 << 20


def documents(paths: Sequence[Path], tokenizer: Any) -> Iterator[str]:
    """Every document of the files and directories, in a fixed order.

    Raises:
        ConfigError: a path is missing, a directory has no text, a .jsonl line has neither text nor messages (names
            file:line).
    """
    for path in paths:
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
            if not files:
                raise ConfigError(f"--data {path}: the directory has no files")
            for file in files:
                yield from _file_documents(file, tokenizer, skip_binary=True)
        elif path.exists():
            yield from _file_documents(path, tokenizer, skip_binary=False)
        else:
            raise ConfigError(f"--data {path}: no such file or directory")


def _file_documents(path: Path, tokenizer: Any, *, skip_binary: bool) -> Iterator[str]:
    if path.suffix == ".jsonl":
        yield from _jsonl_documents(path, tokenizer)
        return
    try:
        with path.open(encoding="utf-8") as file:
            while text := file.read(_TOKENIZE_CHARS):
                yield text
    except UnicodeDecodeError as error:
        if not skip_binary:
            raise ConfigError(f"--data {path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
        logger.info("skipped %s: not UTF-8 text", path)


def _jsonl_documents(path: Path, tokenizer: Any) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"--data {path}:{number}: not valid JSON: {error}") from error
            yield _record_text(record, f"{path}:{number}", tokenizer)


def _record_text(record: Any, where: str, tokenizer: Any) -> str:
    if isinstance(record, dict) and isinstance(record.get("text"), str):
        return str(record["text"])
    if isinstance(record, dict) and isinstance(record.get("messages"), list):
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                f"--data {where}: has messages, but the model's tokenizer has no chat template; use a text field"
            )
        return str(tokenizer.apply_chat_template(record["messages"], tokenize=False))
    raise ConfigError(f"--data {where}: a line needs a 'text' string or a 'messages' list")


class PackedData:
    """Documents as one run of tokens, with the end-of-text token between them, cut into sequences of equal length.

    Args:
        spill: a file for the tokens, created here and removed by `close`.

    Raises:
        ConfigError: there are fewer tokens than one sequence.
    """

    def __init__(self, paths: Sequence[Path], tokenizer: Any, sequence_length: int, spill: Path) -> None:
        self._spill = spill
        separator = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
        self.tokens = 0
        with spill.open("xb") as file:
            for text in documents(paths, tokenizer):
                if not text.strip():
                    continue
                ids = tokenizer(text, add_special_tokens=False)["input_ids"] + separator
                np.asarray(ids, dtype=np.uint32).tofile(file)
                self.tokens += len(ids)
        self.sequence_length = sequence_length
        self.sequences = self.tokens // sequence_length
        if not self.sequences:
            names = ", ".join(map(str, paths))
            raise ConfigError(
                f"--data {names}: {self.tokens} tokens are less than one sequence of {sequence_length}. Give more "
                f"text, or a "
                "smaller --sequence-length."
            )

    def batches(self, batch_size: int, seed: int) -> Iterator[torch.Tensor]:
        """int64 [batch_size, sequence_length], shuffled anew each pass, without end."""
        data = np.memmap(self._spill, dtype=np.uint32, mode="r")
        epoch, queue = 0, np.empty(0, dtype=np.int64)
        while True:
            while len(queue) < batch_size:
                order = np.random.default_rng((seed, epoch)).permutation(self.sequences)
                queue, epoch = np.concatenate([queue, order]), epoch + 1
            chosen, queue = queue[:batch_size], queue[batch_size:]
            length = self.sequence_length
            rows = [data[index * length : (index + 1) * length].astype(np.int64) for index in chosen]
            yield torch.from_numpy(np.stack(rows))

    def close(self) -> None:
        self._spill.unlink(missing_ok=True)
