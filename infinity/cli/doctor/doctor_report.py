"""The report of `infinity doctor`: a verdict with a table for people, JSON for programs, or Markdown for an issue.

[Note: the JSON]
`schema` and `version` identify the format. Keys may be added without a new version, but no key is removed or changed.
`rows` has an object for each row of the table, in order. The keys of the object are section, what, finding, state
('ok', 'slower', 'missing' or 'unknown') and mend, which is a command or ''.
"""

from __future__ import annotations

import contextlib
import os
import platform
import pwd
import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

from infinity.cli.doctor.probes import ProbeFinding, State
from infinity.errors import printable

SCHEMA, VERSION = "infinity-doctor", 1

_STATE_WIDTH, _WHAT_WIDTH = 9, 22
_FOUND_AT = 2 + _STATE_WIDTH + _WHAT_WIDTH
_WIDTH_MIN = _FOUND_AT + 30

_NOT_PRIVATE = {"", ".", "/", "~", "root", "localhost"}
_SYSTEM = frozenset(("dev", "proc", "sys", "etc"))
_NAME = r"[\w.@+~-]+"
_PATHS = re.compile(rf"(?:(?<![\w/])/(?!(?:{'|'.join(_SYSTEM)})/)|\bPATH/)(?:{_NAME}(?: {_NAME})*/)*{_NAME}")
"""Paths of files and directories, except paths of the system.

All components of a path except the last may contain spaces.
"""


def is_ready(rows: Sequence[ProbeFinding]) -> bool:
    return not any(row.state == "missing" for row in rows)


def verdict(rows: Sequence[ProbeFinding]) -> str:
    """Return whether a run can work on this machine, and the number of rows of each state."""
    counts = Counter(row.state for row in rows)
    said = ", ".join(f"{counts[state]} {state}" for state in get_args(State) if counts[state])
    return f"{'ready' if is_ready(rows) else 'not ready'}: {len(rows)} checks, {said}"


def ordered(rows: Sequence[ProbeFinding]) -> list[ProbeFinding]:
    """Return the rows sorted by section, in the order of the sections' first rows."""
    sections = list(dict.fromkeys(row.section for row in rows))
    return sorted(rows, key=lambda row: sections.index(row.section))


def to_text(rows: Sequence[ProbeFinding], width: int) -> str:
    """Return the report as text.

    Args:
        rows: the rows.
        width: width of the terminal. Commands are not wrapped, so that users can copy them.
    """
    lines = [verdict(rows)]
    for section, each in groupby(rows, key=lambda row: row.section):
        lines += ["", printable(section)]
        for row in each:
            lines += _lines(row, max(width, _WIDTH_MIN))
    return "\n".join(lines)


def to_issue(rows: Sequence[ProbeFinding], paths: Sequence[Path], version: str, width: int) -> str:
    """Return Markdown for an issue.

    The Markdown has no commands, and does not name this user, this machine, or directories of this machine.

    Args:
        rows: the rows.
        paths: the swap directories.
        version: version of infinity.
        width: width of the text.
    """
    private = {str(each): f"SWAP_DIR_{at}" for at, path in enumerate(paths, 1) for each in (path, path.absolute())}
    above = {str(each) for path in paths for each in path.absolute().parents if _SYSTEM.isdisjoint(each.parts)}
    private |= dict.fromkeys(above - private.keys(), "PATH") | _names()
    told = [
        row._replace(section=_without(private, row.section), finding=_without(private, row.finding), mend="")
        for row in rows
    ]
    machine = f"infinity {version} on {platform.system()} {platform.machine()}"
    return (
        f"<details><summary>{machine}: {verdict(rows)}</summary>\n\n```text\n{to_text(told, width)}\n```\n\n</details>"
    )


def _lines(row: ProbeFinding, width: int) -> list[str]:
    name = f"{printable(row.what)} " if len(row.what) >= _WHAT_WIDTH else f"{printable(row.what):<{_WHAT_WIDTH}}"
    begin = f"  {row.state:<{_STATE_WIDTH}}{name}"
    lines = textwrap.wrap(
        printable(row.finding) or "-",
        width,
        initial_indent=begin,
        subsequent_indent=" " * _FOUND_AT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [*lines, f"{' ' * _FOUND_AT}→ {printable(row.mend)}"] if row.mend else lines


def to_json(rows: Sequence[ProbeFinding], version: str) -> dict[str, Any]:
    """Return the report as JSON values. `version` is the version of infinity."""
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "infinity": version,
        "verdict": verdict(rows),
        "ready": is_ready(rows),
        "rows": [row._asdict() for row in rows],
    }


def _names() -> dict[str, str]:
    """Return the names of this user, the home directory and this machine, each with a replacement."""
    names = {os.environ.get(variable, ""): "USER" for variable in ("USER", "LOGNAME", "SUDO_USER")}
    homes = [os.path.expanduser("~")]
    with contextlib.suppress(KeyError):  # for example in a container whose system does not know the user's name
        user = pwd.getpwuid(os.getuid())
        names[user.pw_name] = "USER"
        homes.append(user.pw_dir)
    host = platform.node()
    return names | dict.fromkeys(homes, "HOME") | {host: "HOST", host.partition(".")[0]: "HOST"}


def _without(private: Mapping[str, str], text: str) -> str:
    """Return the text with private names replaced, and without paths that exist only on some machines."""
    for name in sorted(private.keys() - _NOT_PRIVATE, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", private[name], text)
    return _PATHS.sub("PATH", text)
