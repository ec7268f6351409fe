"""Recorder of the logs of all scenarios, and comparison of two recordings.

python -m tests.operations record FOLDER
python -m tests.operations compare FOLDER OTHER
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from difflib import unified_diff
from itertools import islice
from pathlib import Path

from tests.operations.scenarios import scenarios

_SHOWN = 40


def record(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, scenario in scenarios().items():
        with tempfile.TemporaryDirectory(dir=folder) as swap:
            lines = scenario(Path(swap))
        (folder / f"{name.replace('/', '-')}.log").write_text("\n".join(lines) + "\n")
        print(f"{name}: {len(lines)} operations")


def compare(before: Path, after: Path) -> int:
    """Compare two recordings and return how many scenarios differ."""
    names = sorted({path.name for folder in (before, after) for path in folder.glob("*.log")})
    differ = 0
    for name in names:
        old, new = (_lines(folder / name) for folder in (before, after))
        if old != new:
            differ += 1
            print(f"{name} differs:")
            print("\n".join(islice(unified_diff(old, new, str(before), str(after), lineterm=""), _SHOWN)))
    print(f"{len(names) - differ} of {len(names)} scenarios have the same log")
    return differ


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.operations", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("record").add_argument("folder", type=Path)
    compared = commands.add_parser("compare")
    compared.add_argument("folder", type=Path)
    compared.add_argument("other", type=Path)
    given = parser.parse_args()
    if given.command == "record":
        record(given.folder)
        return 0
    return bool(compare(given.folder, given.other))


if __name__ == "__main__":
    sys.exit(main())
