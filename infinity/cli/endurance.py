"""The wear of an NVMe drive, which the program smartctl reads from the drive. /sys does not contain the wear."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.base.small_files import number_in
from infinity.files import nearest
from infinity.io.disks import disk_under

_NVME_UNIT_BYTES = 512_000  # size of one of NVMe's "data units"
_ENDURANCE_READABLE_PERCENT = 5  # if a smaller percentage is used, the estimate of the rated bytes is too coarse
_SYSTEM_PROGRAMS = ("/usr/local/sbin", "/usr/sbin", "/sbin")
"""Directories in which smartctl is often installed. They are often missing from the PATH of ordinary users."""
_ASK_S = 5


@dataclass(frozen=True)
class Endurance:
    """The wear of a drive, as the drive reports it.

    Attributes:
        written_bytes: bytes that have been written to the drive over its life.
        percentage_used: share of the rated endurance that is used up, 0 to 255 percent.
        rated_bytes: estimate of the rated endurance in bytes, which is written_bytes / percentage_used. None if less
            than 5 % are used up, because the percentage is then too coarse.
    """

    written_bytes: int
    percentage_used: int
    rated_bytes: int | None


def smartctl() -> str | None:
    """Return the path of the program; None if it is not installed."""
    return shutil.which("smartctl", path=os.pathsep.join([os.environ.get("PATH", os.defpath), *_SYSTEM_PROGRAMS]))


def endurance_of(device: str) -> Endurance | None:
    """Return the wear of a drive; None if smartctl does not report it. The query may take seconds, and may need root.

    Args:
        device: kernel name of the disk ('nvme0n1').
    """
    program = smartctl()
    if program is None:
        return None
    try:
        command = [program, "-j", "-a", f"/dev/{device}"]
        done = subprocess.run(command, capture_output=True, timeout=_ASK_S, check=False)
        return parse_smartctl(json.loads(done.stdout))
    except (OSError, ValueError, RecursionError, subprocess.TimeoutExpired):
        return None


def parse_smartctl(report: object) -> Endurance | None:
    """Return the wear in a report of `smartctl -j -a`; None if the report lacks the written bytes or the percentage."""
    log = report.get("nvme_smart_health_information_log") if isinstance(report, Mapping) else None
    if not isinstance(log, Mapping):
        return None
    count, used = number_in(log.get("data_units_written")), number_in(log.get("percentage_used"))
    if count is None or used is None:
        return None
    written = count * _NVME_UNIT_BYTES
    return Endurance(written, used, written * 100 // used if used >= _ENDURANCE_READABLE_PERCENT else None)


def endurance_bytes(paths: Sequence[Path]) -> float:
    """Return the rated endurance of all drives together in bytes, from the drives' own counters.

    The result is 0 if a drive does not report its endurance.
    """
    disks = [disk_under(nearest(path)).members for path in paths]
    told = [endurance_of(members[0].name) if members else None for members in disks]
    rated = [wear.rated_bytes or 0 if wear is not None else 0 for wear in told]
    return sum(rated) if all(rated) else 0
