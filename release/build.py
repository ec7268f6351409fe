"""Builds the source distribution and, from it, the wheel for the Python that runs this, into dist/: `make wheel`.

python -m release.build              both
python -m release.build --sdist      the source distribution alone

The build is isolated: it has what pyproject.toml requires and no torch. Variables that change how code is compiled
(CXXFLAGS, CMAKE_ARGS and others) have no effect: the wheel is for every processor of its architecture.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from release.checks import WheelError, check

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
WORK = ROOT / "build" / "release"

_OTHER_CODE = ("CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CMAKE_ARGS", "CMAKE_BUILD_TYPE", "ARCHFLAGS")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sdist", action="store_true", help="the source distribution alone")
    options = parser.parse_args()
    shutil.rmtree(WORK, ignore_errors=True)
    for folder in (DIST, WORK):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        source = build_sdist()
        print(f"{source.relative_to(ROOT)}: {source.stat().st_size / 1e6:.2f} MB", flush=True)
        if not options.sdist:
            wheel = build_wheel(source)
            facts = check(wheel, built_in=ROOT)
            print(
                f"{wheel.relative_to(ROOT)}: {facts.nbytes / 1e6:.2f} MB, of which the native core is "
                f"{facts.native_bytes / 1e6:.2f} MB before compression; it links {', '.join(facts.linked)}"
            )
    except (WheelError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def build_sdist() -> Path:
    """Replace the source distribution in dist/."""
    _run("build", "--sdist", "--outdir", WORK, ROOT)
    return _moved(next(WORK.glob("*.tar.gz")))


def build_wheel(source: Path) -> Path:
    """Build a source distribution, and replace the wheel for this Python in dist/.

    Raises:
        CalledProcessError: the build failed, or needs what no manylinux tag allows.
    """
    shutil.unpack_archive(source, WORK / "source")
    (tree,) = (WORK / "source").iterdir()
    _run("build", "--wheel", "-Ccmake.define.INFINITY_URING=REQUIRED", "--outdir", WORK / "built", tree)
    (built,) = (WORK / "built").iterdir()
    _run("auditwheel", "repair", "--wheel-dir", WORK / "repaired", built)
    (repaired,) = (WORK / "repaired").iterdir()
    name, version, python, _ = repaired.name.split("-", 3)
    for earlier in DIST.glob(f"{name}-{version}-{python}-*.whl"):
        earlier.unlink()
    return _moved(repaired)


def environment() -> dict[str, str]:
    """Return the build's environment: pinned versions, these programs, and no variable that changes the code."""
    kept = {key: value for key, value in os.environ.items() if key not in _OTHER_CODE and not key.startswith("SKBUILD")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', os.defpath)}"
    return kept | {"PATH": path, "PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def _run(module: str, *arguments: str | Path) -> None:
    """Run a program of this environment; what it prints is shown when it fails."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=WORK, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        raise subprocess.CalledProcessError(done.returncode, command)


def _moved(file: Path) -> Path:
    return Path(shutil.move(file, DIST / file.name))


if __name__ == "__main__":
    sys.exit(main())
