"""The command line before and around its work: quick to start, exact about options, calm when interrupted or unread."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infinity.cli import main
from infinity.cli.bench import main as bench_main
from infinity.cli.optimizers import _MAKE, DTYPES
from infinity.cli.options import DTYPE_NAMES, OPTIMIZERS, StrictArgumentParser, number, size, whole
from infinity.errors import ConfigError
from tests.models import llama
from tests.test_front_door import HEAVY

PROGRAMS = {"infinity": main, "infinity-bench": bench_main}


def ended(program: str, *arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a program as the shell runs it, and return the result."""
    command = [sys.executable, "-m", PROGRAMS[program].__name__, *arguments]
    how = {"capture_output": True, "text": True, "timeout": 120} | how
    return subprocess.run(command, **how)


# ------------------------------------------------------------------------------------------ before the work


LINES = [
    ("infinity", "--help"),
    ("infinity", "--version"),
    ("infinity", "finetune --help"),
    ("infinity", "checkpoint export --help"),
    ("infinity", "convert --help"),
    ("infinity", "convert"),
    ("infinity", "finetune --seed -1"),
    ("infinity", "checkpoint list"),
    ("infinity", "doctor --help"),
    ("infinity", "doctor a b"),
    ("infinity", "finetun"),
    ("infinity-bench", "--help"),
    ("infinity-bench", "--version"),
    ("infinity-bench", "--size 0"),
]
_ALL_LINES = """
import io, json, sys
from contextlib import redirect_stdout
from importlib import import_module

def ended(module, line):
    with redirect_stdout(io.StringIO()) as out:
        try:
            code = import_module(module).main(line.split())
        except SystemExit as ended:
            code = ended.code
    return code, [name for name in heavy if name in sys.modules], bool(out.getvalue())

heavy, lines = json.loads(sys.argv[1])
print(json.dumps([ended(*each) for each in lines]))
"""


@pytest.fixture(scope="module")
def done() -> dict[tuple[str, str], tuple[int, list[str], bool]]:
    """Each line's exit code, imports, and whether it printed something; all in one new process."""
    given = json.dumps([HEAVY, [(PROGRAMS[program].__name__, line) for program, line in LINES]])
    command = [sys.executable, "-c", _ALL_LINES, given]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {line: tuple(each) for line, each in zip(LINES, found, strict=True)}


@pytest.mark.parametrize(("program", "line"), LINES)
def test_help_and_wrong_options_import_nothing_slow(
    program: str, line: str, done: dict[tuple[str, str], tuple[int, list[str], bool]]
) -> None:
    good = "--help" in line or "--version" in line
    assert done[program, line] == (0 if good else 2, [], good)


@pytest.mark.parametrize("program", PROGRAMS)
def test_ctrl_c_while_modules_are_imported_is_one_line(program: str, tmp_path: Path) -> None:
    """Even where a module swallows what is raised in it."""
    waiting = (
        "print('importing', flush=True)\nimport signal\ntry:\n    signal.pause()\nexcept BaseException:\n    pass\n"
    )
    for name in ("torch", "numpy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(waiting)
    (tmp_path / "swap.yaml").touch()
    arguments = {"infinity": ["finetune"], "infinity-bench": ["--path", str(tmp_path)]}[program]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-m", PROGRAMS[program].__name__, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    assert "importing\n" in itertools.islice(process.stdout, 2)  # infinity finetune prints that it loads libraries
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "interrupted\n")


# ------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("finetune --step 3", "unknown argument '--step'; did you mean --steps?"),
        ("finetune --lear 3", "unknown argument '--lear'"),
        ("finetune --verb", "unknown argument '--verb'; did you mean --verbose?"),
        ("checkpoint export a --out b", "the following arguments are required: --output"),
        ("--vers", "the following arguments are required: command"),
        ("finetune --steps=--", "argument --steps: '--' is not a value"),
        ("finetune --seed -1", "--seed: must be at least 0, not -1"),
        (f"finetune --seed {'9' * 30}", "--seed: must be at most 18446744073709551615"),
        (f"finetune --seed {'9' * 400}", "(400 characters)"),
        (f"finetune --seed {'9' * 9000}", "(9000 characters) is not a whole number"),
        ("finetune --seed 1e3", "'1e3' is not a whole number"),
        ("finetune --seed 1_000", "'1_000' is not a whole number"),
        ("finetune --seed ٣", "'٣' is not a whole number"),
        ("finetune --steps 1000000000000", "--steps: must be at most 999999999999"),
        ("finetune --batch-size 99999999999", "--batch-size: must be at most"),
        ("finetune --sequence-length 99999999999", "--sequence-length: must be at most"),
        ("finetune --batch-size 65536 --sequence-length 65536", "4294967296 tokens in one backward pass"),
        ("finetune --lr nan", "--lr: 'nan' is not a number"),
        ("finetune --lr inf", "--lr: must be between 1e-12 and 1e+06, not inf"),
        ("finetune --lr 1e-300", "--lr: must be between 1e-12 and 1e+06"),
        ("finetune --lr 0", "--lr: must be positive"),
        ("finetune --max-grad-norm inf", "--max-grad-norm: must be between"),
        ("finetune --max-grad-norm=-1", "--max-grad-norm: must be positive or 0"),
        ("finetune --weight-decay nan", "--weight-decay: 'nan' is not a number"),
        ("finetune --trace-steps 1:99999999999999", "is not A:B"),
        ("finetune --optimizer adamm", "invalid choice: 'adamm'"),
        ("checkpoint verify a --step 0", "--step: must be at least 1"),
    ],
)
def test_wrong_options_are_one_line(line: str, message: str, capsys: Any) -> None:
    assert main.main(line.split()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert len(error.splitlines()) == 1
    assert len(error) < 600


@pytest.mark.parametrize("option", ["--model", "--data", "--config", "--output", "--resume", "--trace"])
@pytest.mark.parametrize("value", ["", " ", "\udcff\udcfe", "n" * 300, "~nobody.here/x"])
def test_paths_that_cannot_be_are_refused(option: str, value: str, capsys: Any) -> None:
    assert main.main(["finetune", option, value]) == 2
    assert f"argument {option}: " in capsys.readouterr().err


def test_escape_sequences_are_shown_not_obeyed(capsys: Any) -> None:
    rest = ["--model", "m", "--data", "d", "--output", "o"]
    assert main.main(["finetune", "--config", "\x1b[2J\x1b]0;x\x07.yaml", *rest]) == 2
    assert r"\x1b[2J\x1b]0;x\x07.yaml" in capsys.readouterr().err


def test_names_for_options_are_those_that_are_understood() -> None:
    assert tuple(DTYPES) == DTYPE_NAMES
    assert tuple(_MAKE) == OPTIMIZERS


def test_types_keep_their_limits() -> None:
    assert [whole(-3, 7)(text) for text in ("-3", "+5", "007")] == [-3, 5, 7]
    assert [number(0.5, 2, or_zero=True)(text) for text in ("0", "0.5", "2e0")] == [0, 0.5, 2]
    assert size(1, 1 << 20)("1MiB") == 1 << 20


def test_every_parser_refuses_abbreviations() -> None:
    parser = StrictArgumentParser(prog="x")
    inner = parser.add_subparsers().add_parser("y")
    inner.add_argument("--long-name")
    assert isinstance(inner, StrictArgumentParser)
    with pytest.raises(ConfigError, match="did you mean --long-name"):
        parser.parse_args(["y", "--long", "3"])


# ----------------------------------------------------------------------------------------------- nobody reads the lines


def unread(tmp_path: Path) -> int:
    """Return the writing end of a pipe whose reader is closed."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


WORKS = "print('a line', flush=True); print('another', flush=True); open('done', 'w').close(); "


def in_output_streams(ending: str, *, go_on: bool, tmp_path: Path, **how: Any) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys\nfrom infinity.cli.streams import output_streams\n"
        f"with output_streams(go_on={go_on}) as out:\n    out.begin_run(); {WORKS}\n{ending}"
    )
    return subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, cwd=tmp_path, **how)


def test_a_run_goes_on_when_its_reader_is_gone(tmp_path: Path) -> None:
    writer = unread(tmp_path)
    done = in_output_streams("sys.exit(7)", go_on=True, tmp_path=tmp_path, stdout=writer)
    os.close(writer)
    assert done.returncode == 7
    assert done.stderr == "the output cannot be written any more (Broken pipe); the work continues without it\n"
    assert (tmp_path / "done").exists()


def test_a_run_goes_on_when_the_disk_of_its_log_is_full(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = in_output_streams("sys.exit(7)", go_on=True, tmp_path=tmp_path, stdout=full)
    assert done.returncode == 7
    assert "No space left on device" in done.stderr
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
def test_a_closed_stream_is_no_place_for_the_next_file(closed: tuple[int, ...], tmp_path: Path) -> None:
    """The swap file would get its number, and then every line."""
    shell = " ".join(f"{number}>&-" for number in closed)
    code = (
        "import os, sys\nfrom infinity.cli.streams import output_streams\n"
        "with output_streams(go_on=True):\n    fd = os.open('file', os.O_CREAT | os.O_WRONLY)\n"
        "    print('a line', flush=True); print('another', file=sys.stderr, flush=True)\n"
        "    assert fd > 2, fd\n    open('done', 'w').close()"
    )
    subprocess.run(["bash", "-c", f'"$@" {shell}', "-", sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert (tmp_path / "done").exists()
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_into_a_closed_pipe_ends_quietly(program: str, tmp_path: Path) -> None:
    writer = unread(tmp_path)
    done = ended(program, "--help", capture_output=False, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert done.stderr == ""


def test_a_benchmark_that_nobody_reads_ends(tmp_path: Path) -> None:
    writer = unread(tmp_path)
    arguments = ["--path", str(tmp_path), "--size", "16MiB"]
    done = ended("infinity-bench", *arguments, capture_output=False, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_no_utf8_is_printed_escaped(tmp_path: Path) -> None:
    code = "from infinity.cli.streams import output_streams\nwith output_streams(go_on=True):\n    print('\\udcff → ü')"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "\\udcff \\u2192 \\xfc\n"


# ---------------------------------------------------------------------------------- infinity checkpoint


def test_every_directory_that_is_named_is_listed(offload: Any, tmp_path: Path, capsys: Any) -> None:
    offload(llama()[0])
    swap = str(tmp_path / "swap")
    assert main.main(["checkpoint", "list", swap]) == 0
    assert main.main(["checkpoint", "list", swap, str(tmp_path / "none")]) == 2
    assert "none holds no store of infinity" in capsys.readouterr().err


@pytest.mark.parametrize("act", ["list", "verify", "export", "remove"])
@pytest.mark.parametrize("place", ["missing", "empty", "file", "file/below", "/dev/zero", "\x1b[31mred"])
def test_what_is_no_store_is_named_and_left_alone(act: str, place: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    more = ["--output", str(tmp_path / "out")] if act == "export" else []
    assert main.main(["checkpoint", act, str(tmp_path / place), *more]) == 2
    error = capsys.readouterr().err
    assert "holds no store of infinity" in error
    assert error.isprintable() or error.rstrip("\n").isprintable()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]
    assert (tmp_path / "file").read_text() == "mine"
