"""Strict parsers of YAML and JSON. A key that occurs twice is an error.

[Note: which YAML]
Plain scalars are read by the core schema of YAML 1.2, but numbers only in decimal form: null, true and false, integers
and fractions. Everything else is text, for example `off`, `12:30:00`, `0x10`, `010`, `1_000`, `.inf` and dates. (YAML
1.1 and PyYAML read these as other values.) If a number is expected, such a text is an error. Anchors, aliases, merge
keys and tags are errors, because a swap config needs none of these, and a few lines that use them can expand to
gigabytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable
from typing import Any

import yaml

from infinity.quoting import one_line, quoted

_DEPTH_MAX = 16


def parse_yaml(text: str) -> Any:
    """Return the value of one YAML document.

    Raises:
        ValueError: the text is not valid. The message is one line, and names the line and column of the problem if
            these are known.
    """
    try:
        return yaml.load(text, _StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        problem = ", ".join(filter(None, (error.context, error.problem)))
        raise ValueError(f"{one_line(problem)}{where}") from error
    except yaml.YAMLError as error:
        raise ValueError(one_line(error)) from error


def parse_json(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError with a message of one line."""
    try:
        return json.loads(text, object_pairs_hook=_without_doubles, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


class _StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader, restricted as described in [Note: which YAML]."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 (add_implicit_resolver puts a copy there)
    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            self._refuse(event, "anchors (&) and aliases (*) are not supported: write the value out")
        if getattr(event, "tag", None) is not None:
            self._refuse(event, "tags (!) are not supported: write the value without a tag")
        self._depth += 1
        if self._depth > _DEPTH_MAX:
            self._refuse(event, f"it is nested more than {_DEPTH_MAX} deep")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self._refuse(key, "a key must be one word")
            line = key.start_mark.line + 1
            if key.value in lines:
                self._refuse(key, f"the key {quoted(key.value)} is given twice, in lines {lines[key.value]} and {line}")
            lines[key.value] = line
        return super().construct_mapping(node, deep)

    @staticmethod
    def _refuse(at: Any, problem: str) -> None:
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)


for _tag, _form, _begins in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    # longer integers are read as text, which every schema rejects
    ("int", r"[-+]?(?:0|[1-9][0-9]{0,17})", list("-+0123456789")),
    ("float", r"[-+]?(?:[1-9][0-9]*|0)?(?:\.[0-9]+|(?<=[0-9])\.)(?:[eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?(?:[1-9][0-9]*|0)[eE][-+]?[0-9]+", list("-+0123456789")),
):
    _StrictLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_form})\\Z"), _begins)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        double = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {quoted(double)} is given twice")
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a JSON number")
