"""The disk under a swap directory: what it is, what it allows, how it was measured, and how worn it is."""

from __future__ import annotations

import datetime
import errno
import os
import shlex
from functools import cached_property
from pathlib import Path

from infinity import files
from infinity.cli.disk_facts import DiskFacts, describe_disk
from infinity.cli.disk_kinds import NETWORK_FILESYSTEMS
from infinity.cli.doctor.apart import new_name
from infinity.cli.doctor.direct import takes_direct
from infinity.cli.doctor.mends import restarted, written
from infinity.cli.doctor.rows import Found, Probes
from infinity.cli.endurance import endurance_of, smartctl
from infinity.errors import ConfigError
from infinity.io.directory import require_place
from infinity.io.disks import MEMORY_FILESYSTEMS
from infinity.io.profile import profile_of
from infinity.sizes import PAGE_BYTES, format_bytes

_ROOT = Path("/")
_LIMIT_S = 30
_FULL_SHARE, _WORN_PERCENT = 0.05, 90
_SHOWN_OPTIONS = (
    *("rw", "ro", "sync", "async", "dirsync", "discard", "nodiscard", "noatime", "relatime", "nobarrier", "barrier"),
    *("nodatacow", "nodatasum", "autodefrag", "compress", "compress-force", "data", "dax", "soft", "hard"),
)
"""Others may name servers, users and keys."""
_KINDS = {
    "rotating": "a rotating disk: every step waits for it",
    "SATA": "SATA, which moves 0.6 GB/s at most",
    "USB": "on USB",
    "card": "a memory card",
    "network": "behind a network",
}


def disk(directory: Path, root: Path = _ROOT) -> Probes:
    """Args: directory: of nvme.paths, which a run makes if only its last part is missing."""
    section, name = f"disk {directory}", directory.expanduser().absolute()
    looks = Disk(name, root)
    rows = {
        "directory": looks.directory,
        "file system": looks.filesystem,
        "device": looks.device,
        "free space": looks.free,
        "direct I/O": looks.direct,
        "measured": looks.measured,
        "scheduler": looks.scheduler,
        "write cache": looks.write_cache,
        "TRIM": looks.trim,
        "wear": looks.wear,
    }
    return Probes.of(section, rows, _LIMIT_S, looks.scratch)


class Disk:
    """Args:
    root: of /sys and /proc, for tests.

    Attributes:
        there: the directory, or its nearest parent that exists.
        scratch: the name of the file that direct I/O is tried on.
    """

    def __init__(self, path: Path, root: Path = _ROOT) -> None:
        self.path, self._root = path, root
        self.there = files.nearest(path)
        self.scratch = new_name(self.there)

    def directory(self) -> Found:
        try:
            require_place(self.path)
        except ConfigError as error:
            name, quoted = self.path, shlex.quote(str(self.path))
            mend = ""
            if not os.path.lexists(name):  # without its parent it may be on a disk that is not mounted: nothing is made
                refused = name.parent.is_dir() and not os.access(name.parent, os.W_OK) and not self._is_read_only
                mend = f"sudo install -d -o $USER {quoted}" if refused else ""
            elif name.is_dir() and not os.access(name, os.W_OK) and not self._is_read_only:
                mend = f"sudo install -d -o $USER {shlex.quote(str(name / 'infinity-swap'))}"
            return Found("missing", str(error).removeprefix("nvme.paths: "), mend)
        return Found("ok", "can be written to" if self.path.exists() else "is made by the run")

    def filesystem(self) -> Found:
        facts = self._facts
        kind = facts.filesystem
        options = [each for each in facts.mount_options.split(",") if each.partition("=")[0] in _SHOWN_OPTIONS]
        said = f"{kind or 'not told'}{', mounted ' if options else ''}{','.join(options)}"
        if self._is_read_only:
            mend = f"sudo mount -o remount,rw {shlex.quote(facts.mount_point)}" if facts.mount_point else ""
            return Found("missing", f"{said}: nothing can be written", mend)
        if kind in MEMORY_FILESYSTEMS:
            return Found("missing", f"{said}: this is RAM, and saves none. Name a directory on an SSD")
        if kind == "overlay":
            mend = restarted("-v /a/directory/on/the/ssd:/swap", self._root)
            return Found("slower", f"{said}: layers of a container's image. Name a directory that is mounted", mend)
        if kind in NETWORK_FILESYSTEMS or facts.kind == "network":
            return Found("slower", f"{said}: behind a network. Name a directory on a local SSD")
        if kind == "btrfs" and "nodatacow" not in options:
            mend = f"chattr +C {shlex.quote(str(self.path))}" if self.path.exists() else ""
            said += ": it copies what is overwritten. Switch that off while the directory is empty"
            return Found("slower", said, mend)
        if "sync" in options:
            mend = f"sudo mount -o remount,async {shlex.quote(facts.mount_point)}"
            return Found("slower", f"{said}: every write waits for the disk", mend)
        return Found("ok", said) if kind else Found("unknown", "the system does not tell")

    def device(self) -> Found:
        facts = self._facts
        if not facts.device:
            return Found("ok" if facts.kind == "memory" else "unknown", facts.kind or "the system does not tell")
        names = " + ".join(facts.members) or facts.device
        said = f"{names} {facts.model}".strip()
        if facts.kind in _KINDS:
            return Found("slower", f"{said}: {_KINDS[facts.kind]}")
        if facts.kind == "memory":
            return Found("missing", f"{said}: this is RAM, and saves none. Name a directory on an SSD")
        if facts.kind == "virtual":
            return Found("ok", f"{said}: a virtual disk; only infinity-bench can tell what is behind it")
        return Found("ok", f"{said}: {facts.kind}") if facts.kind else Found("unknown", f"{said}: of no known kind")

    def free(self) -> Found:
        facts = self._facts
        said = f"{format_bytes(facts.free_bytes)} of {format_bytes(facts.total_bytes)}"
        if facts.free_bytes < PAGE_BYTES:
            return Found("missing", f"{said}: the disk is full")
        if facts.free_bytes < _FULL_SHARE * facts.total_bytes:
            return Found("slower", f"{said}: full file systems, and full drives, are slow")
        return Found("ok", said)

    def direct(self) -> Found:
        """Whether transfers go around the page cache, tried on a file that is gone at once."""
        try:
            works = takes_direct(self.scratch)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                return Found("unknown", f"a file cannot be made here: {error.strerror}")
            raise
        if works:
            return Found("ok", "works in blocks of 4 KiB")
        said = "does not work here in blocks of 4 KiB"
        return Found("slower", f"{said}: transfers go through the page cache, which takes RAM and time")

    def measured(self) -> Found:
        """The rates that the planner knows."""
        profile = profile_of(self.there)
        if profile is None:
            said = "not yet: block size and rates are guesses; measuring takes three minutes"
            return Found("unknown", said, self._measuring())
        said = f"{profile.read_rate / 1e9:.2f} GB/s reading, {profile.overwrite_rate / 1e9:.2f} overwriting, "
        return Found("ok", f"{said}{profile.mixed_rate / 1e9:.2f} both, {age(profile.measured)}")

    def _measuring(self) -> str:
        """The command that measures the disk; "" where the directory cannot be made, so that it may be another disk."""
        if self.there not in (self.path, self.path.parent) or not os.access(self.there, os.W_OK):
            return ""
        quoted = shlex.quote(str(self.path))
        return f"{'' if self.there == self.path else f'mkdir {quoted} && '}infinity-bench --path {quoted}"

    def scheduler(self) -> Found:
        facts = self._facts
        if not facts.scheduler:
            return Found("ok", "the device has none, or the system does not tell")
        if facts.kind == "NVMe" and facts.scheduler in ("bfq", "kyber"):
            name = f"/sys/block/{facts.members[0]}/queue/scheduler"
            return Found("slower", f"{facts.scheduler}, which takes processor time", written("none", name))
        return Found("ok", facts.scheduler)

    def write_cache(self) -> Found:
        cache = self._facts.write_cache
        if cache == "write back":
            return Found("ok", f"{cache}: a commit waits for the device to flush it")
        return Found("ok", cache or "the system does not tell")

    def trim(self) -> Found:
        facts = self._facts
        if facts.discards is None:
            return Found("ok", "the system does not tell")
        if not facts.discards:
            return Found("ok", "the device does not take it")
        always = "discard" in facts.mount_options.split(",")
        mount = shlex.quote(facts.mount_point)
        return Found("ok", "as files are removed" if always else f"when asked for, as by `sudo fstrim {mount}`")

    def wear(self) -> Found:
        """What the drive itself tells of its age. Its serial number is not shown."""
        facts = self._facts
        if facts.kind not in ("NVMe", "SATA", "SCSI", "USB", "rotating"):
            return Found("ok", f"{facts.kind or 'such'} disks tell none")
        if smartctl() is None:
            return Found("unknown", "smartmontools is not installed", "sudo apt-get install smartmontools")
        command, told = f"smartctl -a /dev/{facts.members[0]}", endurance_of(facts.members[0])
        if told is None and os.geteuid() != 0:
            return Found("unknown", "the drive tells it to root only", f"sudo {command}")
        if told is None:
            return Found("unknown", f"`{command}` does not tell it")
        said = f"{told.percentage_used} % used, {told.written_bytes / 1e12:.1f} TB written"
        if told.percentage_used >= _WORN_PERCENT:
            return Found("slower", f"{said}: the drive is near the end of its rated life, and fine-tuning writes a lot")
        return Found("ok", said)

    @cached_property
    def _facts(self) -> DiskFacts:
        return describe_disk(self.there, root=self._root)

    @property
    def _is_read_only(self) -> bool:
        return bool(os.statvfs(self.there).f_flag & os.ST_RDONLY)


def age(measured: str, today: datetime.date | None = None) -> str:
    """'2026-11-21' → 'measured 4 days ago'."""
    try:
        days = ((today or datetime.date.today()) - datetime.date.fromisoformat(measured)).days
    except ValueError:
        return f"measured {measured}"
    return "measured today" if days <= 0 else f"measured {days} day{'' if days == 1 else 's'} ago"
