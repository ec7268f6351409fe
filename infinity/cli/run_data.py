"""Reading of the data for training (--data) and for evaluation (--eval-data or --eval-split)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.cli.data import PackedDataset, SequenceDataset, split
from infinity.cli.dataset_rows import by_name
from infinity.cli.finetune_options import FinetuneOptions
from infinity.cli.pairs import PairDataset
from infinity.errors import ConfigError, printable


@dataclass(frozen=True)
class RunData:
    """The data of a run.

    Attributes:
        trained: sequences for training.
        held_out: sequences for evaluation; None if there is no evaluation.
        summary: text about the data that was read.
        notes: lines about data that was left out, and why.
        has_examples: whether there are tokens that do not contribute to the loss, or padding.
        shares_sequences: whether any sequence has more than one example.
        has_chats: whether any example is a conversation.
        tokens_each: number of tokens of a sequence. For pairs, the mean number of tokens of a pair.
        largest_token: the largest token in the data.
    """

    trained: SequenceDataset
    held_out: SequenceDataset | None
    summary: str
    notes: list[str]
    has_examples: bool
    shares_sequences: bool
    has_chats: bool
    largest_token: int
    tokens_each: int

    @property
    def digest(self) -> str:
        return self.trained.digest + ("" if self.held_out is None else self.held_out.digest)


def read(options: FinetuneOptions, tokenizer: Any, disk: Path, held: ExitStack) -> RunData:
    """Read all data of a run. The tokens are written to unnamed files on `disk`.

    Args:
        options: options of the run.
        tokenizer: tokenizer of the model.
        disk: directory on the disk for the tokens.
        held: exit stack that closes the files.

    Raises:
        ConfigError: the data cannot be used (see PackedDataset), or `disk` cannot be written.
    """

    def packed(option: str, paths: Sequence[Path]) -> PackedDataset:
        try:
            made = (PackedDataset if options.method == "sft" else PairDataset)(
                paths,
                tokenizer,
                options.sequence_length,
                disk,
                loss_on=options.loss_on,
                columns=by_name(options.columns or ()),
                packing=not options.no_packing,
                option=option,
                method=options.method,
            )
        except OSError as error:
            raise ConfigError(
                f"--output {printable(options.output)}: cannot write the tokens of {option} to {printable(disk)}: "
                f"{error.strerror or error}"
            ) from error
        return held.enter_context(closing(made))

    data = packed("--data", options.data)
    trained: SequenceDataset = data
    held_out: SequenceDataset | None = None
    read = [data]
    if options.eval_data is not None:
        apart = packed("--eval-data", options.eval_data)
        read, held_out = [data, apart], apart
    elif options.eval_split is not None:
        trained, held_out = split(data, options.eval_split, options.seed)
    summary = data.summary()
    if held_out is not None:
        summary += (
            f"; {trained.sequences} to train on, {held_out.sequences} held out"
            if options.eval_data is None
            else f"; held out: {read[1].summary()}"
        )
    if options.verbose:
        print(f"the first document of --data, with the learned text in «»:\n{printable(data.preview())}", flush=True)
    return RunData(
        trained,
        held_out,
        summary,
        [note for each in read for note in each.notes()],
        any(each.has_examples for each in read),
        options.method == "sft" and any(each.shares_sequences for each in read),
        any(each.has_chats for each in read),
        max(each.largest_token for each in read),
        options.sequence_length if options.method == "sft" else data.tokens // data.sequences,
    )
