"""The commands and the Python code of the README and the pages run as they are written (tests/docs/sandbox.py). `make
test` runs two of the README; `make docs-test` runs all."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infinity.cli.bench import main as bench
from infinity.cli.subcommands import build_parser
from infinity.errors import ConfigError
from tests import sampling
from tests.docs.pages import ROOT, Block, blocks, pages, text_without_blocks
from tests.docs.sandbox import MODEL_IN_PRELUDE, PRELUDE, make_files, make_things, run_python, run_shell, stop_a_run

SHELL, PYTHON = blocks("sh"), blocks("python")
FIRST = ("README.md",)
"""Pages of which `make test` runs the first code; the long forms the first command, too."""
ENVIRONMENT = re.compile(r"^(?:[A-Z]+=\S+ )*")
LAUNCHERS = re.compile(r"^(?:torchrun .*?-m infinity|\.venv/bin/infinity)(?=[ .-])")


# -- all commands are parsed ------------------------------------------------------------------------------------------


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command in a block."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(
            LAUNCHERS.sub("infinity", ENVIRONMENT.sub("", line.strip())).replace("infinity.run ", "infinity run "),
            comments=True,
        )
        if words:
            yield words


def known_commands() -> dict[str, argparse.ArgumentParser]:
    inner = [action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(inner[0].choices)


def require_known(words: list[str]) -> None:
    """Check that a command's own parser accepts its words."""
    program, *rest = Path(words[0]).name, *words[1:]
    if program == "infinity":
        build_parser().parse_args(rest)
    elif program == "infinity-bench":
        bench.build_parser().parse_args(rest)
    elif program == "make":
        targets = re.findall(r"^([\w-]+)(?: [\w-]+)*:(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in rest if "=" not in word} <= set(targets), words
    elif program == "pip":
        extras = re.findall(
            r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text().partition("optional-dependencies]")[2], re.MULTILINE
        )
        assert rest[0] in ("install", "download")
        assert {name for word in rest for name in re.findall(r"\[(\w+)\]", word)} <= set(extras)
    elif re.fullmatch(r"python[0-9.]*", program):
        assert rest[0] == "-m"
        assert importlib.util.find_spec(rest[1]) is not None
    else:
        raise AssertionError(f"no parser for {program}: mark the block, or let the test know the program")


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_every_command_is_one_that_its_parser_takes(block: Block) -> None:
    found = list(commands(block.text))
    assert found
    for words in found:
        require_known(words)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_options_that_a_text_names_with_their_command_are_known(page: Path) -> None:
    for code in re.findall(r"`(infinity(?:-bench)? [^`]*--[^`]*)`", " ".join(text_without_blocks(page).split())):
        words = [word for word in code.split() if word not in ("…", "...")]
        parser = parser_of(words)
        if parser is not None:
            given = [word.partition("=")[0].strip("[]") for word in words if word.startswith("--")]
            assert [name for name in given if name not in parser._option_string_actions] == [], code


def parser_of(words: list[str]) -> argparse.ArgumentParser | None:
    """Return the parser of the command that the words begin with; None for an unknown command."""
    if words[0] == "infinity-bench":
        return bench.build_parser()
    parser = known_commands().get(words[1])
    inner = [] if parser is None else [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    return inner[0].choices[words[2]] if inner else parser


@pytest.mark.parametrize(
    "line",
    ["infinity finetune --leraning-rate 1", "infinity run swap.yaml", "infinity-bench --size many", "make nothing"],
)
def test_a_command_that_is_wrong_is_found(line: str) -> None:
    with pytest.raises((ConfigError, AssertionError)):
        require_known(next(commands(line)))


def test_the_readme_begins_with_the_two_commands_that_set_everything_up() -> None:
    first = next(block for block in SHELL if block.page == "README.md")
    assert [words[:2] for words in commands(first.text)] == [["make", "demo"], ["make", "test"]]


# -- commands and code are run ----------------------------------------------------------------------------------------


def drawn(candidates: list[Block], mark: pytest.MarkDecorator) -> list[Any]:
    """Return the first block of each page in FIRST, with a mark, and a sample of the others; with INFINITY_TESTS=all
    every block."""
    first = [
        next(block for block in candidates if block.page == page)
        for page in FIRST
        if any(block.page == page for block in candidates)
    ]
    if sampling.SHARE == 1:
        return candidates
    others = sampling.some([block for block in candidates if block not in first])
    return [
        pytest.param(block, marks=mark) if block in first else block
        for block in candidates
        if block in others or block in first
    ]


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("things")
    make_things(place)
    return place


@pytest.fixture
def sandbox(things: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(things, tmp_path / "sandbox"))


def chain(block: Block) -> list[Block]:
    """Return the blocks to run: those that this one continues, and itself."""
    if "goes on" not in block.marks:
        return [block]
    before = [each for each in SHELL if each.page == block.page and each.line < block.line and is_run(each)]
    return [*chain(before[-1]), block]


def is_run(block: Block) -> bool:
    return "needs" not in block.marks and "file" not in block.marks


@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", drawn([each for each in SHELL if is_run(each)], pytest.mark.long), ids=str)
def test_commands_run_as_they_are_written(block: Block, sandbox: Path) -> None:
    make_files(sandbox, block)
    for each in chain(block):
        if stopped := re.fullmatch(r"a stopped run in (\S+)", each.marks.get("with", "")):
            stop_a_run(stopped[1], sandbox)
        run_shell(each, sandbox)


def test_python_code_compiles() -> None:
    for block in PYTHON:
        compile(block.text, str(block), "exec")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "block",
    drawn(
        [each for each in PYTHON if is_run(each)],
        pytest.mark.long(kept="only here what the README says is run as it is written"),
    ),
    ids=str,
)
def test_python_code_runs_as_it_is_written(block: Block, sandbox: Path) -> None:
    make_files(sandbox, block)
    run_python(PRELUDE + (MODEL_IN_PRELUDE if goes_on_with_a_model(block.text) else "") + block.text, sandbox)


def goes_on_with_a_model(code: str) -> bool:
    """Whether a name `model` is read before it is given a value."""
    names = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name) and node.id == "model"]
    first = min(names, key=lambda node: (node.lineno, node.col_offset), default=None)
    return first is not None and isinstance(first.ctx, ast.Load)


# -- links ------------------------------------------------------------------------------------------------------------


def test_links_of_the_readme_lead_to_files() -> None:
    links = re.findall(r"\]\(((?!https?:)[^)#]+)(?:#[^)]*)?\)", (ROOT / "README.md").read_text())
    assert len(links) > 20
    assert [link for link in links if not (ROOT / link).is_file()] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_pictures_have_words_for_those_who_do_not_see_them() -> None:
    pictures = [found for page in pages() for found in re.findall(r"!\[(.*?)\]\((.*?)\)", page.read_text())]
    assert {Path(path).name for _, path in pictures} == {path.name for path in (ROOT / "docs/pictures").iterdir()}
    assert all(len(words) > 20 for words, _ in pictures)
