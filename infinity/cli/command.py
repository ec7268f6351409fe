"""Commands that messages tell the user to type."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def command(*arguments: object) -> str:
    """A command line that starts this program again: as `infinity` if the shell finds it by that name, else as
    called."""
    return " ".join([_program(), *(shlex.quote(str(argument)) for argument in arguments)])


def _program() -> str:
    called, found = Path(sys.argv[0]), shutil.which("infinity")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        return f"torchrun --nproc-per-node {os.environ.get('LOCAL_WORLD_SIZE', 'N')} -m infinity"
    if called.name == "__main__.py":  # python -m infinity
        return f"{shlex.quote(sys.executable)} -m infinity"
    if called.name == "main.py":  # python -m
        return f"{shlex.quote(sys.executable)} -m infinity.cli.main"
    if called.name != "infinity" or (found and called.exists() and os.path.samefile(found, called)):
        return "infinity"
    return shlex.quote(sys.argv[0])
