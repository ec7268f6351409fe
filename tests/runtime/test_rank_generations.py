"""A generation of several ranks exists where all have its manifest: a run goes on from there, whatever ends it."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import random
import shutil
import signal
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import infinity
from infinity.checkpoint import reshard
from infinity.cli.main import main
from infinity.errors import InfinityError, PeerError, ResumeError, SwapIOError
from infinity.io import atomic_file
from infinity.ranks.paths import rank_path, rank_paths
from infinity.runtime.pins import pin
from infinity.sharded.rank_stores import counts_in
from tests import sampling
from tests.checkpoint.test_export import flip
from tests.crash.job import kind_of
from tests.ranks.workers import RankError, ended, run
from tests.runtime.over_ranks import TIERS, Blocks, batch, digest, offloaded

pytestmark = pytest.mark.cpu_only("several ranks compute on the CPU")

NVME = TIERS[3]
STEPS = 5
BATCHES = 12
"""Number of batches that any number of ranks in the tests can divide equally."""
PAIR = 2
"""Batches of a run of two ranks."""


@dataclass(frozen=True)
class Kill:
    """A rank is killed at the `nth` time (from 0) that `moment` comes for a file of this kind."""

    rank: int
    moment: str
    file: str
    nth: int

    @property
    def axes(self) -> dict[str, Hashable]:
        when, act = self.moment.split(" ", 1)
        return {"rank": self.rank, "when": when, "act": act, "file": self.file}

    def at(self, rank: int) -> contextlib.AbstractContextManager[None]:
        if rank != self.rank:
            return contextlib.nullcontext()
        seen = 0

        def kill(moment: str, path: Path, _target: Path | None, _data: bytes) -> None:
            nonlocal seen
            if (moment, kind_of(path)) == (self.moment, self.file):
                seen += 1
                if seen > self.nth:
                    os.kill(os.getpid(), signal.SIGKILL)

        return atomic_file.observed(kill)


@dataclass(frozen=True)
class Life:
    """The results of a rank: the step that it began after, the losses of its steps by step, and the
    weights at the end."""

    began: int
    losses: dict[int, list[float]]
    weights: dict[str, str]


def live(
    folder: str,
    config: dict[str, Any],
    until: int,
    micro: int,
    *,
    dtype: str = "float32",
    kill: Kill | None = None,
    copy: str = "",
    model: dict[str, Any] | None = None,
) -> Life:
    """One life of this rank, or of a process alone: it goes on from what is there, or begins anew, and takes `micro`
    batches in each step. Args: copy: a portable copy to begin with. model: arguments of Blocks."""
    several = dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
    kind = getattr(torch, dtype)
    paths, memory = {"nvme": {"paths": [folder]}}, {"memory": {"host": "256MiB", "device": "64MiB"}}
    built = functools.partial(Blocks, kind, **(model or {}))
    with contextlib.nullcontext() if kill is None else kill.at(rank):
        try:
            trained = infinity.resume(built(), {"commit_every": 1, **memory, **paths, **config}, device="cpu")
        except ResumeError:
            if copy:
                trained = infinity.offload_from_checkpoint(built(), copy, {**memory, **paths, **config}, device="cpu")
            else:
                trained = offloaded(folder, {"commit_every": 1, **config}, kind, **(model or {}))
        optim = infinity.AdamW(trained.parameters(), lr=1e-2, max_grad_norm=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optim, 2, 0.5)
        began = infinity.track(model=trained, schedule=schedule)
        losses: dict[int, list[float]] = {}
        for step in range(began, until):
            for turn in range(micro):
                loss = trained(batch(step, turn * world + rank, kind))
                loss.backward()
                losses.setdefault(step, []).append(loss.item())
            optim.grad_scale = torch.tensor(float(micro))
            optim.step()
            vars(optim).pop("grad_scale", None)
            optim.zero_grad()
            schedule.step()
        with infinity.gathered(trained, trained):
            weights = {name: digest(parameter) for name, parameter in trained.named_parameters()}
        infinity.close(trained)
    return Life(began, losses, weights)


def on_rank(folder: str, config: dict[str, Any], until: int, micro: int, options: dict[str, Any]) -> Any:
    """Return a Life, or the ranks that an error names and its text."""
    try:
        return live(folder, config, until, micro, **options)
    except PeerError as error:
        return error.ranks, str(error)


def batches_of(life: Life, rank: int, world: int) -> dict[int, list[float]]:
    """Return the losses of a rank, from the losses of one process with all batches."""
    return {step: losses[rank::world] for step, losses in life.losses.items()}


def require_same(lives: list[Life], one: Life, world: int) -> None:
    for rank, life in enumerate(lives):
        assert life.weights == one.weights
        expected = batches_of(one, rank, world)
        assert life.losses == {step: expected[step] for step in life.losses}


class Undisturbed:
    """Runs of one process that never stop, each made once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[str, Life] = {}

    def __call__(self, config: dict[str, Any], batches: int, dtype: str = "float32", steps: int = STEPS) -> Life:
        key = repr((sorted(config.items()), batches, dtype, steps))
        if key not in self._made:
            self._made[key] = live(str(self._root / str(len(self._made))), config, steps, batches, dtype=dtype)
        return self._made[key]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"))


COMMITS = [{"commit_every": 1}, {"commit_every": 2, "keep": 2}, {"commit_every": "auto"}]


@pytest.mark.covering(strength=1, most=1)
@pytest.mark.parametrize("tiers", TIERS[1:])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("moments", ["fp32", "int8"])
@pytest.mark.parametrize("commits", COMMITS)
def test_a_resumed_run_ends_in_the_bits_of_one_that_never_stopped(
    tmp_path: Path,
    undisturbed: Undisturbed,
    tiers: dict[str, Any],
    ranks: int,
    dtype: str,
    moments: str,
    commits: dict[str, Any],
) -> None:
    config = tiers | commits | {"moments": moments}
    require_resumed(str(tmp_path), config, dtype, ranks, 1, (3, STEPS), undisturbed)


@pytest.mark.long
@pytest.mark.parametrize("tiers", TIERS[1:])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("moments", ["fp32", "int8"])
@pytest.mark.parametrize("commits", COMMITS)
def test_a_run_that_is_resumed_twice_ends_in_the_bits_of_one_that_never_stopped(
    tmp_path: Path,
    undisturbed: Undisturbed,
    tiers: dict[str, Any],
    ranks: int,
    dtype: str,
    moments: str,
    commits: dict[str, Any],
) -> None:
    config = tiers | commits | {"moments": moments}
    require_resumed(str(tmp_path), config, dtype, ranks, 2, (2, 3, STEPS), undisturbed)


def require_resumed(
    folder: str,
    config: dict[str, Any],
    dtype: str,
    ranks: int,
    micro: int,
    ends: tuple[int, ...],
    undisturbed: Undisturbed,
) -> None:
    """Each life goes on where the one before it ended. Args: micro: batches of a rank in each step."""
    began = 0
    for end in ends:
        lives = run(ranks, on_rank, folder, config, end, micro, {"dtype": dtype})
        assert {life.began for life in lives} == {began}
        began = end
    require_same(lives, undisturbed(config, micro * ranks, dtype), ranks)


def manifests(folder: str, rank: int, ranks: int) -> list[Path]:
    return sorted(rank_paths(Path(folder), ranks)[rank].glob("generation-*.infinity"))


def steps_of(folder: str, rank: int, ranks: int) -> list[int]:
    return [int(path.stem.split("-")[1]) for path in manifests(folder, rank, ranks)]


KILLS = [
    Kill(rank, moment, file, nth)
    for rank in (0, 1)
    for file, moments, times in (
        ("manifest", ("begin create", "end write", "begin rename", "end rename", "begin unlink", "end unlink"), 3),
        ("header", ("begin write", "end rename"), 1),
        ("directory", ("begin fsync directory", "end fsync directory"), 5),
    )
    for moment in moments
    for nth in range(times)
]


@pytest.mark.parametrize(
    "kill",
    sampling.drawn(KILLS, [kill.axes for kill in KILLS], strength=1, most=3),
    ids=lambda kill: f"{kill.rank} {kill.moment} {kill.file} {kill.nth}",
)
def test_a_rank_that_is_killed_at_any_act_loses_no_generation(
    tmp_path: Path, undisturbed: Undisturbed, kill: Kill
) -> None:
    one, folder = undisturbed(NVME, PAIR), str(tmp_path / "all")
    first = ended(2, on_rank, folder, NVME, STEPS, 1, {"kill": kill})
    assert first[kill.rank].exitcode == -signal.SIGKILL
    told = first[1 - kill.rank].value
    if isinstance(told, tuple):  # else it had done all of its steps
        assert told[0] == (kill.rank,), told
    there = set(steps_of(folder, 0, 2)) & set(steps_of(folder, 1, 2))
    lives = run(2, on_rank, folder, NVME, STEPS, 1, {})
    assert [life.began for life in lives] == [max(there, default=0)] * 2
    require_same(lives, one, 2)


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stores of two ranks after three steps, with the last two generations."""
    folder = tmp_path_factory.mktemp("three steps") / "all"
    run(2, on_rank, str(folder), NVME | {"keep": 2}, 3, 1, {})
    return folder


@pytest.mark.parametrize(
    "how", ["no manifest", pytest.param("a damaged manifest", marks=pytest.mark.long), "a damaged state"]
)
def test_where_one_rank_has_no_whole_generation_all_go_on_from_the_one_before(
    tmp_path: Path, undisturbed: Undisturbed, three_steps: Path, how: str
) -> None:
    config, folder = NVME | {"keep": 2}, str(tmp_path / "all")
    shutil.copytree(three_steps, folder)
    newest = manifests(folder, 1, 2)[-1]
    if how == "no manifest":
        newest.unlink()
    elif how == "a damaged manifest":
        newest.write_bytes(newest.read_bytes()[:-3])
    else:  # which only reading it tells
        flip(newest.parent, 3, "exp_avg")
    lives = run(2, on_rank, folder, config, STEPS, 1, {})
    assert {life.began for life in lives} == {2}
    require_same(lives, undisturbed(NVME, PAIR), 2)


def asked(folder: str) -> Any:
    model = offloaded(folder, NVME | {"commit_every": 1000})
    optim = infinity.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        model(batch(step, dist.get_rank(), torch.float32)).backward()
        optim.step()
        optim.zero_grad()
        infinity.commit(model)
        infinity.commit(model)
    found = steps_of(folder, dist.get_rank(), 2)
    infinity.close(model)
    return found


def test_what_is_asked_for_is_a_generation_of_all_ranks(tmp_path: Path) -> None:
    assert run(2, asked, str(tmp_path)) == [[2]] * 2


def begun(folder: str) -> str:
    try:
        infinity.close(offloaded(folder, NVME | {"commit_every": 1}), discard=True)
    except InfinityError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_run_of_another_number_of_ranks_is_not_written_over(tmp_path: Path) -> None:
    folder = str(tmp_path / "all")
    run(2, on_rank, folder, NVME, 1, 1, {})
    told = run(3, begun, folder)
    assert "StoreNotEmptyError" in told[0]
    assert "2 ranks" in told[0]
    assert "2 ranks" in told[1]
    assert "2 ranks" in begun(folder)
    assert len(manifests(folder, 0, 2)) == 1


def differing(folder: str) -> Any:
    try:
        offloaded(folder, NVME | {"commit_every": 1 + dist.get_rank()})
    except PeerError as error:
        return str(error)


def test_ranks_that_would_commit_other_steps_are_told(tmp_path: Path) -> None:
    assert all("commit_every" in told for told in run(2, differing, str(tmp_path)))


@pytest.mark.long
def test_ranks_that_are_killed_at_any_time_go_on_from_one_step(tmp_path: Path, undisturbed: Undisturbed) -> None:
    drawn = random.Random(sampling.SEED)
    one = undisturbed(NVME, PAIR)
    for number in range(sampling.number(1, 40)):
        folder, lives = str(tmp_path / f"all{number}"), 0
        while lives < 3:
            lives += 1
            kill = Kill(
                drawn.randrange(2),
                drawn.choice(("begin rename", "end unlink", "end write")),
                "manifest",
                drawn.randrange(3),
            )
            ended(2, on_rank, folder, NVME, STEPS, 1, {"kill": kill})
        require_same(run(2, on_rank, folder, NVME, STEPS, 1, {}), one, 2)


def went_on(
    folder: str, config: dict[str, Any], ranks: int, until: int, batches: int = BATCHES, **options: Any
) -> list[Life]:
    micro = batches // ranks
    if ranks == 1:
        return [live(folder, config, until, micro, **options)]
    return run(ranks, on_rank, folder, config, until, micro, options)


def require_only(folder: Path, ranks: int) -> None:
    """Check that the stores of so many ranks exist, and no others."""
    assert counts_in(folder) == [ranks]
    names = {"rank" if path.name.startswith("rank-") else path.name for path in folder.iterdir()}
    assert ("rank" in names) == (ranks > 1)
    assert ("store.infinity" in names) == (ranks == 1)


@dataclass(frozen=True)
class Changing:
    """A run whose number of ranks changes after each step."""

    config: dict[str, Any]
    dtype: str
    folders: list[Path]

    def require_same(self, counts: tuple[int, ...], batches: int, one: Life) -> None:
        config = self.config | {"nvme": {"paths": [str(each) for each in self.folders]}}
        for done, ranks in enumerate(counts):
            lives = went_on(str(self.folders[0]), config, ranks, done + 1, batches, dtype=self.dtype)
            assert [life.began for life in lives] == [done] * ranks
            for folder in self.folders:
                require_only(folder, ranks)
        require_same(lives, one, ranks)


@pytest.fixture
def changing(tiers: dict[str, Any], moments: str, dtype: str, disks: int, tmp_path: Path) -> Changing:
    return Changing(tiers | {"moments": moments}, dtype, [tmp_path / f"disk{index}" for index in range(disks)])


@pytest.mark.long
@pytest.mark.parametrize("moments", ["fp32", "int8"])
@pytest.mark.parametrize("tiers", TIERS[1:])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("disks", [1, 2])
def test_a_run_goes_on_with_any_number_of_ranks(changing: Changing, undisturbed: Undisturbed) -> None:
    changing.require_same((4, 2, 3, 1, 2), BATCHES, undisturbed(changing.config, BATCHES, changing.dtype))


@pytest.mark.long(kept="only here a run goes on with more ranks, then in one process, over two disks")
@pytest.mark.covering(most=1)
@pytest.mark.parametrize("moments", ["int8"])
@pytest.mark.parametrize("tiers", TIERS[3:])
@pytest.mark.parametrize("dtype", ["bfloat16"])
@pytest.mark.parametrize("disks", [2])
def test_a_run_goes_on_with_more_ranks_and_in_one_process(changing: Changing, undisturbed: Undisturbed) -> None:
    changing.require_same((2, 3, 1), 6, undisturbed(changing.config, 6, changing.dtype, steps=3))


@pytest.mark.parametrize(
    "kill",
    [
        pytest.param(
            Kill(0, "end rename", "manifest", 0),
            marks=pytest.mark.long(kept="only here a rank dies while the number of ranks changes"),
        ),
        # As after the one above: rank 0 has a manifest, rank 1 has none.
        pytest.param(Kill(1, "begin rename", "manifest", 0), marks=pytest.mark.long),
        pytest.param(Kill(0, "end unlink", "manifest", 0), marks=pytest.mark.long),
    ],
)
def test_a_rank_that_is_killed_while_a_run_changes_its_number_of_ranks_loses_nothing(
    tmp_path: Path, undisturbed: Undisturbed, kill: Kill
) -> None:
    batches, folder = 6, str(tmp_path / "all")
    one = undisturbed(NVME, batches)
    went_on(folder, NVME, 3, 2, batches)
    assert ended(2, on_rank, folder, NVME, STEPS, 3, {"kill": kill})[kill.rank].exitcode == -signal.SIGKILL
    lives = went_on(folder, NVME, 2, 3, batches)
    assert {life.began for life in lives} == {2}
    lives = went_on(folder, NVME, 3, STEPS, batches)
    assert {life.began for life in lives} == {3}
    require_same(lives, one, 3)
    require_only(Path(folder), 3)


def test_the_commands_know_the_stores_of_all_ranks(tmp_path: Path, capsys: Any) -> None:
    folder = str(tmp_path / "all")
    (life, _) = went_on(folder, NVME | {"moments": "int8"}, 2, 2, PAIR)
    assert main(["checkpoint", "list", folder]) == 0
    assert "generations that are complete on all 2 ranks: 1, 2" in capsys.readouterr().out
    assert main(["checkpoint", "verify", folder]) == 0
    assert capsys.readouterr().out.count("every byte is as it was written") == 4
    assert main(["checkpoint", "export", folder, "--output", str(tmp_path / "out")]) == 0
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: digest(value) for name, value in written.items()} == life.weights
    assert main(["checkpoint", "remove", folder]) == 0
    assert list(Path(folder).iterdir()) == []


@pytest.mark.long
def test_a_portable_copy_of_ranks_goes_on_in_one_process_and_in_others(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    config, folder, out, batches = NVME | {"moments": "int8"}, str(tmp_path / "all"), str(tmp_path / "out"), 6
    one = undisturbed(config, batches)
    went_on(folder, config, 3, 2, batches)
    assert infinity.export_checkpoint(folder, out) == 2
    for ranks in (1, 2):
        lives = went_on(str(tmp_path / f"after{ranks}"), config, ranks, STEPS, batches, copy=out)
        assert {life.began for life in lives} == {2}
        require_same(lives, one, ranks)


def test_a_store_that_one_rank_lacks_and_one_of_another_run_are_named_on_all_ranks(tmp_path: Path) -> None:
    folder, other = str(tmp_path / "all"), str(tmp_path / "other")
    went_on(folder, NVME, 2, 1, PAIR)
    shutil.rmtree(rank_path(tmp_path / "all", 1, 2))
    for told in run(2, resumed, folder):
        assert "rank 1 has no store there" in told
    went_on(other, NVME, 2, 1, PAIR)
    shutil.copytree(rank_path(tmp_path / "other", 1, 2), rank_path(tmp_path / "all", 1, 2))
    for told in run(2, resumed, folder):
        assert "the stores of ranks 0 and 1 are of different runs" in told


def resumed(folder: str) -> str:
    with pytest.raises(ResumeError) as error:
        infinity.resume(Blocks(torch.float32), NVME | {"commit_every": 1, "nvme": {"paths": [folder]}}, device="cpu")
    return str(error.value)


def test_a_checkpoint_of_one_process_is_not_written_over_by_ranks(tmp_path: Path) -> None:
    folder = str(tmp_path / "all")
    went_on(folder, NVME, 1, 2, PAIR)
    told = run(2, begun, folder)
    assert "StoreNotEmptyError" in told[0]
    assert "one process" in told[0]
    assert "one process" in told[1]
    assert [life.began for life in went_on(folder, NVME, 2, 3, PAIR)] == [2, 2]


def test_what_not_all_ranks_see_is_not_taken_over(tmp_path: Path) -> None:
    """Local disks: on that of rank 0 is a checkpoint that rank 1 does not see."""
    disks = [str(tmp_path / f"disk{rank}") for rank in range(2)]
    went_on(disks[0], NVME, 1, 1, PAIR)
    before = sorted(tmp_path.rglob("*"))
    told = run(2, on_own_disk, disks)
    assert "one process" in told[0]
    assert "one process" in told[1]
    assert sorted(tmp_path.rglob("*")) == before


def on_own_disk(disks: list[str]) -> str:
    try:
        live(disks[dist.get_rank()], NVME, 1, 1)
    except InfinityError as error:
        return str(error)
    return ""


def test_what_folders_pin_is_not_taken_over(tmp_path: Path) -> None:
    folder = str(tmp_path / "all")
    model = offloaded(folder, NVME | {"commit_every": 1, "pins": 1})
    optim = infinity.AdamW(model.parameters())
    model(batch(0, 0, torch.float32)).backward()
    optim.step()
    pin(model, tmp_path / "checkpoint")
    infinity.close(model)
    with pytest.raises(RankError, match="pin"):
        run(2, taken_over, folder)
    assert list(Path(folder).glob("pinned-*"))


def taken_over(folder: str) -> None:
    paths, memory = {"nvme": {"paths": [folder]}}, {"memory": {"host": "256MiB", "device": "64MiB"}}
    infinity.resume(Blocks(torch.float32), {**NVME, **paths, **memory, "commit_every": 1}, device="cpu")


def test_an_error_in_the_first_commit_leaves_what_can_begin_anew(tmp_path: Path) -> None:
    folder = str(tmp_path / "all")
    one = live(str(tmp_path / "one"), NVME, 2, PAIR)
    told = run(2, failing_to_write, folder)
    assert "rank 1" in told[0]
    assert "generation 1" in told[1]
    lives = went_on(folder, NVME, 2, 2, PAIR)
    assert [life.began for life in lives] == [0, 0]
    require_same(lives, one, 2)


def failing_to_write(folder: str) -> str:
    def full(moment: str, path: Path, _target: Path | None, _data: bytes) -> None:
        if dist.get_rank() == 1 and moment == "begin write" and kind_of(path) == "manifest":
            raise SwapIOError("write", path=str(path), errno=errno.ENOSPC)

    with atomic_file.observed(full), pytest.raises(InfinityError) as error:
        live(folder, NVME, 2, 1)
    return str(error.value)


def unreadable(folder: str) -> str:
    def fail(*_: Any, **__: Any) -> Any:
        raise SwapIOError("reading", path=folder, errno=errno.EIO)

    if dist.get_rank() == 1:
        reshard.newest_stored_generation = fail
    with pytest.raises(InfinityError) as error:
        taken_over(folder)
    return str(error.value)


def test_all_hear_of_a_rank_that_cannot_read_what_is_taken_over(tmp_path: Path) -> None:
    folder = str(tmp_path / "all")
    went_on(folder, NVME, 1, 1, PAIR)
    told = run(2, unreadable, folder)
    assert "rank 1" in told[0]
    assert "reading" in told[0]
    assert "reading" in told[1]
    require_only(Path(folder), 1)
