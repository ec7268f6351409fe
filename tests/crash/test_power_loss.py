"""A power cut at any moment leaves a disk from which the run goes on to the bits of the undisturbed run, from the
generation it took for durable or a newer one (docs/crash-safety.md)."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from infinity.io.generation_pins import MARKER_NAME
from tests import sampling
from tests.crash.job import AtAct, Setup, look, step_in
from tests.crash.lives import DEADLINE_S, Result, require_only_the_newest, require_same_end, result_of, run_life
from tests.crash.power import Moment, Record, put, read_journal
from tests.processes import server

IMAGES = sampling.number(8, 1000, "INFINITY_POWER_IMAGES")
SEED = sampling.seed("INFINITY_CRASH_SEED")

RUNS = {
    "states in the store": (Setup(steps=5), None),
    "two generations kept": (Setup(steps=5, keep=2, engine="threads"), None),
    "weights in RAM": (Setup(steps=5, weights="host"), None),
    "two paths": (Setup(steps=5, paths=2), None),
    "all in RAM, every other step": (Setup(steps=5, weights="host", optimizer="host", commit_every=2), None),
    "states on the device": (Setup(steps=4, weights="auto", optimizer="device", resident="all"), None),
    "folders pin generations": (Setup(steps=5, pins=1), None),
    "folders pin generations, killed and resumed": (Setup(steps=5, pins=2), AtAct("end rename", "marker", 1)),
    "killed and resumed": (Setup(steps=5, keep=2), AtAct("end create", "manifest", 2)),
}
"""Each with where a first life was killed, if one was."""


@dataclass
class NativeEvents:
    """A run that was recorded, in a directory whose disk is put into one state after the other."""

    setup: Setup
    root: Path
    records: list[Record]
    sizes: dict[Path, int]
    expected: Result
    saved: dict[int, str]
    looked: int = 0

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
            self._look_at_folders()
            life = run_life(self.setup, self.root)
            assert life.began is not None
            assert moment.promised <= life.began <= moment.begun, life.nothing
            require_same_end(self.root, [life], self.expected)
            require_only_the_newest(self.setup, self.root)
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}") from error
        return life.began

    def _look_at_folders(self) -> None:
        """Each folder with a marker leads to the states that it was saved with."""
        for marker in (self.root / "disk").glob(f"*/{MARKER_NAME}"):
            folder = marker.parent
            process = server().Process(target=look, args=(self.setup, self.root, folder))
            process.start()
            process.join(DEADLINE_S)
            lines = (self.root / "log").read_text().splitlines()
            found = lines[-1].split() if process.exitcode == 0 else ["nothing"]
            expected = ["found", str(step_in(folder)), self.saved[step_in(folder)]]
            assert found == expected, f"{folder} leads to {found}"
            self.looked += 1


def record(setup: Setup, kill: AtAct | None, root: Path) -> NativeEvents:
    """Run the job to its end, with a life that is killed before if `kill` says where."""
    if kill is not None:
        undisturbed = root / "undisturbed"
        undisturbed.mkdir()
        expected, saved = _end_of(setup, undisturbed)
        run_life(setup, root, kill, root / "journal")
        run_life(setup, root, None, root / "journal")
    else:
        expected, saved = _end_of(setup, root, root / "journal")
    sizes = {file: file.stat().st_size for file in root.glob("disk/*/*.infinity-swap")}
    return NativeEvents(setup, root, read_journal(root / "journal"), sizes, expected, saved)


def _end_of(setup: Setup, root: Path, journal: Path | None = None) -> tuple[Result, dict[int, str]]:
    """Return the result of an undisturbed run, and the states of its folders by step."""
    result = result_of(root, [run_life(setup, root, journal=journal)])
    words = [line.split() for line in (root / "log").read_text().splitlines()]
    return result, {int(each[1]): each[2] for each in words if each[0] == "saved"}


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
        f"{recorded.looked} folders led to their states, {len(lost)} unrecoverable, "
        f"{(time.monotonic() - started) / images:.2f} s each"
    )
    assert not lost, "\n".join(lost[:5])
