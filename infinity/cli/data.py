"""Packing text into sequences of tokens in bounded memory: tokens are written to a file as they are made."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from infinity.cli.documents import Document, NotTextError, documents, find_files
from infinity.cli.world import ALONE, World
from infinity.errors import ConfigError, printable

_NAMED = 5
"""How many files a message names; of the others it gives the number."""


@dataclass
class _Content:
    """Counts of the tokens written so far.

    Attributes:
        digest: of the tokens.
        tokens: number of tokens.
        first_known: place of the first token that is neither a separator nor the tokenizer's token for unknown text;
            None: there is none.
        largest: the highest token; -1 before the first.
        documents: number of documents.
        blank: number of blank documents, which were left out.
    """

    digest: Any
    tokens: int = 0
    first_known: int | None = None
    largest: int = -1
    documents: int = 0
    blank: int = 0

    def copy(self) -> _Content:
        return _Content(self.digest.copy(), self.tokens, self.first_known, self.largest, self.documents, self.blank)


class PackedData:
    """Documents as one row of tokens, with the end-of-text token between them, cut into sequences of equal length.

    Args:
        directory: for the file with the tokens, which has no name and ends with the process.

    Attributes:
        tokens: number of tokens.
        largest_token: the highest token.
        sequences: number of sequences, of `sequence_length` tokens each.
        left_out: files that hold no text, each with the reason.

    Raises:
        ConfigError: the errors of documents.find_files and documents.documents; or no file holds text, the tokenizer
            knows none of the text, or there are fewer tokens than one sequence.
        OSError: `directory` cannot be written.
    """

    def __init__(self, paths: Sequence[Path], tokenizer: Any, sequence_length: int, directory: Path) -> None:
        self._tokenizer = tokenizer
        self._spill = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 (it lives as long as this)
        self._content = _Content(hashlib.blake2b(digest_size=16))
        files, self.left_out = find_files(paths)
        for file in files:
            self._add_file(file)
        self._spill.flush()
        self.digest = self._content.digest.hexdigest()
        self.tokens, self.largest_token = self._content.tokens, self._content.largest
        self.sequence_length = sequence_length
        self.sequences = self.tokens // sequence_length
        self._require_enough(", ".join(map(printable, paths)))

    def notes(self) -> list[str]:
        """Sentences about files and documents that were left out, and about missing separators; [] when there are
        none."""
        said = []
        if self.left_out:
            more = f" and {len(self.left_out) - _NAMED} more" if len(self.left_out) > _NAMED else ""
            said.append(f"files left out: {len(self.left_out)} (" + self._why_left_out() + f"{more})")
        if self._content.blank:
            said.append(f"documents left out, because they are blank: {self._content.blank}")
        if self._tokenizer.eos_token_id is None and self._content.documents > 1:
            said.append("the tokenizer has no end-of-text token: nothing parts one document from the next")
        return said

    def _why_left_out(self) -> str:
        return "; ".join(f"{printable(path)}: {reason}" for path, reason in self.left_out[:_NAMED])

    def _add_file(self, path: Path) -> None:
        """Add all documents of a file, or none."""
        before = self._content.copy()
        try:
            for document in documents(path, self._tokenizer):
                self._add(document)
        except NotTextError as error:
            self._return_to(before)
            self.left_out.append((path, str(error)))

    def _add(self, document: Document) -> None:
        before = self._content.copy()
        blank = True
        for piece in document:
            blank = blank and not piece.strip()
            self._write(self._tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])
        if blank:
            self._return_to(before)
            self._content.blank += 1
            return
        self._content.documents += 1
        if self._tokenizer.eos_token_id is not None:
            self._write([self._tokenizer.eos_token_id])

    def _write(self, ids: list[int]) -> None:
        array = np.asarray(ids, dtype=np.uint32)
        packed = array.tobytes()
        self._spill.write(packed)
        content = self._content
        content.digest.update(packed)
        if content.first_known is None:
            special = self._tokenizer.unk_token_id, self._tokenizer.eos_token_id
            known = np.flatnonzero(~np.isin(array, [each for each in special if each is not None]))
            content.first_known = content.tokens + int(known[0]) if len(known) else None
        content.tokens += len(ids)
        content.largest = max(content.largest, int(array.max(initial=0)) if len(ids) else -1)

    def _return_to(self, before: _Content) -> None:
        """Take back the tokens added since `before`."""
        self._spill.seek(before.tokens * np.dtype(np.uint32).itemsize)
        self._spill.truncate()
        self._content = before

    def _require_enough(self, names: str) -> None:
        content = self._content
        if not content.documents:
            why = self._why_left_out() or "everything in it is blank"
            raise ConfigError(f"--data {names}: there is no text in it ({why})")
        if content.first_known is None:
            raise ConfigError(
                f"--data {names}: the model's tokenizer knows none of the text: all of it becomes "
                f"{content.tokens} tokens that mean 'unknown' or 'end of text'. Is it this model's tokenizer?"
            )
        if not self.sequences:
            raise ConfigError(
                f"--data {names}: {self.tokens} tokens are less than one sequence of {self.sequence_length}. Give more "
                "text, or a smaller --sequence-length."
            )
        if content.first_known >= self.sequences * self.sequence_length:
            raise ConfigError(
                f"--data {names}: the model's tokenizer knows none of the {self.sequences} whole sequences of "
                f"{self.sequence_length} tokens: all of them mean 'unknown' or 'end of text'. Is it this "
                "model's tokenizer?"
            )

    def batches(self, batch_size: int, seed: int, world: World = ALONE) -> Batches:
        """Endless batches; the sequences are shuffled anew for each pass over the data."""
        return Batches(self, batch_size, seed, world)

    def rows(self, indices: Iterable[int]) -> torch.Tensor:
        """int64 [len(indices), sequence_length]."""
        data = np.memmap(self._spill, dtype=np.uint32, mode="r")[: self.sequences * self.sequence_length]
        rows = data.reshape(self.sequences, self.sequence_length)
        return torch.from_numpy(rows[np.fromiter(indices, np.int64)].astype(np.int64))

    def close(self) -> None:
        self._spill.close()


class Batches:
    """An endless iterator over batches, int64 [batch_size, sequence_length], with a state_dict to continue from.

    The sequences of pass 0, 1, … follow each other, each pass in an order of its own that (seed, pass) determines.
    Batch k is the k-th group of `batch_size` sequences. Of N ranks each has every Nth batch, so that they have together
    what one process would have.
    """

    def __init__(self, data: PackedData, batch_size: int, seed: int, world: World = ALONE) -> None:
        self._data = data
        self._world = world
        self._batch_size = batch_size
        self._seed = seed
        self._given = 0
        self._pass = -1
        self._order = np.empty(0, dtype=np.int64)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> torch.Tensor:
        first = (self._given + self._world.rank) * self._batch_size
        chosen = [self._sequence(first + position) for position in range(self._batch_size)]
        self._given += self._world.count
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
        """Continue after the batches of `state`. Raises ConfigError for the state of other data or batches."""
        if {key: state.get(key) for key in self._identity()} != self._identity():
            raise ConfigError("the text, the tokenizer or the batches are not those of the run: give the same --data")
        self._given = int(state["given"])
