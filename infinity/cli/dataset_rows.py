"""Conversion of rows of --data to TRL's formats. The table dataset_layouts.yaml has the layouts of rows that are known.

| columns of a row                                      | TRL's format                                               |
|---|---|
| `chosen` and `rejected`                               | preference, with the question as `prompt`, if there is one |
| `messages`, or such a list of another name            | language modeling: `messages`                              |
| `prompt` and `completion`, both strings or both lists | prompt-completion, as they are                             |
| a question (`instruction`) and an answer (`output`)   | prompt-completion, of messages if there is a chat template |
| a question and calls (`answers`, xLAM)                | prompt-completion: the answer has `tool_calls`             |
| a question, an answer and `history` (LLaMA-Factory)   | language modeling: `messages`                              |
| `text`                                                | language modeling: `text`                                  |

If a field says which tokens should be learned, infinity obeys the field, or refuses the row with an error that names
the field. Fields that dataset_layouts.yaml does not have are not read, and the run prints their names. If --columns is
given, only the columns that it names are read.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infinity.cli.chat_messages import TABLE, kind, listed, messages_of, unicode
from infinity.errors import ConfigError
from infinity.quoting import quoted

DATA_HELP = (
    "text files; .jsonl, .json, .parquet and .csv files (.jsonl.gz, too) whose rows have text, messages, "
    "conversations, prompt and completion, or a question and an answer such as instruction and output; directories of "
    "such files, or those that `datasets` saved. infinity's page on finetune has all layouts and fields, and says "
    "which are refused"
)
_NAMES: dict[str, list[str]] = TABLE["names"]
_SHAPES = (
    "a 'text' string, a list of 'messages' or 'conversations', a 'prompt' and a 'completion', a question and an answer "
    "such as 'instruction' and 'output', or two answers, 'chosen' and 'rejected'"
)
_OPTIONAL = ("input", "history", "system", "tools", "chat_template_kwargs")
_KEYS_SHOWN = 8
_KINDS: dict[Any, str] = {str: "a string", list: "a list of messages", (str, list): "a string or a list of messages"}
_NOTHING: tuple[Any, ...] = (None, "", [], {})


@dataclass(frozen=True)
class DatasetRow:
    """A row in one of TRL's formats.

    Attributes:
        trl: fields of TRL's format, with their values. If the format has messages, also `tools` and
            `chat_template_kwargs`.
        columns: columns that were read, by their names in dataset_layouts.yaml.
        unread: fields that are not read, but might be important to the user.
    """

    trl: dict[str, Any]
    columns: dict[str, list[str]]
    unread: list[str]


def column(text: str) -> str:
    """Return a value of --columns, after a check that the value has the form NAME=COLUMN.

    Raises:
        argparse.ArgumentTypeError: the value has another form.
    """
    name, _, given = text.partition("=")
    if name not in _NAMES or not given:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not NAME=COLUMN, with a NAME of {', '.join(_NAMES)}")
    return text


def by_name(given: Sequence[str]) -> dict[str, str]:
    """Return the values of --columns by name.

    Raises:
        ConfigError: two values have the same name.
    """
    named = dict(each.split("=", 1) for each in given)
    if len(named) < len(given):
        raise ConfigError(f"--columns: a name is given twice in {' '.join(given)}; remove one of the two")
    return named


def in_trl_format(record: Any, where: str, columns: Mapping[str, str], *, chat: bool) -> DatasetRow:
    """Convert a row to one of TRL's formats.

    Args:
        record: the row, which may have other fields.
        where: place of the row, for messages.
        columns: values of --columns, by name. If there are none, all columns that dataset_layouts.yaml has are read.
        chat: whether the model has a chat template. With a chat template, questions and answers become messages.

    Raises:
        ConfigError: the row has an unknown layout, has two columns with the same meaning, or has a field that infinity
            cannot obey.
    """
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: a row needs {_SHAPES}")
    row = {key: value for key, value in record.items() if value is not None}
    if columns:
        absent = [each for name, each in columns.items() if each not in row and name not in _OPTIONAL]
        if absent:
            raise ConfigError(f"{where}: the row has no {quoted(absent[0])}, which --columns names")
        row = {_NAMES[name][0]: row[each] for name, each in columns.items() if each in row}
    form, found = _format_of(row, where)
    if not columns:
        _require_learned_as_it_asks(row, where, form["of"], found)
    trl = _mapped(row, where, form, found, chat)
    used = {each for name in found for each in found[name]}
    for other in ("text", "prompt", "completion"):
        if other in row and other not in used and not _repeats(row[other], other, trl):
            raise _both(where, found[form["of"][0]][0], other, found)
    _add_what_is_told(trl, row, where, found)
    return DatasetRow(trl, found, [] if columns else _unread(record, used, trl))


def _format_of(row: dict[str, Any], where: str) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return the first format for which the row has all columns, and the columns to read, by name."""
    has = {name: [each for each in names if each in row] for name, names in _NAMES.items()}
    form = next((form for form in TABLE["formats"] if all(has[name] for name in form["of"])), None)
    if form is None:
        keys = ", ".join(quoted(str(key)) for key in list(row)[:_KEYS_SHOWN]) or "nothing"
        raise ConfigError(
            f"{where}: a row needs {_SHAPES}; this one has {keys}. If its columns have other names, give --columns"
        )
    beside = {name: [each for each in has[name] if row[each] not in _NOTHING] for name in form["beside"]}
    found = {name: has[name] for name in form["of"]} | {name: each for name, each in beside.items() if each}
    for name, columns in found.items():
        other = next((each for each in columns if row[each] != row[columns[0]]), None)
        if other is not None and name != "input":
            raise _both(where, columns[0], other, found)
    return form, found


def _chosen(found: Mapping[str, list[str]]) -> str:
    return " ".join(f"{name}={columns[0]}" for name, columns in found.items())


def _both(where: str, one: str, other: str, found: Mapping[str, list[str]]) -> ConfigError:
    return ConfigError(
        f"{where}: the row has both '{one}' and '{other}', which differ; remove one of the two, or name the columns to "
        f"read, such as --columns {_chosen(found)}"
    )


def _require_learned_as_it_asks(
    row: dict[str, Any], where: str, form: list[str], found: Mapping[str, list[str]]
) -> None:
    for refused in TABLE["refused"]:
        for field in refused["fields"] if not {*form}.isdisjoint(refused.get("in", form)) else ():
            if row.get(field) not in _NOTHING:
                raise ConfigError(
                    f"{where}: has {quoted(field)}, which infinity cannot obey: {refused['instead']}. To learn the row "
                    f"without it, name the columns to read: --columns {_chosen(found)}"
                )
    # in a row of text, the value 0 may be the label of a class
    said_no = () if form == ["text"] else (0, "0", "false", "False", "no")
    for field in TABLE["say_no"]:
        asked = row.get(field, True)
        if asked is False or asked in said_no or ("weight" in field and asked != 1):
            raise ConfigError(
                f"{where}: {quoted(field)} is {quoted(asked)}, but infinity gives all rows the same weight: leave this "
                "row out"
            )


def _value(row: Mapping[str, Any], column: str, where: str, kinds: Any = (str, list)) -> Any:
    """Return the value of a column as a string or as a list of messages.

    Raises:
        ConfigError: the column has another type.
    """
    given = row[column]
    if not isinstance(given, kinds):
        raise ConfigError(f"{where}: '{column}' is {kind(given)}; it must be {_KINDS[kinds]}")
    return unicode(given, where) if isinstance(given, str) else messages_of(given, f"{where}: {column}")


def _mapped(
    row: dict[str, Any], where: str, form: Mapping[str, Any], found: dict[str, list[str]], chat: bool
) -> dict[str, Any]:
    if "trl" in form:
        kinds = {"text": str, "messages": list}.get(form["of"][0], (str, list))
        trl = {to: _value(row, found[name][0], where, kinds) for name, to in form["trl"].items() if name in found}
        if "input" in found:
            parts = [*found.get("instruction", [])[:1], *found["input"]]
            trl["prompt"] = "\n\n".join(_value(row, each, where, str) for each in parts)
        # rows of UltraFeedback have this form
        if isinstance(trl.get("prompt"), str) and isinstance(trl.get("chosen"), list):
            asked = [{"role": "user", "content": trl.pop("prompt")}]
            trl |= {} if trl["chosen"][:1] == asked else {"prompt": asked}
        if len({type(each) for each in trl.values()}) > 1:
            names = " and ".join(f"'{found[name][0]}'" for name in form["trl"] if name in found)
            raise ConfigError(f"{where}: {names} must all be strings, or must all be lists of messages")
        return trl
    calls = listed(row["answers"], f"{where}: 'answers', calls of tools,") if "calls" in found else None
    chat = chat or calls is not None or "history" in found
    system = [] if chat else found.pop("system", [])
    parts = [*system[:1], *found.get("instruction", [])[:1], *found.get("input", [])]
    question = "\n\n".join(filter(None, (_value(row, each, where, str) for each in parts)))
    answer = "" if calls is not None else _value(row, found["output"][0], where, str)
    if not chat:
        return {"prompt": f"{question}\n\n", "completion": answer}
    said = {"role": "assistant"} | ({"tool_calls": calls} if calls is not None else {"content": answer})
    turns = messages_of([{"role": "user", "content": question}, said], where)
    if "history" in found:
        return {"messages": [*_value(row, "history", where, list), *turns]}
    return {"prompt": turns[:1], "completion": turns[1:]}


def _repeats(value: Any, name: str, trl: Mapping[str, Any]) -> bool:
    """Return whether a column only repeats the contents of other columns of the row.

    Published chats often have such columns.
    """
    said = [trl[each] for each in ("messages", "prompt", "completion") if each in trl]
    turns: list[Any] = [turn for part in said for turn in (part if isinstance(part, list) else [part])]
    texts = [turn if isinstance(turn, str) else turn.get("content", "") for turn in turns]
    if name == "text":
        return isinstance(value, str) and all(part in value for each in texts for part in each.strip().split("\n\n"))
    if isinstance(value, list) and value and "messages" in trl:
        given = messages_of(value, name)
        return given == (turns[: len(given)] if name == "prompt" else turns[-len(given) :])
    if "messages" not in trl:
        return False
    asked = [text for turn, text in zip(turns, texts, strict=True) if turn["role"] in ("user", "human")]
    return value in (asked[:1] if name == "prompt" else texts[-1:])


def _add_what_is_told(trl: dict[str, Any], row: dict[str, Any], where: str, found: Mapping[str, list[str]]) -> None:
    """Add the system message before the other messages.

    If the row has messages, also add the arguments of the chat template.
    """
    head = next(name for name in ("text", "messages", "prompt", "chosen") if name in trl)
    chat = isinstance(trl[head], list)
    system = _value(row, found["system"][0], where, str) if "system" in found else ""
    if system.strip() and not chat and "chosen" not in trl:
        raise ConfigError(f"{where}: has 'system', and '{head}' is not a list: put the text of 'system' into '{head}'")
    for name in ("chosen", "rejected") if head == "chosen" else (head,):
        if system.strip() and not chat:
            trl[name] = f"{system}\n\n{trl[name]}"
        elif system.strip() and any(message["role"] == "system" for message in trl[name]):
            raise ConfigError(f"{where}: has 'system' and also a system message; remove one of the two")
        elif system.strip():
            trl[name] = [{"role": "system", "content": system}, *trl[name]]
    if chat and "tools" in found:
        trl["tools"] = [
            {"type": "function", "function": each} if isinstance(each, dict) and "function" not in each else each
            for each in listed(row[found["tools"][0]], f"{where}: 'tools'")
        ]
    if chat and "chat_template_kwargs" in found:
        trl["chat_template_kwargs"] = row["chat_template_kwargs"]


def _unread(record: Mapping[str, Any], used: set[str], trl: Mapping[str, Any]) -> list[str]:
    told = {each for name in ("tools", "chat_template_kwargs") if name not in trl for each in _NAMES[name]}
    known = {*used - told, *TABLE["no_account"], "text", "prompt", "completion"}
    found = [key for key, value in record.items() if key not in known and value not in _NOTHING]
    for key in sorted(used - {*_NAMES["tools"]}):
        said = record[key] if isinstance(record[key], list) else []
        parts = [part for message in said if isinstance(message, dict) for part in message]
        found += [f"{key}.{part}" for part in parts if part not in TABLE["messages"]]
    return list(dict.fromkeys(found))
