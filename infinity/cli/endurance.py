"""The wear of an NVMe drive, as the drive itself tells it to smartctl: /sys says nothing of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from infinity.base.small_files import number_in

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
    """From `smartctl -j -a`, of the health log; None where it does not tell both numbers."""
    log = report.get("nvme_smart_health_information_log") if isinstance(report, Mapping) else None
    if not isinstance(log, Mapping):
        return None
    count, used = number_in(log.get("data_units_written")), number_in(log.get("percentage_used"))
    if count is None or used is None:
        return None
    written = count * _NVME_UNIT_BYTES
    return Endurance(written, used, written * 100 // used if used >= _ENDURANCE_READABLE_PERCENT else None)
