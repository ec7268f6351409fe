"""The options of `infinity finetune` in one YAML file, which --options names."""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path
from typing import Any

from infinity.cli.arguments import build_finetune_parser
from infinity.cli.options import Parser
from infinity.echo import quoted
from infinity.errors import ConfigError, printable
from infinity.files import read_regular
from infinity.strict import parse_yaml

_FILE_BYTES_MAX = 1 << 20
_ON_THE_COMMAND_LINE = ("options", "help", "resume", "from_checkpoint")


def with_file(options: argparse.Namespace) -> argparse.Namespace:
    """The options of the command line, and where they are not given those of the file that --options names. Of options
    that exclude each other the command line's counts.

    Raises:
        ConfigError: the file cannot be read, or has an unknown option or a wrong value; names them.
    """
    if options.options is None:
        return options
    parser, file = build_finetune_parser(), printable(options.options)
    arguments = _arguments(_read(options.options, file), parser, file)
    try:
        of_file = parser.parse_args(arguments)
    except ConfigError as error:
        raise ConfigError(f"{file}: {str(error).removesuffix(' (see `infinity finetune --help`)')}") from None
    given = {name for name, value in vars(options).items() if value is not None and value is not False}
    given |= {action.dest for action in parser._actions if action.dest == "resume" and options.resume is not None}
    for group in parser._mutually_exclusive_groups:
        names = {action.dest for action in group._group_actions}
        given |= names if names & given else set()
    merged = {name: value for name, value in vars(of_file).items() if name not in given}
    return argparse.Namespace(**(vars(options) | {name: value for name, value in merged.items() if value is not None}))


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


def _arguments(values: dict[str, Any], parser: Parser, file: str) -> list[str]:
    """As a command line would have them."""
    known = {action.dest: action for action in parser._actions}
    arguments: list[str] = []
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{file}: {quoted(str(key))} is no option of infinity finetune{hint}")
        if name in _ON_THE_COMMAND_LINE:
            raise ConfigError(f"{file}: --{name.replace('_', '-')} belongs on the command line")
        option, action = f"--{name.replace('_', '-')}", known[name]
        if action.nargs == 0:
            if not isinstance(value, bool):
                raise ConfigError(f"{file}: {key} is {quoted(value)}; it is true or false")
            arguments += [option] if value else []
        elif value is None:
            continue  # as if it were not there
        elif action.nargs == "+":
            texts = [_text(each, key, file) for each in (value if isinstance(value, list) else [value])]
            if any(text.startswith("-") for text in texts):
                raise ConfigError(f"{file}: {key}: a value that begins with - cannot be given; write ./ before a path")
            arguments += [option, *texts] if texts else []
        else:
            arguments.append(f"{option}={_text(value, key, file)}")
    return arguments


def _text(value: Any, key: str, file: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        kind = "true or false" if isinstance(value, bool) else f"a {type(value).__name__}"
        raise ConfigError(f"{file}: {key} is {kind}; it takes a number or a text")
    return repr(value) if isinstance(value, float) else str(value)
