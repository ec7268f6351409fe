"""Whether the native core of an installed wheel works on this machine. Of what the wheel needs PyYAML is enough.

python release/smoke.py     the core is loaded, moves bytes to a disk and back, and computes the same bits with every
                            instruction set of this processor; both commands start
"""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

# Python puts the folder of a script first on the path: a checkout beside it must not be what is tried.
sys.path = [entry for entry in sys.path if entry and not (Path(entry) / "pyproject.toml").exists()]

from infinity import _native  # noqa: E402

_NBYTES = 1 << 20
_NUMEL = 1 << 16
_FOREIGN = ("liburing", "libxxhash", "libtorch", "libc10", "libcuda", "libcudart")
"""Libraries that the core must not bring into a process: what it takes of the first two is inside it."""


def main() -> int:
    foreign = loaded(_FOREIGN)
    if foreign:
        print(f"error: the native core loads {', '.join(foreign)}", file=sys.stderr)
        return 1
    print(f"core: {_native.__file__}")
    with tempfile.TemporaryDirectory() as folder:
        for engine, reason in engines():
            if reason:
                print(f"engine {engine}: {reason}")
                if "built without" in reason:
                    return 1
                continue
            move(engine, Path(folder) / engine)
            print(f"engine {engine}: {_NBYTES >> 10} KiB read back as written")
    results = {isa: step(isa) for isa in _native.supported_isas()}
    if len(set(results.values())) != 1:
        print(f"error: {', '.join(results)} do not compute the same bits", file=sys.stderr)
        return 1
    print(f"instruction sets: {', '.join(results)} compute the same bits")
    for command in ("infinity", "infinity-bench"):
        done = subprocess.run([Path(sys.executable).parent / command, "--version"], capture_output=True, text=True)
        if done.returncode:
            print(f"error: {command} --version: {done.stderr.strip()}", file=sys.stderr)
            return 1
        print(done.stdout.strip())
    return 0


def loaded(names: tuple[str, ...]) -> list[str]:
    """Return the libraries of `names` that are mapped into this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = {Path(line.split(maxsplit=5)[5]).name for line in lines if "/" in line}
    return sorted(file for file in files if file.startswith(names))


def engines() -> list[tuple[str, str]]:
    """(engine, why it cannot be used; '' where it can)."""
    found = []
    for name in ("io_uring", "threads"):
        try:
            _native.IOEngine(name).close()
        except OSError as error:
            found.append((name, str(error)))
        else:
            found.append((name, ""))
    return found


def move(engine: str, path: Path) -> None:
    """Write to a new file and read back. Raises RuntimeError when that fails, or the bytes differ."""
    arena = _native.Arena(2 * _NBYTES)
    written, read = arena.view(0, _NBYTES), arena.view(_NBYTES, _NBYTES)
    written[:] = os.urandom(_NBYTES)
    io, file = _native.IOEngine(engine), _native.File(str(path), create=True)
    file.preallocate(_NBYTES)
    file.keep_checksums(_NBYTES)
    for request in (lambda: io.write(file, 0, written), lambda: io.sync(file), lambda: io.read(file, 0, read)):
        future = request()
        if not future.wait(60):
            raise RuntimeError(f"engine {engine}: no answer within a minute")
        if future.failure() is not None:
            raise RuntimeError(f"engine {engine}: {future.failure().message}")
    if written != read:
        raise RuntimeError(f"engine {engine}: other bytes were read than written")
    file.close()
    io.close()


def step(isa: str) -> bytes:
    """Weights and moments after one step of AdamW, computed with one instruction set."""
    arena = _native.Arena(4 * 4 * _NUMEL)
    views = [arena.view(4 * _NUMEL * index, 4 * _NUMEL) for index in range(4)]
    weight, exp_avg, exp_avg_sq, grad = views
    drawn = random.Random(0)
    for view in (weight, grad):
        view[:] = struct.pack(f"{_NUMEL}f", *(drawn.uniform(-1, 1) for _ in range(_NUMEL)))
    segment = _native.Segment(0, _NUMEL, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)
    pool = _native.ThreadPool(2)
    how = {"weight_dtype": "fp32", "master": "weight", "grad_dtype": "fp32", "segments": [segment], "pool": pool}
    if not _native.optimizer_update(weight, None, exp_avg, exp_avg_sq, grad, isa=isa, **how):
        raise RuntimeError(f"{isa}: the step gave values that are not finite")
    pool.close()
    return bytes(weight) + bytes(exp_avg) + bytes(exp_avg_sq)


if __name__ == "__main__":
    sys.exit(main())
