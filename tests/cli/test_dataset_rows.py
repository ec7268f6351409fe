"""Further layouts of rows, as public datasets and trainers have them: the learned part of each, or its refusal."""

from __future__ import annotations

import json
from typing import Any

import pytest

from infinity.errors import ConfigError
from tests.cli.test_examples import CHATML, Read, learned, read, spoken

__all__ = ["read"]  # the fixture

END = "<|im_end|>"
ASKED, FOX, MORE, HEN = "who is there", "the fox", "and", "a hen"
TALK = spoken([("user", ASKED), ("assistant", FOX), ("user", MORE), ("assistant", HEN)])
SHARED = spoken([("human", ASKED), ("gpt", FOX), ("human", MORE), ("gpt", HEN)], "from", "value")


def saying(talk: list[dict[str, Any]], index: int, **more: Any) -> list[dict[str, Any]]:
    """Return the conversation with further entries in one of its messages."""
    return [message | more if number == index else message for number, message in enumerate(talk)]


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, "image_url": None} for text in texts]


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
        {"instruction": ASKED, "input": MORE, "output": FOX, "text": f"Below is an instruction. {ASKED} {MORE} {FOX}"},
        f"{FOX}{END}",
    ),
    "LLaMA-Factory's Alpaca with a system and no history": (
        {"instruction": ASKED, "input": "", "output": FOX, "system": "be kind", "history": []},
        f"{FOX}{END}",
    ),
    "KTO, of an answer that is wanted": ({"prompt": ASKED, "completion": FOX, "label": True}, f"{FOX}<eos>"),
    "TRL's prompts and completions of messages": ({"prompt": TALK[:3], "completion": TALK[3:]}, f"{HEN}{END}"),
    "ultrachat_200k, whose prompt is in its messages": (
        {"prompt": ASKED, "prompt_id": "x", "messages": TALK},
        f"{FOX}{END}{HEN}{END}",
    ),
    "prompt and completion beside the same messages": (
        {"prompt": TALK[:3], "completion": TALK[3:], "messages": TALK},
        f"{FOX}{END}{HEN}{END}",
    ),
    "a list of text parts": (
        {"messages": saying(saying(TALK, 1, content=parts(FOX, HEN)), 2, content=parts(MORE))},
        f"{FOX}\n{HEN}{END}{HEN}{END}",
    ),
    "argilla's Capybara": ({"messages": TALK, "source": "x", "num_turns": 2}, f"{FOX}{END}{HEN}{END}"),
    "C4": ({"text": ASKED, "timestamp": "2019", "url": "x"}, f"{ASKED[1:]}<eos>"),
    "IMDB, of which text is learned": ({"text": ASKED, "label": 0}, f"{ASKED[1:]}<eos>"),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a prompt that is not in the messages": (
        {"prompt": "something else", "messages": TALK},
        "both 'messages' and 'prompt', which differ; remove one of the two",
    ),
    "a prompt and a completion that is not in the messages": (
        {"prompt": TALK[:3], "completion": TALK[1:2], "messages": TALK},
        "both 'messages' and 'completion'",
    ),
    "an image among the parts": (
        {"messages": saying(TALK, 0, content=[*parts(ASKED), {"type": "image", "image": "a.jpg"}])},
        "messages\\[0\\]: 'content' has a part of the type 'image'",
    ),
    "calls in a template without them": (
        {"messages": saying(TALK, 1, tool_calls=[{"function": {"name": "find", "arguments": {}}}])},
        "leaves out 'tool_calls' of messages\\[1\\]: write the calls into the message's 'content'",
    ),
    "KTO, of an answer that is not wanted": (
        {"prompt": ASKED, "completion": FOX, "label": False},
        "'label' is False, but infinity gives all rows the same weight",
    ),
    "LLaMA-Factory's KTO": ({"messages": TALK, "kto_tag": False}, "'kto_tag' is False"),
    "KTO with a number": ({"prompt": ASKED, "completion": FOX, "label": 0}, "'label' is 0"),
    "KTO with a string": ({"prompt": ASKED, "completion": FOX, "is_good": "false"}, "'is_good' is 'false'"),
    "axolotl's train_detail": ({"messages": saying(TALK, 1, train_detail=[{"begin_offset": 0}])}, "has 'train_detail'"),
    "LLaVA": ({"conversations": SHARED, "image": "a.jpg"}, "has 'image', .* text is all"),
    "a history beside messages": ({"messages": TALK, "history": [[ASKED, FOX]]}, "has 'history', .* as 'messages'"),
    "a text that is not the row's": ({"question": ASKED, "answer": FOX, "text": HEN}, "both 'question' and 'text'"),
    "a text and its prompt (cosmopedia)": ({"prompt": ASKED, "text": FOX}, "both 'text' and 'prompt'"),
    "rows of tokens": ({"text": ASKED, "input_ids": [1, 2]}, "has 'input_ids'"),
    "a part of a weight": ({"messages": saying(TALK, 1, weight=0.5)}, "messages\\[1\\]: 'weight' must be 0 or 1"),
    "a user who is to be learned": ({"messages": saying(TALK, 0, train=True)}, "asks to learn what the user says"),
    "a row of half a weight": ({"prompt": ASKED, "completion": FOX, "weight": 0.5}, "'weight' is 0.5"),
    "a row that is not to be trained": ({"messages": TALK, "train": False}, "'train' is False"),
    "two messages of the system": (
        {"messages": [*spoken([("system", "x")]), *TALK], "system": "be kind"},
        "'system' and also a system message",
    ),
    "a system beside a prompt": (
        {"prompt": ASKED, "completion": FOX, "system": "be kind"},
        "put the text of 'system' into 'prompt'",
    ),
    "a user in a completion": ({"prompt": TALK[:1], "completion": TALK[1:]}, "give the row as 'messages'"),
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


CALLING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}SAID"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)
CALLS = "{% for c in m.tool_calls %}CALL {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
TEMPLATES = {
    "Qwen's, which asks whether there is a text": CALLING.replace("SAID", "{{ m.content }}" + CALLS),
    "one that asks whether there is a content": CALLING.replace(
        "SAID", "{% if m.content is undefined %}" + CALLS + "{% else %}{{ m.content }}{% endif %}"
    ),
    "one that needs a content": CALLING.replace("SAID", "{{ m.content + '' }}" + CALLS),
    "one that reads lists only": CALLING.replace(
        "SAID", "{% for p in m.content %}{{ p.text }}{% endfor %}" + CALLS
    ).replace("{{ m.content }}<", "{% for p in m.content %}{{ p.text }}{% endfor %}<"),
}
FIND = {"name": "find", "arguments": '{"what": "hen"}'}
NEWER = [
    {"role": "user", "content": ASKED},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": FIND}]},
    {"role": "tool", "tool_call_id": "1", "content": "here"},
    {"role": "assistant", "content": HEN},
]
OLDER = [
    *NEWER[:1],
    {"role": "assistant", "content": None, "function_call": FIND},
    {"role": "function", "name": "find", "content": "here"},
    *NEWER[3:],
]
TOOLS = [{"name": "find", "description": "finds", "parameters": {"type": "object", "properties": {}}}]
CALLED: dict[str, dict[str, Any]] = {
    "OpenAI's": {"messages": NEWER, "tools": [{"type": "function", "function": TOOLS[0]}]},
    "OpenAI's older": {"messages": OLDER, "functions": TOOLS},
    "ShareGPT's of LLaMA-Factory": {
        "conversations": [
            {"from": "human", "value": ASKED},
            {"from": "function_call", "value": '{"name": "find", "arguments": {"what": "hen"}}'},
            {"from": "observation", "value": "here"},
            {"from": "gpt", "value": HEN},
        ]
    },
}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("layout", CALLED)
def test_calls_of_tools_are_learned_as_the_template_writes_them(layout: str, template: str, read: Read) -> None:
    data = read([CALLED[layout]], TEMPLATES[template])
    assert learned(data) == [f'CALL find {{"what": "hen"}}{END}{HEN}{END}']
    assert "<|im_start|>tool\nhere" in data.preview()
    assert data.notes() == []


def test_arguments_that_are_no_json_are_learned_as_they_are(read: Read) -> None:
    template = TEMPLATES["Qwen's, which asks whether there is a text"]
    for arguments in ("what is", "[" * 5000, ""):
        call = {"function": {"name": "find", "arguments": arguments}}
        row = {"messages": [*NEWER[:1], {"role": "assistant", "content": None, "tool_calls": [call]}]}
        said = json.dumps(arguments) if arguments else "{}"
        assert learned(read([row], template, length=6000)) == [f"CALL find {said}{END}"]


def test_a_template_is_told_of_tools_in_the_older_words_too(read: Read) -> None:
    template = TEMPLATES["Qwen's, which asks whether there is a text"]
    told = "{% for t in tools or [] %}TOOL {{ t.function.name }}{% endfor %}" + template
    for row in (CALLED["OpenAI's"], CALLED["OpenAI's older"]):
        assert read([row], told).preview().startswith("TOOL find<|im_start|>user")


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ({"tool_calls": [FIND], "function_call": FIND}, "'function_call' and 'tool_calls'; remove one of the two"),
        ({"tool_calls": [{"function": "find"}]}, "a call needs a 'name' and 'arguments'; this one has 'find'"),
        ({"tool_calls": {"find": 1}}, "'tool_calls' is a dict; it must be a list"),
        ({"content": None}, "needs a 'content' that is a string; this one has null"),
    ],
    ids=str,
)
def test_a_call_of_another_shape_is_named(turn: dict[str, Any], said: str, read: Read) -> None:
    with pytest.raises(ConfigError, match=rf"messages\[1\].*{said}"):
        read([{"messages": saying(TALK, 1, **turn)}], TEMPLATES["Qwen's, which asks whether there is a text"])


def test_calls_that_a_template_neither_writes_nor_accepts_beside_a_null_content_are_named(read: Read) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [FIND]}
    with pytest.raises(ConfigError, match=r"leaves out 'tool_calls' of messages\[1\]: write the calls into"):
        read([{"messages": [TALK[0], call, *TALK[2:]]}], CHATML.replace("m.content", "(m['content'] + '')"))


@pytest.mark.parametrize("field", [{"weight": 0}, {"train": False}, {"loss": False}], ids=str)
def test_rows_all_of_whose_answers_are_not_to_be_learned_name_the_field_and_its_value(
    field: dict[str, Any], read: Read
) -> None:
    row = {"messages": saying(saying(TALK, 1, **field), 3, **field)}
    with pytest.raises(
        ConfigError, match=r"all of their answers have 'weight': 0 .*: 1 \(.*rows\d.jsonl:1\)\. Give 1, or true"
    ):
        read([row])
    notes = read([row, {"messages": TALK}]).notes()
    assert len(notes) == 1
    assert "because all of their answers have 'weight': 0 (or 'train' or 'loss': false): 1 (" in notes[0]
    assert learned(read([{"messages": saying(row["messages"], 3, **dict.fromkeys(field, 1))}])) == [f"{HEN}{END}"]


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
    with pytest.raises(ConfigError, match="with --loss-on all, all tokens are learned"):
        read([row], loss_on="all")
    assert learned(read([row])) == [f"{HEN}{END}"]
    last = CHATML.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
    with pytest.raises(ConfigError, match="the chat template marks other tokens than those of the messages"):
        read([row], last)


def test_fields_that_are_not_read_are_said_once(read: Read) -> None:
    talk = saying(TALK, 0, mood="x")
    rows = [{"messages": talk, "id": index, "num_turns": 2, "quality": 0.5} for index in range(3)]
    assert read(rows).notes() == ["fields of rows that are not read: 'num_turns', 'quality', 'messages.mood'"]


def test_thoughts_that_the_chat_template_leaves_out_are_named(read: Read) -> None:
    row = {"messages": saying(TALK, 3, reasoning_content="a hen? ")}
    left_out = "fields of rows that are not read: 'reasoning_content of messages, which the chat template leaves out'"
    assert read([row]).notes() == [left_out]
    assert read([row], columns={"messages": "messages"}).notes() == [left_out]
    thinking = CHATML.replace("{% generation %}", "{% generation %}{{ m.reasoning_content }}")
    assert read([row], thinking).notes() == []
    assert learned(read([row], thinking)) == [f"{FOX}{END}a hen? {HEN}{END}"]
    assert read([{"messages": TALK, "id": 1}]).notes() == []


def test_what_a_user_says_is_learned_as_the_message_says(read: Read) -> None:
    row = {"messages": saying(TALK, 0, train=True)}
    with pytest.raises(ConfigError, match="Remove the field; or give --loss-on all to learn whole conversations"):
        read([row])
    said = learned(read([{"messages": TALK}], loss_on="all"))[0]
    assert ASKED in said
    assert FOX in said
