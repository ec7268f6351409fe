"""What else rows have: rows as public datasets and trainers lay them out, with what is learned of each, or refused."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from infinity.errors import ConfigError
from tests import sampling
from tests.cli.test_examples import CHATML, Read, learned, read, spoken

__all__ = ["read"]  # the fixture

END = "<|im_end|>"
ASKED, FOX, MORE, HEN = "who is there", "the fox", "and", "a hen"
TALK = spoken([("user", ASKED), ("assistant", FOX), ("user", MORE), ("assistant", HEN)])
SHARED = spoken([("human", ASKED), ("gpt", FOX), ("human", MORE), ("gpt", HEN)], "from", "value")


def saying(talk: list[dict[str, Any]], index: int, **more: Any) -> list[dict[str, Any]]:
    """The conversation, with more in one of its messages."""
    return [message | more if number == index else message for number, message in enumerate(talk)]


LEARNED: dict[str, tuple[dict[str, Any], str]] = {
    "OpenAI's chats": ({"messages": TALK}, f"{FOX}{END}{HEN}{END}"),
    "OpenAI's chats with weights": (
        {"messages": saying(saying(TALK, 1, weight=0), 3, weight=1)},
        f"{HEN}{END}",
    ),
    "axolotl's chat_template with train": ({"messages": saying(TALK, 3, train=False)}, f"{FOX}{END}"),
    "ms-swift's loss": ({"messages": saying(TALK, 1, loss=False)}, f"{HEN}{END}"),
    "axolotl's, where the user is not to be learned": (
        {"messages": saying(TALK, 0, train=False)},
        f"{FOX}{END}{HEN}{END}",
    ),
    "ShareGPT": ({"conversations": SHARED}, f"{FOX}{END}{HEN}{END}"),
    "ShareGPT with weights": ({"conversations": saying(SHARED, 1, weight=0)}, f"{HEN}{END}"),
    "ShareGPT with a system column (LLaMA-Factory)": (
        {"conversations": SHARED, "system": "be kind", "tools": ""},
        f"{FOX}{END}{HEN}{END}",
    ),
    "yahma/alpaca-cleaned": ({"instruction": ASKED, "input": "", "output": FOX}, f"{FOX}{END}"),
    "tatsu-lab/alpaca, with its text column": (
        {"instruction": ASKED, "input": MORE, "output": FOX, "text": f"Below is an instruction. {ASKED} {FOX}"},
        f"{FOX}{END}",
    ),
    "LLaMA-Factory's Alpaca with a system and no history": (
        {"instruction": ASKED, "input": "", "output": FOX, "system": "be kind", "history": []},
        f"{FOX}{END}",
    ),
    "KTO, of an answer that is wanted": ({"prompt": ASKED, "completion": FOX, "label": True}, f"{FOX}<eos>"),
    "TRL's prompts and completions of messages": ({"prompt": TALK[:3], "completion": TALK[3:]}, f"{HEN}{END}"),
    "argilla's Capybara": ({"messages": TALK, "source": "x", "num_turns": 2}, f"{FOX}{END}{HEN}{END}"),
    "C4": ({"text": ASKED, "timestamp": "2019", "url": "x"}, f"{ASKED[1:]}<eos>"),
    "IMDB, of which text is learned": ({"text": ASKED, "label": 0}, f"{ASKED[1:]}<eos>"),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "KTO, of an answer that is not wanted": (
        {"prompt": ASKED, "completion": FOX, "label": False},
        "'label' is False: a row that is not to be learned",
    ),
    "LLaMA-Factory's KTO": ({"messages": TALK, "kto_tag": False}, "'kto_tag' is False"),
    "KTO with a number": ({"prompt": ASKED, "completion": FOX, "label": 0}, "'label' is 0"),
    "KTO with a string": ({"prompt": ASKED, "completion": FOX, "is_good": "false"}, "'is_good' is 'false'"),
    "axolotl's train_detail": ({"messages": saying(TALK, 1, train_detail=[{"begin_offset": 0}])}, "has 'train_detail'"),
    "HH-RLHF": ({"chosen": FOX, "rejected": HEN}, "has 'chosen', .* give the one to learn as 'completion'"),
    "UltraFeedback": (
        {"prompt": ASKED, "chosen": TALK[:2], "rejected": TALK[2:], "messages": TALK},
        "has 'chosen'",
    ),
    "LLaMA-Factory's Alpaca with a history": (
        {"instruction": MORE, "input": "", "output": HEN, "history": [[ASKED, FOX]]},
        "has 'history', .* give earlier turns as 'messages'",
    ),
    "OpenOrca": ({"system_prompt": "be kind", "question": ASKED, "response": FOX}, "has 'system_prompt', .* call it"),
    "LLaVA": ({"conversations": SHARED, "image": "a.jpg"}, "has 'image', .* text is all"),
    "Dolly": ({"instruction": ASKED, "context": "", "response": FOX, "category": "x"}, "this one has 'instruction'"),
    "rows of tokens": ({"text": ASKED, "input_ids": [1, 2]}, "has 'input_ids'"),
    "a part of a weight": ({"messages": saying(TALK, 1, weight=0.5)}, "messages\\[1\\]: 'weight' is 0 or 1"),
    "a user who is to be learned": ({"messages": saying(TALK, 0, train=True)}, "asks that what the user says"),
    "a row of half a weight": ({"prompt": ASKED, "completion": FOX, "weight": 0.5}, "'weight' is 0.5"),
    "a row that is not to be trained": ({"messages": TALK, "train": False}, "'train' is False"),
    "two messages of the system": (
        {"messages": [*spoken([("system", "x")]), *TALK], "system": "be kind"},
        "'system' and a message of the system",
    ),
    "a system beside a prompt": ({"prompt": ASKED, "completion": FOX, "system": "be kind"}, "begin the prompt with it"),
    "an answer in a prompt": (
        {"prompt": saying(TALK[:3], 1, weight=1), "completion": TALK[3:]},
        "give the row as 'messages'",
    ),
    "a completion that is not to be learned": (
        {"prompt": TALK[:3], "completion": saying(TALK[3:], 0, train=False)},
        "give the row as 'messages'",
    ),
}


@pytest.mark.parametrize("layout", LEARNED)
def test_what_is_learned_of_a_row_is_what_its_dataset_says(layout: str, read: Read) -> None:
    row, said = LEARNED[layout]
    assert learned(read([row, {"prompt": "?", "completion": "."}])) == [said, ".<eos>"]


@pytest.mark.parametrize("layout", REFUSED)
def test_a_row_that_asks_for_something_else_is_refused_by_the_name_of_its_field(layout: str, read: Read) -> None:
    row, said = REFUSED[layout]
    with pytest.raises(ConfigError, match=rf"rows0.jsonl:1: .*{said}"):
        read([row])


def test_a_system_column_is_in_the_prompt(read: Read) -> None:
    shared, alpaca = (
        {"conversations": SHARED, "system": "be kind"},
        {"instruction": ASKED, "output": FOX, "system": "be kind"},
    )
    for row in (shared, alpaca):
        assert "«" in read([row]).preview()
        assert read([row]).preview().startswith("<|im_start|>system\nbe kind<|im_end|>")
    assert read([alpaca], None).preview().startswith(f"be kind\n\n{ASKED}\n\n«{FOX}")


def test_answers_cannot_be_told_apart_where_everything_is_learned_or_the_template_marks_otherwise(read: Read) -> None:
    row = {"messages": saying(TALK, 1, weight=0)}
    with pytest.raises(ConfigError, match="with --loss-on all everything is learned"):
        read([row], loss_on="all")
    last = CHATML.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
    with pytest.raises(ConfigError, match="the chat template marks them otherwise"):
        read([row], last)


def test_fields_that_are_not_read_are_said_once(read: Read) -> None:
    talk = saying(TALK, 0, mood="x")
    rows = [{"messages": talk, "id": index, "num_turns": 2, "quality": 0.5} for index in range(3)]
    assert read(rows).notes() == ["fields of rows that are not read: 'num_turns', 'quality', 'messages.mood'"]
    assert read([{"messages": TALK, "id": 1}]).notes() == []


MUTATIONS = sampling.number(60, 2000)


def mutated(draw: random.Random) -> tuple[dict[str, Any], list[str]]:
    """A row with something changed in it, and what may be learned of it."""
    row: dict[str, Any] = copy.deepcopy(draw.choice([each for each, _ in (*LEARNED.values(), *REFUSED.values())]))
    for _ in range(draw.randint(1, 3)):
        talk = next(
            (row[key] for key in ("messages", "conversations", "completion") if isinstance(row.get(key), list)), []
        )
        where: Any = draw.choice([row, row, *(each for each in talk if isinstance(each, dict))])
        field = draw.choice([*where, "weight", "train", "label", "system", "history", "text", "role", "content"])
        value = draw.choice([None, 0, 1, 0.5, True, False, "", ASKED, [], {}, [ASKED], TALK, {"role": "user"}])
        if draw.random() < 0.3:
            where.pop(field, None)
        else:
            where[field] = value
    answers = [
        message.get(said)
        for said in ("content", "value")
        for key in ("messages", "conversations", "completion")
        for message in (row.get(key) or [] if isinstance(row.get(key), list) else [])
        if isinstance(message, dict)
        and message.get("role", message.get("from")) in ("assistant", "gpt")
        and message.get("weight", 1) in (None, 1)
        and message.get("train", True) in (None, True, 1)
    ]
    given = [row.get("completion"), row.get("output"), row.get("text")]
    return row, [str(each) for each in (*answers, *given) if isinstance(each, str)]


def test_a_mutated_row_is_refused_in_a_line_or_nothing_but_answers_is_learned(read: Read) -> None:
    draw, refused = random.Random("mutated rows"), 0
    for _ in range(MUTATIONS):
        row, answers = mutated(draw)
        try:
            (said,) = learned(read([row]))
        except ConfigError as error:
            assert "\n" not in str(error), row
            assert len(str(error)) < 1500, row
            refused += 1
            continue
        if not any(isinstance(row.get(shape), list) for shape in ("messages", "conversations")):
            continue
        left = said.replace("<eos>", "").replace(END, "")
        for answer in sorted(answers, key=len, reverse=True):
            left = left.replace(answer.strip(), "").replace(answer[1:], "")
        assert not left.strip(), (row, said)
    assert 0 < refused < MUTATIONS
