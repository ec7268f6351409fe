"""Text to packed sequences of tokens, in bounded memory: tokens are spilled to a file as they come."""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Iterable, Iterator, Sequence
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
        directory: where the tokens are spilled to, into a file without a name that is gone with the process.

    Raises:
        ConfigError: there are fewer tokens than one sequence.
    """

    def __init__(self, paths: Sequence[Path], tokenizer: Any, sequence_length: int, directory: Path) -> None:
        self._spill = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 (it lives as long as this)
        separator = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
        self.tokens = 0
        digest = hashlib.blake2b(digest_size=16)
        for text in documents(paths, tokenizer):
            if not text.strip():
                continue
            ids = tokenizer(text, add_special_tokens=False)["input_ids"] + separator
            packed = np.asarray(ids, dtype=np.uint32).tobytes()
            self._spill.write(packed)
            digest.update(packed)
            self.tokens += len(ids)
        self._spill.flush()
        self.digest = digest.hexdigest()
        self.sequence_length = sequence_length
        self.sequences = self.tokens // sequence_length
        if not self.sequences:
            names = ", ".join(map(str, paths))
            raise ConfigError(
                f"--data {names}: {self.tokens} tokens are less than one sequence of {sequence_length}. Give more "
                f"text, or a "
                "smaller --sequence-length."
            )

    def batches(self, batch_size: int, seed: int) -> Batches:
        """Endless, shuffled anew each pass."""
        return Batches(self, batch_size, seed)

    def rows(self, indices: Iterable[int]) -> torch.Tensor:
        """int64 [len(indices), sequence_length]."""
        data, length = np.memmap(self._spill, dtype=np.uint32, mode="r"), self.sequence_length
        rows = [data[index * length : (index + 1) * length].astype(np.int64) for index in indices]
        return torch.from_numpy(np.stack(rows))

    def close(self) -> None:
        self._spill.close()


class Batches:
    """An endless iterator over batches, int64 [batch_size, sequence_length], that can be continued where it was.

    The sequences of pass 0, 1, … lie one after the other, each pass in an order of its own that (seed, pass) gives;
    batch k is the k-th `batch_size` of them.
    """

    def __init__(self, data: PackedData, batch_size: int, seed: int) -> None:
        self._data = data
        self._batch_size = batch_size
        self._seed = seed
        self._given = 0
        self._pass = -1
        self._order = np.empty(0, dtype=np.int64)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> torch.Tensor:
        first = self._given * self._batch_size
        chosen = [self._sequence(first + position) for position in range(self._batch_size)]
        self._given += 1
        return self._data.rows(chosen)

    def _sequence(self, position: int) -> int:
        number, within = divmod(position, self._data.sequences)
        if number != self._pass:
            self._pass = number
            self._order = np.random.default_rng((self._seed, number)).permutation(self._data.sequences)
        return int(self._order[within])

    def _identity(self) -> dict[str, Any]:
        return {"batch_size": self._batch_size, "seed": self._seed, "tokens": self._data.digest}

    def state_dict(self) -> dict[str, Any]:
        return {"given": self._given, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ConfigError when it is of other data or batches."""
        if {key: state.get(key) for key in self._identity()} != self._identity():
            raise ConfigError("the text, the tokenizer or the batches are not those of the run: give the same --data")
        self._given = int(state["given"])
