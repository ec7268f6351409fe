"""A power cut at any moment leaves a disk from which the run goes on to the bits of the undisturbed run, from the
generation it took for durable or a newer one (README, "Nothing lost")."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import sampling
from tests.crash.job import AtAct, Setup
from tests.crash.lives import Result, require_only_the_newest, require_same_end, result_of, run_life
from tests.crash.power import Moment, Record, put, read_journal

IMAGES = sampling.number(30, 1000, "INFINITY_POWER_IMAGES")
SEED = sampling.seed("INFINITY_CRASH_SEED")

RUNS = {
    "states in the store": (Setup(steps=5), None),
    "two generations kept": (Setup(steps=5, keep=2, engine="threads"), None),
    "weights in RAM": (Setup(steps=5, weights="host"), None),
    "two paths": (Setup(steps=5, paths=2), None),
    "all in RAM, every other step": (Setup(steps=5, weights="host", optimizer="host", commit_every=2), None),
    "killed and resumed": (Setup(steps=5, keep=2), AtAct("end create", "manifest", 2)),
}
"""Each with where a first life was killed, if one was."""


@dataclass
class Recorded:
    """A run that was recorded, in a directory whose disk is put into one state after the other."""

    setup: Setup
    root: Path
    records: list[Record]
    sizes: dict[Path, int]
    expected: Result

    def go_on(self, chance: random.Random) -> int:
        """Cut the power at a random moment and run the job; returns the step it went on from.

        Raises:
            AssertionError: what was promised is lost, or the end is another.
        """
        cut = chance.randint(0, len(self.records))
        moment = Moment(self.records, cut, self.sizes)
        put(moment.image(chance), self.root / "disk")
        where = f"cut at {cut} of {len(self.records)} records, generation {moment.promised} promised"
        try:
            life = run_life(self.setup, self.root)
            assert life.began is not None
            assert moment.promised <= life.began <= moment.begun, life.nothing
            require_same_end(self.root, [life], self.expected)
            require_only_the_newest(self.setup, self.root)
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}") from error
        return life.began


def record(setup: Setup, kill: AtAct | None, root: Path) -> Recorded:
    """Run the job to its end, with a life that is killed before if `kill` says where."""
    undisturbed = root / "undisturbed"
    undisturbed.mkdir()
    expected = result_of(undisturbed, [run_life(setup, undisturbed)])
    for end in [kill, None] if kill else [None]:
        run_life(setup, root, end, root / "journal")
    sizes = {file: file.stat().st_size for file in root.glob("disk/*/*.infinity-swap")}
    return Recorded(setup, root, read_journal(root / "journal"), sizes, expected)


@pytest.mark.parametrize("name", RUNS)
def test_no_power_cut_loses_a_generation(name: str, tmp_path: Path) -> None:
    recorded = record(*RUNS[name], tmp_path)
    images, started, began, lost = -(-IMAGES // len(RUNS)), time.monotonic(), list[int](), list[str]()
    for index in range(images):
        try:
            began.append(recorded.go_on(random.Random(f"{SEED} {name} {index}")))
        except AssertionError as error:
            lost.append(f"INFINITY_CRASH_SEED={SEED}, image {index}, {error}")
    print(
        f"power cut, {name}: {images} images, {len(began) - began.count(0)} resumed, {began.count(0)} begun anew, "
        f"{len(lost)} unrecoverable, {(time.monotonic() - started) / images:.2f} s each"
    )
    assert not lost, "\n".join(lost[:5])
