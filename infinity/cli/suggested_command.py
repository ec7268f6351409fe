"""Commands that messages tell the user to type."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

_TOGETHER = ("finetune", "run")
"""Commands that run on all ranks.

All other commands run in one process. For example, if each rank removed the same store, only one rank would succeed.
"""


def command(*arguments: object) -> str:
    """Return a command line that starts this program again.

    If the shell finds this program under the name `infinity`, the command line begins with `infinity`, otherwise with
    the name by which this program was called. If there are several ranks, a command that runs on all ranks begins with
    torchrun.

    Args:
        arguments: the command and its arguments, which are quoted for the shell.
    """
    program = _program(together=arguments[0] in _TOGETHER)
    return " ".join([program, *(shlex.quote(str(argument)) for argument in arguments)])


def _program(*, together: bool) -> str:
    called, found = Path(sys.argv[0]), shutil.which("infinity")
    if together and os.environ.get("WORLD_SIZE", "1") != "1":
        return f"torchrun --nproc-per-node {os.environ.get('LOCAL_WORLD_SIZE', 'N')} -m infinity"
    if called.name == "__main__.py":  # python -m infinity
        return f"{shlex.quote(sys.executable)} -m infinity"
    if called.name == "main.py":  # python -m
        return f"{shlex.quote(sys.executable)} -m infinity.cli.main"
    if called.name != "infinity" or (found and called.exists() and os.path.samefile(found, called)):
        return "infinity"
    return shlex.quote(sys.argv[0])
