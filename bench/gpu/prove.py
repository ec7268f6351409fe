"""Proof of the bundle: without a network and with torch as the only package, infinity is built from the bundle and
trains two offloaded steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from gpu.bundle import FOLDER, BundleError, tree_files

_TORCH_ALONE = """
import importlib.metadata as metadata, json, re
from packaging.requirements import Requirement
seen, todo, entries = set(), ["torch"], {}
while todo:
    name = todo.pop()
    if name in seen:
        continue
    seen.add(name)
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        continue
    for file in found.files or ():
        if file.parts[0] not in ("..", "__pycache__"):
            entries[file.parts[0]] = str(found.locate_file(file.parts[0]))
    for text in found.requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            todo.append(re.sub("[-_.]+", "-", requirement.name).lower())
print(json.dumps(entries))
"""

_STEPS = """
import os, tempfile, torch, infinity
from torch import nn
for tier in ("host", "nvme"):
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as swap:
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]).bfloat16()
        config = {"weights": tier, "optimizer": tier, "memory": {"device": "16MiB", "host": "128MiB"}}
        model = infinity.offload(model, config | {"nvme": {"paths": [swap]}, "commit_every": 0}, device="cpu")
        optim = infinity.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(2):
            loss = model(torch.ones(4, 64, dtype=torch.bfloat16)).square().mean()
            loss.backward(); optim.step(); optim.zero_grad()
            losses.append(round(loss.item(), 5))
        engine = infinity.statistics(model).engine
        infinity.close(model)
        print(f"proved: weights and states on {tier}, engine {engine}, losses {losses}", flush=True)
"""

_PREPARE = """
import sys
from pathlib import Path
sys.path.insert(0, "bench")
from gpu.environment import prepare
try:
    print("prepared:", *prepare(Path.cwd(), Path(sys.executable)))
except RuntimeError as error:
    sys.exit(f"prepare: {error}")
"""


def prove(root: Path, python: Path) -> int:
    """Build and train from the bundle, in an environment without a network.

    Args:
        root: root of the checkout, with its .bundle.
        python: a Python of the bundle's version that has torch; no other package of this Python is used.

    Returns:
        0: infinity was built and trained. 1: the build or the training failed, and stderr says why.

    Raises:
        BundleError: there is no bundle, or `python` has no torch.
    """
    if not (root / FOLDER).is_dir():
        raise BundleError(f"{root / FOLDER} does not exist; run make gpu-bundle")
    asked = subprocess.run([str(python), "-c", _TORCH_ALONE], capture_output=True, text=True, check=False)
    entries = json.loads(asked.stdout) if asked.returncode == 0 else {}
    if not entries:
        raise BundleError(f"{python} has no torch to prove anything with: {asked.stderr.strip()[-500:]}")
    with tempfile.TemporaryDirectory(prefix="gpu-bundle-") as temporary:
        tree = Path(temporary) / "tree"
        _copy_tree(root, tree)
        bare = Path(temporary) / "bare"
        subprocess.run([str(python), "-m", "venv", str(bare)], check=True)
        site = next((bare / "lib").glob("python*/site-packages"))
        for name, place in entries.items():
            if not (site / name).exists():
                (site / name).symlink_to(place)
        inside = bare / "bin" / "python"
        programs = _programs(Path(temporary) / "bin")
        done = _offline([str(inside), "-c", _PREPARE], tree, programs)
        if done == 0:
            _require_bundled(tree)
            done = _offline([str(tree / "build" / "gpu-venv" / "bin" / "python"), "-c", _STEPS], tree, programs)
    return 1 if done else 0


def _copy_tree(root: Path, tree: Path) -> None:
    """Copy the files that would be sent to the machine: the bundle, and the files that git does not ignore."""
    tree.mkdir()
    subprocess.run(["cp", "-r", "--parents", "-t", str(tree), *tree_files(root), FOLDER], cwd=root, check=True)


def _programs(folder: Path) -> Path:
    """Return a folder that links to the system's programs, apart from those that the bundle provides."""
    folder.mkdir()
    for program in Path("/usr/bin").iterdir():
        if not program.name.startswith(("cmake", "ninja")):
            (folder / program.name).symlink_to(program)
    return folder


def _offline(command: list[str], cwd: Path, programs: Path) -> int:
    """Run a command in a network namespace without devices and with a clean environment; return its exit code."""
    environment = {
        "PATH": str(programs),
        "HOME": str(cwd),
        # CMake ignores the system's own headers and libraries.
        "CMAKE_ARGS": "-DCMAKE_IGNORE_PATH=/usr/include;/usr/lib/x86_64-linux-gnu;/usr/lib;/lib;/lib/x86_64-linux-gnu",
    }
    namespace = ["unshare", "-n"] if os.geteuid() == 0 else ["unshare", "-rn"]
    return subprocess.run([*namespace, *command], cwd=cwd, env=environment, check=False).returncode


def _require_bundled(tree: Path) -> None:
    """Require that the build used the bundle.

    Raises BundleError if the build used a header or a library of the system.
    """
    cache = next((tree / "build").glob("*/CMakeCache.txt")).read_text()
    for line in cache.splitlines():
        if line.startswith(("XXHASH_INCLUDE:", "URING_INCLUDE:", "URING_LIBRARY:")):
            print(line, file=sys.stderr)
            if str(tree / FOLDER) not in line:
                raise BundleError(f"the build did not use the bundle: {line}")
