"""Conversion of documents to sequences of tokens.

The tokens are written to a file, so any amount of text needs only a bounded amount of memory.

[Note: rows and packed examples]
If all documents are text, their tokens form one row, with the end-of-text token between documents. This row is cut into
sequences. Therefore the sequences need no padding. A sequence may contain the end of one document and the beginning of
the next document.

If any document has a prompt or messages, every document becomes an example. One sequence may contain several examples.
In each example the positions of the tokens count from 0, and a token attends only to tokens of its own example
(batches.py). An example that is longer than a sequence is cut. If this example is a plain text, the remaining tokens
become a further example.
"""

from __future__ import annotations

import hashlib
import tempfile
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from infinity.cli.batches import TokenBatch
from infinity.cli.documents import Document, NotTextError, Text, documents, find_files, of_option
from infinity.cli.packing import pack
from infinity.cli.training_examples import LossOn, PreferencePair, TrainingExample
from infinity.errors import ConfigError, printable
from infinity.quoting import quoted

_NAMED = 5
"""Maximum number of files that a message names. The message gives only the number of the other files."""
_COUNTED = 100
"""Maximum number of different unread fields that are counted."""
_SCANNED = 1 << 20
"""Number of tokens that are scanned at a time."""
_LEFT_OUT = {
    "blank": ("documents left out, because they are blank", ""),
    "unanswered": (
        "examples left out, because they have no answer",
        "Check that there are messages of the assistant, and that the chat template marks what the assistant says",
    ),
    "declined": (
        "examples left out, because all of their answers have 'weight': 0 (or 'train' or 'loss': false)",
        "Give 1, or true, for each answer that the model should learn",
    ),
    "late": (
        "examples left out, because their answer begins after --sequence-length {length} tokens",
        "Give a larger --sequence-length",
    ),
    "same": ("pairs left out, because both answers are the same", "Give pairs of answers that differ"),
    "long": (
        "pairs left out, because an answer is longer than --sequence-length {length}",
        "Give a larger --sequence-length",
    ),
    "cut": ("examples cut, because they are longer than --sequence-length {length}", ""),
}
"""Reasons why rows are left out or cut. The advice for a reason is shown if no row can be used, all for this reason."""
NOT_LEARNED = np.uint32(1 << 31)
"""Bit that marks a token that does not contribute to the loss."""


class _DocumentSpan(NamedTuple):
    """A whole document, or a part of a document, in the file of tokens.

    Attributes:
        begin: position of the first token in the file.
        numel: number of tokens.
    """

    begin: int
    numel: int


class SequenceDataset(Protocol):
    """Sequences of tokens, or pairs of sequences, by index. `rows` returns a TokenBatch of sequences, or PairBatch.

    Attributes:
        digest: digest of all sequences.
    """

    digest: str

    @property
    def sequences(self) -> int: ...

    def rows(self, indices: Iterable[int]) -> Any: ...


class SequenceSubset:
    """A selection of the sequences of another object."""

    def __init__(self, whole: SequenceDataset, chosen: Sequence[int]) -> None:
        self._whole = whole
        self._chosen = chosen
        self.digest = hashlib.blake2b(f"{whole.digest} {list(chosen)}".encode(), digest_size=16).hexdigest()

    @property
    def sequences(self) -> int:
        return len(self._chosen)

    def rows(self, indices: Iterable[int]) -> Any:
        return self._whole.rows([self._chosen[index] for index in indices])


def split(data: SequenceDataset, share: float, seed: int) -> tuple[SequenceSubset, SequenceSubset]:
    """Split sequences at random, and return the sequences to train on and the held-out sequences.

    Args:
        data: the sequences.
        share: share of the held-out sequences. At least one sequence is held out.
        seed: seed of the selection.

    Raises:
        ConfigError: the data has only one sequence.
    """
    if data.sequences < 2:
        raise ConfigError("--eval-split needs two sequences or more, and --data has only one: give --eval-data instead")
    held_out = min(max(round(share * data.sequences), 1), data.sequences - 1)
    order = np.random.default_rng((seed, 0x5EED)).permutation(data.sequences)
    return SequenceSubset(data, sorted(order[held_out:].tolist())), SequenceSubset(
        data, sorted(order[:held_out].tolist())
    )


class PackedDataset:
    """Documents as sequences of equal length: see [Note: rows and packed examples].

    Args:
        paths: files and directories of the data.
        tokenizer: tokenizer of the model.
        sequence_length: tokens of a sequence.
        directory: directory for the file with the tokens. The file has no name, and its space is freed when the process
            ends.
        loss_on: the tokens that contribute to the loss, in rows with prompts or messages: "answers" or "all".
        columns: values of --columns, by name.
        packing: whether a sequence may have several examples. If not, each sequence has one example and padding.
        option: option that named the paths, for messages.
        method: --method of the run.

    Attributes:
        tokens: number of tokens.
        largest_token: the largest token.
        sequences: number of sequences, of `sequence_length` tokens each.
        has_examples: whether each document is an example. If not, the documents form one row.
        has_chats: whether the chat template made some of the examples.
        shares_sequences: whether any sequence has more than one example.
        left_out: files that are not text, each with the reason.

    Raises:
        ConfigError: no file is text; the tokenizer knows none of the text; there are fewer tokens than one sequence
            has; or no token contributes to the loss. documents.find_files and documents.documents raise further errors.
        OSError: `directory` cannot be written.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        tokenizer: Any,
        sequence_length: int,
        directory: Path,
        *,
        loss_on: LossOn = "answers",
        columns: Mapping[str, str] | None = None,
        packing: bool = True,
        option: str = "--data",
        method: str = "sft",
    ) -> None:
        self._method = method
        self._tokenizer = tokenizer
        self._loss_on: LossOn = loss_on
        self._columns = columns or {}
        self.sequence_length = sequence_length
        self._spill = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 (it lives as long as this object)
        self._counts: Counter[str] = Counter()  # number of rows by reason, with the names of _LEFT_OUT
        self._places: dict[str, list[str]] = defaultdict(list)  # the first rows of each reason
        self._unread: Counter[str] = Counter()  # fields of rows that are not read
        self.tokens = 0
        self.has_chats = False
        self._ends = array("q")  # for each document, the position of its end in the file
        self._of_example = bytearray()  # for each document, whether it is an example
        self._before, self._after = _around_text(tokenizer)
        with of_option(option):
            self._read(paths, packing)

    def _read(self, paths: Sequence[Path], packing: bool) -> None:
        files, self.left_out = find_files(paths)
        for file in files:
            self._add_file(file)
        self._spill.flush()
        self.has_examples = any(self._of_example)
        self._spans: list[_DocumentSpan] = list(self._spans_of_documents()) if self.has_examples else []
        self._parts: list[list[int]] = self._packed(packing)
        self.shares_sequences = any(len(each) > 1 for each in self._parts)
        self._count = len(self._parts) if self.has_examples else self.tokens // self.sequence_length
        self.digest = self._scanned(f"{packing} {len(self._parts)}".encode() + self._ends.tobytes())
        self._require_enough(", ".join(map(printable, paths)))

    def _scanned(self, layout: bytes) -> str:
        """Set `largest_token` and the position of the first known token. Return the digest of all tokens."""
        special = self._tokenizer.unk_token_id, self._tokenizer.eos_token_id, self._tokenizer.bos_token_id
        digest, self.largest_token, self._first_known = hashlib.blake2b(digest_size=16), -1, self.tokens
        for begin in range(0, self.tokens, _SCANNED):
            marked = self._stored()[begin : begin + _SCANNED]
            digest.update(marked.tobytes())
            ids = marked & ~NOT_LEARNED
            self.largest_token = max(self.largest_token, int(ids.max()))
            if self._first_known == self.tokens:
                known = np.flatnonzero(~np.isin(ids, [each for each in special if each is not None]))
                self._first_known = begin + int(known[0]) if len(known) else self.tokens
        digest.update(layout if self.has_examples else b"")
        return digest.hexdigest()

    @property
    def sequences(self) -> int:
        return self._count

    def summary(self) -> str:
        """Return a summary of the data."""
        form = f"{_counted(self.sequences, 'sequence')} of {self.sequence_length}"
        if not self.has_examples:
            rest = self.tokens - self.sequences * self.sequence_length
            dropped = f"; the last {rest} tokens, less than a sequence, are left out" if rest else ""
            return f"{self.tokens} tokens of {_counted(len(self._ends), 'document')} in {form}{dropped}"
        used = sum(span.numel for span in self._spans)
        return (
            f"{_counted(len(self._ends), 'example')} in {form}: {used} tokens, of which {self._learned()} are learned, "
            f"and {self.sequences * self.sequence_length - used} of padding"
        )

    def notes(self) -> list[str]:
        """Return sentences about left-out or cut files and documents, unread fields and missing separators."""
        noted = list[str]()
        if self.left_out:
            more = f" and {len(self.left_out) - _NAMED} more" if len(self.left_out) > _NAMED else ""
            noted.append(f"files left out: {len(self.left_out)} (" + self._why_left_out() + f"{more})")
        noted += [self._note(why) for why in _LEFT_OUT if self._counts[why]]
        if self._unread:
            most = self._unread.most_common(_NAMED)
            more = f" and {len(self._unread) - _NAMED} more" if len(self._unread) > _NAMED else ""
            noted.append("fields of rows that are not read: " + ", ".join(quoted(name) for name, _ in most) + more)
        if self._tokenizer.eos_token_id is None and self._of_example.count(0) > 1:
            noted.append("the tokenizer has no end-of-text token, so no token separates one document from the next")
        return noted

    def _note(self, why: str) -> str:
        places = ", ".join(self._places[why][:_NAMED]) + (", …" if len(self._places[why]) > _NAMED else "")
        said = _LEFT_OUT[why][0].format(length=self.sequence_length)
        return f"{said}: {self._counts[why]}" + (f" ({places})" if places else "")

    def preview(self) -> str:
        """Return the text of the first document, with «» around the parts that contribute to the loss."""
        stored = self._stored()
        numel = min(self._ends[0] if self._ends else 0, self.sequence_length)
        text, spans = "", list[tuple[bool, list[int]]]()
        for place, marked in enumerate(stored[:numel].tolist()):
            learned = place > 0 and marked < int(NOT_LEARNED)
            if not spans or spans[-1][0] != learned:
                spans.append((learned, []))
            spans[-1][1].append(marked & ~int(NOT_LEARNED))
        for learned, ids in spans:
            piece = self._tokenizer.decode(ids)
            text += f"«{piece}»" if learned else piece
        return text

    def _why_left_out(self) -> str:
        return "; ".join(f"{printable(path)}: {reason}" for path, reason in self.left_out[:_NAMED])

    # -- reading ------------------------------------------------------------------------------------------------------

    def _add_file(self, path: Path) -> None:
        """Add all documents of a file."""
        try:
            read = documents(path, self._tokenizer, self._loss_on, self._columns, self._note_unread, self._method)
            for document in read:
                self._add(document)
        except NotTextError as error:
            self.left_out.append((path, str(error)))

    def _add(self, document: Document) -> None:
        if isinstance(document, TrainingExample):
            self._add_example(document)
        else:
            assert not isinstance(document, PreferencePair)
            self._add_text(document)

    def _leave_out(self, why: str, where: str = "") -> None:
        self._counts[why] += 1
        if where and len(self._places[why]) <= _NAMED:
            self._places[why].append(where)

    def _note_unread(self, fields: Iterable[str]) -> None:
        self._unread.update(each for each in fields if each in self._unread or len(self._unread) < _COUNTED)

    def _add_text(self, document: Text) -> None:
        """Add a document. A document that is blank, or that is not text, is ignored."""
        begin, blank = self.tokens, True
        try:
            self._write(self._before)
            for piece in document:
                blank = blank and not piece.strip()
                self._write(self._tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])
        except NotTextError:
            self._return_to(begin)
            raise
        if blank:
            self._return_to(begin)
            self._leave_out("blank")
            return
        self._write(self._after)
        self._end_document(is_example=False)

    def _add_example(self, example: TrainingExample) -> None:
        numel = min(len(example.ids), self.sequence_length)
        # the first token does not contribute to the loss, because no earlier token predicts it
        if not any(example.learned[1:numel]):
            why = "declined" if example.declined else "late" if any(example.learned[1:]) else "unanswered"
            self._leave_out(why, example.where)
            return
        if numel < len(example.ids):
            self._leave_out("cut", example.where)
        self._store(example)

    def _store(self, example: TrainingExample) -> None:
        """Add the part of an example that fits into a sequence."""
        self._write(example.ids[: self.sequence_length], example.learned[: self.sequence_length])
        self.has_chats |= example.is_chat
        self._end_document(is_example=True)

    def _end_document(self, *, is_example: bool) -> None:
        self._ends.append(self.tokens)
        self._of_example.append(is_example)

    def _write(self, ids: Sequence[int], learned: Sequence[bool] = ()) -> None:
        tokens = np.asarray(ids, dtype=np.uint32)
        marked = tokens if not learned else np.where(np.asarray(learned), tokens, tokens | NOT_LEARNED)
        self._spill.write(marked.tobytes())
        self.tokens += len(ids)

    def _return_to(self, tokens: int) -> None:
        """Remove the tokens after the first `tokens`."""
        self._spill.seek(tokens * np.dtype(np.uint32).itemsize)
        self._spill.truncate()
        self.tokens = tokens

    def _require_enough(self, names: str) -> None:
        if not self._ends:
            why = next((why for why in ("long", "same", "late", "declined", "unanswered") if self._counts[why]), "")
            if why:
                raise ConfigError(f"{names}: no row of it can be learned: {self._note(why)}. {_LEFT_OUT[why][1]}")
            nothing = self._why_left_out() or "all of it is blank"
            raise ConfigError(f"{names}: there is no text in it ({nothing})")
        looked_at = self.tokens if self.has_examples or not self.sequences else self.sequences * self.sequence_length
        if self._first_known >= looked_at:
            raise ConfigError(
                f"{names}: the model's tokenizer knows none of the text: all tokens (or all tokens in complete "
                f"sequences of {self.sequence_length}) mean 'unknown' or 'end of text'. Is this the model's own "
                "tokenizer?"
            )
        if not self.sequences:
            raise ConfigError(
                f"{names}: {self.tokens} tokens are less than one sequence of {self.sequence_length}. Give more text, "
                "or a smaller --sequence-length."
            )

    # -- examples -----------------------------------------------------------------------------------------------------

    def _spans_of_documents(self) -> Iterator[_DocumentSpan]:
        begin = 0
        for end, is_example in zip(self._ends, self._of_example, strict=True):
            for at in range(begin, end, self.sequence_length):
                numel = min(self.sequence_length, end - at)
                if is_example or numel > 1:  # a part of one token is useless, because the model has no token to predict
                    yield _DocumentSpan(at, numel)
            begin = end

    def _packed(self, packing: bool) -> list[list[int]]:
        """Return for each sequence the spans that it contains."""
        if packing:
            return pack([span.numel for span in self._spans], self.sequence_length)
        return [[index] for index in range(len(self._spans))]

    def _learned(self) -> int:
        """Return the number of tokens that contribute to the loss."""
        stored = self._stored()
        return sum(
            int(np.count_nonzero(stored[span.begin + 1 : span.begin + span.numel] < NOT_LEARNED))
            for span in self._spans
        )

    def _stored(self) -> Any:
        return np.memmap(self._spill, dtype=np.uint32, mode="r")

    # -- sequences ----------------------------------------------------------------------------------------------------

    def rows(self, indices: Iterable[int]) -> Any:
        """Return the TokenBatch of the sequences with these indices."""
        stored = self._stored()
        if not self.has_examples:
            rows = stored[: self.sequences * self.sequence_length].reshape(self.sequences, self.sequence_length)
            return TokenBatch(torch.from_numpy(rows[np.fromiter(indices, np.int64)].astype(np.int64)))
        padding = self._tokenizer.pad_token_id
        padding = padding if padding is not None else self._tokenizer.eos_token_id or 0
        rows = [self._examples_of(stored, index, padding) for index in indices]
        return TokenBatch(*(torch.from_numpy(np.stack(each)) for each in zip(*rows, strict=True)))

    def _examples_of(self, stored: Any, index: int, padding: int) -> tuple[Any, Any, Any]:
        """Return tokens, labels and positions of a sequence.

        The padding is treated as one more example, whose tokens do not contribute to the loss.
        """
        ids = np.full(self.sequence_length, padding, dtype=np.int64)
        labels = np.full(self.sequence_length, TokenBatch.NOTHING, dtype=np.int64)
        positions = np.empty(self.sequence_length, dtype=np.int64)
        at = 0
        for span in (self._spans[each] for each in self._parts[index]):
            marked = stored[span.begin : span.begin + span.numel]
            tokens = (marked & ~NOT_LEARNED).astype(np.int64)
            ids[at : at + span.numel] = tokens
            labels[at + 1 : at + span.numel] = np.where(marked < NOT_LEARNED, tokens, TokenBatch.NOTHING)[1:]
            positions[at : at + span.numel] = np.arange(span.numel)
            at += span.numel
        positions[at:] = np.arange(self.sequence_length - at)
        return ids, labels, positions

    def close(self) -> None:
        self._spill.close()


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def _around_text(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the tokens that the tokenizer puts before a text, and the token that ends a document."""
    alone = tokenizer("", verbose=False)["input_ids"]
    begin = tokenizer.bos_token_id
    end = tokenizer.eos_token_id
    before = [begin] if begin is not None and begin != end and alone[:1] == [begin] else []
    return before, [] if end is None else [end]
