"""Profile of this machine's disks, as infinity-bench measured them.

The profile determines the engine's block size, the store's stripes and the planner's predictions. It is one JSON file
per user. infinity works without a profile, so a profile that cannot be read is ignored with a warning.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from infinity import files
from infinity.errors import printable
from infinity.io.disks import disk_key
from infinity.io.schema import Name, first_problem

logger = logging.getLogger(__name__)

_BYTES_MAX = 1 << 20
_RATE_MAX = 1e15

_Rate = Annotated[float, Field(gt=0, lt=_RATE_MAX, allow_inf_nan=False)]


class DiskProfile(BaseModel):
    """Measurements of one file system. Rates are in bytes per second, for blocks of `block_bytes`.

    Attributes:
        read_rate, overwrite_rate: rate of reads without writes, and of writes to existing blocks without reads.
        mixed_rate: sum of the rates of reads and writes in equal parts, as in a training step.
        block_bytes: block size that was measured.
        in_flight_bytes: smallest number of bytes in flight with which these rates are reached; at least 8 MiB.
        engine: name of the I/O engine that was measured.
        path: directory that was measured.
        measured: date of the measurement, ISO 8601.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    read_rate: _Rate
    overwrite_rate: _Rate
    mixed_rate: _Rate
    block_bytes: int = Field(gt=0, multiple_of=4096, le=1 << 30)
    in_flight_bytes: int = Field(gt=0, le=1 << 40)
    engine: Name
    path: Name
    measured: Name


class _ProfilesFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    version: Literal[1] = 1
    disks: dict[Name, DiskProfile] = Field(default_factory=dict)


def profile_path() -> Path:
    """Return the path $XDG_CACHE_HOME/infinity/disks.json; XDG_CACHE_HOME defaults to ~/.cache.

    Raises OSError if no home directory is known.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(cache).expanduser() / "infinity" / "disks.json"
    except RuntimeError as error:  # the user has no entry in passwd, as in some containers
        raise OSError(errno.ENOENT, "no home directory is known: set HOME or XDG_CACHE_HOME", cache) from error


def load_profiles(path: Path | None = None) -> Mapping[str, DiskProfile]:
    """Return the measurements of all disks, by `disk_key`; an empty mapping if there is no profile that this version
    can read."""
    try:
        path = path or profile_path()
    except OSError:  # without a home directory, no profile can have been saved
        return {}
    try:
        profiles = _ProfilesFile.model_validate_json(files.read_regular(path, _BYTES_MAX, follow=True))
    except FileNotFoundError:
        return {}
    except (OSError, ValidationError) as error:
        problem = error.strerror if isinstance(error, OSError) else first_problem(error)
        logger.warning(
            "the disk profile %s is not readable (%s); run infinity-bench to make a new one", path, printable(problem)
        )
        return {}
    return profiles.disks


def profile_of(directory: Path, path: Path | None = None) -> DiskProfile | None:
    """Return the profile of the disk with `directory`, or with its nearest existing parent; None if the disk was not
    measured."""
    profiles = load_profiles(path)
    if not profiles:
        return None
    return profiles.get(disk_key(files.nearest(directory)))


def save_profile(directory: Path, profile: DiskProfile, path: Path | None = None) -> Path:
    """Add the measurements of a disk to the profile, in place of earlier measurements of this disk. Return the
    profile's path.

    Args:
        directory: a directory on the disk.
        profile: measurements of the disk.
        path: the profile file; None: the user's profile.

    Raises:
        OSError: the file cannot be written.
    """
    path = path or profile_path()
    disks = dict(load_profiles(path)) | {disk_key(directory): profile}
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as file:
        file.write(json.dumps(_ProfilesFile(disks=disks).model_dump(), indent=2) + "\n")
    return path
