"""Pairs of answers for --method dpo and --method reward. The first answer of a pair is the better answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from infinity.cli.batches import TokenBatch
from infinity.cli.data import NOT_LEARNED, PackedDataset
from infinity.cli.documents import Document
from infinity.cli.training_examples import PreferencePair


@dataclass(frozen=True)
class PairBatch:
    """The pairs of one forward and backward pass.

    Attributes:
        rows: rows for the collators of TRL's trainers.
    """

    rows: list[dict[str, Any]]

    def inputs_of(self, model: Any) -> dict[str, Any]:
        """Return the arguments for a call of the model with the better answer of the first of the pairs."""
        first = self.rows[0]
        return TokenBatch(torch.tensor([[*first.get("prompt_ids", []), *first["chosen_ids"]]])).inputs_of(model)


class PairDataset(PackedDataset):
    """Pairs of answers. Each sequence is one pair: two documents, each of which has the prompt and an answer."""

    def _add(self, document: Document) -> None:
        assert isinstance(document, PreferencePair)
        room, where = self.sequence_length, document.chosen.where
        is_cut = any(len(each.ids) > room for each in document)
        if is_cut and self._method == "reward":
            self._leave_out("long", where)
        elif not all(any(each.learned[1:room]) for each in document):
            self._leave_out("late", where)
        elif document.chosen.ids[:room] == document.rejected.ids[:room]:
            self._leave_out("same", where)
        else:
            if is_cut:
                self._leave_out("cut", where)
            for each in document:
                self._store(each)

    def _packed(self, packing: bool) -> list[list[int]]:
        return [[index, index + 1] for index in range(0, len(self._spans), 2)]

    def summary(self) -> str:
        return f"{self.tokens} tokens in {self.sequences} pair{'' if self.sequences == 1 else 's'} of answers"

    def rows(self, indices: Iterable[int]) -> PairBatch:
        stored = self._stored()
        return PairBatch([self._row(*(self._tokens(stored, each) for each in self._parts[index])) for index in indices])

    def _tokens(self, stored: Any, span: int) -> Any:
        begin, numel = self._spans[span]
        return stored[begin : begin + numel]

    def _row(self, chosen: Any, rejected: Any) -> dict[str, Any]:
        first = int(np.count_nonzero(chosen & NOT_LEARNED)) if self._method == "dpo" else 0
        prompt, better, worse = (
            (each & ~NOT_LEARNED).tolist() for each in (chosen[:first], chosen[first:], rejected[first:])
        )
        return {"chosen_ids": better, "rejected_ids": worse} | ({"prompt_ids": prompt} if self._method == "dpo" else {})
