"""The disks that the config names: how far a swap file can grow there, and how fast they are."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.config import SwapConfig
from infinity.files import nearest
from infinity.io.directory import SWAP_NAME, generations_in
from infinity.io.profile import DiskProfile, profile_of

_SHARE = 0.9  # of what is free: the rest is for what the run writes elsewhere


@dataclass(frozen=True)
class Disks:
    """What a plan must know of the disks.

    Attributes:
        room_bytes: what a swap file may grow to where nobody asked for it; of one rank's file, where several ranks
            share the disks.
        rate: bytes per second of all of them, half reads and half writes; None: not known.
        free_bytes: what a swap file of one rank has room for at most; None: not known.
    """

    room_bytes: int
    rate: float | None = None
    free_bytes: int | None = None


def disks_of(config: SwapConfig, ranks: int = 1) -> Disks:
    """Those that are here: what is free on them, and what infinity-bench measured."""
    known = profiles_of(config.nvme.paths)
    rate = sum(profile.mixed_rate for profile in known) if known else None
    paths = config.nvme.paths
    return Disks(room_bytes(paths) // ranks, rate, _free_bytes(paths) // ranks)


def profiles_of(paths: Sequence[Path]) -> list[DiskProfile]:
    """What infinity-bench measured of these directories; of none, where it did not measure all of them."""
    found = [profile_of(path) for path in paths]
    profiles = [profile for profile in found if profile is not None]
    return profiles if len(profiles) == len(paths) else []


def room_bytes(paths: Sequence[Path]) -> int:
    """What a file striped evenly over these directories may grow to where nobody asked for it: second copies of states
    leave a tenth of the disks free."""
    return int(_free_bytes(paths) * _SHARE)


def _free_bytes(paths: Sequence[Path]) -> int:
    """What a file striped evenly over these directories has room for."""
    free = [
        (os.stat(there).st_dev, _free_at(path, there)) for path, there in zip(paths, map(nearest, paths), strict=True)
    ]
    devices = [device for device, _ in free]
    return min((nbytes // devices.count(device) for device, nbytes in free), default=0) * len(paths)


def _free_at(path: Path, there: Path) -> int:
    """A swap file that a run without generations left behind is removed before a new one is made."""
    left = path.expanduser() / SWAP_NAME
    replaced = left.stat().st_blocks * 512 if left.is_file() and not generations_in(left.parent) else 0
    return shutil.disk_usage(there).free + replaced
