"""A process killed at any instant, again and again, goes on from its newest generation to the bits of the undisturbed
run (docs/crash-safety.md)."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from tests import sampling
from tests.crash.job import AtAct, AtOperation, AtPiece, AtTime, Kill, Setup
from tests.crash.lives import Campaign, Reference, run_life

KILLS = sampling.number(2, 500, "INFINITY_CRASH_KILLS")
SEED = sampling.seed("INFINITY_CRASH_SEED")
PIECES = sampling.number(1, 100)
PART = 50  # kills in a test, so that several processes share them

SETUPS = [
    Setup(),
    Setup(engine="threads", keep=2, experts=True),
    Setup(weights="host", optimizer="host", commit_every=2, overlap="during_backward"),
    Setup(weights="host", engine="threads", activations="nvme"),
    Setup(optimizer="host", keep=2, overlap="during_backward"),
    Setup(engine="threads", commit_every=2, frozen="nf4"),
    Setup(optimizer="host", frozen="int8"),
]
RESUMED = 3
"""Number of setups that `make test` kills while they resume."""
RESIDENT = [
    Setup(weights="host", optimizer="host", engine="threads", keep=2, steps=4, resident="some"),
    Setup(weights="auto", optimizer="device", steps=4, resident="all"),
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


@dataclass(frozen=True)
class Points:
    """Where to kill a setup.

    Attributes:
        axes: of each point; `make test` tries every value of an axis, and of `strength` axes together, in some setup.
        setups: number of setups, the first of SETUPS, that share these points in `make test`.
    """

    points: Sequence[Kill]
    axes: Sequence[dict[str, Any]]
    strength: int = 1
    setups: int = len(SETUPS)

    def walk(self, number: int) -> list[Kill]:
        """Where `make test` kills the setup of this number, in one life after the other: the setups share the points
        that cover the axes."""
        return [self.points[index] for index in self._walked(number)]

    def others(self, number: int) -> list[Kill]:
        """Where the long forms kill it besides, once in each run: `make crash-test` at all points."""
        if KILLS >= 500:
            return list(self.points)
        walked = [self._walked(each) for each in range(len(SETUPS))]
        left = [(each, index) for each in range(len(SETUPS)) for index in range(len(self.points))]
        left = [(each, index) for each, index in left if index not in walked[each]]
        return [self.points[index] for each, index in sampling.some(left) if each == number]

    def _walked(self, number: int) -> list[int]:
        sample = sampling.covering(self.axes, self.strength)
        return sample[number :: self.setups] if number < self.setups else []


def acts(file: str, *numbers: int, names: tuple[str, ...]) -> list[AtAct]:
    return [AtAct(f"{when} {name}", file, nth) for nth in numbers for name in names for when in ("begin", "end")]


WRITTEN_ASIDE = ("create", "write", "fsync", "rename")
ACTS = [
    *acts("header", 0, names=("unlink", *WRITTEN_ASIDE)),
    *acts("swap", 0, names=("unlink",)),
    *acts("directory", 0, 1, 2, 3, 4, names=("fsync directory",)),  # with the header, those above, two manifests
    *acts("manifest", 0, 1, names=WRITTEN_ASIDE),
    *acts("manifest", 0, 1, names=("unlink",)),
]
"""Acts at which runs are killed. In a walk, the first acts come before any generation exists."""
KINDS: tuple[Literal["kill", "kill_after"], ...] = ("kill", "kill_after")


def on_small_files() -> Points:
    return Points(ACTS, [{"act": (point.moment, point.file), "nth": point.nth} for point in ACTS])


def on_writes_and_syncs(reference: Reference) -> Points:
    """Before and after a write of each state in the first and the last unit, and before and after each sync."""
    states, units = ("weight", "residual", "exp_avg", "exp_avg_sq"), {0: 0, -1: 1}
    writes, syncs = list(itertools.product(states, units, KINDS)), list(itertools.product((0, 1), KINDS))
    points = [AtOperation(kind, "write", units[unit], *reference.extent(state, unit)) for state, unit, kind in writes]
    points += [AtOperation(kind, "sync", commit) for commit, kind in syncs]
    axes: list[dict[str, Any]] = [{"state": state, "unit": unit, "kind": kind} for state, unit, kind in writes]
    axes += [{"sync": commit, "kind": kind} for commit, kind in syncs]
    return Points(points, axes, strength=2)


def on_steps(reference: Reference) -> Points:
    """Before and after a step's first and last write."""
    cases = list(itertools.product((0, 1), (0, 1), KINDS))
    points = [AtOperation(kind, "write", reference.writes_of(commit)[last]) for commit, last, kind in cases]
    return Points(points, [{"commit": commit, "last": last, "kind": kind} for commit, last, kind in cases], strength=2)


def in_a_resume() -> Points:
    points: list[Kill] = [
        *acts("manifest", 0, names=("unlink",)),  # of what was left aside
        *[AtOperation(kind, "read", index) for index in (0, 3, 9) for kind in KINDS],
        *[AtOperation(kind, "write", 0) for kind in KINDS],
        *acts("manifest", 0, names=("rename",)),
    ]
    axes = [
        {"act": point.moment}
        if isinstance(point, AtAct)
        else {"act": (point.kind, point.operation), "index": point.index}
        for point in points
    ]
    return Points(points, axes, setups=RESUMED)


@pytest.mark.parametrize("number", range(len(SETUPS)))
def test_killed_at_each_act_on_a_small_file(number: int, campaign: Campaign) -> None:
    points, setup = on_small_files(), SETUPS[number]
    walk, others = points.walk(number), points.others(number)
    campaign.run(setup, walk)
    for point in others:
        campaign.run(setup, [point])
    assert len(walk) >= 3
    assert campaign.kills == len(walk) + len(others)


@pytest.mark.parametrize("number", range(len(SETUPS)))
def test_killed_before_and_after_each_kind_of_write_and_sync(
    number: int, campaign: Campaign, references: Callable[[Setup], Reference]
) -> None:
    setup = SETUPS[number]
    reference = references(setup)
    counted = on_writes_and_syncs(reference)
    steps = on_steps(reference)  # by their number in a whole run: none of them comes in a life that resumes
    walk, alone = counted.walk(number), [*counted.others(number), *steps.walk(number), *steps.others(number)]
    campaign.run(setup, walk)
    for point in alone:
        campaign.run(setup, [point])
    assert walk
    assert campaign.kills == len(walk) + len(alone) - campaign.unreached
    assert campaign.unreached <= 2  # before and after the last write of a run, in the setups that commit it last


@pytest.mark.parametrize(
    "number",
    [*range(RESUMED), *(pytest.param(number, marks=pytest.mark.long) for number in range(RESUMED, len(SETUPS)))],
)
def test_killed_while_it_resumes_and_in_its_first_step_then(number: int, campaign: Campaign) -> None:
    first = AtAct("end fsync", "manifest", 2)  # two generations are there, and a third aside
    points, setup = in_a_resume(), SETUPS[number]
    campaign.run(setup, [first, *points.walk(number)])
    for point in points.others(number):
        campaign.run(setup, [first, point, point])


def test_killed_where_a_damaged_generation_is_given_up(campaign: Campaign) -> None:
    """The one before it is taken, and what names the damaged one goes first."""
    setup, first = Setup(keep=2), AtAct("begin create", "manifest", 3)
    before, after = acts("manifest", 0, names=("unlink",))
    syncing, synced = acts("directory", 0, names=("fsync directory",))
    for points in [[before, syncing], [after]] if KILLS < 500 else [[before], [after], [syncing], [synced]]:
        campaign.run(setup, [first, *points], damage=damage_the_newest)


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
        setup = chance.choice(SETUPS + RESIDENT)
        duration = campaign.references(setup).seconds
        times = [AtTime(chance.uniform(0, duration)) for _ in range(chance.choice([1, 1, 1, 2, 3, 4]))]
        campaign.run(setup, times, note=f"INFINITY_CRASH_SEED={SEED}, run {index}")
        index += 1


@pytest.mark.long(kept="only here a process is killed while states go from the device to the store")
def test_killed_while_states_go_from_the_device_to_the_store(campaign: Campaign) -> None:
    """Between the copy of a random piece to host memory, its write and the manifest, in two lives."""
    for index in range(PIECES):
        chance = random.Random(f"{SEED} {index}")
        setup = chance.choice(RESIDENT)
        first, then = (chance.randrange(campaign.references(setup).pieces // 3) for _ in range(2))
        points = [AtPiece("copied", first), AtPiece("written", then)]
        campaign.run(setup, points, note=f"INFINITY_CRASH_SEED={SEED}, run {index}")
    assert campaign.kills == 2 * PIECES


@pytest.mark.long
@pytest.mark.parametrize("setup", RESIDENT, ids=lambda setup: setup.resident)
def test_killed_at_each_point_with_states_on_the_device(
    setup: Setup, campaign: Campaign, references: Callable[[Setup], Reference]
) -> None:
    reference, first = references(setup), AtAct("end fsync", "manifest", 2)
    named = [*on_small_files().points, *on_writes_and_syncs(reference).points, *on_steps(reference).points]
    for point in sampling.some(named):
        campaign.run(setup, [point])
    for point in sampling.some(in_a_resume().points):
        campaign.run(setup, [first, point, point])
    assert campaign.kills


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
