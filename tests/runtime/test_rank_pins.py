"""A checkpoint folder pins a generation where all ranks pin theirs, and a run of as many ranks goes on from it."""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity.checkpoint.pinned import make_room_for_pin
from infinity.cli.main import main
from infinity.errors import InfinityError, PlanError, ResumeError, SwapIOError
from infinity.integrations import checkpoint_folders
from infinity.io import atomic_file
from infinity.io.directory import generations_in
from infinity.io.generation_pins import MARKER_NAME, PINS_NAME, digest_of, read_marker, read_pins
from infinity.io.manifest import manifest_bytes
from infinity.ranks import world
from infinity.ranks.paths import rank_paths
from infinity.runtime.pins import pin, pinned, unpin
from tests import sampling
from tests.ranks.workers import ended, run
from tests.runtime.over_ranks import TIERS, Blocks, batch, digest, offloaded

pytestmark = pytest.mark.cpu_only("several ranks compute on the CPU")

RANKS = 2
UNTIL = 5


@dataclass(frozen=True)
class Kill:
    """A rank is killed at the `nth` moment (from 0) of files that are written, renamed or removed."""

    rank: int
    nth: int

    @contextlib.contextmanager
    def at(self, rank: int) -> Iterator[None]:
        seen = 0

        def kill(*_: object) -> None:
            nonlocal seen
            seen += rank == self.rank
            if seen > self.nth:
                os.kill(os.getpid(), signal.SIGKILL)

        with atomic_file.observed(kill):
            yield


def config(root: str, pins: int = 2) -> dict[str, Any]:
    memory = {"host": "256MiB", "device": "64MiB"}
    return {**TIERS[3], "commit_every": 1, "pins": pins, "memory": memory, "nvme": {"paths": [f"{root}/swap"]}}


def begun(root: str, pins: int = 2) -> nn.Module:
    Path(root).mkdir(exist_ok=True)
    return offloaded(f"{root}/swap", {"commit_every": 1, "pins": pins, **TIERS[3]})


def trained(model: nn.Module, until: int) -> Iterator[int]:
    """Trains, and yields after each step."""
    optim = infinity.AdamW(model.parameters(), lr=1e-2)
    for step in range(infinity.track(model=model), until):
        model(batch(step, dist.get_rank(), torch.float32)).backward()
        optim.step()
        optim.zero_grad()
        yield step + 1


def weights_of(model: nn.Module) -> dict[str, str]:
    with infinity.gathered(model, model):
        weights = {name: digest(parameter) for name, parameter in model.named_parameters()}
    infinity.close(model)
    return weights


def pinning(root: str, at: list[int], kill: Kill | None = None) -> dict[str, str]:
    """Run, pin a folder after some steps, and return the weights at the end."""
    with contextlib.nullcontext() if kill is None else kill.at(dist.get_rank()):
        model = begun(root)
        for step in trained(model, UNTIL):
            if step in at:
                pin(model, Path(root, f"checkpoint-{step}"))
        return weights_of(model)


def going_on(root: str, folder: str, pins: int = 2) -> tuple[int, dict[str, str]]:
    model = infinity.resume(Blocks(torch.float32), config(root, pins), folder=Path(root, folder), device="cpu")
    steps = list(trained(model, UNTIL))
    return steps[0], weights_of(model)


def acts(root: str) -> tuple[int, dict[str, str]]:
    """How many moments the run has on this rank, and its weights at the end."""
    count = 0

    def seen(*_: object) -> None:
        nonlocal count
        count += 1

    with atomic_file.observed(seen):
        weights = pinning(root, [2, 3])
    return count, weights


PARTS = 3


@dataclass(frozen=True)
class Counted:
    """A run that pins the folders of steps 2 and 3 and is not killed.

    Attributes:
        acts: by rank, how many moments it has.
        whole: its weights at the end.
    """

    root: Path
    acts: list[int]
    whole: dict[str, str]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    root = tmp_path_factory.mktemp("counted") / "run"
    told = run(RANKS, acts, str(root))
    return Counted(root, [count for count, _ in told], told[0][1])


@pytest.fixture
def there(counted: Counted, tmp_path: Path) -> Iterator[Path]:
    """Where that run is, for a test that changes it. Its folders name the place of the store: no copy would do."""
    shutil.copytree(counted.root, tmp_path / "kept", symlinks=True)
    yield counted.root
    shutil.rmtree(counted.root)
    (tmp_path / "kept").rename(counted.root)


@pytest.mark.long(kept="only here ranks go on from each of several folders")
def test_ranks_go_on_from_each_folder_to_the_same_bits(there: Path, counted: Counted) -> None:
    marker = read_marker(there / "checkpoint-2")
    assert marker is not None
    assert len(set(marker.digests)) == RANKS
    assert marker.directories == [str(there / "swap")]
    for began in (3, 2, 3):  # whichever was pinned, and again
        assert run(RANKS, going_on, str(there), f"checkpoint-{began}") == [(began + 1, counted.whole)] * RANKS


def outcome(root: str, folder: str) -> tuple[int, dict[str, str]] | str:
    try:
        return going_on(root, folder)
    except InfinityError as error:
        return str(error)


def plainly(root: str) -> dict[str, str] | str:
    try:
        model = infinity.resume(Blocks(torch.float32), config(root), device="cpu")
    except InfinityError as error:
        return str(error)
    for _ in trained(model, UNTIL):
        pass
    return weights_of(model)


@pytest.mark.covering(strength=1, most=2)
@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("part", range(PARTS))
def test_a_folder_with_a_marker_can_be_gone_on_from_whenever_a_rank_is_killed(
    tmp_path: Path, rank: int, part: int, counted: Counted
) -> None:
    """Every act of a rank after its store was made, one of each part of them in a short run of the tests."""
    whole, every = counted.whole, range(8, counted.acts[rank])
    mine = every[len(every) * part // PARTS : len(every) * (part + 1) // PARTS]
    chance = random.Random(f"{sampling.SEED} {part}")
    for nth in chance.sample(mine, sampling.number(1, len(mine))):
        root = tmp_path / f"killed-{nth}"
        ended(RANKS, pinning, str(root), [2, 3], Kill(rank, nth))
        folders = [path for path in root.glob("checkpoint-*") if read_marker(path) is not None]
        for folder in folders:
            began = int(folder.name.split("-")[1])
            assert run(RANKS, outcome, str(root), folder.name) == [(began + 1, whole)] * RANKS, nth
        found = run(RANKS, plainly, str(root))
        assert found == [whole] * RANKS or "generation" in str(found[0]), nth
        shutil.rmtree(root)


def begun_again(root: str) -> tuple[int, dict[str, str]] | str:
    """Resume without a folder, and run to the end. Return the first step and the weights; or the error."""
    try:
        model = infinity.resume(Blocks(torch.float32), config(root), device="cpu")
    except InfinityError as error:
        return str(error)
    began = infinity.track(model=model)
    for _ in trained(model, UNTIL):
        pass
    return began, weights_of(model)


@pytest.mark.long
def test_a_run_that_went_back_goes_on_from_its_own_newest_generation(tmp_path: Path) -> None:
    """Although a folder pins one of the same step, of the run before it went back."""
    (whole, _) = run(RANKS, pinning, str(tmp_path), [2, UNTIL])
    run(RANKS, going_on, str(tmp_path), "checkpoint-2")
    for path in rank_paths(tmp_path / "swap", RANKS):
        assert len({pin.digest for pin in read_pins(path)} | {digest_of(manifest_bytes(generations_in(path)[5]))}) == 3
    assert run(RANKS, begun_again, str(tmp_path)) == [(UNTIL, whole)] * RANKS


@pytest.mark.long(kept="only here a rank has another generation of the same step")
def test_ranks_never_go_on_from_parts_of_another_generation_of_the_step(tmp_path: Path) -> None:
    """One rank's store is put back as it was before the run went back."""
    (whole, _) = run(RANKS, pinning, str(tmp_path), [2])
    mine, _ = rank_paths(tmp_path / "swap", RANKS)
    shutil.copytree(mine, tmp_path / "before")
    run(RANKS, going_on, str(tmp_path), "checkpoint-2")
    shutil.rmtree(mine)
    shutil.copytree(tmp_path / "before", mine)
    assert [max(generations_in(path)) for path in rank_paths(tmp_path / "swap", RANKS)] == [UNTIL] * RANKS
    assert run(RANKS, begun_again, str(tmp_path)) == [(2, whole)] * RANKS
    for path in rank_paths(tmp_path / "swap", RANKS):
        (pin_,) = read_pins(path)
        (path / pin_.manifest_name).unlink()  # what is left is nobody's
    shutil.rmtree(mine)
    shutil.copytree(tmp_path / "before", mine)
    for path in mine.glob("pinned-*"):
        path.unlink()
    for told in run(RANKS, begun_again, str(tmp_path)):
        assert "there is no generation of which every rank has its part (rank 0: 5" in str(told)


def going_on_killed(root: str, folder: str, kill: Kill) -> None:
    with kill.at(dist.get_rank()):
        going_on(root, folder)


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_that_is_killed_while_a_run_goes_back_loses_nothing(tmp_path: Path, rank: int, counted: Counted) -> None:
    """A short run of the tests kills at one of the first acts, in which the resume becomes durable."""
    chance, run_of = random.Random(f"{sampling.SEED} {rank}"), counted.root
    for nth in chance.sample(range(12), sampling.number(1, 12)):
        shutil.copytree(run_of, tmp_path / "kept", symlinks=True)
        try:
            ended(RANKS, going_on_killed, str(run_of), "checkpoint-2", Kill(rank, nth))
            (began, weights), other = run(RANKS, begun_again, str(run_of))
        finally:
            shutil.rmtree(run_of)  # folders name where the store is
            (tmp_path / "kept").rename(run_of)
        assert other == (began, weights), nth
        assert weights == counted.whole, nth
        assert began >= 2


def letting_go(root: str, how: str) -> list[list[str]]:
    """Rank 0 alone lets a folder go; then all pin another one, for which there would be no room."""
    model, seen = begun(root), []
    for step in trained(model, UNTIL):
        folder = Path(root, f"checkpoint-{step}")
        if step == 3 and dist.get_rank() == 0:
            unpin(model, Path(root, "checkpoint-1"))
            if how == "removed":
                shutil.rmtree(Path(root, "checkpoint-1"))
        if step <= 3:
            pin(model, folder)
        seen.append(sorted(path.name for path in pinned(model)))
    infinity.close(model)
    return seen


@pytest.mark.parametrize("how", [pytest.param("unpinned", marks=pytest.mark.long), "removed"])
def test_what_one_rank_lets_go_all_let_go(tmp_path: Path, how: str) -> None:
    assert [seen[-1] for seen in run(RANKS, letting_go, str(tmp_path), how)] == [["checkpoint-2", "checkpoint-3"]] * 2
    for path in rank_paths(tmp_path / "swap", RANKS):
        assert len(list(path.glob("pinned-*"))) == 2


def let_go_at_the_end(root: str) -> None:
    model = begun(root)
    for step in trained(model, 2):
        pin(model, Path(root, f"checkpoint-{step}"))
    if dist.get_rank() == 0:
        unpin(model, Path(root, "checkpoint-1"))
        shutil.rmtree(Path(root, "checkpoint-1"))
    infinity.close(model)


def test_what_no_rank_can_go_on_from_is_said_and_its_pin_goes_with_the_next_resume(tmp_path: Path) -> None:
    run(RANKS, let_go_at_the_end, str(tmp_path))
    paths = rank_paths(tmp_path / "swap", RANKS)
    assert [len(read_pins(path)) for path in paths] == [1, 2]
    assert all(
        "does not exist, nor does its infinity.json" in str(each)
        for each in run(RANKS, outcome, str(tmp_path), "checkpoint-1")
    )
    told = run(3, outcome, str(tmp_path), "checkpoint-2")
    assert all("was written by a run of 2 ranks, and this run has 3 ranks" in str(each) for each in told)
    with pytest.raises(ResumeError, match="of 2 ranks, and this run has one process"):
        infinity.resume(Blocks(torch.float32), config(str(tmp_path)), folder=tmp_path / "checkpoint-2", device="cpu")
    assert all("another number of ranks cannot keep them" in str(each) for each in run(3, plainly, str(tmp_path)))
    assert run(RANKS, going_on, str(tmp_path), "checkpoint-2", 2)[0][0] == 3
    assert [len(read_pins(path)) for path in paths] == [1, 1]


def vanished(root: str) -> str:
    """Remove a checkpoint folder while the run continues, and return this rank's messages about it."""
    model, said = begun(root), list[str]()
    for step in trained(model, 1):
        pin(model, Path(root, f"checkpoint-{step}"))
    if dist.get_rank() == 0:
        shutil.rmtree(Path(root, "checkpoint-1"))
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_folders.logger, "warning", lambda text, *values: said.append(text % values))
        checkpoint_folders.name_vanished(model)
    infinity.close(model)
    return said[0]


def test_what_is_said_of_a_folder_that_is_gone_lets_all_ranks_generations_go(tmp_path: Path) -> None:
    for line in run(RANKS, vanished, str(tmp_path)):
        assert main(shlex.split(line.partition("`infinity ")[2].partition("`")[0])) == 0
    assert [read_pins(path) for path in rank_paths(tmp_path / "swap", RANKS)] == [[], []]


def failing(root: str) -> str:
    """Rank 1's disk is full when it pins; afterwards it is not."""
    model, problem = begun(root), ""

    def full(moment: str, path: Path, *_: object) -> None:
        if dist.get_rank() == 1 and moment == "begin write" and path.name.startswith("pinned-"):
            raise SwapIOError("write", path=str(path), errno=28)

    for step in trained(model, 3):
        with atomic_file.observed(full) if step == 1 else contextlib.nullcontext():
            try:
                pin(model, Path(root, f"checkpoint-{step}"))
            except InfinityError as error:
                problem += f"{step}: {error}"
    infinity.close(model)
    return problem


def test_an_error_of_one_rank_is_one_of_all_and_the_run_goes_on(tmp_path: Path) -> None:
    first, second = run(RANKS, failing, str(tmp_path))
    assert first.startswith("1: rank 1: ")
    assert second.startswith("1: ")
    assert read_marker(tmp_path / "checkpoint-1") is None
    assert run(RANKS, outcome, str(tmp_path), "checkpoint-3")[0][0] == 4


def pinned_again(root: str) -> tuple[str, list[str]]:
    """One folder twice; the second time rank 1's disk is full when it remembers that. Then another one."""
    model, problem = begun(root), ""

    def full(moment: str, path: Path, *_: object) -> None:
        if dist.get_rank() == 1 and moment == "begin write" and PINS_NAME in path.name:
            raise SwapIOError("write", path=str(path), errno=28)

    for step in trained(model, 4):
        with atomic_file.observed(full) if step == 3 else contextlib.nullcontext():
            try:
                pin(model, Path(root, {1: "last", 2: "best", 3: "last", 4: "new"}[step]))
            except InfinityError as error:
                problem += f"{step}: {error}"
    there = [f"{path.name} {of}" for path, of in pinned(model).items()]
    infinity.close(model)
    return problem, there


def test_a_folder_that_could_not_be_pinned_again_by_one_rank_is_pinned_by_none(tmp_path: Path) -> None:
    (first, mine), (second, its) = run(RANKS, pinned_again, str(tmp_path))
    assert mine == its == ["best 2", "new 4"]
    assert first.startswith("3: rank 1: ")
    assert second.startswith("3: ")
    assert not (tmp_path / "last" / MARKER_NAME).exists()


def without_room(root: str) -> str:
    model, problem = begun(root, 1), ""
    for step in trained(model, 2):
        try:
            pin(model, Path(root, f"checkpoint-{step}"))
        except PlanError as error:
            problem += f"{step}: {error}"
    infinity.close(model)
    return problem


def test_no_rank_pins_more_than_there_is_room_for(tmp_path: Path) -> None:
    assert all("2: " in each and "cannot pin" in each for each in run(RANKS, without_room, str(tmp_path)))


def copying(root: str) -> list[str]:
    world._SIGN_OF_LIFE_S = 1e-4  # rank 0 takes long
    model = begun(root, 1)
    for step in trained(model, UNTIL):
        if step in (2, 4):
            freed = make_room_for_pin(model, Path(root, f"checkpoint-{step}"))
            pin(model, Path(root, f"checkpoint-{step}"))
    infinity.close(model)
    return [path.name for path in freed]


def from_copy(root: str) -> tuple[int, dict[str, str]]:
    made = config(root) | {"nvme": {"paths": [f"{root}/other"]}}
    model = infinity.offload_from_checkpoint(
        Blocks(torch.float32), Path(root, "checkpoint-2", "portable"), made, device="cpu"
    )
    steps = list(trained(model, UNTIL))
    return steps[0], weights_of(model)


@pytest.mark.long
def test_where_all_pins_are_taken_the_oldest_becomes_a_portable_copy(tmp_path: Path, counted: Counted) -> None:
    whole = counted.whole
    assert run(RANKS, copying, str(tmp_path)) == [["checkpoint-2"]] * RANKS
    marker = read_marker(tmp_path / "checkpoint-2")
    assert marker is not None
    assert marker.portable
    assert run(RANKS, from_copy, str(tmp_path)) == [(3, whole)] * RANKS
    assert run(RANKS, going_on, str(tmp_path), "checkpoint-4", 1) == [(5, whole)] * RANKS


def test_the_commands_know_what_ranks_pin(there: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    swap = str(there / "swap")
    assert main(["checkpoint", "list", swap]) == 0
    assert capsys.readouterr().out.count("pinned by") == 2 * RANKS
    assert main(["checkpoint", "verify", swap]) == 0
    assert main(["checkpoint", "export", swap, "--output", str(tmp_path / "out"), "--step", "2"]) == 0
    assert main(["checkpoint", "remove", swap]) == 2
    assert "checkpoint folders pin generations" in capsys.readouterr().err
    assert main(["checkpoint", "unpin", swap, "--folder", str(there / "checkpoint-2")]) == 0
    assert read_marker(there / "checkpoint-2") is None
    assert [len(read_pins(path)) for path in rank_paths(there / "swap", RANKS)] == [1, 1]
    assert main(["checkpoint", "unpin", swap, "--folder", str(there / "checkpoint-2")]) == 2
    assert "pins no generation" in capsys.readouterr().err
    assert main(["checkpoint", "remove", swap, "--pinned"]) == 0
    assert read_marker(there / "checkpoint-3") is None
    assert not list((there / "swap").glob("rank-*"))
