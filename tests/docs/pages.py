"""Pages of the documentation, and the marked blocks of code in these pages.

A mark is an HTML comment in the lines before a block:

| mark | meaning for the block |
|---|---|
| `<!-- needs: a GPU -->` | it is parsed and not run, because it needs something that the tests do not have |
| `<!-- file: swap.yaml -->` | it is the text of that file from this block on |
| `<!-- with: a stopped run in DIR -->` | a run was stopped in DIR before |
| `<!-- goes on -->` | it is run in the directory of the previous block |
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
_GENERATED = ("reference/config.md", "reference/commands.md", "reference/predicted.md")
_MARK = re.compile(r"<!--\s*([a-z ]+?)\s*(?::\s*(.*?)\s*)?-->")
_FENCE = re.compile(r"^( *)```(\w*)$")


@dataclass(frozen=True)
class Block:
    """Code in a page.

    Attributes:
        page: path below the root of the repository.
        line: line of the opening fence, counted from 1.
        language: language in the fence.
        marks: values of the marks, by name.
    """

    page: str
    line: int
    language: str
    text: str
    marks: dict[str, str] = field(hash=False)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """Return the README and all pages that are not generated."""
    docs = ROOT / "docs"
    return [
        ROOT / "README.md",
        *sorted(page for page in docs.rglob("*.md") if str(page.relative_to(docs)) not in _GENERATED),
    ]


def blocks(*languages: str) -> list[Block]:
    """Return the blocks of all pages in these languages, in order."""
    return [block for page in pages() for block in _of(page) if block.language in languages]


def _of(page: Path) -> Iterator[Block]:
    opened: tuple[int, str, str] | None = None
    marks: dict[str, str] = {}
    lines: list[str] = []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = _FENCE.match(line)
        if opened is not None:
            if fence and not fence[2]:
                yield Block(str(page.relative_to(ROOT)), opened[0], opened[2], "\n".join(lines) + "\n", marks)
                opened, marks, lines = None, {}, []
            else:
                lines.append(line.removeprefix(opened[1]))
        elif fence:
            opened = number, fence[1], fence[2]
        elif mark := _MARK.fullmatch(line.strip()):
            marks[mark[1]] = mark[2] or ""
        elif line.strip():
            marks = {}


def text_without_blocks(page: Path) -> str:
    return re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def tool(name: str) -> ModuleType:
    """Return the script docs/tools/NAME.py, which is not in a package, as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs/tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
