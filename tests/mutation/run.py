"""Take away one guard after the other, in a copy of the sources, and see that a test turns red: `make mutation-test`.

Exit code 1 when a mutant survives, when one cannot be made any more (its text is gone from the sources), or when the
tests fail without any.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.mutation.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
# The editable install finds the sources of the checkout first, in every process: here it must not.
SITE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__.lower()]
"""
CHECK = "import sys, infinity; sys.exit(not infinity.__file__.startswith(sys.argv[1]))"
_TIMEOUT_S = 900


class Copy:
    """A copy of the sources in which mutants are made, tried and taken back."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "copy"
        for name in ("infinity", "csrc", "tests", "bench", "examples"):
            shutil.copytree(ROOT / name, self.path / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        for name in ("CMakeLists.txt", "pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, self.path / name)
        (self.path / "sitecustomize.py").write_text(SITE)
        self.environment = os.environ | {
            "PYTHONPATH": str(self.path),
            "INFINITY_CRASH_KILLS": "20",
            "INFINITY_POWER_IMAGES": "120",
        }
        self.build()
        subprocess.run([sys.executable, "-c", CHECK, str(self.path)], check=True, cwd=self.path, env=self.environment)

    def build(self) -> None:
        """The native core of the copy, beside its Python files."""
        cmake = Path(sys.executable).with_name("cmake")
        where = self.path / "build"
        pybind = subprocess.run(
            [sys.executable, "-m", "pybind11", "--cmakedir"], check=True, capture_output=True, text=True
        ).stdout.strip()
        configure = [cmake, "-S", self.path, "-B", where, "-DCMAKE_BUILD_TYPE=Release", f"-Dpybind11_DIR={pybind}"]
        for command in (
            [*configure, f"-DPython_EXECUTABLE={sys.executable}"],
            [cmake, "--build", where, "-j", str(os.cpu_count() or 2), "--target", "_native"],
        ):
            done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"the copy does not build:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        for built in where.glob("_native*.so"):
            shutil.copy(built, self.path / "infinity" / built.name)

    def try_tests(self, tests: tuple[str, ...]) -> tuple[int, str]:
        """pytest's exit code, and the last line it printed that names a test."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not gpu", *tests]
        try:
            done = subprocess.run(
                command, cwd=self.path, env=self.environment, capture_output=True, text=True, timeout=_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return 1, f"no end within {_TIMEOUT_S} s"
        named = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if done.returncode < 0:
            named.append(f"killed by signal {-done.returncode}")
        return done.returncode, (named or done.stdout.splitlines()[-1:] or [done.stderr[-300:]])[-1]

    def apply(self, mutant: Mutant) -> str:
        """Make a mutant; returns what the file held before. Raises ValueError when its text does not occur once,
        SyntaxError when it is no Python."""
        path = self.path / mutant.path
        text = path.read_text()
        if text.count(mutant.old) != 1:
            raise ValueError(f"'{mutant.old.strip()}' occurs {text.count(mutant.old)} times in {mutant.path}")
        changed = text.replace(mutant.old, mutant.new)
        if not mutant.native:
            compile(changed, mutant.path, "exec")  # what does not even compile proves nothing
        path.write_text(changed)
        return text


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="mutants whose name contains this")
    parser.add_argument("--trust", action="store_true", help="do not run the tests without a mutant first")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if options.only is None or options.only in mutant.name]
    survivors = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        copy = Copy(Path(scratch))
        if not options.trust:
            tests = sorted({test for mutant in chosen for test in mutant.tests if test.startswith("tests/")})
            code, line = copy.try_tests(tuple(tests))
            if code:
                print(f"the tests fail without a mutant: {line}")
                return 1
        for number, mutant in enumerate(chosen, 1):
            began = time.monotonic()
            verdict = _try(copy, mutant)
            if verdict.startswith("SURVIVED"):
                survivors.append(mutant.name)
            print(f"{number:>2}/{len(chosen)} {mutant.name}: {verdict} ({time.monotonic() - began:.0f} s)", flush=True)
    print(
        f"{len(chosen) - len(survivors)} of {len(chosen)} mutants found" + "".join(f"\n  not: {s}" for s in survivors)
    )
    return 1 if survivors else 0


def _try(copy: Copy, mutant: Mutant) -> str:
    try:
        before = copy.apply(mutant)
    except (ValueError, SyntaxError) as error:
        return f"SURVIVED: it cannot be made: {error}"
    try:
        if mutant.native:
            copy.build()
        code, line = copy.try_tests(mutant.tests)
    finally:
        (copy.path / mutant.path).write_text(before)
        if mutant.native:
            copy.build()
    return f"found: {line}" if code else "SURVIVED"


if __name__ == "__main__":
    sys.exit(main())
