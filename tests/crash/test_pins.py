"""Random sequences of saving, removing, killing and going back: every checkpoint folder that looks resumable leads to
the bits that it was saved with, and nothing else keeps space (docs/crash-safety.md)."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import sampling
from tests.crash.lives import ended
from tests.crash.pinned_job import Act, Life, Setup, check, live, resumable
from tests.processes import server

SEQUENCES = sampling.number(4, 200, "INFINITY_PIN_SEQUENCES")
SEED = sampling.seed("INFINITY_CRASH_SEED")
PART = 20
DEADLINE_S = 120.0

SETUPS = [
    Setup(),
    Setup(keep=2, pins=1),
    Setup(weights="host", commit_every=2, pins=3),
    Setup(overlap="during_backward", pins=1),
]


@dataclass
class Sequence:
    """Lives on one disk, and what is known of it."""

    setup: Setup
    root: Path
    kills: int = 0
    states: dict[int, str] = field(default_factory=dict)  # by step, of the line that the run is on

    def run(self, life: Life) -> bool:
        """Run one life, check its states, and return whether it was killed."""
        log = self.root / "log"
        before = log.stat().st_size if log.exists() else 0
        if life.folder:
            self.states = {}
        killed = self._process(live, life)
        for line in (log.read_bytes()[before:].decode() if log.exists() else "").splitlines():
            word, step, digest = line.split()
            if word == "began":
                expected = self.states.get(int(step), digest)
                assert expected == digest, f"it went on from other states at step {step}: {life}"
                newest = max(self.states, default=0)
                assert life.folder or int(step) >= newest - self.setup.commit_every, f"steps are lost: {life}"
            self.states = {at: each for at, each in self.states.items() if at < int(step)} | {int(step): digest}
        self.kills += killed
        return killed

    def check(self) -> None:
        self._process(check)

    def _process(self, target: Callable[..., None], *arguments: Any) -> bool:
        process = server().Process(target=target, args=(self.setup, self.root, *arguments))
        process.start()
        return ended(process, self.root, f"{target.__name__}{arguments}", within_s=DEADLINE_S)


def acts(chance: random.Random) -> list[Act]:
    choices: list[Callable[[], Act]] = [
        lambda: ("train", chance.randint(1, 3)),
        lambda: ("save", chance.choice(["rotate", "rotate", "aside", "portable"])),
        lambda: ("remove", chance.choice(["folder first", "pin first"])),
        lambda: ("vanish", None),
    ]
    weights = [4, 5, 1, 0.5]
    return [("train", 1), *(chance.choices(choices, weights)[0]() for _ in range(chance.randint(3, 8)))]


def random_life(chance: random.Random, sequence: Sequence, number: int) -> Life:
    folders = [str(path) for path in resumable(sequence.root) if (path / "portable").exists() is False]
    folder = chance.choice(folders) if folders and chance.random() < 0.4 else ""
    writes = chance.random() < 0.2
    at = chance.randrange(60) if writes else chance.randrange(120)
    return Life(number, acts(chance), folder, at, writes)


@pytest.mark.long(kept="only here folders are saved, removed and gone back to in any order between kills")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(-(-SEQUENCES // PART)))
def test_every_folder_that_exists_leads_to_its_bits_and_nothing_else_keeps_space(part: int, tmp_path: Path) -> None:
    wrong, kills, lives = list[str](), 0, 0
    for index in range(part * PART, min((part + 1) * PART, SEQUENCES)):
        chance = random.Random(f"{SEED} pins {index}")
        sequence = Sequence(SETUPS[index % len(SETUPS)], tmp_path / str(index))
        (sequence.root / "out").mkdir(parents=True)
        try:
            for number in range(chance.randint(2, 5)):
                sequence.run(random_life(chance, sequence, number))
                lives += 1
            sequence.run(Life(9, [("train", 1 + sequence.setup.keep), ("save", "rotate"), ("train", 1)]))
            sequence.check()
        except AssertionError as error:
            wrong.append(f"INFINITY_CRASH_SEED={SEED}, sequence {index}, {sequence.setup}: {error}")
        kills += sequence.kills
        shutil.rmtree(sequence.root)
    print(f"pins: {lives} lives, {kills} kills, {len(wrong)} sequences with a wrong end")
    assert not wrong, "\n\n".join(wrong[:3])
    assert kills > 0


BEGUN: list[Act] = [("train", 2), ("save", "rotate"), ("train", 1)]
TWICE: list[Act] = [*BEGUN, ("save", "rotate"), ("train", 1)]
SAVED: dict[str, tuple[list[Act], list[Act], str]] = {
    "the first pin": ([("train", 1)], [("save", "rotate"), ("train", 2)], ""),
    "a folder takes the place of another": (BEGUN, [("save", "rotate"), ("train", 2)], ""),
    "a folder gets its name last": (BEGUN, [("save", "aside"), ("train", 2)], ""),
    "the oldest becomes a portable copy": (BEGUN, [("save", "portable"), ("train", 2)], ""),
    "the same step is saved again aside": (TWICE, [("train", 1), ("save", "aside")], "2"),
    "the same step is saved again in place": (TWICE, [("train", 1), ("save", "rotate")], "2"),
}
"""The acts of a first life, those of the life that is killed, and the step that it goes back to."""
LONG = {"the first pin", "the same step is saved again in place"}
"""Cases whose acts other cases have, too."""
ACTS = sampling.number(1, 400)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in SAVED]
)
def test_killed_at_each_act_on_pins_pinned_manifests_and_markers(name: str, tmp_path: Path) -> None:
    first, second, back = SAVED[name]
    began, root = tmp_path / "began", tmp_path / "disk"
    (root / "out").mkdir(parents=True)
    folder = str(root / "out" / f"checkpoint-{back}") if back else ""
    sequence = Sequence(Setup(pins=2 if back else 1), root)
    assert not sequence.run(Life(0, first))
    states = dict(sequence.states)
    shutil.copytree(root, began)
    assert not sequence.run(Life(1, second, folder))
    kinds = (root / "acts").read_text().split()
    ours = [at for at, kind in enumerate(kinds) if kind in ("pins", "pinned", "marker")]
    assert len(ours) >= 12
    wrong: list[str] = []
    for at in sorted(random.Random(SEED).sample(ours, min(ACTS, len(ours)))):
        shutil.rmtree(root)
        shutil.copytree(began, root)
        killed = Sequence(sequence.setup, root, states=dict(states))
        try:
            assert killed.run(Life(1, second, folder, killed_at=at)), "it was not killed"
            killed.run(Life(2, [("train", 3)]))
            killed.check()
        except AssertionError as error:
            wrong.append(f"killed before act {at} ({kinds[at]}): {error}")
    print(f"pins, {name}: killed before {min(ACTS, len(ours))} of {len(ours)} acts on their files")
    assert not wrong, "\n\n".join(wrong[:3])
