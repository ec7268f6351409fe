"""The wear of a drive, as the drive itself tells it to smartctl: /sys says nothing of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from infinity.base.small_files import number_in

_SMART_SECTOR_BYTES = 512
_NVME_UNIT_BYTES = 512_000  # what NVMe's "data units" count
_ENDURANCE_READABLE_PERCENT = 5  # below, the estimate is too coarse
_SYSTEM_PROGRAMS = ("/usr/local/sbin", "/usr/sbin", "/sbin")
"""Where the program is, and where the PATH of a user who is not root may not look."""
_ASK_S = 5


@dataclass(frozen=True)
class Endurance:
    """The wear of a drive, as the drive reports it.

    Attributes:
        written_bytes: by hosts, over its life.
        percentage_used: of the rated endurance, 0 to 255.
        rated_bytes: an estimate of the rated endurance, written / used; None below 5 %, where the percentage is too
            coarse.
    """

    written_bytes: int
    percentage_used: int
    rated_bytes: int | None


def smartctl() -> str | None:
    """The path of the program; None where it is not installed."""
    return shutil.which("smartctl", path=os.pathsep.join([os.environ.get("PATH", os.defpath), *_SYSTEM_PROGRAMS]))


def endurance_of(device: str) -> Endurance | None:
    """The wear of a drive; None where no program tells it. Asking may take seconds, and may need root.

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
    """From `smartctl -j -a`: NVMe's health log, or a SATA drive's attributes; None where neither tells both numbers."""
    log = _at(report, "nvme_smart_health_information_log")
    if log is not None:
        return _wear(_at(log, "data_units_written"), _NVME_UNIT_BYTES, _at(log, "percentage_used"))
    rows = _at(report, "ata_smart_attributes", "table")
    table = {str(_at(row, "name")): row for row in rows} if isinstance(rows, list) else {}
    left = number_in(_at(table.get("Wear_Leveling_Count"), "value"))
    written = _at(table.get("Total_LBAs_Written"), "raw", "value")
    return _wear(written, _SMART_SECTOR_BYTES, None if left is None else max(100 - left, 0))


def _wear(units: object, unit_bytes: int, percent: object) -> Endurance | None:
    count, used = number_in(units), number_in(percent)
    if count is None or used is None:
        return None
    written = count * unit_bytes
    return Endurance(written, used, written * 100 // used if used >= _ENDURANCE_READABLE_PERCENT else None)


def _at(report: object, *names: str) -> object:
    """The value at a path of names; None where the path ends early."""
    for name in names:
        report = report.get(name) if isinstance(report, Mapping) else None
    return report
