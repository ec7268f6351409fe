"""Random sequences of saving, rotating, killing and resuming by transformers' own Trainer: every checkpoint folder that
exists resumes to its bits, and nothing else keeps space (docs/crash-safety.md)."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests import sampling
from tests.crash.lives import ended
from tests.crash.rotating_job import STEPS, Digests, Life, check, live, make_checkpoint, marked, undisturbed
from tests.processes import server

SEQUENCES = sampling.number(1, 200, "INFINITY_ROTATIONS")
SEED = sampling.seed("INFINITY_CRASH_SEED")
PART = 20
DEADLINE_S = 240.0
LIVES = 3
"""At most so many of a sequence are killed before one that is not."""

PINS = {
    (None, False): 2, (1, False): 2, (2, False): 3, (3, False): 4,
    (None, True): 2, (1, True): 3, (2, True): 3, (3, True): 4,
}  # fmt: skip
"""Checkpoint folders at a time with a generation, by save_total_limit and load_best_model_at_end: those that stay, and
the new one before an old one goes."""


@dataclass(frozen=True)
class Job:
    """The model that every sequence begins with, and the states of the undisturbed run."""

    checkpoint: Path
    expected: Digests


def process(root: Path, target: Callable[..., None], *arguments: Any) -> bool:
    """Run a function in a process of its own, and return whether the process was killed."""
    one = server().Process(target=target, args=arguments)
    one.start()
    return ended(one, root, f"{target.__name__}{arguments}", within_s=DEADLINE_S)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    root = tmp_path_factory.mktemp("undisturbed")
    make_checkpoint(root / "checkpoint")
    assert not process(root, undisturbed, root / "checkpoint", root)
    digests = json.loads((root / "digests").read_text())
    return Job(root / "checkpoint", {int(step): digest for step, digest in digests.items()})


class Sequence:
    """Lives of one run on one disk.

    Attributes:
        lives, kills: so far.
        pins: that the store has room for.
    """

    def __init__(self, job: Job, root: Path) -> None:
        self.lives = self.kills = self.pins = 0
        self._job = job
        self.root = root
        root.mkdir(parents=True)

    def run(self, life: Life) -> None:
        if not life.folder:
            self.pins = PINS[life.limit, life.best]
            for left in ("swap", "out"):
                shutil.rmtree(self.root / left, ignore_errors=True)
        killed = False
        try:
            killed = process(self.root, live, self._job.checkpoint, self.root, life, self._job.expected)
            self.lives, self.kills = self.lives + 1, self.kills + killed
            process(self.root, check, self._job.checkpoint, self.root, self._job.expected, self.pins, killed)
        except AssertionError as error:
            raise AssertionError(f"after {life}, {'killed' if killed else 'at its end'}: {error}") from error


def random_life(chance: random.Random, best: bool, root: Path) -> Life:
    """Goes on from one of the folders that have a generation and are not at the end, or begins anew where there is
    none."""
    folders = [path for path, marker in marked(root).items() if marker.portable is None and marker.step < STEPS]
    folder = chance.choice(folders) if folders else None
    limits = [None, 2, 3] if folder is not None and _lacks_its_best(folder) else [None, 1, 2, 3]
    save_steps, acts = chance.choice([1, 2, 3]), chance.choice(["files", "pins", "writes"])
    at_most = {"files": 300 // save_steps, "pins": 100 // save_steps, "writes": 200}
    return Life(
        save_steps=save_steps,
        limit=chance.choice(limits),
        best=best,
        folder="" if folder is None else str(folder),
        killed_at=chance.randrange(at_most[acts]),
        acts=acts,
        chance=chance.randrange(1000),
    )


def age(root: Path) -> None:
    """Make the folders an hour older. Trainer then orders them by their times instead of their numbers."""
    for folder in root.glob("out/checkpoint-*"):
        times = folder.stat()
        os.utime(folder, (times.st_atime - 3600, times.st_mtime - 3600))


def _lacks_its_best(folder: Path) -> bool:
    """Return whether the best folder that this one names was removed because a later one was better. With
    save_total_limit 1, Trainer then fails at its end."""
    best = json.loads((folder / "trainer_state.json").read_text())["best_model_checkpoint"]
    return best is not None and not Path(best).exists()


@pytest.mark.long(kept="only here a Trainer that rotates its folders is killed")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(-(-SEQUENCES // PART)))
def test_every_folder_of_a_trainer_resumes_to_its_bits_and_nothing_else_keeps_space(
    part: int, job: Job, tmp_path: Path
) -> None:
    wrong, kills, lives = list[str](), 0, 0
    for index in range(part * PART, min((part + 1) * PART, SEQUENCES)):
        chance = random.Random(f"{SEED} rotation {index}")
        best = chance.random() < 0.4
        sequence = Sequence(job, tmp_path / str(index))
        try:
            for _ in range(chance.randint(1, LIVES)):
                if chance.random() < 0.5:
                    age(sequence.root)
                sequence.run(random_life(chance, best, sequence.root))
            sequence.run(replace(random_life(chance, best, sequence.root), killed_at=None))
        except AssertionError as error:
            wrong.append(f"INFINITY_CRASH_SEED={SEED}, sequence {index}: {error}")
        kills, lives = kills + sequence.kills, lives + sequence.lives
        shutil.rmtree(sequence.root)
    print(f"rotation: {lives} lives, {kills} kills, {len(wrong)} sequences with a wrong end")
    assert not wrong, "\n\n".join(wrong[:3])
    assert kills > 0 or SEQUENCES < 10
