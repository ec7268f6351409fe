"""`infinity checkpoint` on stores that something was done to: it removes nothing that could still be resumed, can be
interrupted and done again, and shows nothing of a file that a terminal would obey."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.cli.main import main
from infinity.errors import ResumeError
from infinity.io import atomic_file, document
from infinity.io.directory import HEADER_NAME, SWAP_NAME, generations_in
from tests.conftest import weights_of
from tests.io.test_headers import STEPS, Run, build, config, disks, flip, headers, made, rewrite, trained

__all__ = ["disks", "made"]  # fixtures

Said = pytest.CaptureFixture[str]


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The swap directory of another run, on one path."""
    trained(config(tmp_path / "other"), seed=9)
    return tmp_path / "other"


def left_in(paths: list[Path]) -> list[str]:
    return [name for path in paths if path.exists() for name in os.listdir(path)]


def test_a_header_of_another_run_on_the_second_part_is_a_damaged_one(disks: list[Path], made: Run, other: Path) -> None:
    shutil.copy(other / HEADER_NAME, disks[1] / HEADER_NAME)
    net = infinity.resume(build(), config(*disks))
    assert all(torch.equal(weight, made[1][name]) for name, weight in weights_of(net).items())
    infinity.close(net)
    assert headers(disks) == headers([made[0] / path.name for path in disks])


def test_another_runs_part_is_not_taken_for_this_ones(disks: list[Path], tmp_path: Path, capsys: Said) -> None:
    trained(config(tmp_path / "c", tmp_path / "d"), seed=9)
    wrong = [disks[0], tmp_path / "d"]
    before = headers(wrong), (tmp_path / "d" / SWAP_NAME).read_bytes()
    with pytest.raises(ResumeError, match=f"{tmp_path}/d.*belongs to run .*, and the generations in {disks[0]} belong"):
        infinity.resume(build(), config(*wrong))
    assert main(["checkpoint", "verify", *map(str, wrong)]) == 1
    capsys.readouterr()
    assert main(["checkpoint", "remove", *map(str, wrong)]) == 2
    assert f"{tmp_path}/d is not a part of the store in {disks[0]}" in capsys.readouterr().err
    assert (headers(wrong), (tmp_path / "d" / SWAP_NAME).read_bytes()) == before
    infinity.close(infinity.resume(build(), config(tmp_path / "c", tmp_path / "d")))
    infinity.close(infinity.resume(build(), config(*disks)))


def test_a_part_with_a_foreign_header_is_not_removed_alone(disks: list[Path], other: Path, capsys: Said) -> None:
    shutil.copy(other / HEADER_NAME, disks[1] / HEADER_NAME)
    assert main(["checkpoint", "remove", str(disks[1])]) == 2
    assert "may be a part of a store that can still be resumed" in capsys.readouterr().err
    assert main(["checkpoint", "list", str(disks[1])]) == 0
    assert f"its path was {other} when the store was made: the store was copied or moved" in capsys.readouterr().out
    infinity.close(infinity.resume(build(), config(*disks)))


def test_what_is_named_beside_a_store_and_is_no_part_of_it_stays(disks: list[Path], other: Path, capsys: Said) -> None:
    paths = [str(disks[0]), str(other)]
    assert main(["checkpoint", "remove", *paths]) == 2
    assert f"{other} is not a part of the store in {disks[0]}" in capsys.readouterr().err
    assert all((Path(path) / SWAP_NAME).exists() for path in paths)


class Interrupted(BaseException):
    pass


def interrupted(act: Callable[[], object], at: int) -> bool:
    """Whether `act` did not reach its step number `at`; there it is left."""
    steps = 0

    def count(name: str, *_: Any) -> None:
        nonlocal steps
        steps += name.startswith("begin")
        if steps > at:
            raise Interrupted

    try:
        with atomic_file.observed(count):
            act()
    except Interrupted:
        return False
    return True


def test_references_that_a_killed_run_has_left_are_removed_with_its_store(disks: list[Path], capsys: Said) -> None:
    for path in disks:
        (path / "reference-2").mkdir()
        for name in (HEADER_NAME, SWAP_NAME):
            shutil.copy(path / name, path / "reference-2")
    assert main(["checkpoint", "remove", *map(str, disks)]) == 0
    assert "references that a killed run left: " in capsys.readouterr().out
    assert left_in(disks) == []


@pytest.mark.parametrize("parts", [1, 2])
def test_removing_can_be_interrupted_anywhere_and_done_again(parts: int, made: Run, tmp_path: Path) -> None:
    if parts == 1:
        trained(config(tmp_path / "alone"))
    sources = [tmp_path / "alone"] if parts == 1 else [made[0] / name for name in ("a", "b")]
    at, done = 0, False
    while not done:
        paths = [tmp_path / str(at) / source.name for source in sources]
        for source, path in zip(sources, paths, strict=True):
            shutil.copytree(source, path)
        command = ["checkpoint", "remove", *map(str, paths)]
        done = interrupted(lambda command=command: main(command), at)  # type: ignore[misc]
        if not done:
            lists = (paths[0] / HEADER_NAME).exists() and not (paths[0] / SWAP_NAME).exists()
            assert not lists or main(["checkpoint", "list", str(paths[0])]) == 1, "it promises what is gone"
            assert main(command) == 0, at
        assert left_in(paths) == []
        at += 1
    assert at > 3 * parts


def test_a_generation_of_a_newer_infinity_is_not_called_damaged(disks: list[Path], capsys: Said) -> None:
    rewrite(generations_in(disks[0])[STEPS], "generation", 2, 3)
    assert main(["checkpoint", "list", str(disks[0])]) == 0
    out = capsys.readouterr().out
    assert f"generation {STEPS:>8}  newer: " in out
    assert "damaged" not in out
    assert main(["checkpoint", "verify", *map(str, disks)]) == 1
    out = capsys.readouterr().out
    assert "newer: " in out
    assert "damaged" not in out


def test_what_a_terminal_would_obey_is_spelled_out(disks: list[Path], capsys: Said) -> None:
    evil = "\x1b[2J\u202e\udcff\n"
    for path, kind, version in (
        (disks[0] / HEADER_NAME, "store", 1),
        *((path, "generation", 2) for path in generations_in(disks[0]).values()),
    ):
        value = document.read(path, kind, version) | {"created": "then\x1b[2J\u202e\nnow"}
        path.write_bytes(b"".join(document.write(kind, value, version)))
    rewrite_unit(disks[0], "evil\x1b]0;title\x07")
    for act in ("list", "verify", "export"):
        options = ["--output", str(disks[0] / evil.replace("\udcff", ""))] if act == "export" else []
        main(["checkpoint", act, *map(str, disks), *options])
        said = capsys.readouterr()
        shown = said.out + said.err
        assert shown
        assert all(letter.isprintable() or letter == "\n" for letter in shown), act
        assert act == "verify" or "\\x1b" in shown


def rewrite_unit(directory: Path, name: str) -> None:
    path = generations_in(directory)[STEPS]
    value = document.read(path, "generation", 2)
    value["extents"]["unit"][0] = name
    path.write_bytes(b"".join(document.write("generation", value, 2)))


def test_a_swap_file_with_another_name_is_not_written_to(tmp_path: Path) -> None:
    settings = config(tmp_path / "swap")
    trained(settings)
    subject = tmp_path / "swap" / SWAP_NAME
    shutil.copytree(tmp_path / "swap", tmp_path / "backup", copy_function=os.link)
    before = subject.read_bytes()
    assert main(["checkpoint", "verify", str(tmp_path / "swap")]) == 0
    with pytest.raises(ResumeError, match="has 2 names .hard links., and this run would change the file"):
        infinity.resume(build(), settings)
    assert subject.read_bytes() == before
    shutil.copy(subject, tmp_path / "own")
    (tmp_path / "own").rename(subject)
    infinity.close(infinity.resume(build(), settings))
    assert (tmp_path / "backup" / SWAP_NAME).read_bytes() == before


@pytest.mark.timeout(60)
@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
@pytest.mark.parametrize("name", [HEADER_NAME, SWAP_NAME, f"generation-{STEPS:012d}.infinity"])
def test_what_is_no_file_ends_every_command_at_once(name: str, put: Any, disks: list[Path], capsys: Said) -> None:
    (disks[0] / name).unlink()
    put(disks[0] / name)
    paths = [str(path) for path in disks]
    for act in (["list", *paths], ["verify", *paths], ["export", *paths, "--output", str(disks[0] / "copy")]):
        assert main(["checkpoint", *act]) in (0, 1, 2)
    said = capsys.readouterr()
    assert name in said.out + said.err
    if name == HEADER_NAME and put is os.mkfifo:  # the header is written again in its place
        infinity.close(infinity.resume(build(), config(*disks)))
        assert main(["checkpoint", "verify", *paths]) == 0
        return
    with pytest.raises(infinity.InfinityError, match=name):
        infinity.resume(build(), config(*disks), step=STEPS)


def test_two_names_of_a_directory_are_one(tmp_path: Path) -> None:
    (tmp_path / "swap").mkdir()
    (tmp_path / "link").symlink_to("swap")
    with pytest.raises(infinity.ConfigError, match="are the same directory"):
        infinity.offload(build(), config(tmp_path / "swap", tmp_path / "link" / ".." / "link"))


def test_a_store_reached_by_a_link_is_the_same_store(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "swap").symlink_to("disk")
    weights = trained(config(tmp_path / "swap"))
    net = infinity.resume(build(), config(tmp_path / "disk"))
    assert all(torch.equal(weight, weights[name]) for name, weight in weights_of(net).items())
    infinity.close(net)
    assert main(["checkpoint", "remove", str(tmp_path / "swap")]) == 0
    assert left_in([tmp_path / "disk"]) == []


def test_a_damaged_store_without_generations_says_what_to_do(tmp_path: Path, capsys: Said) -> None:
    trained(config(tmp_path / "swap"))
    for path in generations_in(tmp_path / "swap").values():
        path.unlink()
    flip(tmp_path / "swap" / HEADER_NAME)
    assert main(["checkpoint", "remove", str(tmp_path / "swap")]) == 2
    assert f"delete {HEADER_NAME} and {SWAP_NAME} in" in capsys.readouterr().err
