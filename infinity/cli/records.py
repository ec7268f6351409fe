"""A row of --data becomes text, or an example of which only answers are learned.

| a row has                         | what is learned                                                           |
|---|---|
| `text`                            | all of it                                                                 |
| `prompt`, `completion`            | the completion, and that it ends there. Strings, or lists of messages     |
| `messages`                        | what the model's chat template marks as the assistant's, calls of tools   |
|                                   | among it; a content that is a list of texts is joined                     |
| `conversations` (ShareGPT)        | as `messages`: `from` and `value` are taken for `role` and `content`      |
| `instruction`, `input`, `output`  | the output (Alpaca); the other two are the prompt                         |

What else a row may have is in fields.py.

[Note: what the assistant said]
Only a chat template knows which tokens of a conversation are the assistant's: it puts them between `{% generation %}`
and `{% endgeneration %}`. transformers returns a mask of nothing for a template without these marks, which trains
nothing at all and says so in one line of a log; here such a template is an error.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from infinity.cli import fields
from infinity.echo import quoted, raised
from infinity.errors import ConfigError, printable

LossOn = Literal["answers", "all"]
"""Of rows with prompts or messages: which tokens are learned."""

_SHAPES = "a 'text' string, a list of 'messages' or 'conversations', or a 'prompt' and a 'completion'"
_KEYS_SHOWN = 8
_TEXTS = ("text", "input_text", "output_text")
"""Types of parts of a content; the last two are those of OpenAI's responses."""
_STANDARD_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "environment")
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "function", "function_response", "observation"), "tool"),
}
"""Who speaks in ShareGPT's conversations."""


@dataclass(frozen=True)
class Example:
    """A document of which not everything is learned.

    Attributes:
        ids: tokens, with those that begin and end it.
        learned: for each token, whether it is.
        where: file and row.
        is_chat: whether the chat template made it.
        declined: whether its messages ask that no answer is learned.
    """

    ids: list[int]
    learned: list[bool]
    where: str = ""
    is_chat: bool = False
    declined: bool = False


def text_or_example(record: Any, where: str, tokenizer: Any, loss_on: LossOn) -> str | Example:
    """What a row says.

    Args:
        record: a row, with any keys beside those that are read.
        where: names the row in messages.

    Raises:
        ConfigError: it has another shape, or the tokenizer's chat template refuses it or does not say what is the
            assistant's.
    """
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: a row needs {_SHAPES}")
    record = fields.plain(record, where)
    given = [key for key in ("text", "messages", "conversations", "prompt") if record.get(key) is not None]
    if len(given) > 1:
        both = " and ".join(f"'{key}'" for key in given[:2])
        raise ConfigError(f"{where}: the row has both {both}; leave one of them")
    shape = given[0] if given else ""
    if shape == "text" and isinstance(record["text"], str):
        return unicode(record["text"], where)
    if shape == "prompt" or record.get("completion") is not None:
        return _answered(record, where, tokenizer, loss_on)
    if shape in ("messages", "conversations") and isinstance(record[shape], list):
        messages = _messages(record[shape], f"{where}: {shape}", shape == "conversations")
        return _chat(messages, where, tokenizer, loss_on, _tools(record, where))
    if isinstance(record.get("instruction"), str) and isinstance(record.get("output"), str):
        return _answered(_of_alpaca(record, tokenizer), where, tokenizer, loss_on)
    if shape:
        raise ConfigError(f"{where}: '{shape}' is {_kind(record[shape])}; a row needs {_SHAPES}")
    has = ", ".join(quoted(str(key)) for key in list(record)[:_KEYS_SHOWN]) or "nothing"
    raise ConfigError(f"{where}: a row needs {_SHAPES}; this one has {has}")


def _of_alpaca(record: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """A row of Alpaca's as a prompt and a completion: messages where there is a chat template."""
    system, given = record.get("system", ""), [record["instruction"], record.get("input", "")]
    prompt, completion = "\n\n".join(str(each) for each in given if each), record["output"]
    if not getattr(tokenizer, "chat_template", None):
        prompt = f"{system}\n\n{prompt}" if system else prompt
        return {"prompt": f"{prompt}\n\n", "completion": completion}
    said = [{"role": "system", "content": system}] if system else []
    return {
        "prompt": [*said, {"role": "user", "content": prompt}],
        "completion": [{"role": "assistant", "content": completion}],
    }


def unicode(text: str, where: str) -> str:
    """Returns `text`. Raises ConfigError for half of a surrogate pair, which JSON can express and which is no
    character."""
    if re.search("[\ud800-\udfff]", text):
        raise ConfigError(f"{where}: the text has half of a surrogate pair (\\ud800 to \\udfff)")
    return text


# -- prompts and completions -------------------------------------------------------------------------------------------


def _answered(record: dict[str, Any], where: str, tokenizer: Any, loss_on: LossOn) -> Example:
    prompt, completion = record.get("prompt"), record.get("completion")
    for name, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, str | list):
            raise ConfigError(f"{where}: '{name}' is {_kind(value)}; it must be a string or a list of messages")
    if isinstance(prompt, list) != isinstance(completion, list):
        raise ConfigError(f"{where}: 'prompt' and 'completion' must both be strings, or both lists of messages")
    if isinstance(prompt, list):
        tools = _tools(record, where)
        first = _messages(prompt, f"{where}: prompt", conversations=False)
        answer = _messages(completion or [], f"{where}: completion", conversations=False)
        _require_a_prompt_and_an_answer(first, answer, where)
        both = [*first, *answer]
        _require_roles(both, where, tokenizer)
        made, form = _rendered_whole(both, where, tokenizer, tools)
        ids, first = made["input_ids"], form[: len(first)]
        asked = _rendered(first, where, tokenizer, tools, add_generation_prompt=True)["input_ids"]
    else:
        end = tokenizer.eos_token or ""
        said = unicode(str(completion), where)
        said = said if said.endswith(end) else said + end
        asked = _ids(tokenizer, unicode(str(prompt), where))
        ids = _ids(tokenizer, str(prompt) + said)
    common = 0  # a token may span the end of the prompt: what differs is the completion's
    while common < min(len(asked), len(ids)) and asked[common] == ids[common]:
        common += 1
    learned = [loss_on == "all" or index >= common for index in range(len(ids))]
    return Example(ids, learned, where, is_chat=isinstance(prompt, list))


def _require_a_prompt_and_an_answer(
    prompt: Sequence[dict[str, Any]], answer: Sequence[dict[str, Any]], where: str
) -> None:
    """Raises ConfigError where a message asks for something else than its place says."""
    asked = fields.answers_learned(prompt, f"{where}: prompt"), fields.answers_learned(answer, f"{where}: completion")
    if True in asked[0] or False in asked[1]:
        raise ConfigError(
            f"{where}: a 'weight' or 'train' asks that a message of the prompt is learned, or one of the completion is "
            "not; give the row as 'messages'"
        )


def _ids(tokenizer: Any, text: str) -> list[int]:
    """With what the tokenizer puts before a text, and without a second token for its end."""
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    end = tokenizer.eos_token_id
    return ids[:-1] if end is not None and ids[-2:] == [end, end] else ids


# -- conversations -----------------------------------------------------------------------------------------------------


def _chat(messages: list[dict[str, Any]], where: str, tokenizer: Any, loss_on: LossOn, tools: Any) -> Example:
    marked = loss_on == "answers"
    asked = fields.answers_learned(messages, f"{where}: messages")
    if marked and not re.search(r"\{%-?\s*generation\s*-?%\}", _template(tokenizer, where)):
        raise ConfigError(
            f"{where}: the model's chat template does not say which tokens are the assistant's: it has no "
            "{% generation %} … {% endgeneration %} around them. Add these marks to chat_template.jinja in the model's "
            "directory (or to chat_template in its tokenizer_config.json), as infinity's documentation shows; or give "
            "rows with a 'prompt' and a 'completion' of messages, which need no marks; or --loss-on all, to learn "
            "whole conversations, what users said included."
        )
    _require_roles(messages, where, tokenizer)
    made, _ = _rendered_whole(messages, where, tokenizer, tools, marked=marked)
    ids = list(made["input_ids"])
    learned = [bool(each) for each in made["assistant_masks"]] if marked else [True] * len(ids)
    if any(each is False and message["role"] == "assistant" for each, message in zip(asked, messages, strict=True)):
        learned = _without_some_answers(learned, asked, messages, where, marked=marked)
    answers = [each for each, message in zip(asked, messages, strict=True) if message["role"] == "assistant"]
    return Example(ids, learned, where, is_chat=True, declined=bool(answers) and set(answers) == {False})


def _without_some_answers(
    learned: list[bool],
    asked: Sequence[bool | None],
    messages: Sequence[dict[str, Any]],
    where: str,
    *,
    marked: bool,
) -> list[bool]:
    """Without the tokens of the assistant's messages that are not to be learned. Args: learned: all of its tokens."""
    spans = [(here, list(each)) for here, each in itertools.groupby(learned)]
    answers = [each for each, message in zip(asked, messages, strict=True) if message["role"] == "assistant"]
    if not marked or sum(here for here, _ in spans) != len(answers):
        why = "with --loss-on all everything is learned" if not marked else "the chat template marks them otherwise"
        raise ConfigError(
            f"{where}: a message has 'weight': 0 or 'train': false, and which tokens are its is not known: {why}"
        )
    wanted = iter(answers)
    return [
        each
        for here, part in spans
        for each in (part if not here or next(wanted) is not False else [False] * len(part))
    ]


def _require_roles(messages: Sequence[dict[str, Any]], where: str, tokenizer: Any) -> None:
    """Raises ConfigError for a role that nobody knows: its messages would be trained on as somebody else's."""
    template = _template(tokenizer, where)
    for index, message in enumerate(messages):
        role = message["role"]
        if role in _STANDARD_ROLES or f"'{role}'" in template or f'"{role}"' in template:
            continue
        meant = _ROLES.get(role.lower(), role.lower() if role.lower() in _STANDARD_ROLES else "")
        fix = f"; did you mean '{meant}'?" if meant else f": give one of {', '.join(_STANDARD_ROLES[:5])}"
        raise ConfigError(
            f"{where}: messages[{index}] has the role {quoted(role)}, which the model's chat template has not{fix}"
        )


def _template(tokenizer: Any, where: str) -> str:
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise ConfigError(
            f"{where}: has messages, but the model's tokenizer has no chat template; use 'prompt' and "
            "'completion', or 'text'"
        )
    return str(template)


def _rendered(
    messages: list[dict[str, Any]],
    where: str,
    tokenizer: Any,
    tools: Any,
    *,
    marked: bool = False,
    add_generation_prompt: bool = False,
) -> Any:
    _template(tokenizer, where)
    try:
        return tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=marked,
            add_generation_prompt=add_generation_prompt,
        )
    except Exception as error:  # a template is a program that came with the model
        raise ConfigError(f"{where}: the model's chat template refuses it: {raised(error)}") from error


def _forms(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The same messages as templates want them: as they are; with a content where there are only calls; with lists."""
    yield messages
    messages = [{"content": ""} | each for each in messages]
    yield messages
    yield [each | {"content": [{"type": "text", "text": each["content"]}]} for each in messages]


def _rendered_whole(
    messages: list[dict[str, Any]], where: str, tokenizer: Any, tools: Any, *, marked: bool = False
) -> tuple[Any, list[dict[str, Any]]]:
    """What the template makes of the first form of the messages of which it leaves nothing out, and that form."""
    refused: ConfigError | None = None
    for form in _forms(messages):
        try:
            made = _rendered(form, where, tokenizer, tools, marked=marked)
            _require_contents(messages, made["input_ids"], where, tokenizer)
            _require_calls(form, made["input_ids"], where, tokenizer, tools)
        except ConfigError as error:
            refused = refused or error
        else:
            return made, form
    raise refused or AssertionError


def _require_calls(form: list[dict[str, Any]], ids: list[int], where: str, tokenizer: Any, tools: Any) -> None:
    """Raises ConfigError where the template writes the same without the calls of a message."""
    for index, message in enumerate(form):
        if not message.get("tool_calls"):
            continue
        bare = {key: value for key, value in message.items() if key != "tool_calls"}
        try:
            without = _rendered([*form[:index], bare, *form[index + 1 :]], where, tokenizer, tools)["input_ids"]
        except ConfigError:
            continue
        if list(without) == list(ids):
            raise ConfigError(
                f"{where}: the model's chat template leaves out 'tool_calls' of messages[{index}]: write them into its "
                "'content' as the model is to say them, or leave such rows out"
            )


def _require_contents(messages: Sequence[dict[str, Any]], ids: list[int], where: str, tokenizer: Any) -> None:
    """Raises ConfigError where the template leaves everything out that the user or the assistant said."""
    for role in dict.fromkeys(message["role"] for message in messages):
        said = " ".join(message.get("content", "").strip() for message in messages if message["role"] == role)
        bare = tokenizer(said, add_special_tokens=False, verbose=False)["input_ids"]
        if role in ("user", "assistant") and said.strip() and set(bare).isdisjoint(ids):
            raise ConfigError(f"{where}: the model's chat template leaves out everything that the {role} says")


def _messages(given: list[Any], where: str, conversations: bool) -> list[dict[str, Any]]:
    if not given:
        raise ConfigError(f"{where} is empty")
    found = [_message(each, f"{where}[{index}]", conversations) for index, each in enumerate(given)]
    if any(isinstance(each, dict) and each.get("function_call") for each in given):  # OpenAI's older words
        found = [each | {"role": "tool"} if each["role"] == "function" else each for each in found]
    return found


def _message(given: Any, where: str, conversations: bool) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ConfigError(f"{where} is no object with a 'role' and a 'content', both strings")
    message = {key: value for key, value in given.items() if value is not None}
    if conversations and "from" in message and "role" not in message:
        _of_sharegpt(message, where)
    calls = _calls(message, where)
    if calls:
        message["tool_calls"] = calls
    if isinstance(message.get("content"), list):
        message["content"] = _text_of(message["content"], where)
    for key, other in (("role", "from"), ("content", "value")):
        if isinstance(message.get(key), str) or (calls and key == "content" and key not in message):
            continue
        if key not in given and isinstance(given.get(other), str):
            raise ConfigError(f"{where} has '{other}' where a '{key}' is needed; rename it")
        what = "none" if key not in given else _kind(given[key])
        raise ConfigError(f"{where} needs a '{key}' that is a string; it has {what}")
    unicode(f"{message.get('content')}{calls}", where)
    return message


def _of_sharegpt(message: dict[str, Any], where: str) -> None:
    """`from` and `value` become what `role` and `content` are."""
    speaker, value = message.pop("from"), message.pop("value", None)
    if speaker == "function_call":  # LLaMA-Factory's
        try:
            calls = json.loads(value)
        except (TypeError, ValueError, RecursionError):
            raise ConfigError(
                f"{where}: the value of a function_call must be JSON, with 'name' and 'arguments'"
            ) from None
        message |= {"role": "assistant", "tool_calls": calls if isinstance(calls, list) else [calls]}
        return
    if not isinstance(speaker, str) or speaker not in _ROLES:
        raise ConfigError(f"{where}: 'from' is {printable(str(speaker))[:40]}, and none of {', '.join(_ROLES)}")
    message["role"] = _ROLES[speaker]
    if value is not None:
        message["content"] = value


def _calls(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """The calls in a message of the assistant, with arguments as objects, which templates write as JSON. (OpenAI has
    JSON in a string, which they would write as a string of JSON.)"""
    older, given = message.pop("function_call", None), message.pop("tool_calls", None)
    if older and given:
        raise ConfigError(f"{where} has 'function_call' and 'tool_calls'; leave one of them")
    given = [older] if older else given or []
    if not isinstance(given, list):
        raise ConfigError(f"{where}: 'tool_calls' is {_kind(given)}; it must be a list")
    calls = []
    for call in given:
        call = call if isinstance(call, dict) and "function" in call else {"type": "function", "function": call}
        function = call["function"]
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ConfigError(f"{where}: a call needs a 'name' and 'arguments'; it has {quoted(function)}")
        arguments = function.get("arguments")
        try:
            parsed = json.loads(arguments) if isinstance(arguments, str) else None
        except (ValueError, RecursionError):
            parsed = None  # as the model is to write it, then
        parsed = parsed if isinstance(parsed, dict) else {} if arguments in (None, "") else arguments
        calls.append(call | {"function": function | {"arguments": parsed}})
    return calls


def _text_of(parts: list[Any], where: str) -> str:
    """The text of a content that is a list of parts, joined by line breaks (as vLLM and llama.cpp do).

    Raises:
        ConfigError: a part is something else than text.
    """
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in _TEXTS or not isinstance(part.get("text"), str):
            raise ConfigError(
                f"{where}: 'content' has a part of the type {quoted(kind)}, and only text is learned here: leave such "
                'rows out, or give {"type": "text", "text": "…"}'
            )
    return "\n".join(part["text"] for part in parts)


def _tools(record: dict[str, Any], where: str) -> Any:
    """What the template is told of tools: a list, or JSON of one."""
    tools = record.get("tools") or None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise ConfigError(f"{where}: 'tools' is not valid JSON: {error}") from None
    if tools is not None and not isinstance(tools, list):
        raise ConfigError(f"{where}: 'tools' is {_kind(tools)}; it must be a list")
    return tools or None


def _kind(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"
