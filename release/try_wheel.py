"""Installs the wheel from dist/ as on a machine without a compiler, and uses it there: `make wheel-test`.

python -m release.try_wheel              the newest wheel for the Python that runs this
python -m release.try_wheel --source     the source distribution instead, which pip builds: this needs the compiler, and
                                         only smoke.py is run

A new virtual environment is made for it in build/wheel-test, with a PATH of a few programs: no compiler, no CMake, no
Ninja. Everything else comes from the wheel and from what its metadata names, in the versions of constraints.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

from release.build import DIST, ROOT

WORK = ROOT / "build" / "wheel-test"
STEPS = 6

PROGRAMS = ("bash", "cat", "env", "ldd", "ls", "rm", "sh", "uname")
"""Programs of the system on a PATH that imitates a machine without development packages."""
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "cmake", "make", "ninja", "ld", "as")

_CONFIG = """\
weights: nvme
optimizer: nvme
memory: {{device: 32MiB, host: 128MiB}}
nvme: {{paths: [{swap}]}}
commit_every: 1
"""


class TrialError(RuntimeError):
    """Something that a user does with the wheel does not work; says what."""


class Trial:
    """A virtual environment without a compiler.

    Args:
        folder: replaced.
    """

    def __init__(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self.folder = folder
        self.programs = folder / "programs"
        self.programs.mkdir(parents=True)
        for found in filter(None, map(shutil.which, PROGRAMS)):
            self.lend(found)
        self.bin = folder / "venv" / "bin"
        _call([Path(sys._base_executable), "-m", "venv", folder / "venv"], os.environ)  # type: ignore[attr-defined]
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV", "LD_"))}
        self.environment = kept | {
            "PATH": f"{self.bin}{os.pathsep}{self.programs}",
            "CC": "/bin/false",
            "CXX": "/bin/false",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "XDG_CACHE_HOME": str(folder / "cache"),
            "PIP_CACHE_DIR": os.environ.get("PIP_CACHE_DIR", str(Path("~/.cache/pip").expanduser())),
            "TQDM_DISABLE": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self.require_no_compiler()

    def lend(self, program: str) -> None:
        """Put a program of the system on the PATH."""
        (self.programs / Path(program).name).symlink_to(program)

    def require_no_compiler(self) -> None:
        """Raise TrialError if a compiler could be found, also one that an installation brought."""
        found = [name for name in COMPILERS if shutil.which(name, path=self.environment["PATH"])]
        if found:
            raise TrialError(f"{', '.join(found)} can be found on {self.environment['PATH']}")

    def call(self, program: str, *arguments: str | Path) -> str:
        """Run a program of the environment and return what it printed; its errors are in it.

        Raises:
            TrialError: it failed.
        """
        begun = time.monotonic()
        found = shutil.which(program, path=self.environment["PATH"])
        if found is None:
            raise TrialError(f"there is no {program} on {self.environment['PATH']}")
        said = _call([found, *arguments], self.environment, self.folder)
        print(f"{time.monotonic() - begun:6.1f} s  {program} {' '.join(map(str, arguments))[:90]}", flush=True)
        return said

    def has(self, command: str) -> bool:
        """Whether `infinity` has this command."""
        done = subprocess.run(
            [self.bin / "infinity", command, "--help"], env=self.environment, capture_output=True, check=False
        )
        return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", action="store_true", help="try dist's source distribution instead of its wheel")
    options = parser.parse_args()
    try:
        if options.source:
            try_source(newest("infinity_offload-*.tar.gz"))
        else:
            try_wheel(newest("infinity_offload-*.whl"))
        shutil.rmtree(WORK)  # gigabytes; after a failure it stays to be looked at
    except TrialError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def newest(pattern: str) -> Path:
    """Return a file in dist/ that this Python can install. Raises TrialError without one."""
    tags = set(sys_tags())
    found = [
        file for file in DIST.glob(pattern) if file.suffix != ".whl" or tags & set(parse_wheel_filename(file.name)[3])
    ]
    if not found:
        raise TrialError(f"{DIST} has no {pattern} that this Python can install; run make wheel")
    return max(found, key=lambda file: file.stat().st_mtime)


def try_wheel(wheel: Path) -> None:
    """Try a wheel. Raises TrialError."""
    print(f"trying {wheel.name} without a compiler")
    trial = Trial(WORK)
    wanted = f"infinity-offload[hf] @ {wheel.as_uri()}"
    trial.call("pip", "install", "-q", "--only-binary=:all:", "-c", ROOT / "constraints.txt", wanted)
    trial.require_no_compiler()
    print(trial.call("python", ROOT / "release" / "smoke.py"), end="")
    without_avx(trial)
    require_installed(trial, trial.call("python", "-c", "import infinity; print(infinity.__file__)"))
    trial.call("infinity", "--help")
    fine_tune(trial)
    trial.call("infinity-bench", "--path", trial.folder, "--size", "16MiB")
    try_when_there(trial, "doctor", "swap.yaml")
    try_when_there(trial, "plan", "--model", "input/checkpoint", "--config", "swap.yaml")
    print("the wheel works without a compiler")


def try_source(source: Path) -> None:
    """Try a source distribution. Raises TrialError."""
    print(f"trying {source.name}, which pip builds")
    trial = Trial(WORK)
    compilers = {"PATH": f"{trial.bin}{os.pathsep}{os.environ['PATH']}"}
    trial.environment = {key: value for key, value in trial.environment.items() if key not in ("CC", "CXX")} | compilers
    trial.call("pip", "install", "-q", "-c", ROOT / "constraints.txt", "pyyaml")  # all that smoke.py needs
    trial.call("pip", "install", "-q", "--no-deps", source)
    print(trial.call("python", ROOT / "release" / "smoke.py"), end="")
    print("the source distribution can be installed")


def require_installed(trial: Trial, where: str) -> None:
    """Raise TrialError unless the wheel is the package that is imported."""
    if not Path(where.strip()).is_relative_to(trial.folder / "venv"):
        raise TrialError(f"{where.strip()} is imported, and not the wheel")


def without_avx(trial: Trial) -> None:
    """Run the core on an emulated x86-64 processor of 2003, which has nothing beyond SSE3. Raises TrialError."""
    qemu = shutil.which("qemu-x86_64")
    if platform.machine() != "x86_64" or qemu is None:
        print("     not tried: a processor without AVX, which takes an x86-64 machine with qemu-user")
        return
    trial.lend(qemu)
    python = trial.bin / "python"
    said = trial.call("qemu-x86_64", "-cpu", "qemu64", python, ROOT / "release" / "smoke.py")
    if "instruction sets: baseline compute" not in said:
        raise TrialError(f"qemu's processor has more than the baseline:\n{said}")


def fine_tune(trial: Trial) -> None:
    """Train a small model with its states on NVMe, then adapters with TRL's trainer, which the hf extra installs.
    Raises TrialError if the loss does not fall."""
    work, steps = trial.folder, str(STEPS)
    small = ("--hidden", "64", "--layers", "2", "--vocabulary", "512", "--text-bytes", "100000", "--dtype", "float32")
    trial.call("python", ROOT / "examples" / "make_demo_checkpoint.py", "input", *small)
    (work / "swap.yaml").write_text(_CONFIG.format(swap=work / "swap"))
    trial.call(
        "infinity", "finetune", "--model", "input/checkpoint", "--data", "input/text", "--config", "swap.yaml",
        "--output", "output", "--steps", steps, "--sequence-length", "64", "--batch-size", "4", "--lr", "3e-3",
        "--warmup-steps", "1", "--dtype", "fp32", "--verify-output",
    )  # fmt: skip
    report = json.loads((work / "output" / "report.json").read_text())
    print(f"          loss {report['first_loss']:.2f} → {report['last_loss']:.2f} in {report['steps']} steps")
    if not report["last_loss"] < report["first_loss"]:
        raise TrialError("the loss did not fall")
    (work / "adapters.yaml").write_text(_CONFIG.format(swap=work / "swap-adapters"))
    trial.environment |= {
        "MODEL": "input/checkpoint",
        "DATA": "input/texts.jsonl",
        "OUTPUT": "adapters",
        "STEPS": "2",
        "EVERY": "2",
        "LENGTH": "128",
        "DTYPE": "float32",
    }
    trial.call("infinity", "run", "adapters.yaml", ROOT / "examples" / "recipes" / "lora.py")
    if not (work / "adapters" / "adapter_model.safetensors").exists():
        raise TrialError("TRL's trainer wrote no adapters")


def try_when_there(trial: Trial, command: str, *arguments: str) -> None:
    """Run a command that not every version has."""
    if trial.has(command):
        print(trial.call("infinity", command, *arguments), end="")
    else:
        print(f"     not tried: this version has no `infinity {command}`")


def _call(command: list[str | Path], environment: dict[str, str] | os._Environ[str], cwd: Path | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        env=dict(environment),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise TrialError(f"{' '.join(map(str, command))} exits with {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
