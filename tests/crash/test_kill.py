"""A process killed at any instant, again and again, goes on from its newest generation to the bits of the undisturbed
run (docs/crash-safety.md)."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest

from tests import sampling
from tests.crash.job import AtAct, AtOperation, AtTime, Kill, Setup
from tests.crash.lives import Campaign, Reference, run_life

KILLS = sampling.number(20, 500, "INFINITY_CRASH_KILLS")
SEED = sampling.seed("INFINITY_CRASH_SEED")
PART = 50  # kills in a test, so that several processes share them

SETUPS = [
    Setup(),
    Setup(engine="threads", keep=2),
    Setup(weights="host", optimizer="host", commit_every=2, overlap="during_backward"),
    Setup(weights="host", engine="threads"),
    Setup(optimizer="host", keep=2, overlap="during_backward"),
    Setup(engine="threads", commit_every=2, frozen="nf4"),
    Setup(optimizer="host", frozen="int8"),
]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Setup], Reference]:
    """Undisturbed runs, each made once."""
    made: dict[Setup, Reference] = {}

    def reference(setup: Setup) -> Reference:
        if setup not in made:
            made[setup] = Reference(setup, tmp_path_factory.mktemp("undisturbed"))
        return made[setup]

    return reference


@pytest.fixture
def campaign(tmp_path: Path, references: Callable[[Setup], Reference]) -> Iterator[Campaign]:
    """Runs that are killed; at the end their totals are printed, and nothing may be lost."""
    made = Campaign(tmp_path, references)
    yield made
    print(made)
    assert not made.lost, "\n\n".join(made.lost[:5])


def acts(file: str, *numbers: int, names: tuple[str, ...]) -> list[AtAct]:
    return [AtAct(f"{when} {name}", file, nth) for nth in numbers for name in names for when in ("begin", "end")]


WRITTEN_ASIDE = ("create", "write", "fsync", "rename")
ACTS = [
    *acts("header", 0, names=("unlink", *WRITTEN_ASIDE)),
    *acts("swap", 0, names=("unlink",)),
    *acts("manifest", 0, 1, names=WRITTEN_ASIDE),
    *acts("manifest", 0, 1, names=("unlink",)),
    *acts("directory", 0, 1, 2, 3, 4, names=("fsync directory",)),  # with the header, those above, two manifests
]


def operations(reference: Reference) -> list[AtOperation]:
    """Before and after: a write of each state in the first and the last unit; a step's first and last write; syncs."""
    points = [
        AtOperation(kind, "write", index, *reference.extent(state, unit))
        for state in ("weight", "residual", "exp_avg", "exp_avg_sq")
        for unit, index in ((0, 0), (-1, 1))
        for kind in ("kill", "kill_after")
    ]
    for commit in (0, 1):
        first, last = reference.writes_of(commit)
        for index in (first, last):
            points += [AtOperation(kind, "write", index) for kind in ("kill", "kill_after")]
        points += [AtOperation(kind, "sync", commit) for kind in ("kill", "kill_after")]
    return points


def every(points: list[Kill]) -> list[tuple[Setup, Kill]]:
    """Each point with one setup, in turn; with all of them when there is time (make crash-test)."""
    whole = [(setup, point) for setup in SETUPS for point in points]
    if KILLS >= 500:
        return whole
    once = list(zip(cycle(SETUPS), points, strict=False))
    return once + sampling.some([each for each in whole if each not in once])


def test_killed_at_each_act_on_a_small_file(campaign: Campaign) -> None:
    for setup, point in every(list(ACTS)):
        campaign.run(setup, [point])
    assert campaign.kills >= 40


def test_killed_before_and_after_each_kind_of_write_and_sync(
    campaign: Campaign, references: Callable[[Setup], Reference]
) -> None:
    points = {setup: operations(references(setup)) for setup in SETUPS}
    for setup, index in every(list(range(len(points[SETUPS[0]])))):
        campaign.run(setup, [points[setup][index]])
    assert campaign.kills >= 28
    assert campaign.unreached <= 4  # before and after the last write of a run, in the two setups that commit it last


def test_killed_while_it_resumes_and_in_its_first_step_then(campaign: Campaign) -> None:
    first = AtAct("end fsync", "manifest", 2)  # two generations are there, and a third aside
    second = [
        *acts("manifest", 0, names=("unlink",)),  # of what was left aside
        *[AtOperation(kind, "read", index) for kind in ("kill", "kill_after") for index in (0, 3, 9)],
        *[AtOperation(kind, "write", 0) for kind in ("kill", "kill_after")],
        *acts("manifest", 0, names=("rename",)),
    ]
    for setup, point in every(second):
        campaign.run(setup, [first, point, point])


def test_killed_where_a_damaged_generation_is_given_up(campaign: Campaign) -> None:
    """The one before it is taken, and what names the damaged one goes first."""
    setup = Setup(keep=2)
    for point in acts("manifest", 0, names=("unlink",)) + acts("directory", 0, names=("fsync directory",)):
        campaign.run(setup, [AtAct("begin create", "manifest", 3), point], damage=damage_the_newest)


def damage_the_newest(directory: Path) -> int:
    """Break generation 3; returns the one that is whole."""
    newest = max(directory.glob("generation-*"))
    newest.write_bytes(newest.read_bytes()[:-1])
    return 2


@pytest.mark.parametrize("part", range(-(-KILLS // PART)))
def test_killed_at_random_instants(part: int, campaign: Campaign) -> None:
    index = 1000 * part
    while campaign.kills < min(PART, KILLS - PART * part):
        chance = random.Random(f"{SEED}.{index}")
        setup = chance.choice(SETUPS)
        duration = campaign.references(setup).seconds
        times = [AtTime(chance.uniform(0, duration)) for _ in range(chance.choice([1, 1, 1, 2, 3, 4]))]
        campaign.run(setup, times, note=f"INFINITY_CRASH_SEED={SEED}, run {index}")
        index += 1


def test_orphaned_loader_workers_do_not_hold_the_store(tmp_path: Path) -> None:
    setup = Setup()
    killed = run_life(replace(setup, loader=True), tmp_path, AtAct("end unlink", "manifest", 1))
    try:
        assert killed.killed
        assert len(killed.workers) == 2
        for worker in killed.workers:
            os.kill(worker, 0)  # alive, and they will hang for ever
        life = run_life(setup, tmp_path)
        assert life.began == killed.commits[-1]
        for worker in killed.workers:
            os.kill(worker, 0)
    finally:
        for worker in killed.workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
