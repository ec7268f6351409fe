"""The house rules that a test can check."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import infinity
from infinity import _native

ROOT = Path(infinity.__file__).parent


Parse = Callable[[Path], ast.Module]


@pytest.fixture(scope="module")
def parsed() -> Parse:
    """Return a function that parses each file once. The trees are not kept longer than the tests of this file: every
    collection of garbage would visit them."""
    return cache(lambda path: ast.parse(path.read_text()))


def test_functions_stay_under_70_lines(parsed: Parse) -> None:
    long = []
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno > 70:
                long.append(f"{path.name}:{node.name}")
    assert long == []


_MANY_PARAMETERS = {
    # the public API's keyword options; optimizers have those of torch's
    "checkpoint/from_portable.py: offload_from_checkpoint",
    "checkpoint/load_pretrained.py: load_pretrained",
    "checkpoint/reshard.py: resume",
    "optim/adagrad.py: Adagrad.__init__",
    "optim/adamw.py: Adam.__init__",
    "optim/adamw.py: AdamW.__init__",
    "optim/lion.py: Lion.__init__",
    "optim/sgd.py: SGD.__init__",
    "runtime/cross_entropy.py: chunked_cross_entropy",
    "runtime/offload.py: offload",
    # a value
    "errors.py: SwapIOError.__init__",
    # a kernel takes pointers and sizes
    "device_update/triton_kernels.py: _apply",
    "device_update/triton_kernels.py: _update",
    "tiers/triton_nf4.py: _decode",
    # what a store is opened with, each of its own
    "io/store.py: SwapStore.__init__",
}


def test_functions_have_at_most_seven_parameters(parsed: Parse) -> None:
    """More belong together: they are a value. That of offload is OffloadArguments (state/offload_arguments.py)."""
    many = set()
    for path in ROOT.rglob("*.py"):
        where = path.relative_to(ROOT)
        if where.parts[0] == "cli":
            continue
        for name, node in _functions(parsed(path)):
            given = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            if len(given) - (given[:1] in (["self"], ["cls"], ["ctx"])) > 7:
                many.add(f"{where}: {name}")
    assert many == _MANY_PARAMETERS


def _functions(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """All of them, by their qualified names."""
    for node in ast.iter_child_nodes(tree):
        named = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        name = f"{inside}{node.name}" if named else inside
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield name, node
        yield from _functions(node, f"{name}." if named else inside)


_TELL_OF_RANKS = ("plan/plan_input.py", "state/shard.py")
"""PeerFacts and MemoryLimits, and RankPartition: whoever wants to know what follows from the number of ranks asks
these, or World.
"""


def test_only_sharded_asks_whether_there_are_other_ranks() -> None:
    """Processes communicate through World; cli/ may speak of ranks."""
    asks = re.compile(
        r"\b(exchange|shared|agreed)\b is (not )?None|"
        r"isinstance\(.*\b(SingleProcessWorld|MultiRankWorld)\)|\bRankExchange\b"
    )
    number = r"(\b_?(ranks|count)|world\.size|rank_and_world\(\)\[1\])"
    compared = r"\s*(==|!=|<=|>=|<|>)\s*"
    counts = re.compile(rf"\b(peers|self)\.sharded\b|{number}{compared}1\b|\b1{compared}\S*{number}")
    rooms = [path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] not in ("sharded", "ranks", "cli")]
    assert [path.name for path in rooms if asks.search(path.read_text())] == []
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in rooms
        if path.relative_to(ROOT).as_posix() not in _TELL_OF_RANKS
        for line in path.read_text().splitlines()
        if counts.search(line)
    ]
    assert found == []


def test_every_file_begins_with_why_it_exists(parsed: Parse) -> None:
    for path in ROOT.rglob("*.py"):
        assert ast.get_docstring(parsed(path)), path


_NO_DOCSTRING = re.compile(r"(What|Of|Whoever|As|That)\b")
_NO_NOUN = re.compile(
    r"(What|Of|Whoever|As|That|How|When|Where|Which|Who|Why|See|If|By|For|From|In|On|To|With|Here|There|"
    r"Is|Are|Has|Holds|Keeps|Returns?|Get|Set|Says|Tells|Gives|Contains)\b"
)


def test_docstrings_begin_as_a_reader_expects(parsed: Parse) -> None:
    """No docstring begins with a clause in place of a noun. Those of attributes and properties begin with a noun."""
    assert list(_odd_docstrings(ast.parse('x = 1\n"""Of x."""\ndef f():\n    """Return x."""'))) == ["Of x."]
    repository = Path(__file__).parent.parent
    folders = [ROOT, *(repository / name for name in ("bench", "docs", "examples", "release", "tests"))]
    paths = [path for folder in folders for path in (*folder.rglob("*.py"), *folder.rglob("*.pyi"))]
    found = [f"{path}: {odd}" for path in paths for odd in _odd_docstrings(parsed(path))]
    assert found == []


def _odd_docstrings(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    text, refused = ast.get_docstring(node) or "", _NO_DOCSTRING
    if isinstance(node, ast.FunctionDef):
        decorators = {getattr(each, "attr", getattr(each, "id", "")) for each in node.decorator_list}
        refused = _NO_NOUN if decorators & {"property", "cached_property"} else _NO_DOCSTRING
    if refused.match(text):
        yield text.splitlines()[0]
    yield from (text for text in _of_attributes(node.body) if _NO_NOUN.match(text))
    for each in node.body:
        if isinstance(each, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _odd_docstrings(each)


def _of_attributes(body: list[ast.stmt]) -> Iterator[str]:
    for assigned, text in itertools.pairwise(body):
        match assigned, text:
            case ast.Assign() | ast.AnnAssign(), ast.Expr(value=ast.Constant(value=str(docstring))):
                yield docstring.strip()


def test_the_native_core_links_neither_torch_nor_cuda() -> None:
    lines = subprocess.run(["ldd", _native.__file__], capture_output=True, text=True, check=True).stdout.splitlines()
    linked = [line.split(" (0x")[0] for line in lines]  # an address may spell anything
    for library in ("torch", "cuda", "c10", "gomp", "python"):
        assert not [line for line in linked if library in line]


def test_the_stub_names_what_the_core_has() -> None:
    stub = ast.parse((ROOT / "_native.pyi").read_text())
    named = {node.name for node in stub.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    named |= {
        node.target.id for node in stub.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    # Names that the stub imports under the same name are its own, too: they are in another file.
    named |= {
        alias.name
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name == alias.asname
    }
    assert named == {name for name in dir(_native) if not name.startswith("_")}


def test_importing_the_package_starts_nothing() -> None:
    code = "import threading, infinity; print(threading.active_count())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "1"
