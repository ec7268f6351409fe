"""Collector of everything that a machine without a network needs to build and run infinity with its own torch.

bench/gpu_bundle.py [--python 3.12]         makes .bundle/: wheels, headers, liburing.a, licences, MANIFEST.json
bench/gpu_bundle.py --check                 checks whether .bundle is complete and small enough
bench/gpu_bundle.py --prove [--with PYTHON] builds infinity from .bundle in an environment that has only torch and no
                                            network, and makes two steps (as root, to create a network namespace)

The bundle's folder, .bundle, is ignored by git. The bundle contains no part of infinity. It contains the licences of
its contents.
"""

from __future__ import annotations

import argparse
import email
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu.bundle import DEBIAN_FILES, FOLDER, LIMIT_BYTES, PLATFORMS, BundleError, check, folder_bytes, tree_bytes
from gpu.environment import BUILD, IMPORT, STAGES, TRAINER
from gpu.prove import prove

ROOT = Path(__file__).resolve().parent.parent


def make(python: str) -> None:
    """Replace the bundle. The old bundle stays in place until the new one is complete."""
    beside = tree_bytes(ROOT)
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=f"{FOLDER}-") as temporary:
        folder = Path(temporary) / "new"
        (folder / "wheels").mkdir(parents=True)
        _download([*BUILD, *IMPORT], python, folder / "wheels")
        packages = [_collect_debian(package, files, folder) for package, files in DEBIAN_FILES.items()]
        for group in STAGES:
            _add_if_it_fits(group, python, folder, LIMIT_BYTES - beside)
        wheels = [_describe(wheel) for wheel in sorted((folder / "wheels").iterdir())]
        manifest = {"python": python, "wheels": wheels, "debian": packages}
        (folder / "MANIFEST.json").write_text(json.dumps(manifest, indent=1) + "\n")
        nbytes = check(folder, python, beside_bytes=beside)
        shutil.rmtree(ROOT / FOLDER, ignore_errors=True)
        folder.rename(ROOT / FOLDER)
    print(
        f"{FOLDER}: {len(wheels)} wheels for Python {python}, {', '.join(DEBIAN_FILES)}; {nbytes / (1 << 20):.1f} MiB, "
        f"with the working tree {(nbytes + beside) / (1 << 20):.1f} of {LIMIT_BYTES >> 20} MiB"
    )


def _download(names: Sequence[str], python: str, into: Path) -> None:
    """Download wheels of `names` and of their dependencies.

    The dependencies of TRAINER include torch, so they are left out.
    """
    digits = python.replace(".", "")
    options = ["-q", "--disable-pip-version-check", "--only-binary=:all:", "--implementation=cp"]
    options += [f"--python-version={python}", *(f"--abi={abi}" for abi in (f"cp{digits}", "abi3", "none"))]
    options += [f"--platform={platform}" for platform in PLATFORMS]
    options += ["--no-deps"] if names == TRAINER else []
    _run([sys.executable, "-m", "pip", "download", *options, "-c", "constraints.txt", "-d", str(into), *names])


def _add_if_it_fits(names: tuple[str, ...], python: str, folder: Path, limit: int) -> None:
    """Download the wheels of `names`, and add them if the bundle stays small enough."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        there = {wheel.name for wheel in (folder / "wheels").iterdir()}
        _download(names, python, Path(temporary))
        new = [wheel for wheel in Path(temporary).iterdir() if wheel.name not in there]
        nbytes = sum(wheel.stat().st_size for wheel in new)
        if folder_bytes(folder) + nbytes > limit:
            print(f"{', '.join(names)}: {nbytes / (1 << 20):.1f} MiB do not fit; the machine must have them")
            return
        for wheel in new:
            shutil.move(wheel, folder / "wheels" / wheel.name)


def _collect_debian(package: str, files: dict[str, str], folder: Path) -> dict[str, str]:
    """Copy the files of a package: the installed files, or the archive's files if the package is not installed."""
    asked = _run(["dpkg-query", "-W", "-f", "${db:Status-Abbrev} ${Version}", package], check=False)
    with tempfile.TemporaryDirectory() as temporary:
        source, version = Path("/"), asked.stdout.split()[-1] if asked.stdout.startswith("ii") else ""
        if not version:
            source = Path(temporary)
            _run(["apt-get", "download", "-q", package], cwd=source)
            archive = next(source.glob("*.deb"))
            _run(["dpkg-deb", "-x", str(archive), str(source)])
            version = _run(["dpkg-deb", "-f", str(archive), "Version"]).stdout.strip()
        for pattern, target in files.items():
            found = sorted(source.glob(pattern))
            if not found:
                raise BundleError(f"{package} {version} has no {pattern}")
            (folder / target).mkdir(parents=True, exist_ok=True)
            for file in found:
                shutil.copy(file, folder / target / file.name)
        licence = folder / "licences" / f"{package}.txt"
        licence.parent.mkdir(exist_ok=True)
        shutil.copy(source / "usr/share/doc" / package / "copyright", licence)
    return {"package": package, "version": version, "licence": str(licence.relative_to(folder))}


def _describe(wheel: Path) -> dict[str, Any]:
    """Return the line of the manifest for a wheel: name, size, digest, licence."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        fields = email.message_from_bytes(archive.read(metadata))
    classified = [each.split(" :: ")[-1] for each in fields.get_all("Classifier", []) if each.startswith("License")]
    licence = fields["License-Expression"] or ", ".join(classified) or (fields["License"] or "").split("\n")[0]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return {"file": wheel.name, "bytes": wheel.stat().st_size, "sha256": digest, "licence": licence}


def _run(command: list[str], *, check: bool = True, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise BundleError(f"{' '.join(command[:4])} … failed: {done.stderr.strip()[-2000:]}")
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="version of the machine's Python (default 3.12)")
    parser.add_argument("--check", action="store_true", help="check the existing folder")
    parser.add_argument(
        "--prove", action="store_true", help="build and run infinity from the bundle, without a network"
    )
    parser.add_argument("--with", dest="interpreter", type=Path, default=Path(sys.executable), metavar="PYTHON")
    options = parser.parse_args()
    try:
        if options.prove:
            return prove(ROOT, options.interpreter)
        if options.check:
            python = json.loads((ROOT / FOLDER / "MANIFEST.json").read_text())["python"]
            nbytes = check(ROOT / FOLDER, python, beside_bytes=tree_bytes(ROOT))
            print(f"{FOLDER}: whole, for Python {python}, {nbytes / (1 << 20):.1f} MiB")
            return 0
        make(options.python)
    except BundleError as error:
        print(f"gpu-bundle: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
