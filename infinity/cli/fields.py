"""Fields of a row beside what is said in it. One that changes what is learned is honoured, or refused by its name; the
others are not read, and the run says which they are.

| field                                                 | what becomes of it                                           |
|---|---|
| `system`                                              | the first message, or where Alpaca's prompt begins           |
| `weight`, `train`, `loss` of a message                | 0 and false: it is not learned (`answers_learned`)           |
| `text` beside an instruction and an output            | not read: it repeats them, and all of it would be learned    |
| `prompt` beside messages                              | not read where they begin with it; else refused              |
| `functions`, `function_call`                          | `tools` and `tool_calls`, in OpenAI's older words            |
| `label`, `kto_tag`, `is_good`, `train`, `loss`, `weight` of a row, where one says no | refused                       |
| those of `_REFUSED`                                   | refused                                                      |
| those of `_OF_NO_ACCOUNT`                             | not read, and not said                                       |
| any other                                             | not read, and said once                                      |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from infinity.echo import quoted
from infinity.errors import ConfigError

DATA_HELP = (
    "text files; .jsonl, .json, .parquet and .csv files (.jsonl.gz, too) whose rows have text, messages, "
    "conversations, prompt and completion, or instruction and output; directories of such files, or those that "
    "`datasets` saved. A row may also have system, its first message, and tools; a message weight, train or loss, with "
    "0 or false where it is not to be learned. A row whose label, weight or train says no is refused: docs/finetune.md "
    "has all fields"
)
_TOLD = ("tools", "functions", "system")
_READ_BESIDE = {
    "messages": ("messages", "prompt", "completion", *_TOLD),
    "conversations": ("conversations", *_TOLD),
    "prompt": ("prompt", "completion", *_TOLD),
    "instruction": ("instruction", "input", "output", "system", "text"),
    "text": ("text",),
}
"""By what a row has: the fields that are read."""
_OF_NO_ACCOUNT = (
    *("id", "idx", "index", "source", "url", "title"),
    *("lang", "language", "date", "license", "meta", "metadata"),
)
_ANSWERS = {"completion", "output", "messages", "conversations"}
_TEXT_ONLY = "text is all that is learned here; leave such rows out"
_PAIRS = "of two answers one is preferred, and that is not learned here: give the one to learn as 'completion'"
_PARTS_OF_MESSAGES = ("train_detail", "training", "masked", "mask", "loss_mask", "loss_weight")
_OF_MESSAGES = (
    *("role", "content", "from", "value", "name", "weight", "train", "loss", "tool_calls", "tool_call_id", "tool_name"),
    *("function_call", "reasoning", "reasoning_content", "thinking", "id"),
)
_REFUSED = {
    "history": "give earlier turns as 'messages', each with a 'role' and a 'content'",
    "system_prompt": "call it 'system'",
    "chosen": _PAIRS,
    "rejected": _PAIRS,
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), _TEXT_ONLY),
    **dict.fromkeys(
        ("input_ids", "loss_mask"), "rows with tokens are not read: give the text, and what is learned of it"
    ),
}


def plain(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A row with its system message where it belongs, and without what repeats the rest.

    Raises:
        ConfigError: it has a field that changes what is to be learned, in a way that nothing here does.
    """
    row = {key: value for key, value in record.items() if value is not None}
    for key, fix in _REFUSED.items():
        if row.get(key, "") not in ("", [], {}):
            raise ConfigError(f"{where}: has {quoted(key)}, which is not learned as it asks: {fix}")
    # Of text alone a 0 may be a class.
    said_no = (0, "0", "false", "False", "no") if not _ANSWERS.isdisjoint(row) else ()
    for key in ("label", "kto_tag", "is_good", "train", "loss", "weight", "loss_weight"):
        asked = row.get(key, True)
        no = asked is False or asked in said_no
        if no or (key in ("weight", "loss_weight") and asked != 1):
            raise ConfigError(
                f"{where}: {quoted(key)} is {quoted(asked)}: a row that is not to be learned, or less than others, "
                "cannot be given; leave it out"
            )
    if isinstance(row.get("instruction"), str) and isinstance(row.get("output"), str):
        row.pop("text", None)
    if isinstance(row.get("messages"), list) and "prompt" in row:
        row = _without_prompt(row, where)
    if row.get("functions"):
        if row.get("tools"):
            raise ConfigError(f"{where}: has 'functions' and 'tools'; leave one of them")
        given = row.pop("functions")
        row["tools"] = [{"type": "function", "function": each} for each in given] if isinstance(given, list) else given
    return _with_system(row, where)


def _without_prompt(row: dict[str, Any], where: str) -> dict[str, Any]:
    """A row of messages without the prompt and the completion that repeat them, as published chats have them."""
    said, prompt, rest = row["messages"], row["prompt"], row.get("completion")
    if isinstance(prompt, list):
        repeats = said[: len(prompt)] == prompt and rest in (None, said[len(prompt) :])
    else:
        talk = [each for each in said if isinstance(each, dict)]
        asked = [each.get("content") for each in talk if each.get("role") == "user"]
        repeats = asked[:1] == [prompt] and (rest is None or talk[-1].get("content") == rest)
    if not repeats:
        raise ConfigError(
            f"{where}: the row has both 'messages' and 'prompt', and the messages do not begin with that prompt. If "
            "the prompt belongs before the messages, put it there as their first one; else leave it out: datasets."
            "load_dataset('json', data_files='FILE', split='train').remove_columns('prompt').to_json('OUT.jsonl')"
        )
    return {key: value for key, value in row.items() if key not in ("prompt", "completion")}


def _with_system(row: dict[str, Any], where: str) -> dict[str, Any]:
    system = row.get("system", "")
    if not isinstance(system, str):
        raise ConfigError(f"{where}: 'system' is a {type(system).__name__}; it must be a string")
    shape = next((key for key in ("messages", "conversations", "prompt") if key in row), "")
    if not system.strip() or not shape:
        return row
    said = row[shape]
    if not isinstance(said, list):
        raise ConfigError(f"{where}: has 'system' beside a '{shape}' that is no list: begin the {shape} with it")
    for message in said:
        if isinstance(message, dict) and "system" in (message.get("role"), message.get("from")):
            raise ConfigError(f"{where}: has 'system' and a message of the system; leave one of them")
    del row["system"]
    return row | {shape: [{"role": "system", "content": system}, *said]}


def answers_learned(messages: Sequence[dict[str, Any]], where: str) -> list[bool | None]:
    """What each message asks for: to be learned, or not; None where it says nothing. Takes the fields away.

    Raises:
        ConfigError: a weight between 0 and 1, or a message that is not the assistant's and is to be learned.
    """
    asked: list[bool | None] = []
    for index, message in enumerate(messages):
        for key in _PARTS_OF_MESSAGES:
            if message.get(key) not in (None, "", [], {}):
                raise ConfigError(
                    f"{where}[{index}]: has {quoted(key)}; what is to be learned of a part of a message is not read"
                )
        wanted = [message.pop(key) for key in ("weight", "train", "loss") if key in message]
        if any(each not in (0, 1) for each in wanted):
            raise ConfigError(
                f"{where}[{index}]: 'weight' is 0 or 1, 'train' and 'loss' false or true; it has {quoted(wanted[0])}"
            )
        learned = all(map(bool, wanted)) if wanted else None
        if learned and message.get("role") != "assistant":
            raise ConfigError(
                f"{where}[{index}]: 'weight' or 'train' asks that what the {message.get('role')} says is learned; only "
                "the assistant's messages are. Take it out; --loss-on all learns whole conversations"
            )
        asked.append(learned)
    return asked


def unread(record: Mapping[str, Any]) -> Iterable[str]:
    """The fields of a row that nothing reads, and that may be of account."""
    shapes = [key for key in ("messages", "conversations", "prompt") if record.get(key) is not None]
    shape = shapes[0] if shapes else "instruction" if record.get("output") is not None else "text"
    known = {*_READ_BESIDE[shape], *_OF_NO_ACCOUNT, *_REFUSED, "weight", "train", "loss"}
    found = [key for key, value in record.items() if key not in known and value not in (None, "", [], {})]
    for shape in ("messages", "conversations", "prompt", "completion"):
        said = record.get(shape)
        for message in said if isinstance(said, list) else ():
            if isinstance(message, dict):
                found += [f"{shape}.{key}" for key in message if key not in _OF_MESSAGES]
    return dict.fromkeys(found)
