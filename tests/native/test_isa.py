"""The core runs on every x86-64 processor: code beyond SSE2 is only in the files of its instruction set, and nothing
else can come to use it. A function that several files define, such as a template of the standard library, is in the
core once, and the linker takes it from any of them."""

from __future__ import annotations

import functools
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

import infinity

ROOT = Path(infinity.__file__).parents[1]
VERSION = f"cp{sys.version_info[0]}{sys.version_info[1]}"
OBJECTS = sorted(ROOT.glob(f"build/editable-{VERSION}-*/CMakeFiles/core.dir/csrc/**/*.o"))
OF_A_SET = {path: path.name.split(".")[0].rpartition("_")[2] for path in OBJECTS if "_avx" in path.name}

BEYOND = re.compile(
    r"^\s*[0-9a-f]+:\s+"
    r"(?:v(?!err|erw)\w+"  # AVX and all that came after it
    r"|popcnt|lzcnt|pshufb|palign\w+|ptest|pmulld|pblend\w+|blendv\w+|round[ps][sd]|pinsr[bdq]|pextr[bdq]|pmov[sz]x\w+"
    r"|crc32\w*|movbe|mulx|rorx|s[ah][lr]x|andn|pdep|pext|aes\w+|pclmul\w+|xgetbv)\b",
    re.MULTILINE,
)

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the baseline of x86-64")


@functools.cache
def beyond_the_baseline() -> dict[Path, list[str]]:
    """Return the instructions beyond the baseline of each object. One process disassembles all objects."""
    command = ["objdump", "-d", "--no-show-raw-insn", *OBJECTS]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    _, *parts = re.split(r"^(/.+\.o): +file format .+$", listing, flags=re.MULTILINE)
    return {Path(path): BEYOND.findall(code) for path, code in zip(parts[::2], parts[1::2], strict=True)}


def test_there_are_objects_of_each_set() -> None:
    assert sorted(OF_A_SET.values()) == ["avx2", "avx2", "avx2", "avx512", "avx512", "avx512"]
    assert len(OBJECTS) > 30


def test_code_beyond_the_baseline_is_seen() -> None:
    assert all(beyond_the_baseline()[path] for path in OF_A_SET)


def test_other_files_have_no_code_beyond_the_baseline() -> None:
    assert list(beyond_the_baseline()) == OBJECTS
    found = {path.name: lines[:3] for path, lines in beyond_the_baseline().items() if path not in OF_A_SET}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_files_of_a_set_share_no_function_with_others() -> None:
    """Weak symbols are those of which the linker keeps one."""
    command = ["nm", "-A", "-C", "--defined-only", *OF_A_SET]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    symbols = {path: list[tuple[str, str]]() for path in OF_A_SET}
    for line in listed.splitlines():
        path, _, symbol = line.partition(".o:")
        _, kind, name = symbol.split(" ", 2)
        symbols[Path(f"{path}.o")].append((kind, name))
    for path, isa in OF_A_SET.items():
        assert symbols[path]
        shared = [name for kind, name in symbols[path] if kind in "WVui"]
        assert [name for name in shared if f"infinity::{isa}::" not in name and "DW.ref" not in name] == [], path.name
