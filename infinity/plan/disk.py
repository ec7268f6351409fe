"""How far a swap file can grow on the disks that the config names."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from infinity.files import nearest
from infinity.io.directory import SWAP_NAME, generations_in

_SHARE = 0.9  # of what is free: the rest is for what the run writes elsewhere


def room_bytes(paths: Sequence[Path]) -> int:
    """What a file striped evenly over these directories may grow to where nobody asked for it: second copies of states
    leave a tenth of the disks free."""
    free = [(os.stat(there).st_dev, _free(path, there)) for path, there in zip(paths, map(nearest, paths), strict=True)]
    devices = [device for device, _ in free]
    return int(min((nbytes // devices.count(device) for device, nbytes in free), default=0) * len(paths) * _SHARE)


def _free(path: Path, there: Path) -> int:
    """A swap file that a run without generations left behind is removed before a new one is made."""
    left = path.expanduser() / SWAP_NAME
    replaced = left.stat().st_blocks * 512 if left.is_file() and not generations_in(left.parent) else 0
    return shutil.disk_usage(there).free + replaced
