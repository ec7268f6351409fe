"""Time to read and write the manifest of a generation with many extents, with its file in the page cache.

    bench/manifest.py [--extents 100000] [--rounds 5]

The script prints medians in seconds, and the size of the file.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from infinity.io.manifest import ExtentRecord, Manifest, read_manifest, sum_bytes, write_manifest

_STATES = ("weight", "residual", "exp_avg", "exp_avg_sq")
_EXTENT_BYTES = 256 << 10


def manifest_of(count: int) -> Manifest:
    """Return a manifest with `count` extents of 256 KiB, four per unit."""
    extents = [
        ExtentRecord(
            unit=f"model.layers.{index // len(_STATES)}",
            group=0,
            state=_STATES[index % len(_STATES)],
            slot=index % 2,
            offset=index * _EXTENT_BYTES,
            nbytes=_EXTENT_BYTES,
        )
        for index in range(count)
    ]
    sums = os.urandom(count * sum_bytes(_EXTENT_BYTES))
    return Manifest(run="0" * 32, step=1, created="now", extents=extents, sums=sums, facts={}, body={})


def median_s(act: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--extents", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    manifest = manifest_of(options.extents)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "manifest"
        path.write_bytes(b"".join(write_manifest(manifest)))
        read, write = (
            median_s(act, options.rounds) for act in (lambda: read_manifest(path), lambda: write_manifest(manifest))
        )
        nbytes = path.stat().st_size
    print(f"{options.extents} extents, {nbytes / 1e6:.1f} MB: read in {read:.3f} s, made in {write:.3f} s")


if __name__ == "__main__":
    main()
