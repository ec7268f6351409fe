"""Rows with two answers, of which one is better: what is learned of them, and which are refused or left out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infinity.cli.dataset_rows import by_name
from infinity.cli.pairs import PairDataset
from infinity.errors import ConfigError
from tests.cli.test_examples import CHATML, byte_level

ASK = [{"role": "user", "content": "say it"}]
FOX, HEN = ([{"role": "assistant", "content": each}] for each in ("fox", "hen"))
CHAT = {"prompt": ASK, "chosen": FOX, "rejected": HEN}
Read = Callable[..., PairDataset]


@pytest.fixture
def read(tmp_path: Path) -> Iterator[Read]:
    """PairDataset of rows, closed at the end."""
    opened: list[PairDataset] = []

    def make(*rows: Any, method: str = "dpo", length: int = 128, **options: Any) -> PairDataset:
        path = tmp_path / f"rows{len(opened)}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        by = byte_level()
        by.chat_template = CHATML
        opened.append(PairDataset([path], by, length, tmp_path, method=method, **options))
        return opened[-1]

    yield make
    for data in opened:
        data.close()


def texts(data: PairDataset) -> list[tuple[str, str, str]]:
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    rows = data.rows(range(data.sequences)).rows
    return [tuple(byte_level().decode(row.get(name, [])) for name in names) for row in rows]


ASKED, SAID = "<|im_start|>user\nsay it<|im_end|><|im_start|>assistant\n", "{}<|im_end|>"
LEARNED = [
    (CHAT, ASKED, SAID.format("fox"), SAID.format("hen")),
    ({"chosen": [*ASK, *FOX], "rejected": [*ASK, *HEN]}, ASKED, SAID.format("fox"), SAID.format("hen")),
    (
        {"prompt": "say it", "chosen": [*ASK, *FOX], "rejected": [*ASK, *HEN]},
        ASKED,
        SAID.format("fox"),
        SAID.format("hen"),
    ),
    ({"question": "say it:", "chosen": " fox", "rejected": " hen"}, "say it:", " fox<eos>", " hen<eos>"),
    (
        {"question": "say", "prompt": "say", "input": "it:", "chosen": " fox", "rejected": " hen"},
        "say\n\nit:",
        " fox<eos>",
        " hen<eos>",
    ),
    (
        {"chosen": "Human: it\n\nAssistant: fox", "rejected": "Human: it\n\nAssistant: hen"},
        "Human: it\n\nAssistant:",
        " fox<eos>",
        " hen<eos>",
    ),
    ({"system": "be kind", "chosen": "a: fox", "rejected": "a: hen"}, "be kind\n\na:", " fox<eos>", " hen<eos>"),
]


@pytest.mark.parametrize(("row", "asked", "better", "worse"), LEARNED)
def test_both_answers_begin_behind_the_prompt(row: Any, asked: str, better: str, worse: str, read: Read) -> None:
    assert texts(read(row)) == [(asked, better, worse)]
    assert texts(read(row, method="reward")) == [("", asked + better, asked + worse)]


MORE = {"role": "user", "content": "and"}
REFUSED = [
    ({"text": "fox"}, "--method dpo learns which of two answers is better, but the row has no 'chosen'"),
    (CHAT | {"margin": 2}, "has 'margin', which infinity cannot obey"),
    (CHAT | {"image": "x.png"}, "has 'image', which infinity cannot obey: text is all that is learned"),
    (CHAT | {"chosen": "fox"}, "must all be strings, or must all be lists of messages"),
    (CHAT | {"chosen": [*FOX, MORE]}, "'chosen' has a message of the user after the prompt"),
    (CHAT | {"rejected": [HEN[0] | {"weight": 0}]}, "rejected: 'weight', 'train' and 'loss' have no effect here"),
    ({"chosen": "fox", "rejected": "hen"}, "have no common beginning, .*: give a 'prompt'"),
    ({"chosen": [*ASK, *FOX], "rejected": ASK}, "one is the beginning of the other: give a 'prompt'"),
    (
        {"prompt": "say it:", "chosen": "fox", "rejected": " "},
        "'rejected' contains only the prompt: leave the row out",
    ),
    (
        CHAT | {"chosen": [*ASK, *FOX], "rejected": [*ASK, *HEN]},
        "begin with the prompt, .* --columns chosen=chosen rejected=rejected",
    ),
]


@pytest.mark.parametrize(("row", "why"), REFUSED)
def test_a_row_that_cannot_be_learned_is_refused_by_name(row: Any, why: str, read: Read) -> None:
    with pytest.raises(ConfigError, match=rf"--data .*rows0\.jsonl:2: .*{why}"):
        read(CHAT, row)


def test_the_way_on_that_a_refusal_names_is_one(read: Read) -> None:
    row = CHAT | {"chosen": [*ASK, *FOX], "rejected": [*ASK, *HEN]}
    assert texts(read(row, columns=by_name(["chosen=chosen", "rejected=rejected"]))) == texts(read(CHAT))
    turns = {"chosen": [*FOX, MORE, *FOX], "rejected": [*HEN, MORE, *HEN]}
    assert texts(read(CHAT | {name: said[:1] for name, said in turns.items()})) == texts(read(CHAT))
    named = by_name(["chosen=better", "rejected=worse"])
    assert texts(read({"better": "a: fox", "worse": "a: hen"}, columns=named)) == [("a:", " fox<eos>", " hen<eos>")]


def test_a_conversation_that_does_not_end_with_an_answer_has_no_reward(read: Read) -> None:
    with pytest.raises(ConfigError, match="'chosen' does not end with a message of the assistant"):
        read(CHAT | {"chosen": [*FOX, MORE]}, method="reward")
    row = {"chosen": [*ASK, *HEN, MORE, *FOX], "rejected": [*ASK, *FOX, MORE, *HEN]}
    assert texts(read(row, method="reward"))[0][1].count("<|im_end|>") == 4


def test_pairs_of_one_answer_and_those_that_are_too_long_are_left_out(read: Read) -> None:
    long = CHAT | {"chosen": [{"role": "assistant", "content": "fox " * 200}]}
    late = CHAT | {"prompt": [{"role": "user", "content": "fox " * 200}]}
    same = CHAT | {"rejected": FOX}
    data = read(CHAT, long, late, same)
    assert data.sequences == 2
    assert [len(row["prompt_ids"] + row["chosen_ids"]) for row in data.rows([1]).rows] == [128]
    notes = "\n".join(data.notes())
    for said in (
        "both answers are the same: 1 (",
        "after --sequence-length 128 tokens: 1 (",
        "cut, because they are longer",
    ):
        assert said in notes
    rewarded = read(CHAT, long, late, same, method="reward")
    assert rewarded.sequences == 1
    assert "an answer is longer than --sequence-length 128: 2 (" in "\n".join(rewarded.notes())
    with pytest.raises(
        ConfigError, match=r"no row of it can be learned: .* are the same: 1 .*Give pairs of answers that"
    ):
        read(same)


def test_text_is_no_pair_and_rows_are(tmp_path: Path, read: Read) -> None:
    (tmp_path / "text.txt").write_text("the fox")
    with pytest.raises(ConfigError, match=r"text\.txt: --method dpo learns rows with 'chosen' and 'rejected'"):
        PairDataset([tmp_path / "text.txt"], byte_level(), 8, tmp_path, method="dpo")
    assert read(CHAT).sequences == 1


def examples_of_the_page() -> list[str]:
    page = (Path(__file__).parents[2] / "docs/finetune.md").read_text().partition("## Preferences")[2]
    return re.findall(r'^\| `(\{".*?\})`[ ,]', page, re.MULTILINE)


def test_each_row_of_the_page_is_read(read: Read) -> None:
    rows = []
    for example in examples_of_the_page():
        better, _, worse = example.rpartition("…")
        rows.append(json.loads(f"{better}a hen{worse}".replace("…", "the fox")))
    data = read(*rows)
    assert data.sequences == len(rows) == 2
    assert data.notes() == []
