"""Stores that runs of another number of ranks left in nvme.paths are removed, or refused, and never lost."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from infinity.cli.main import main
from infinity.config import NvmeConfig
from infinity.errors import StoreLockedError, StoreNotEmptyError
from infinity.io.engine import open_engine
from infinity.io.generations import Generations
from infinity.io.store import Extent, Mode, SwapStore
from infinity.ranks.paths import rank_path, rank_paths
from infinity.sharded.rank_stores import clear_leftovers, clear_others, counts_in, remove_generations, run_and_steps_in
from infinity.sizes import PAGE_BYTES


def left(path: Path, mode: Mode, *others: Path, ends: bool = True, run: str = "", step: int = 0) -> SwapStore:
    """Return a store as a killed run leaves it. Args: ends: whether the run's process ends. step: of its generation; 0
    for none."""
    for each in (path, *others):
        each.parent.mkdir(exist_ok=True)
    engine = open_engine(NvmeConfig(paths=[path, *others]))
    store = SwapStore([path, *others], PAGE_BYTES, engine, mode=mode, run=run)
    if step:
        Generations(store, [Extent("a", 0, "weight", (0,), PAGE_BYTES)], 1).make(step, {}, {})
    engine.close()
    for directory in store.directories if ends else ():
        directory.close(keep=True)
    return store


def test_stores_are_counted_by_the_ranks_of_their_runs(tmp_path: Path) -> None:
    assert counts_in(tmp_path / "missing") == []
    for rank in range(2):
        left(rank_path(tmp_path, rank, 2), "in place")
    left(rank_path(tmp_path, 4, 5), "in place")
    left(tmp_path, "in place")
    rank_path(tmp_path, 0, 3).mkdir()
    assert counts_in(tmp_path) == [1, 2, 5]
    assert rank_paths(tmp_path, 1) == [tmp_path]
    assert [path.name for path in rank_paths(tmp_path, 2)] == ["rank-00000-of-00002", "rank-00001-of-00002"]


def test_what_cannot_be_resumed_goes(tmp_path: Path) -> None:
    for rank in range(2):
        left(rank_path(tmp_path, rank, 2), "in place")
        left(rank_path(tmp_path, rank, 3), "generations")
    clear_others([tmp_path, tmp_path / "missing"], 3)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["rank-00000-of-00003", "rank-00001-of-00003"]


def test_a_generation_of_another_number_of_ranks_is_in_the_way(tmp_path: Path) -> None:
    left(rank_path(tmp_path, 0, 2), "in place")
    left(rank_path(tmp_path, 1, 2), "generations", step=4)
    before = sorted(tmp_path.rglob("*"))
    for count in (1, 2, 3):
        with pytest.raises(StoreNotEmptyError, match="2 ranks.*No checkpoint folder names its generations"):
            clear_others([tmp_path], count)
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("disks", [["a disk"], ["a disk", "b"]], ids=["one disk", "two disks"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_in_the_way_goes_with_the_command_that_is_named(ranks: int, disks: list[str], tmp_path: Path) -> None:
    places = [tmp_path / disk for disk in disks]
    for rank in range(ranks):
        first, *others = (rank_path(place, rank, ranks) for place in places)
        left(first, "generations", *others, step=4)
    with pytest.raises(StoreNotEmptyError, match="give this run another directory") as raised:
        clear_others(places, 3)
    clear_others([tmp_path / "another"], 3)
    remove = str(raised.value).partition("`infinity checkpoint remove ")[2].partition("`")[0]
    assert main(["checkpoint", "remove", *shlex.split(remove)]) == 0
    clear_others(places, 3)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_generation_of_one_process_is_in_the_way_of_ranks_and_what_it_cannot_resume_goes(tmp_path: Path) -> None:
    left(tmp_path / "a", "generations", step=4)
    left(tmp_path / "b", "in place")
    with pytest.raises(StoreNotEmptyError, match="one process"):
        clear_others([tmp_path / "b", tmp_path / "a"], 2)
    assert (tmp_path / "b" / "store.infinity").exists()
    clear_others([tmp_path / "b"], 2)
    assert list((tmp_path / "b").iterdir()) == []
    clear_others([tmp_path / "a"], 1)  # which is refused where the store is opened


def test_of_other_ranks_only_leftovers_go_with_a_resume(tmp_path: Path) -> None:
    """Which generations a store on two paths has is said on the first of them only."""
    first, second = tmp_path / "a", tmp_path / "b"
    for path in (first, second):
        left(rank_path(path, 0, 2), "in place")
        left(rank_path(path, 0, 4), "in place")
    left(rank_path(first, 0, 3), "generations", step=4)
    left(rank_path(second, 0, 3), "generations")
    clear_leftovers([first, second], 4)
    assert counts_in(first) == counts_in(second) == [3, 4]


def test_a_store_that_a_run_uses_is_not_removed(tmp_path: Path) -> None:
    store = left(rank_path(tmp_path, 0, 2), "in place", ends=False)
    with pytest.raises(StoreLockedError):
        clear_others([tmp_path], 1)
    assert store.directories[0].swap_path.exists()
    store.directories[0].close()


def test_a_store_tells_its_run_and_steps_until_they_are_removed(tmp_path: Path) -> None:
    path = rank_path(tmp_path, 0, 2)
    assert run_and_steps_in([path]) == ("", [])
    left(path, "generations", run="r", step=7)
    assert run_and_steps_in([path]) == ("r", [7])
    remove_generations(path)
    assert run_and_steps_in([path]) == ("r", [])
