"""Conversion of published lists of messages to the form of chat templates and TRL: each message has a `role`, a
`content` that is a string, and `tool_calls` that are objects.

| published form                                 | result                                                         |
|---|---|
| `role` and `content` (OpenAI)                  | the same; a content that is a list of texts is joined          |
| `from` and `value` (ShareGPT)                  | `role` and `content`                                           |
| strings (LIMA, UltraChat)                      | messages of the user and the assistant in turn, first the user |
| `input` and `output`, or pairs (Capybara)      | a message of the user and one of the assistant                 |
| `function_call`, as a field or as a role       | a message of the assistant with `tool_calls`                   |
| `weight`, `train`, `loss`                      | whether the message is learned (`answers_learned`)             |
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError
from infinity.quoting import quoted
from infinity.strict_parsers import parse_yaml

TABLE: dict[str, Any] = parse_yaml(Path(__file__).with_name("dataset_layouts.yaml").read_text(encoding="utf-8"))
"""Content of dataset_layouts.yaml, whose comments describe its parts."""
ROLES: dict[str, str] = {each: role for role, names in TABLE["roles"].items() for each in (role, *names)}
"""Roles of chat templates, by the names that datasets have for them."""
_SHAREGPT = {"from": "role", "value": "content"}


def messages_of(given: list[Any], where: str) -> list[dict[str, Any]]:
    """Return the messages in a list of messages, of strings, or of questions with their answers.

    Args:
        given: the list of messages, strings, or questions with their answers.
        where: place of the list in the data, for error messages.

    Raises:
        ConfigError: the list is empty, or one of its entries has another shape.
    """
    if not given:
        raise ConfigError(f"{where} is empty")
    if all(isinstance(each, str) for each in given):
        given = [{"role": ("user", "assistant")[index % 2], "content": each} for index, each in enumerate(given)]
    elif all(isinstance(each, list) and len(each) == 2 for each in given):
        given = [message for asked, said in given for message in _turn(asked, said)]
    elif all(isinstance(each, dict) and set(each) == {"input", "output"} for each in given):
        given = [message for each in given for message in _turn(each["input"], each["output"])]
    found = [_message(each, f"{where}[{index}]") for index, each in enumerate(given)]
    if any(isinstance(each, dict) and ("from" in each or each.get("function_call")) for each in given):
        found = [each | {"role": "tool"} if each["role"] == "function" else each for each in found]
    return found


def _turn(asked: Any, said: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]


def _message(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ConfigError(f"{where} is not an object with a 'role' and a 'content', both strings")
    message = {key: value for key, value in given.items() if value is not None}
    for other, key in _SHAREGPT.items():
        if key in message and other in message:
            raise ConfigError(f"{where} has '{other}' and '{key}'; remove one of the two")
        if other in message:
            message[key] = message.pop(other)
    if message.get("role") == "function_call":  # a pair in the form of LLaMA-Factory
        calls = from_json(message.pop("content", None), f"{where}: the value of a function_call")
        message |= {"role": "assistant", "tool_calls": calls if isinstance(calls, list) else [calls]}
    calls = _calls(message, where)
    if isinstance(message.get("content"), list):
        message["content"] = _text_of(message["content"], where)
    for key in ("role",) if calls and "content" not in message else ("role", "content"):
        if not isinstance(message.get(key), str):
            has = kind(message.get(key)) if key in message or key in given else "none"
            raise ConfigError(f"{where} needs a '{key}' that is a string; this one has {has}")
    unicode(f"{message.get('content')}{calls}", where)
    return message | ({"tool_calls": calls} if calls else {})


def _calls(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Remove the tool calls from a message and return the calls, with their arguments as objects.

    A chat template encodes the arguments as JSON. In OpenAI's form the arguments are already a string of JSON, and the
    template would encode this string a second time.
    """
    older, given = message.pop("function_call", None), message.pop("tool_calls", None)
    if older and given:
        raise ConfigError(f"{where} has 'function_call' and 'tool_calls'; remove one of the two")
    calls = []
    for call in listed([older] if older else given or [], f"{where}: 'tool_calls'"):
        call = call if isinstance(call, dict) and "function" in call else {"type": "function", "function": call}
        function = call["function"]
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ConfigError(f"{where}: a call needs a 'name' and 'arguments'; this one has {quoted(function)}")
        arguments = function.get("arguments")
        try:
            parsed = json.loads(arguments) if isinstance(arguments, str) else None
        except (ValueError, RecursionError):
            parsed = None  # if the arguments are not JSON, the model learns to write the string as it is
        parsed = parsed if isinstance(parsed, dict) else {} if arguments in (None, "") else arguments
        calls.append(call | {"function": function | {"arguments": parsed}})
    return calls


def _text_of(parts: list[Any], where: str) -> str:
    """Return the text of a content that is a list of parts: the parts joined by line breaks, as in vLLM and llama.cpp.

    Raises:
        ConfigError: a part is not text.
    """
    for part in parts:
        what = part.get("type") if isinstance(part, dict) else type(part).__name__
        if what not in TABLE["texts"] or not isinstance(part.get("text"), str):
            raise ConfigError(
                f"{where}: 'content' has a part of the type {quoted(what)}, and infinity "
                "trains on text only: leave such "
                'rows out, or give {"type": "text", "text": "…"}'
            )
    return "\n".join(part["text"] for part in parts)


def answers_learned(messages: Sequence[dict[str, Any]], where: str) -> list[bool | None]:
    """Return for each message whether its fields ask to learn the message; None if no message has such a field.

    The fields are `weight`, `train` and `loss`; they are removed from the messages.

    Raises:
        ConfigError: a weight is not 0 or 1, a field asks to learn a message whose role is not the assistant, or a field
            asks to learn only a part of a message.
    """
    asked: list[bool | None] = []
    for index, message in enumerate(messages):
        for key in TABLE["parts"]:
            if message.get(key) not in (None, "", [], {}):
                raise ConfigError(
                    f"{where}[{index}]: has {quoted(key)}; learning only a part of a message is not supported"
                )
        wanted = [message.pop(key) for key in ("weight", "train", "loss") if key in message]
        if any(each not in (0, 1) for each in wanted):
            raise ConfigError(
                f"{where}[{index}]: 'weight' must be 0 or 1, 'train' and 'loss' must be false or true; this message "
                f"has {quoted(wanted[0])}"
            )
        asked.append(all(map(bool, wanted)) if wanted else None)
        if asked[-1] and message["role"] != "assistant":
            raise ConfigError(
                f"{where}[{index}]: 'weight' or 'train' asks to learn what the {message['role']} says, but only the "
                "assistant's messages are learned. Remove the field; or give --loss-on all to learn whole conversations"
            )
    return asked


def unicode(text: str, where: str) -> str:
    """Return `text`, after a check that every code point is a character.

    Raises:
        ConfigError: the text has half of a surrogate pair, which JSON can express but which is not a character.
    """
    if re.search("[\ud800-\udfff]", text):
        raise ConfigError(f"{where}: the text has half of a surrogate pair (\\ud800 to \\udfff)")
    return text


def listed(value: Any, what: str) -> list[Any]:
    """Return a list from a value that is a list or a string of JSON.

    Args:
        value: the list or the JSON.
        what: name of the value, for error messages.

    Raises:
        ConfigError: the value is not a list.
    """
    found = from_json(value, what) if isinstance(value, str) else value
    if not isinstance(found, list):
        raise ConfigError(f"{what} is {kind(found)}; it must be a list")
    return found


def from_json(text: Any, what: str) -> Any:
    """Return the value of a string of JSON.

    Args:
        text: the JSON.
        what: name of the text, for error messages.

    Raises:
        ConfigError: the text is not valid JSON.
    """
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{what} is not valid JSON: {error}") from None


def kind(value: Any) -> str:
    """Return the type of a value in words, for messages."""
    return "null" if value is None else f"a {type(value).__name__}"
