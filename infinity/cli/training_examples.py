"""Conversion of a row in one of TRL's formats (dataset_rows.py) to text, or to an example in which only answers are
learned.

| TRL's format             | what is learned                                                                      |
|---|---|
| `text`                   | the whole text                                                                       |
| `prompt`, `completion` | the completion and its end. Both are strings, or both are lists of messages |
| `messages`               | the tokens that the model's chat template marks as the assistant's, with tool calls  |
| `chosen`, `rejected`     | --method dpo: the chosen answer is better. Without a prompt, the common beginning is |
|                          | the prompt. --method reward: the chosen text or conversation is better               |

[Note: what the assistant said]
Only a chat template knows which tokens of a conversation are the assistant's: it puts them between `{% generation %}`
and `{% endgeneration %}`. If a template lacks these marks, transformers returns an empty mask and logs one line, and
the model would learn nothing. Therefore infinity refuses a template without these marks.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from infinity.cli.chat_messages import ROLES, TABLE, answers_learned, kind
from infinity.cli.dataset_rows import DatasetRow
from infinity.errors import ConfigError
from infinity.quoting import quoted, raised

LossOn = Literal["answers", "all"]
"""The tokens that contribute to the loss, in rows with prompts or messages: only the answers, or all tokens."""

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class TrainingExample:
    """A document in which only some tokens contribute to the loss.

    Attributes:
        ids: tokens, including the tokens that begin and end the document.
        learned: for each token, whether it contributes to the loss.
        where: file and row of the document.
        is_chat: whether the chat template made the tokens.
        declined: whether fields of the messages ask that the model learns none of the answers.
    """

    ids: list[int]
    learned: list[bool]
    where: str = ""
    is_chat: bool = False
    declined: bool = False


class PreferencePair(NamedTuple):
    """Two answers.

    The first is the better answer. In both, the tokens that contribute to the loss begin at the same position.
    """

    chosen: TrainingExample
    rejected: TrainingExample


def text_or_example(row: DatasetRow, where: str, tokenizer: Any, loss_on: LossOn) -> str | TrainingExample:
    """Return the text or the example of a row.

    Args:
        row: the row.
        where: place of the row, for messages.
        tokenizer: tokenizer of the model.
        loss_on: tokens that contribute to the loss.

    Raises:
        ConfigError: the row has a preferred and a rejected answer; the tokenizer's chat template refuses the row or
            leaves out a part of it; or the template does not mark the assistant's tokens.
    """
    trl = row.trl
    if "chosen" in trl:
        raise ConfigError(
            f"{where}: the row has two answers, 'chosen' and 'rejected', which are for --method dpo and --method "
            f"reward. To learn only the chosen answers: --columns {_chosen_alone(row)}"
        )
    if "text" in trl:
        return str(trl["text"])
    if isinstance(trl.get("prompt"), str):
        return _continued(trl["prompt"], trl["completion"], where, tokenizer, loss_on)
    return _chat(trl, where, _ChatTemplate.of(tokenizer, trl, where, row.unread), loss_on)


def pair_of(row: DatasetRow, where: str, tokenizer: Any, method: str) -> PreferencePair:
    """Return the two answers of a row.

    Args:
        row: the row.
        where: place of the row, for messages.
        tokenizer: tokenizer of the model.
        method: "dpo" or "reward".

    Raises:
        ConfigError: the row does not have two answers that can be learned, or the chat template refuses an answer.
    """
    trl = dict(row.trl)
    if "chosen" not in trl:
        raise ConfigError(
            f"{where}: --method {method} learns which of two answers is better, but the row has no 'chosen' and "
            "'rejected': leave --method out, or name the columns, such as --columns chosen=better rejected=worse"
        )
    asked = trl.get("prompt")
    if asked and all(trl[name][: len(asked)] == asked for name in ("chosen", "rejected")):
        raise ConfigError(
            f"{where}: 'chosen' and 'rejected' begin with the prompt, which would occur twice. Name the columns to "
            f"read: --columns chosen={row.columns['chosen'][0]} rejected={row.columns['rejected'][0]}"
        )
    if method == "dpo" and not asked:
        from trl import extract_prompt

        trl |= extract_prompt(trl)
        if not trl["prompt"]:
            raise ConfigError(
                f"{where}: 'chosen' and 'rejected' have no common beginning, or one is the beginning of the other: "
                "give a 'prompt'"
            )
    for name in ("chosen", "rejected"):
        _require_answer(trl, name, where, method)
    answers = (_answer(trl, name, where, tokenizer, method, row.unread) for name in ("chosen", "rejected"))
    chosen, rejected = answers
    first = min(each.learned.index(True) if any(each.learned) else len(each.ids) for each in (chosen, rejected))
    return PreferencePair(
        *(replace(each, learned=[index >= first for index in range(len(each.ids))]) for each in (chosen, rejected))
    )


def _require_answer(trl: dict[str, Any], name: str, where: str, method: str) -> None:
    """Check that a model can learn an answer.

    Raises:
        ConfigError: the answer is empty, does not end with a message of the assistant, or has a field that is not
            supported.
    """
    said = trl[name]
    if not said or (isinstance(said, str) and not said.strip()):
        raise ConfigError(f"{where}: '{name}' contains only the prompt: leave the row out")
    for message in [*trl.get("prompt", []), *said] if isinstance(said, list) else []:
        if not {"weight", "train", "loss"}.isdisjoint(message):
            raise ConfigError(f"{where}: {name}: 'weight', 'train' and 'loss' have no effect here: remove them")
    roles = [message["role"] for message in said] if isinstance(said, list) else []
    others = [role for role in roles if ROLES.get(role.lower()) != "assistant"]
    if method == "dpo" and others:
        raise ConfigError(
            f"{where}: '{name}' has a message of the {others[0]} after the prompt, which --method dpo would teach the "
            "model to say: end both answers with the first message in which they differ"
        )
    if roles and roles[-1] in others:
        raise ConfigError(f"{where}: '{name}' does not end with a message of the assistant: leave the row out")


def _answer(
    trl: dict[str, Any], name: str, where: str, tokenizer: Any, method: str, unread: list[str]
) -> TrainingExample:
    prompt, said = trl.get("prompt"), trl[name]
    if isinstance(said, str):
        return _continued(prompt or "", said, where, tokenizer, "answers")
    told: dict[str, Any] = {each: trl[each] for each in ("tools", "chat_template_kwargs") if each in trl}
    template = _ChatTemplate.of(tokenizer, told, where, unread)
    if method == "reward":
        return _chat({"messages": [*(prompt or []), *said]}, where, template, "all")
    return _chat({"prompt": prompt, "completion": said}, where, template, "answers")


def _chosen_alone(row: DatasetRow) -> str:
    prompt, chosen = row.trl.get("prompt"), row.trl["chosen"]
    if prompt is None:
        return "text=chosen" if isinstance(chosen, str) else "messages=chosen"
    names = ("instruction", "output") if isinstance(prompt, str) else ("prompt", "completion")
    system = "".join(f" system={each}" for each in row.columns.get("system", []))
    return f"{names[0]}={row.columns['instruction'][0]} {names[1]}=chosen{system}"


def _continued(prompt: str, completion: str, where: str, tokenizer: Any, loss_on: LossOn) -> TrainingExample:
    """Return the example of a prompt and a completion that are strings."""
    end = tokenizer.eos_token or ""
    said = completion if completion.endswith(end) else completion + end
    ids = _ids(tokenizer, prompt + said)
    return TrainingExample(ids, _behind(_ids(tokenizer, prompt), ids, loss_on), where)


def _ids(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text.

    They begin with the tokens that the tokenizer puts before a text, and end with at most one end token.
    """
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    end = tokenizer.eos_token_id
    return ids[:-1] if end is not None and ids[-2:] == [end, end] else ids


def _behind(asked: list[int], ids: list[int], loss_on: LossOn) -> list[bool]:
    """Return for each token of `ids` whether it comes after the common beginning of `ids` and the prompt `asked`.

    The common beginning may be shorter than the prompt, because a token of `ids` may contain the end of the prompt and
    the beginning of the answer.
    """
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(asked, ids, strict=False))
    common = sum(1 for _ in same)
    return [loss_on == "all" or index >= common for index in range(len(ids))]


# -- conversations -----------------------------------------------------------------------------------------------------


def _chat(trl: dict[str, Any], where: str, template: _ChatTemplate, loss_on: LossOn) -> TrainingExample:
    answered = "messages" not in trl
    marked = loss_on == "answers" and not answered
    messages = [*trl["prompt"], *trl["completion"]] if answered else trl["messages"]
    messages = [each | {"role": template.role(each["role"], index)} for index, each in enumerate(messages)]
    asked = answers_learned(messages, f"{where}: messages")
    if marked:
        template.require_marks()
    made, form = template.whole(messages, marked=marked)
    ids = list(made["input_ids"])
    if answered:
        first = len(trl["prompt"])
        others = loss_on == "answers" and any(each["role"] != "assistant" for each in messages[first:])
        if others or True in asked[:first] or False in asked[first:]:
            raise ConfigError(
                f"{where}: exactly the completion is learned, but one of its messages is not the assistant's, or a "
                "'weight' or 'train' asks for something else; give the row as 'messages'"
            )
        prompt = template.rendered(form[:first], add_generation_prompt=True)["input_ids"]
        return TrainingExample(ids, _behind(list(prompt), ids, loss_on), where, is_chat=True)
    learned = [bool(each) for each in made["assistant_masks"]] if marked else [True] * len(ids)
    answers = [each for each, message in zip(asked, messages, strict=True) if message["role"] == "assistant"]
    if False in answers:
        learned = _without_some_answers(learned, answers, where, marked=marked)
    return TrainingExample(ids, learned, where, is_chat=True, declined=bool(answers) and set(answers) == {False})


def _without_some_answers(
    learned: list[bool], answers: Sequence[bool | None], where: str, *, marked: bool
) -> list[bool]:
    """Return `learned`, with False for the tokens of the assistant's messages that the model should not learn.

    Args:
        learned: whether each token belongs to the assistant.
        answers: for each message of the assistant, whether the model should learn the message; None if the row does not
            say this.
        where: place of the row, for messages.
        marked: whether the chat template has marked the assistant's tokens.

    Raises:
        ConfigError: it is unknown which tokens belong to which message.
    """
    begun = itertools.accumulate(here > before for here, before in zip(learned, [False, *learned], strict=False))
    numbers = list(begun)
    if not marked or numbers[-1] != len(answers):
        why = (
            "with --loss-on all, all tokens are learned"
            if not marked
            else "the chat template marks other tokens than those of the messages"
        )
        raise ConfigError(f"{where}: a message has 'weight': 0 or 'train': false, but its tokens are not known: {why}")
    return [here and answers[number - 1] is not False for here, number in zip(learned, numbers, strict=True)]


@dataclass(frozen=True)
class _ChatTemplate:
    """A model's chat template, applied to one row.

    Attributes:
        tokenizer: tokenizer of the model.
        text: source of the template.
        told: arguments of the template other than the messages: tools, and variables that this template has.
        where: place of the row, for messages.
        unread: list to which the names of message fields are added that the template leaves out.
    """

    tokenizer: Any
    text: str
    told: dict[str, Any]
    where: str
    unread: list[str]

    @classmethod
    def of(cls, tokenizer: Any, trl: dict[str, Any], where: str, unread: list[str]) -> _ChatTemplate:
        text, own = getattr(tokenizer, "chat_template", None), trl.get("chat_template_kwargs", {})
        if not text:
            raise ConfigError(
                f"{where}: has messages, but the model's tokenizer has no chat template; put one into "
                "chat_template.jinja in the model's directory (infinity's page on finetune has one, under Chats), or "
                "use 'prompt' and 'completion', or 'text'"
            )
        taken = inspect.signature(tokenizer.apply_chat_template).parameters
        if not isinstance(own, dict) or not taken.keys().isdisjoint(own):
            has = kind(own) if not isinstance(own, dict) else quoted(next(each for each in own if each in taken))
            raise ConfigError(
                f"{where}: 'chat_template_kwargs' may only have variables of the chat template; this one has {has}"
            )
        return cls(tokenizer, str(text), {**own, "tools": trl.get("tools") or None}, where, unread)

    def names(self, role: str) -> bool:
        return f"'{role}'" in self.text or f'"{role}"' in self.text

    def role(self, role: str, index: int) -> str:
        """Return the template's name of a role.

        Raises:
            ConfigError: the template does not know the role. The model would learn messages of this role as messages of
                another role.
        """
        meant = ROLES.get(role.lower(), role)
        if self.names(role) and not self.names(meant):
            return role
        if meant not in ROLES and not self.names(meant):
            raise ConfigError(
                f"{self.where}: messages[{index}] has the role {quoted(role)}, which the model's chat template does "
                f"not have: give one of {', '.join(list(TABLE['roles'])[:5])}"
            )
        return meant

    def require_marks(self) -> None:
        """Check that the template marks the assistant's tokens.

        Raises:
            ConfigError: the template has no marks.
        """
        if not re.search(r"\{%-?\s*generation\s*-?%\}", self.text):
            raise ConfigError(
                f"{self.where}: the model's chat template does not say which tokens are the assistant's: it has no "
                "{% generation %} … {% endgeneration %} around them. Add these marks to chat_template.jinja in the "
                "model's directory (or to chat_template in its tokenizer_config.json); infinity's page on finetune "
                "shows how, under Chats. Or give rows with a 'prompt' and a 'completion' of messages, which need no "
                "marks; or give --loss-on all to learn whole conversations, including what users said."
            )

    def rendered(self, messages: Messages, *, marked: bool = False, add_generation_prompt: bool = False) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=add_generation_prompt,
                **self.told,
            )
        except Exception as error:  # a template is a program that comes with the model, and may raise anything
            raise _TemplateError(
                f"{self.where}: the model's chat template refuses the row: {raised(error)}. Change the row, or "
                "chat_template.jinja in the model's directory (or chat_template in its tokenizer_config.json)"
            ) from error

    def whole(self, messages: Messages, *, marked: bool) -> tuple[Any, Messages]:
        """Return the template's result for the first form of messages that it writes completely, and this form.

        Raises:
            ConfigError: the template refuses each form of the messages, or leaves out a part of it. If the template
                leaves out a part of one form and refuses another form, the error names the part.
        """
        refused: ConfigError | None = None
        for form in _forms(messages):
            try:
                made = self.rendered(form, marked=marked)
                self._require_contents(messages, made["input_ids"])
                self._require_calls(form, made["input_ids"])
                self._note_thoughts(form, made["input_ids"])
            except _TemplateError as error:
                refused = refused or error
            except ConfigError as error:
                refused = error if isinstance(refused, _TemplateError) else refused or error
            else:
                return made, form
        raise refused or AssertionError

    def _require_calls(self, form: Messages, ids: list[int]) -> None:
        """Check that the template writes the tool calls of each message.

        Raises:
            ConfigError: the template's result does not depend on the tool calls of some message.
        """
        for index, message in enumerate(form):
            if not message.get("tool_calls"):
                continue
            if self._is_without(ids, [*form[:index], _bare(message, "tool_calls"), *form[index + 1 :]]):
                raise ConfigError(
                    f"{self.where}: the model's chat template leaves out 'tool_calls' of messages[{index}]: write the "
                    "calls into the message's 'content' as the model should say them, or leave such rows out"
                )

    def _note_thoughts(self, form: Messages, ids: list[int]) -> None:
        """Add to `unread` the fields with thoughts (such as reasoning_content) that the template leaves out.

        Many templates write only the thoughts of the last message.
        """
        for name in TABLE["thoughts"]:
            there = any(message.get(name) for message in form)
            if there and self._is_without(ids, [_bare(message, name) for message in form]):
                self.unread.append(f"{name} of messages, which the chat template leaves out")

    def _is_without(self, ids: list[int], bare: Messages) -> bool:
        """Return whether the template makes the same tokens if one field is removed from the messages."""
        try:
            return list(self.rendered(bare)["input_ids"]) == list(ids)
        except ConfigError:
            return False

    def _require_contents(self, messages: Messages, ids: list[int]) -> None:
        """Check that the template writes something that the user said, and something that the assistant said.

        Raises:
            ConfigError: the template leaves out everything that the user, or the assistant, said.
        """
        for role in ("user", "assistant"):
            said = " ".join(each.get("content", "").strip() for each in messages if each["role"] == role)
            bare = self.tokenizer(said, add_special_tokens=False, verbose=False)["input_ids"]
            if said.strip() and set(bare).isdisjoint(ids):
                raise ConfigError(f"{self.where}: the model's chat template leaves out everything that the {role} says")


class _TemplateError(ConfigError):
    """The chat template raised an exception."""


def _bare(message: dict[str, Any], field: str) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != field}


def _forms(messages: Messages) -> Iterator[Messages]:
    """Yield the messages in several forms, because templates differ in the forms that they accept.

    The first form is the unchanged messages. In the second, messages with tool calls have an empty content. In the
    third, contents are lists.
    """
    yield messages
    messages = [{"content": ""} | each for each in messages]
    yield messages
    yield [each | {"content": [{"type": "text", "text": each["content"]}]} for each in messages]
