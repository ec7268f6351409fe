"""The options of `infinity finetune` in one YAML file, which --options names."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from infinity.cli import options as types
from infinity.cli.finetune_options import FinetuneOptions
from infinity.cli.options import OTHERS_NAMES
from infinity.cli.trainer_options import OURS, names, require_passed_on
from infinity.errors import ConfigError, printable
from infinity.files import read_regular
from infinity.quoting import quoted
from infinity.strict_parsers import parse_yaml

_FILE_BYTES_MAX = 1 << 20
_TEXTS = (types.name, types.path, types.text, types.word)
_ON_THE_COMMAND_LINE = ("options", "resume", "from_checkpoint")
_KNOWN: dict[str, Mapping[str, Any]] = {each.name: each.metadata for each in fields(FinetuneOptions) if each.metadata}
"""The options, by name. The value has the arguments with which options.argument was called for the option."""


def with_file(options: argparse.Namespace) -> argparse.Namespace:
    """Return the options of the command line. Options that are missing come from the file that --options names.

    If an option of the command line and an option of the file exclude each other, the option of the command line
    applies.

    Raises:
        ConfigError: the file cannot be read, or has an unknown option or a wrong value; the error names the option.
    """
    if options.options is None:
        return options
    file = printable(options.options)
    of_file = _checked(_read(options.options, file), file)
    given = {name for name, value in vars(options).items() if value is not None and value is not False}
    if options.resume is not None:
        given.add("resume")
    for one, other in ((name, about["excludes"]) for name, about in _KNOWN.items() if "excludes" in about):
        if one in of_file and other in of_file:
            raise ConfigError(
                f"{file}: {types.option(one)} and {types.option(other)} exclude each other; remove one of the two"
            )
        given |= {one, other} if given.intersection((one, other)) else set()
    trainer = {**of_file.pop("trainer", {}), **(options.trainer or {})}
    merged = vars(options) | {name: each for name, each in of_file.items() if name not in given}
    return argparse.Namespace(**(merged | {"trainer": trainer or None}))


def _read(path: Path, file: str) -> dict[str, Any]:
    try:
        text = read_regular(path.expanduser(), _FILE_BYTES_MAX, follow=True).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"--options: cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    try:
        values = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{file}: not valid YAML: {error}") from error
    if not isinstance(values, dict | None):
        raise ConfigError(f"{file}: expected options and values, such as `lr: 1e-5`, found {type(values).__name__}")
    return values or {}


def _checked(values: dict[str, Any], file: str) -> dict[str, Any]:
    """Return the file's values in the form of the parser's namespace. Options whose value is null are left out."""
    checked: dict[str, Any] = {}
    given: dict[str, str] = {}
    for key, value in values.items():
        theirs = str(key).replace("-", "_")
        name = OURS.get(theirs, theirs)
        of_trainer = name not in _KNOWN and name in names()
        if name not in _KNOWN and not of_trainer:
            raise ConfigError(f"{file}: {quoted(str(key))} is not an option of infinity finetune{_hint(name)}")
        if name in _ON_THE_COMMAND_LINE:
            raise ConfigError(f"{file}: {types.option(name)} belongs on the command line")
        if value is None or value == []:
            continue  # null has the same effect as a missing option
        if name in given:
            raise ConfigError(f"{file}: {given[name]} and {key} are the same option; remove one of the two")
        given[name] = str(key)
        if of_trainer:
            require_passed_on(name, f"{file}: ")
            checked.setdefault("trainer", {})[name] = list(map(_as_typed, _listed(value)))
            continue
        about = _KNOWN[name]
        if about.get("action") == "store_true":
            if not isinstance(value, bool):
                raise ConfigError(f"{file}: {key} is {quoted(value)}; it must be true or false")
            checked[name] = value or None
        elif about.get("nargs") == "+":
            checked[name] = [_converted(each, about, key, file) for each in _listed(value)]
        else:
            checked[name] = _converted(value, about, key, file)
    return {name: value for name, value in checked.items() if value is not None}


def _hint(name: str) -> str:
    near = [OTHERS_NAMES[name]] if name in OTHERS_NAMES else difflib.get_close_matches(name, _KNOWN, n=1, cutoff=0.5)
    return f"; did you mean {near[0].replace('_', '-')}?" if near else ""


def _as_typed(value: Any) -> str:
    """Return a value of YAML as the text that a user would write on the command line.

    A whole number may be written as 3.0.
    """
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return value if isinstance(value, str) else json.dumps(value)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _converted(value: Any, about: Mapping[str, Any], key: str, file: str) -> Any:
    """Return one value of an option.

    Raises:
        ConfigError: the value has another type, or is not accepted.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        kind = "true or false" if isinstance(value, bool) else f"a {type(value).__name__}"
        raise ConfigError(f"{file}: {key} is {kind}; it must be a number or a text")
    if isinstance(value, float) and about["type"] in _TEXTS:
        raise ConfigError(f"{file}: {key} is the number {value!r}, but a text is needed: put it in quotes")
    try:
        made = about["type"](_as_typed(value))
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{file}: {key}: {error}") from None
    if made not in about.get("choices", (made,)):
        raise ConfigError(f"{file}: {key} is {quoted(made)}, which is not one of {', '.join(about['choices'])}")
    return made
