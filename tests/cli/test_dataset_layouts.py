"""Layouts of public datasets: which tokens of a row are learned, or why the row is refused and what is read instead.

The names are those of datasets on the Hugging Face hub, whose cards show the columns; the rows are our own.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from infinity.cli.dataset_rows import by_name, column, in_trl_format
from infinity.errors import ConfigError
from tests import sampling
from tests.cli import test_dataset_rows
from tests.cli.test_examples import Read, read, spoken
from tests.cli.test_finetune import run

__all__ = ["read"]  # the fixture

TEMPLATE = (
    "{% for t in tools or [] %}TOOL {{ t.function.name }} {% endfor %}{% if no_thinking %}/no_think {% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% for c in m.tool_calls %}CALL {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASKED, FOX, MORE, HEN, KIND = "who is there", "the fox", "and", "a hen", "be kind"
TALK = [("user", ASKED), ("assistant", FOX), ("user", MORE), ("assistant", HEN)]
SHARED = spoken([("human", ASKED), ("gpt", FOX), ("human", MORE), ("gpt", HEN)], "from", "value")
TOOLS = json.dumps([{"name": "find", "description": "finds", "parameters": {"what": {"type": "str"}}}])
FIND = '{"name": "find", "arguments": {"what": "hen"}}'


def chat(*turns: str) -> str:
    """Return the text that the template writes of turns such as "user: who", with the learned parts in «»."""
    said = ""
    for role, content in (turn.split(": ", 1) for turn in turns):
        inner = f"{content.strip('«»')}<|im_end|>"
        said += f"<|im_start|>{role}\n" + (f"«{inner}»" if content.startswith("«") else inner)
    return said


ONE, TWO = chat(f"user: {ASKED}", f"assistant: «{FOX}»"), chat(f"user: {MORE}", f"assistant: «{HEN}»")
LEARNED: dict[str, tuple[dict[str, Any], str]] = {
    # -- text
    "OpenAssistant/oasst_top1_2023-08-25": ({"text": f"{ASKED} {FOX}"}, f"w«{ASKED[1:]} {FOX}<eos>»"),
    "codeparrot/codeparrot-clean": (
        {"repo_name": "a/b", "path": "a.py", "copies": "1", "size": "8", "content": FOX, "license": "mit", "hash": 7},
        "the« fox<eos>»",
    ),
    "HuggingFaceFW/fineweb": (
        {"text": FOX, "id": "x", "dump": "d", "url": "u", "language_score": 0.9, "token_count": 2},
        "the« fox<eos>»",
    ),
    # -- a question and an answer
    "databricks/databricks-dolly-15k": (
        {"instruction": ASKED, "context": MORE, "response": FOX, "category": "closed_qa"},
        chat(f"user: {ASKED}\n\n{MORE}", f"assistant: «{FOX}»"),
    ),
    "tatsu-lab/alpaca": (
        {"instruction": ASKED, "input": "", "output": FOX, "text": f"### Instruction:\n{ASKED}\n### Response:\n{FOX}"},
        ONE,
    ),
    "Open-Orca/OpenOrca": (
        {"id": "cot.1", "system_prompt": KIND, "question": ASKED, "response": FOX},
        chat(f"system: {KIND}") + ONE,
    ),
    "meta-math/MetaMathQA": (
        {"type": "GSM", "query": ASKED, "original_question": MORE, "response": FOX},
        ONE,
    ),
    "openai/gsm8k": ({"question": ASKED, "answer": FOX}, ONE),
    "microsoft/orca-math-word-problems-200k": ({"question": ASKED, "answer": FOX}, ONE),
    "m-a-p/CodeFeedback-Filtered-Instruction": (
        {"query": ASKED, "answer": FOX, "resource": "evol", "lang": "python"},
        ONE,
    ),
    "theblackcat102/evol-codealpaca-v1": ({"instruction": ASKED, "output": FOX}, ONE),
    "b-mc2/sql-create-context": (
        {"question": ASKED, "context": MORE, "answer": FOX},
        chat(f"user: {ASKED}\n\n{MORE}", f"assistant: «{FOX}»"),
    ),
    "nampdn-ai/tiny-codes": ({"prompt": ASKED, "response": FOX, "topic": "x"}, ONE),
    "an input and an output": ({"input": ASKED, "output": FOX}, ONE),
    "LLaMA-Factory's Alpaca with a history": (
        {"instruction": MORE, "input": "", "output": HEN, "system": KIND, "history": [[ASKED, FOX]]},
        chat(f"system: {KIND}") + ONE + TWO,
    ),
    # -- conversations
    "HuggingFaceH4/no_robots": (
        {"prompt": ASKED, "prompt_id": "x", "messages": spoken(TALK), "category": "Chat"},
        ONE + TWO,
    ),
    "allenai/tulu-3-sft-mixture": ({"id": "x", "messages": spoken(TALK), "source": "y"}, ONE + TWO),
    "AI-MO/NuminaMath-CoT": (
        {"source": "x", "problem": ASKED, "solution": FOX, "messages": spoken(TALK[:2])},
        ONE,
    ),
    "open-r1/OpenR1-Math-220k": (
        {"problem": ASKED, "solution": MORE, "answer": HEN, "messages": spoken(TALK[:2]), "generations": [FOX, HEN]},
        ONE,
    ),
    "HuggingFaceTB/smoltalk2": (
        {"messages": spoken(TALK), "chat_template_kwargs": {"no_thinking": True}, "source": "x"},
        "/no_think " + ONE + TWO,
    ),
    "teknium/OpenHermes-2.5": (
        {"conversations": SHARED, "system_prompt": None, "source": "x", "skip_prompt_formatting": False},
        ONE + TWO,
    ),
    "Open-Orca/SlimOrca": (
        {
            "conversations": [
                {"from": "system", "value": KIND, "weight": None},
                {"from": "human", "value": ASKED, "weight": 0},
                {"from": "gpt", "value": FOX, "weight": 1},
            ]
        },
        chat(f"system: {KIND}") + ONE,
    ),
    "Magpie-Align/Magpie-Pro-300K-Filtered": (
        {"uuid": "x", "instruction": ASKED, "response": FOX, "conversations": SHARED[:2]},
        ONE,
    ),
    "open-thoughts/OpenThoughts-114k": (
        {"system": KIND, "conversations": spoken(TALK, "from", "value")},
        chat(f"system: {KIND}") + ONE + TWO,
    ),
    "GAIR/lima": ({"conversations": [ASKED, FOX, MORE, HEN], "source": "multi_turn"}, ONE + TWO),
    "LDJnr/Capybara": (
        {"source": "x", "conversation": [{"input": ASKED, "output": FOX}, {"input": MORE, "output": HEN}]},
        ONE + TWO,
    ),
    "lmsys/lmsys-chat-1m": (
        {"conversation_id": "x", "model": "y", "conversation": spoken(TALK), "turn": 2, "redacted": False},
        ONE + TWO,
    ),
    # -- calls of tools
    "Salesforce/xlam-function-calling-60k": (
        {"id": 0, "query": ASKED, "answers": f"[{FIND}]", "tools": TOOLS},
        "TOOL find " + chat(f"user: {ASKED}", 'assistant: «CALL find {"what": "hen"}»'),
    ),
    "Salesforce/APIGen-MT-5k": (
        {
            "system": KIND,
            "tools": TOOLS,
            "conversations": spoken(
                [("human", ASKED), ("function_call", FIND), ("observation", "here"), ("gpt", FOX)], "from", "value"
            ),
        },
        "TOOL find "
        + chat(
            f"system: {KIND}",
            f"user: {ASKED}",
            'assistant: «CALL find {"what": "hen"}»',
            "tool: here",
            f"assistant: «{FOX}»",
        ),
    ),
    "NousResearch/hermes-function-calling-v1": (
        {
            "id": "x",
            "tools": TOOLS,
            "conversations": spoken(
                [("system", KIND), ("human", ASKED), ("gpt", f"<tool_call>{FIND}</tool_call>"), ("tool", "here")],
                "from",
                "value",
            ),
        },
        "TOOL find "
        + chat(f"system: {KIND}", f"user: {ASKED}", f"assistant: «<tool_call>{FIND}</tool_call>»", "tool: here"),
    ),
}
REFUSED: dict[str, tuple[dict[str, Any], str, str, str]] = {
    # the row, why it is refused, --columns, and what is learned of the row with them
    "OpenAssistant/oasst1": (
        {"message_id": "a", "parent_id": "b", "role": "prompter", "text": ASKED, "lang": "en", "rank": 0},
        "has 'parent_id', .* join those of a conversation as 'messages'. .*--columns text=text",
        "text=text",
        f"w«{ASKED[1:]}<eos>»",
    ),
    "stingning/ultrachat": (
        {"id": "0", "data": [ASKED, FOX, MORE, HEN]},
        "this one has 'id', 'data'. If its columns have other names, give --columns",
        "messages=data",
        ONE + TWO,
    ),
    "openbmb/UltraFeedback": (
        {"source": "x", "instruction": ASKED, "models": ["a", "b"], "completions": [{"response": FOX}, {}]},
        "this one has 'source', 'instruction', 'models', 'completions'",
        "text=instruction",
        f"w«{ASKED[1:]}<eos>»",
    ),
    "HuggingFaceH4/ultrafeedback_binarized": (
        {
            "prompt": ASKED,
            "prompt_id": "x",
            "chosen": spoken(TALK[:2]),
            "rejected": spoken([TALK[0], TALK[3]]),
            "messages": spoken(TALK[:2]),
            "score_chosen": 8.0,
        },
        "learn only the chosen answers: --columns messages=chosen",
        "messages=chosen",
        ONE,
    ),
    "Anthropic/hh-rlhf": (
        {"chosen": f"Human: {ASKED}\n\nAssistant: {FOX}", "rejected": f"Human: {ASKED}\n\nAssistant: {HEN}"},
        "learn only the chosen answers: --columns text=chosen",
        "text=chosen",
        f"H«uman: {ASKED}\n\nAssistant: {FOX}<eos>»",
    ),
    "Intel/orca_dpo_pairs": (
        {"system": KIND, "question": ASKED, "chosen": FOX, "rejected": HEN},
        "learn only the chosen answers: --columns instruction=question output=chosen system=system",
        "instruction=question output=chosen system=system",
        chat(f"system: {KIND}") + ONE,
    ),
    "trl-lib/lm-human-preferences-descriptiveness": (
        {"prompt": spoken(TALK[:1]), "chosen": spoken(TALK[1:2]), "rejected": spoken(TALK[3:])},
        "learn only the chosen answers: --columns prompt=prompt completion=chosen",
        "prompt=prompt completion=chosen",
        ONE,
    ),
    "simplescaling/s1K": (
        {"question": ASKED, "solution": FOX, "thinking_trajectories": [MORE], "attempt": HEN, "cot": None},
        "has 'thinking_trajectories', .* write it into one of them. .*--columns instruction=question output=solution",
        "instruction=question output=solution",
        ONE,
    ),
    "a question with two answers": (
        {"question": ASKED, "answer": FOX, "solution": HEN},
        "has both 'answer' and 'solution', .*--columns instruction=question output=answer",
        "instruction=question output=answer",
        ONE,
    ),
    "cais/mmlu": (
        {"question": ASKED, "subject": "x", "choices": [FOX, HEN], "answer": FOX},
        "has 'choices', .* write it into one of them",
        "instruction=question output=answer",
        ONE,
    ),
    "rajpurkar/squad": (
        {"id": "x", "title": "y", "context": MORE, "question": ASKED, "answers": {"text": [FOX], "answer_start": [0]}},
        "'answers', calls of tools, is a dict; it must be a list",
        "instruction=question input=context output=title",
        chat(f"user: {ASKED}\n\n{MORE}", "assistant: «y»"),
    ),
    "HuggingFaceTB/cosmopedia": (
        {"prompt": ASKED, "text": FOX, "seed_data": "x", "format": "y", "audience": "z"},
        "has both 'text' and 'prompt', .*--columns text=text",
        "instruction=prompt output=text",
        ONE,
    ),
    "glaiveai/glaive-function-calling-v2": (
        {"system": f"SYSTEM: {KIND}", "chat": f"USER: {ASKED}\n\n\nASSISTANT: {FOX} <|endoftext|>"},
        "this one has 'system', 'chat'",
        "text=chat",
        f"U«SER: {ASKED}\n\n\nASSISTANT: {FOX} <|endoftext|><eos>»",
    ),
}
APART = {"prompt": "?", "completion": "."}
"""A row that makes examples of all rows, so that the first one is shown alone."""


def shown(read: Read, row: Mapping[str, Any]) -> str:
    return read([row, APART], TEMPLATE, length=256).preview()


@pytest.mark.parametrize("layout", LEARNED)
def test_of_a_public_layout_these_tokens_are_learned(layout: str, read: Read) -> None:
    row, said = LEARNED[layout]
    assert shown(read, row) == said


@pytest.mark.parametrize("layout", REFUSED)
def test_a_public_layout_that_is_refused_is_read_with_its_columns_named(layout: str, read: Read) -> None:
    row, why, columns, said = REFUSED[layout]
    with pytest.raises(ConfigError, match=rf"rows0\.jsonl:1: .*{why}"):
        shown(read, row)
    named = by_name([column(each) for each in columns.split()])
    assert read([row] * 20, TEMPLATE, length=160, columns=named).preview() == said


def test_a_column_that_a_row_has_not_is_named(read: Read) -> None:
    rows = [{"riddle": ASKED, "tale": FOX}, {"riddle": MORE, "tale": None}]
    with pytest.raises(ConfigError, match=r"rows0\.jsonl:2: the row has no 'tale', which --columns names"):
        read(rows, TEMPLATE, columns=by_name(["instruction=riddle", "output=tale"]))
    named = by_name(["instruction=riddle", "output=tale", "system=there_is_none"])
    assert read(rows[:1], TEMPLATE, columns=named).preview() == ONE


def test_the_option_names_each_column_once() -> None:
    with pytest.raises(ConfigError, match="a name is given twice in text=a text=b; remove one of the two"):
        by_name(["text=a", "text=b"])
    assert by_name(["text=b=c"]) == {"text": "b=c"}
    for wrong in ("text", "text=", "words=a", "=a"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not NAME=COLUMN, with a NAME of chosen"):
            column(wrong)


def test_the_option_is_one_of_finetune(job: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text((json.dumps({"ask": "the quick", "say": "brown fox"}) + "\n") * 4)
    wanted = ["--columns", "prompt=ask", "completion=say", "--verbose"]
    assert run(job | {"--data": tmp_path / "rows.jsonl", "--steps": 1}, *wanted) == 0
    assert "brown fox" in capsys.readouterr().out.partition("the first document of --data")[2]


@pytest.mark.parametrize(
    ("row", "trl"),
    [
        ({"chosen": FOX, "rejected": HEN}, {"chosen": FOX, "rejected": HEN}),
        (
            {"question": ASKED, "chosen": FOX, "rejected": HEN, "score": 1},
            {"prompt": ASKED, "chosen": FOX, "rejected": HEN},
        ),
        (
            {"prompt": ASKED, "chosen": spoken(TALK[:2]), "rejected": spoken([TALK[0], TALK[3]])},
            {"chosen": spoken(TALK[:2]), "rejected": spoken([TALK[0], TALK[3]])},
        ),
        (
            {"prompt": ASKED, "chosen": SHARED[1:2], "rejected": SHARED[3:]},
            {"prompt": spoken(TALK[:1]), "chosen": spoken([("gpt", FOX)]), "rejected": spoken([("gpt", HEN)])},
        ),
    ],
)
def test_preferences_are_in_trls_format_too(row: dict[str, Any], trl: dict[str, Any]) -> None:
    assert in_trl_format(row, "row", {}, chat=True).trl == trl


MUTATIONS = sampling.number(60, 2000)
DOG = "lazy dog"
"""Stands only where a mutation has put it."""
ROWS = [
    each[0]
    for table in (LEARNED, REFUSED, test_dataset_rows.LEARNED, test_dataset_rows.REFUSED)
    for each in table.values()
] + list(test_dataset_rows.CALLED.values())
ANSWERS = ("text", "content", "completion", "output", "response", "answer", "solution")
LISTS = ("messages", "conversations", "conversation", "history", "completion")
FIELDS = (*ANSWERS, *LISTS, "weight", "train", "label", "system", "role", "from", "value", "question", "tools", "image")


def mutated(draw: random.Random) -> dict[str, Any]:
    """Return a row in which something is changed."""
    row: dict[str, Any] = copy.deepcopy(draw.choice(ROWS))
    for _ in range(draw.randint(1, 3)):
        talks = [row[key] for key in LISTS if isinstance(row.get(key), list)]
        where: Any = draw.choice([row, row, *(each for talk in talks for each in talk if isinstance(each, dict))])
        field = draw.choice([*where, *FIELDS])
        value = draw.choice([None, 0, 1, 0.5, True, False, "", DOG, [], {}, [DOG], spoken(TALK), {"role": "user"}])
        if draw.random() < 0.3:
            where.pop(field, None)
        else:
            where[field] = copy.deepcopy(value)
    return row


def strings(value: Any) -> Iterator[str]:
    """All strings in a value."""
    if isinstance(value, str):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from strings(each)


def answers(row: dict[str, Any]) -> Iterator[str]:
    """Yield the strings of a row that may be learned: those at the place of an answer."""
    for key in ANSWERS:
        yield from strings(row.get(key))
    for key in LISTS:
        for index, turn in enumerate(row[key] if isinstance(row.get(key), list) else ()):
            if isinstance(turn, dict) and (turn.get("role") or turn.get("from")) in ("assistant", "gpt"):
                if all(turn.get(field) in (None, 1) for field in ("weight", "train", "loss")):
                    yield from strings([turn.get("content"), turn.get("value")])
            elif isinstance(turn, dict):
                yield from strings(turn.get("output"))
            elif isinstance(turn, list):
                yield from strings(turn[1:])
            elif index % 2:
                yield from strings(turn)


def test_a_mutated_row_is_refused_in_a_line_or_nothing_but_answers_is_learned(read: Read) -> None:
    draw, refused, alone = random.Random(f"mutated rows {sampling.SEED}"), 0, 0
    for _ in range(MUTATIONS):
        row = mutated(draw)
        try:
            data = read([row, APART], TEMPLATE, length=320)
        except ConfigError as error:
            assert "\n" not in str(error), row
            assert len(str(error)) < 1500, row
            refused += 1
            continue
        said = data.preview()
        if said == "?«.<eos>»":  # the row has no answer
            continue
        alone += 1
        assert row.get("label") is not False, row
        assert row.get("label") != 0 or "text" in row or "content" in row, row
        assert not row.get("image"), row
        assert not {"chosen", "rejected"} <= {key for key in row if row[key] is not None}, row
        left = " ".join(re.findall("«(.*?)»", said, re.DOTALL)).replace("<eos>", "").replace("<|im_end|>", "")
        if "call" in json.dumps(row) or "answers" in row:
            left = re.sub(r"CALL find \{.*?\}", "", left)
        wanted = sorted(answers(row), key=len, reverse=True)
        for answer in wanted:
            left = left.replace(answer.strip(), "")
        left = left.strip()  # of a text the first token follows nothing
        assert not left or any(answer.endswith(left) for answer in wanted), (row, said)
    assert min(refused, alone) > 0


def examples_of_the_page() -> list[str]:
    page = (Path(__file__).parents[2] / "docs/finetune.md").read_text()
    return re.findall(r'^\| `(\{".*?\})`[ ,]', page.partition("## Preferences")[0], re.MULTILINE)


@pytest.mark.parametrize("example", examples_of_the_page())
def test_each_row_of_the_page_is_read(example: str, read: Read) -> None:
    data = read([json.loads(example.replace("…", "the fox")), APART], TEMPLATE)
    assert "fox" in "".join(re.findall("«(.*?)»", data.preview(), re.DOTALL))
    assert data.notes() == []


def test_the_page_has_a_row_of_each_format() -> None:
    assert len(examples_of_the_page()) >= 13
