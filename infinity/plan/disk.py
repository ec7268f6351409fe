"""The disks that the config names: their space for a swap file, and their speed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.config import SwapConfig
from infinity.files import nearest
from infinity.io.directory import SWAP_NAME, generations_in
from infinity.io.disk_profile import DiskProfile, profile_of

_SHARE = 0.9  # share of the free space; the run may write other files to the remaining space


@dataclass(frozen=True)
class DiskLimits:
    """Facts about the disks that a plan needs.

    Attributes:
        room_bytes: largest size of a swap file with optional data. Optional data is data that the config does not ask
            for, such as second copies of states. If several ranks use the disks, this is the size of one rank's file.
        rate: bytes per second of all disks together, half reads and half writes; None: not known.
        free_bytes: largest size that one rank's swap file can have on the disks; None: not known.
    """

    room_bytes: int
    rate: float | None = None
    free_bytes: int | None = None


def disks_of(config: SwapConfig, ranks: int = 1) -> DiskLimits:
    """Return the facts about this machine's disks: their free space, and the rates that infinity-bench measured."""
    known = profiles_of(config.nvme.paths)
    rate = sum(profile.mixed_rate for profile in known) if known else None
    paths = config.nvme.paths
    return DiskLimits(room_bytes(paths) // ranks, rate, _free_bytes(paths) // ranks)


def profiles_of(paths: Sequence[Path]) -> list[DiskProfile]:
    """Return the profiles that infinity-bench measured of these directories; an empty list if one was not measured."""
    found = [profile_of(path) for path in paths]
    profiles = [profile for profile in found if profile is not None]
    return profiles if len(profiles) == len(paths) else []


def room_bytes(paths: Sequence[Path]) -> int:
    """Return the largest size, including optional data, of a file that is striped evenly over these directories.

    Optional data is data that the config does not ask for, such as second copies of states. A tenth of the free space
    stays free of optional data.
    """
    return int(_free_bytes(paths) * _SHARE)


def _free_bytes(paths: Sequence[Path]) -> int:
    """Return the largest size that a file striped evenly over these directories can have."""
    free = [
        (os.stat(there).st_dev, _free_at(path, there)) for path, there in zip(paths, map(nearest, paths), strict=True)
    ]
    devices = [device for device, _ in free]
    return min((nbytes // devices.count(device) for device, nbytes in free), default=0) * len(paths)


def _free_at(path: Path, there: Path) -> int:
    """Return the free bytes of a path.

    A swap file without generations counts as free, because a new run removes the file first.
    """
    left = path.expanduser() / SWAP_NAME
    replaced = left.stat().st_blocks * 512 if left.is_file() and not generations_in(left.parent) else 0
    return shutil.disk_usage(there).free + replaced
