"""Writer of the reference pages config.md, commands.md and trainers.md, from the code; `make docs` runs it.

The text of a swap config key is its docstring in infinity/config.py. The text of an option is its help in the parsers.
The functions that infinity replaces in other libraries are listed in infinity/integrations/patch_table.py.
tests/docs/test_reference.py compares the pages with the output of this script.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, BeforeValidator

import infinity.config
from infinity import InfinityConfig, hf
from infinity.cli import subcommands
from infinity.cli.bench import main as bench
from infinity.config import SwapConfig, load_config
from infinity.errors import NotAvailableError
from infinity.integrations.patch_table import POINTS
from infinity.sizes import parse_bytes

PLACE = Path(__file__).parents[1] / "reference"
GENERATED = "<!-- Written by docs/tools/reference.py. Change the code it reads, then run `make docs`. -->\n\n"

PAGES = {
    "weights": ("Choosing a placement", "../placement.md"),
    "optimizer": ("Choosing a placement", "../placement.md"),
    "gradients": ("Micro-batches", "../micro-batches.md"),
    "memory.device": ("Choosing a placement", "../placement.md"),
    "nvme.block": ("What can my disks do?", "../disks.md"),
    "overlap": ("Updates in parallel with compute", "../overlap.md"),
    "vertical": ("Micro-batches", "../micro-batches.md"),
    "commit_every": ("Crash safety", "../crash-safety.md"),
    "keep": ("Crash safety", "../crash-safety.md"),
    "pins": ("Crash safety", "../crash-safety.md#checkpoint-folders-that-pin"),
    "master": ("Fewer bytes", "../fewer-bytes.md"),
    "moments": ("Fewer bytes", "../fewer-bytes.md"),
    "frozen": ("Frozen weights in 4 or 8 bits", "../frozen.md"),
    "ranks.gather": ("Several ranks", "../ranks.md"),
}
"""Page with more information about a key."""

CONFIG_HEAD = """\
# The swap config

The swap config says where states are kept and how they move. It does not describe the training. To use a disk, only
`nvme.paths` is needed; every omitted value is measured or chosen, and printed with `--verbose`. The smallest useful
config:

```yaml
nvme: {paths: [/mnt/nvme/swap]}
memory: {device: 20GiB, host: 48GiB}
```

The file is YAML or JSON, 64 KiB at most. An unknown key is an error that names the nearest known key; a key that is
given twice is an error that names both lines; a value whose feature is not available yet is an error. Only YAML with
the same meaning in versions 1.1 and 1.2 is accepted: `12:30:00` and `010` are texts, not numbers, and anchors, aliases
and tags are refused. Sizes are written `64MiB`, `20GiB` or `2.5GB`. In code, you can use a `dict` with the same keys
instead of a file.

`auto` keeps as much in RAM as `memory.host` has room for: first the weights of as many units as fit, then the
optimizer states of as many units as fit. This is decided once, and the traffic falls in proportion. `nvme` keeps none
of these states in RAM.

"""
COMMANDS_HEAD = """\
# Commands

Options cannot be abbreviated. A wrong option gives an error of one line and exit code 2, before
anything is loaded. See also [environment variables and exit codes](environment.md).

"""
TRAINERS_HEAD = """\
# A Trainer's own arguments, and what the launcher replaces

[Unchanged scripts](../unchanged.md) has an example. With these arguments, infinity replaces no function of a library.

"""
REPLACED_HEAD = """\
## What infinity replaces in libraries

`infinity run` replaces functions, so that a script that names nothing of infinity calls infinity's, which call the
libraries' own. `infinity finetune` uses private methods of a Trainer. A library in which one is gone is named before
anything is trained.

| function | effect of the replacement | why no official extension point is enough | first failure without it | for |
|---|---|---|---|---|
"""


# -- the swap config --------------------------------------------------------------------------------------------------


def docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings of the fields of a section, by name."""
    tree = ast.parse(inspect.getsource(infinity.config))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == model.__name__)
    found = {}
    for field, after in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
            found[field.target.id] = " ".join(str(ast.literal_eval(after.value)).split())
    return found


def values(annotation: Any) -> list[str]:
    """Return the values that a key may have, in Markdown."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        if any(isinstance(each, BeforeValidator) and each.func is parse_bytes for each in inner[1:]):
            return ["a size"]
        return values(inner[0])
    if origin is Literal:
        return [f"`{value}`" for value in inner]
    if origin in (Union, UnionType):
        return [value for each in inner for value in values(each)]
    if origin is list:
        return ["directories"]
    words = {bool: ["`true`", "`false`"], int: ["a whole number"], float: ["a number"], NoneType: []}
    return list(words[annotation])


def keys(model: type[BaseModel] = SwapConfig, prefix: str = "") -> Iterator[tuple[str, list[str], str, str]]:
    """Yield (key, values, default, docstring) of every key, in the order of the schema."""
    hints, told = get_type_hints(model, include_extras=True), docstrings(model)
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, f"{prefix}{name}.")
            continue
        limits = [getattr(each, end) for end in ("ge", "le") for each in field.metadata if hasattr(each, end)]
        allowed = [
            f"a whole number ({limits[0]} to {limits[1]})" if value == "a whole number" and limits else value
            for value in values(hints[name])
        ]
        default = field.get_default(call_default_factory=True)
        shown = (
            str(default).lower()
            if isinstance(default, bool)
            else f"{default:g}"
            if isinstance(default, float)
            else default
        )
        yield prefix + name, allowed, "" if default in (None, []) else f"`{shown}`", told[name]


def is_refused(key: str, value: str) -> bool:
    """Return whether this version does not support `key: value`."""
    try:
        load_config({key: value.strip("`")})
    except NotAvailableError:
        return True
    return False


def config_page() -> str:
    lines = ["| key | values | default | meaning |", "|---|---|---|---|"]
    refused = []
    for key, allowed, default, told in keys():
        known = [
            value for value in allowed if not (value.startswith("`") and "." not in key and is_refused(key, value))
        ]
        refused += [f"`{key}: {value.strip('`')}`" for value in allowed if value not in known]
        title, page = PAGES.get(key, ("", ""))
        more = f" See [{title}]({page})." if page else ""
        lines.append(f"| `{key}` | {', '.join(known)} | {default} | {escaped(told)}{more} |")
    last = f"\nKnown to the schema, but not available yet: {', '.join(refused)}.\n" if refused else ""
    return CONFIG_HEAD + "\n".join(lines) + "\n" + last


# -- the commands -----------------------------------------------------------------------------------------------------


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser, str]]:
    """Yield (command line, parser, its parent's help for it) for every command."""

    def walk(
        line: str, parser: argparse.ArgumentParser, told: str
    ) -> Iterator[tuple[str, argparse.ArgumentParser, str]]:
        inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        if not inner:
            yield line, parser, told
        for action in inner:
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, each in action.choices.items():
                yield from walk(f"{line} {name}", each, helps.get(name, ""))

    yield from walk("infinity", subcommands.build_parser(), "")
    yield "infinity-bench", bench.build_parser(), ""


def commands_page() -> str:
    return COMMANDS_HEAD + "\n".join(section(*each) for each in parsers())


def section(line: str, parser: argparse.ArgumentParser, told: str) -> str:
    about = parser.description or told
    if isinstance(about, str) and "\n" in about:
        about = f"```text\n{about.strip()}\n```"
    else:
        about = escaped(f"{about[:1].upper()}{about[1:].removesuffix('.')}.")
    parts = [f"## {line}\n\n{about}\n\n```text\n{usage(line, parser)}\n```\n"]
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.dest != "help"]
        if not actions:
            continue
        title = {"positional arguments": "argument", "options": "option"}.get(str(group.title))
        if title is None:
            note = f" {escaped(group.description)}" if group.description else ""
            parts.append(f"**{str(group.title)[:1].upper()}{str(group.title)[1:]}.**{note}\n")
        rows = [f"| {name_of(action)} | {escaped(help_of(parser, action))} |" for action in actions]
        parts.append("\n".join([f"| {title or 'option'} | meaning |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


# -- in a script ------------------------------------------------------------------------------------------------------


def trainers_page() -> str:
    named = {
        "infinity.InfinityConfig": InfinityConfig,
        "infinity.hf.optimizer_factory": hf.optimizer_factory,
        "infinity.hf.Checkpoints": hf.Checkpoints,
    }
    parts = [f"## {name}\n\n```text\n{inspect.getdoc(what)}\n```\n\n" for name, what in named.items()]
    rows = [
        f"| {', '.join(f'`{where}`' for where in point.where)} | {escaped(point.does)} | {escaped(point.why)} "
        f"| {escaped(point.breaks)} | `{point.who}` |\n"
        for point in POINTS
    ]
    return TRAINERS_HEAD + "".join(parts) + REPLACED_HEAD + "".join(rows)


def usage(line: str, parser: argparse.ArgumentParser) -> str:
    if parser.usage:
        return parser.usage
    needed = [
        f"{action.option_strings[-1]} {metavar(action)}"
        for action in parser._actions
        if action.option_strings and action.required
    ]
    places = [metavar(action) for action in parser._actions if not action.option_strings]
    return " ".join([line, *needed, "[OPTIONS]", *places])


def metavar(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    word = str(action.metavar or (action.dest.upper() if not action.choices or action.option_strings == [] else ""))
    if action.choices and action.metavar is None and action.option_strings:
        word = "|".join(str(choice) for choice in action.choices)
    return {"+": f"{word} …", "?": f"[{word}]", "...": f"[{word} …]"}.get(str(action.nargs), word)


def name_of(action: argparse.Action) -> str:
    names = ", ".join(action.option_strings)
    return f"`{' '.join(part for part in (names, metavar(action)) if part)}`".replace("|", "\\|")


def help_of(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return parser._get_formatter()._expand_help(action) if action.help else ""


def escaped(text: str) -> str:
    """Return the text escaped for Markdown, also inside a table; text in backquotes is code."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*_\[\]<>|\\])", r"\\\1", part) for part in parts[::2]]
    parts[1::2] = [part.replace("|", "\\|") for part in parts[1::2]]
    return "`".join(parts)


def pages() -> dict[Path, str]:
    """Return the text of each page by path."""
    made = {"config.md": config_page, "commands.md": commands_page, "trainers.md": trainers_page}
    return {PLACE / name: GENERATED + page() for name, page in made.items()}


if __name__ == "__main__":
    PLACE.mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text)
