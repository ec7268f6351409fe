"""Mutation test, `make mutation-test`: remove one guard after the other in copies of the sources; a test must fail.

The exit code is 1 if a mutant survives, if a mutant cannot be made because its text is not in the sources, or if the
tests fail without any mutant.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from fractions import Fraction
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from infinity import _native
from tests.mutation.mutant import Mutant
from tests.mutation.mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
# The editable install finds the sources of the checkout first, in every process; in the copy, the sources of the copy
# must be found.
SITE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__.lower()]
"""
CHECK = "import sys, infinity; sys.exit(not infinity.__file__.startswith(sys.argv[1]))"
_TIMEOUT_S = 900
_SHARES = ("INFINITY_TESTS", "INFINITY_SAMPLE")
"""Environment variables that are removed. For each mutant, the tests of `make test` run first, and after them all long
tests.
"""
_NO_TEST_RAN = (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED)


class Copy:
    """A copy of the sources in which mutants are made, tested and reverted, one at a time.

    Args:
        builds: whether some mutants change the native core; False: the checkout's core is used.
    """

    def __init__(self, path: Path, cores: int, *, builds: bool) -> None:
        self.path = path
        self._cores = cores
        for name in ("infinity", "csrc", "tests", "bench", "examples"):
            shutil.copytree(ROOT / name, self.path / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        for name in ("CMakeLists.txt", "pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, self.path / name)
        (self.path / "sitecustomize.py").write_text(SITE)
        sample = {name: value for name, value in os.environ.items() if name not in _SHARES}
        self.environment = sample | {
            "PYTHONPATH": str(self.path),
            "INFINITY_CRASH_KILLS": "20",
            "INFINITY_POWER_IMAGES": "120",
        }
        if builds:
            self.build()
        else:
            shutil.copy(_native.__file__, self.path / "infinity")
        self._whole = {path: path.read_bytes() for path in (self.path / "infinity").glob("_native*.so")}
        subprocess.run([sys.executable, "-c", CHECK, str(self.path)], check=True, cwd=self.path, env=self.environment)

    def build(self) -> None:
        """Build the native core of the copy, beside its Python files."""
        cmake = Path(sys.executable).with_name("cmake")
        where = self.path / "build"
        pybind = subprocess.run(
            [sys.executable, "-m", "pybind11", "--cmakedir"], check=True, capture_output=True, text=True
        ).stdout.strip()
        configure = [cmake, "-S", self.path, "-B", where, "-DCMAKE_BUILD_TYPE=Release", f"-Dpybind11_DIR={pybind}"]
        for command in (
            [*configure, f"-DPython_EXECUTABLE={sys.executable}"],
            [cmake, "--build", where, "-j", str(self._cores), "--target", "_native"],
        ):
            done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"the copy does not build:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        for built in where.glob("_native*.so"):
            shutil.copy(built, self.path / "infinity" / built.name)

    def take_back(self, mutant: Mutant, text: str) -> None:
        """Restore the original text of a mutant's file. For a mutant of the native core, restore the
        built core, too.
        """
        (self.path / mutant.path).write_text(text)
        for path, built in self._whole.items() if mutant.native else ():
            path.unlink()  # the file is replaced and not overwritten, because a process may still have it mapped
            path.write_bytes(built)

    def try_tests(self, *arguments: str, long: bool = False) -> tuple[int, str]:
        """Run tests. Tests that hang count as failed.

        Long tests that hang count as passed, because long tests may only need more time.

        Args:
            arguments: arguments of pytest.
            long: whether to run all tests with the mark `long`, instead of the tests of `make test`.

        Returns:
            pytest's exit code, and the last printed line that names a test.
        """
        marks = "long and not gpu and not simulated" if long else "not gpu"
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", marks, *arguments]
        environment = self.environment | ({"INFINITY_TESTS": "all"} if long else {})
        try:
            done = subprocess.run(
                command, cwd=self.path, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return int(not long), f"no end within {_TIMEOUT_S} s"
        named = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if done.returncode < 0:
            named.append(f"killed by signal {-done.returncode}")
        return done.returncode, (named or done.stdout.splitlines()[-1:] or [done.stderr[-300:]])[-1]

    def apply(self, mutant: Mutant) -> str:
        """Make a mutant; return the file's previous text.

        Raises:
            ValueError: the mutant's text does not occur exactly once.
            SyntaxError: the changed file is not valid Python.
        """
        path = self.path / mutant.path
        text = path.read_text()
        if text.count(mutant.old) != 1:
            raise ValueError(f"'{mutant.old.strip()}' occurs {text.count(mutant.old)} times in {mutant.path}")
        changed = text.replace(mutant.old, mutant.new)
        if not mutant.native:
            compile(changed, mutant.path, "exec")  # a file that does not compile proves nothing
        path.write_text(changed)
        return text


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="mutants whose name contains this")
    parser.add_argument("--trust", action="store_true", help="do not run the tests without a mutant first")
    parser.add_argument("--share", default="all", help="share of the mutants: 0.1 is a tenth, chosen at random")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choice")
    parser.add_argument(
        "--jobs",
        type=int,
        default=min(os.cpu_count() or 1, 8),
        help="number of mutants that are tested at the same time",
    )
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if options.only is None or options.only in mutant.name]
    if options.share != "all":
        count = max(2, round(Fraction(options.share) * len(chosen)))
        chosen = random.Random(options.seed).sample(chosen, min(count, len(chosen)))
        print(f"{len(chosen)} of {len(MUTANTS)} mutants, drawn with --seed {options.seed}", flush=True)
    jobs = max(1, min(options.jobs, len(chosen)))
    cores = max(1, (os.cpu_count() or 1) // jobs)
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch, ThreadPoolExecutor(jobs) as pool:
        builds = any(mutant.native for mutant in chosen)
        copies = list(pool.map(lambda index: Copy(Path(scratch) / f"copy{index}", cores, builds=builds), range(jobs)))
        if not options.trust:
            tests = sorted({test for mutant in chosen for test in mutant.tests if test.startswith("tests/")})
            code, line = copies[0].try_tests("-n", str(jobs), "--dist", "worksteal", *tests)
            if code:
                print(f"the tests fail without a mutant: {line}")
                return 1
        survivors = _survivors(chosen, copies, pool)
    print(
        f"{len(chosen) - len(survivors)} of {len(chosen)} mutants found" + "".join(f"\n  not: {s}" for s in survivors)
    )
    return 1 if survivors else 0


def _survivors(mutants: list[Mutant], copies: list[Copy], pool: ThreadPoolExecutor) -> list[str]:
    """Test all mutants, each in any free copy. Return the names of the mutants that no test detected."""
    free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def judged(mutant: Mutant) -> tuple[Mutant, str, float]:
        copy, began = free.get(), time.monotonic()
        try:
            return mutant, _try(copy, mutant), time.monotonic() - began
        finally:
            free.put(copy)

    survivors = []
    for number, done in enumerate(as_completed([pool.submit(judged, mutant) for mutant in mutants]), 1):
        mutant, verdict, seconds = done.result()
        if verdict.startswith("SURVIVED"):
            survivors.append(mutant.name)
        print(f"{number:>2}/{len(mutants)} {mutant.name}: {verdict} ({seconds:.0f} s)", flush=True)
    return survivors


def _try(copy: Copy, mutant: Mutant) -> str:
    try:
        before = copy.apply(mutant)
    except (ValueError, SyntaxError) as error:
        return f"SURVIVED: it cannot be made: {error}"
    try:
        if mutant.native:
            copy.build()
        code, line = copy.try_tests(*mutant.tests)
        if code in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
            found = copy.try_tests(*mutant.tests, long=True)
            if found[0] not in _NO_TEST_RAN:
                code, line = found[0], f"by a long test only: {found[1]}"
    finally:
        copy.take_back(mutant, before)
    if code in _NO_TEST_RAN:
        return f"SURVIVED: no test ran: {line}"
    return f"found: {line}" if code else "SURVIVED"


if __name__ == "__main__":
    sys.exit(main())
