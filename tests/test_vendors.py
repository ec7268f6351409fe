"""The house rule that the seam to a device is one file: no other names a vendor's module of torch, or its runtime."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import infinity

ROOT = Path(infinity.__file__).parent
SEAM = {"base/accelerator.py", "base/device_runtime.py"}
_MODULES = ("cuda", "xpu", "hip", "mtia", "accelerator")
_NAMED = re.compile(
    rf"torch\.(?:{'|'.join(_MODULES)})\b"  # also in a comment, or a string
    r"|cudart|amdhip|\bhip\b"
    r"|\b(?:cuda|hip)[A-Z]\w*"  # a function of the runtime
    r"|\brecord_stream\b|\bshares_memory\b"
)
"""The last line is of the seam of before: memory of a device is the slab's, and what a device shares is `in_place`."""


def vendors_in(text: str) -> list[str]:
    """Return the vendors that a file names, in the order of the lines."""
    return [f"{line}: {name}" for line, name in sorted({*_in_text(text), *_imported(ast.parse(text))})]


def _in_text(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        for found in _NAMED.finditer(line):
            yield number, found.group()


def _imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """`from torch import cuda`, and what asks torch for a module by its name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            yield from ((node.lineno, f"torch.{each.name}") for each in node.names if each.name in _MODULES)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) > 1:
            base, name = node.args[:2]
            if ast.unparse(base) == "torch" and isinstance(name, ast.Constant) and name.value in _MODULES:
                yield node.lineno, f"torch.{name.value}"


def test_no_file_but_the_seam_names_a_vendor() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): vendors_in(path.read_text())
        for path in sorted(ROOT.rglob("*.py"))
        if path.relative_to(ROOT).as_posix() not in SEAM
    }
    assert {path: names for path, names in found.items() if names} == {}


def test_the_seam_is_where_the_rule_says() -> None:
    for name in SEAM:
        assert vendors_in((ROOT / name).read_text())


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("x = torch.cuda.Stream()", ["1: torch.cuda"]),
        ("\nfrom torch import cuda, nn", ["2: torch.cuda"]),
        ("import torch.xpu as device", ["1: torch.xpu"]),
        ("getattr(torch, 'cuda')", ["1: torch.cuda"]),
        ("load('libcudart.so')", ["1: cudart"]),
        ("library.hipMemcpyAsync()", ["1: hipMemcpyAsync"]),
        ("# cudaFree", ["1: cudaFree"]),
        ("plan.shares_memory", ["1: shares_memory"]),
        ("device = 'cuda'; ownership = relationship", []),
        ("accelerator.stream()", []),
    ],
)
def test_what_counts_as_naming_a_vendor(text: str, named: list[str]) -> None:
    assert vendors_in(text) == named
