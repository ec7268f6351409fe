"""Runs of the job, life after life, in forked processes, and checks of the states that they left."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tests.crash.job import AtOperation, AtTime, Kill, Setup, kind_of, live
from tests.crash.power import read_journal
from tests.processes import server

DEADLINE_S = 60.0


@dataclass
class Life:
    """Log entries of one process.

    `began` is the step from which the process resumed, or None if the process was killed before it logged this step.
    """

    began: int | None = None
    nothing: str = ""
    losses: dict[int, str] = field(default_factory=dict)
    commits: list[int] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)
    killed: bool = False


def ended(process: ForkServerProcess, root: Path, what: str, within_s: float = DEADLINE_S) -> bool:
    """Wait for a started process, and return whether it was killed.

    Args:
        process: the process to wait for.
        root: directory in which the process writes its exception, to a file named error.
        what: description of the process, for messages.
        within_s: seconds to wait.

    Raises:
        AssertionError: the process did not end, or it failed without a SIGKILL.
    """
    process.join(within_s)
    if process.exitcode is None:
        process.kill()
        raise AssertionError(f"{what} did not end")
    if process.exitcode not in (0, -signal.SIGKILL):
        error = root / "error"
        raise AssertionError(f"{what}: {error.read_text() if error.exists() else f'exit code {process.exitcode}'}")
    return process.exitcode != 0


def run_life(setup: Setup, root: Path, kill: Kill | None = None, journal: Path | None = None) -> Life:
    """Run one process to its end.

    Raises:
        AssertionError: the process failed without a SIGKILL; the message says how it ended.
    """
    log = root / "log"
    before = log.stat().st_size if log.exists() else 0
    process = server().Process(target=live, args=(setup, root, kill, journal))
    process.start()
    if isinstance(kill, AtTime):
        time.sleep(kill.seconds)
        process.kill()
    killed = ended(process, root, f"a life of the job ({setup})")
    life = _parse(log.read_bytes()[before:].decode() if log.exists() else "")
    life.killed = killed
    return life


def _parse(text: str) -> Life:
    life = Life()
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        if word == "began":
            life.began = int(rest)
        elif word == "nothing":
            life.nothing = rest
        elif word == "loss":
            step, value = rest.split()
            life.losses[int(step)] = value
        elif word == "commit":
            life.commits.append(int(rest))
        elif word == "workers":
            life.workers = [int(number) for number in rest.split()]
    return life


@dataclass(frozen=True)
class Result:
    """Result of a run that reached its end: a digest of all states, and the losses of all lives by step."""

    digest: str
    losses: dict[int, str]


def result_of(root: Path, lives: Sequence[Life]) -> Result:
    """Return the result of the last life.

    Raises:
        AssertionError: two lives had different losses at the same step.
    """
    losses: dict[int, str] = {}
    for life in lives:
        for step, value in life.losses.items():
            assert losses.setdefault(step, value) == value, f"the losses of step {step} differ between two lives"
    return Result(json.loads((root / "result").read_text())["digest"], losses)


class Reference:
    """The undisturbed run of a setup: its result, its duration and its journal. The journal shows the points at which
    other runs can be killed.
    """

    def __init__(self, setup: Setup, root: Path) -> None:
        self.result = result_of(root, [run_life(setup, root, journal=root / "journal")])
        self._records = read_journal(root / "journal")
        self._extents = json.loads((root / "result").read_text())["extents"]
        self._setup, self._root = setup, root

    @property
    def pieces(self) -> int:
        """Number of pieces of states that went from the device to the store."""
        return int((self._root / "pieces").read_text())

    @cached_property
    def seconds(self) -> float:
        """Seconds that a run takes without a journal."""
        began = time.monotonic()
        run_life(self._setup, _made(self._root / "again"))
        return time.monotonic() - began

    def extent(self, state: str, unit: int) -> tuple[int, int]:
        """Return the byte range [begin, end) of all copies of the `unit`-th extent of a state; -1 is the
        last extent.
        """
        found = [extent for extent in self._extents if extent["state"] == state and extent["changes"]][unit]
        return found["begin"], found["end"]

    def writes_of(self, commit: int) -> tuple[int, int]:
        """Return the numbers of the first and the last write between the commit number `commit` and the next commit."""
        written, begins = 0, []
        for record in self._records:
            written += record.letter == b"W"
            if record.moment == "begin create" and kind_of(record.path) == "manifest":
                begins.append(written)
        return begins[commit], begins[commit + 1] - 1


@dataclass
class Campaign:
    """Many runs that are killed, and their outcomes.

    Attributes:
        lost: descriptions of failures: states that could not be recovered, or were recovered with other bits.
        anew, resumed: numbers of lives that began after a killed life: lives that started a new run, and lives that
            resumed.
        unreached: number of lives that ended before the write at which they should have been killed.
    """

    root: Path
    references: Callable[[Setup], Reference]
    runs: int = 0
    kills: int = 0
    anew: int = 0
    resumed: int = 0
    unreached: int = 0
    lost: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.runs} runs, {self.kills} kills, then {self.resumed} resumed, {self.anew} begun anew, "
            f"{self.unreached} ended before their kill, {len(self.lost)} unrecoverable"
        )

    def run(
        self, setup: Setup, kills: Sequence[Kill], *, note: str = "", damage: Callable[[Path], int] | None = None
    ) -> None:
        """Kill one life after the other, and let the last life end. Each life must resume from the newest certain
        generation, or from a later one.

        Args:
            setup: settings of the job.
            kills: a kill for each life but the last.
            note: instructions to repeat the run.
            damage: function that damages the first directory after the first life, and returns the newest undamaged
                generation.
        """
        root, lives = _made(self.root / f"run{self.runs}"), list[Life]()
        self.runs += 1
        try:
            for kill in [*kills, None]:
                life = run_life(setup, root, kill)
                require_nothing_lost(setup, lives, life)
                self._require_killed(kill, life)
                self._count(lives, life)
                lives.append(life)
                if not life.killed:
                    break
                if damage is not None and len(lives) == 1:
                    whole = damage(setup.directories(root)[0])
                    lives = [Life(commits=[step for step in life.commits if step <= whole])]
            require_same_end(root, lives, self.references(setup).result)
            require_only_the_newest(setup, root)
        except AssertionError as error:
            self.lost.append(f"{setup}, {' '.join(map(str, kills))} {note}: {error}")
        finally:
            shutil.rmtree(root)

    def _require_killed(self, kill: Kill | None, life: Life) -> None:
        """Require that the life reached its kill.

        Kills at a time or at a number of writes are not checked. The number of writes of a run depends on timing: a
        speculative update whose scale was wrong may or may not have been written before it was withdrawn.
        """
        if life.killed or kill is None or isinstance(kill, AtTime):
            return
        by_number = isinstance(kill, AtOperation) and kill.numbers_all_writes
        assert by_number, f"{kill} was never reached"
        self.unreached += 1

    def _count(self, before: Sequence[Life], life: Life) -> None:
        self.kills += life.killed
        self.anew += bool(before) and life.began == 0
        self.resumed += bool(before) and bool(life.began)


def _made(path: Path) -> Path:
    path.mkdir()
    return path


def require_nothing_lost(setup: Setup, before: Sequence[Life], life: Life) -> None:
    """Require that a life resumed from the newest generation, so that few steps are lost.

    At most the steps since the last commit may be lost.
    """
    if life.began is None:
        return
    certain = max((step for earlier in before for step in earlier.commits), default=0)
    ended = max((step for earlier in before for step in earlier.losses), default=0)
    # A step's loss is logged after its forward, which finished the commit of the previous step.
    least = max(ended - 1, 0) // setup.commit_every * setup.commit_every
    # A kill may occur between the rename of a manifest and its log entry.
    most = certain + setup.commit_every
    assert max(certain, least) <= life.began <= most, f"generation {certain} was made, step {ended} done: {life}"


def require_same_end(root: Path, lives: Sequence[Life], expected: Result) -> None:
    """Require that the states are those of the undisturbed run, and that the losses in the logs of these lives are
    those of the undisturbed run.
    """
    found = result_of(root, lives)
    for step, value in found.losses.items():
        assert value == expected.losses[step], f"the loss of step {step} is not that of the undisturbed run: {lives}"
    assert found.digest == expected.digest, f"the states are not those of the undisturbed run: {lives}"


def require_only_the_newest(setup: Setup, root: Path) -> None:
    """Require that at most `keep` generations are left, and no partly written file."""
    names = sorted(path.name for path in setup.directories(root)[0].iterdir())
    manifests = [name for name in names if name.startswith("generation-")]
    assert not [name for name in names if name.endswith(".aside")], names
    assert len(manifests) <= setup.keep, f"{names} are left, and keep is {setup.keep}"
