"""Probes of the disk of a swap directory: the kind of the disk, its mount options, its measured rates and its wear."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
from functools import cached_property
from pathlib import Path

from infinity import _native, files
from infinity.base.small_files import chosen, text_of
from infinity.cli.disk_kinds import DiskKind, kind_of
from infinity.cli.doctor.fixes import restarted, written
from infinity.cli.doctor.probes import ProbeFinding, ProbeGroup, State
from infinity.cli.doctor.subprocess_probes import new_name
from infinity.cli.endurance import endurance_of, smartctl
from infinity.errors import ConfigError
from infinity.io import disks
from infinity.io.directory import require_place
from infinity.io.disk_profile import profile_of
from infinity.sizes import PAGE_BYTES, format_bytes

_ROOT = Path("/")
_LIMIT_S = 30
_FULL_SHARE, _WORN_PERCENT = 0.05, 90
_SHOWN_OPTIONS = (
    *("rw", "ro", "sync", "async", "dirsync", "discard", "nodiscard", "noatime", "relatime", "nobarrier", "barrier"),
    *("nodatacow", "nodatasum", "autodefrag", "compress", "compress-force", "data", "dax", "soft", "hard"),
)
"""Mount options that are shown. Other options may contain names of servers, users and keys."""
_KINDS: dict[DiskKind, tuple[State, str]] = {
    "NVMe": ("ok", "NVMe"),
    "SCSI": ("ok", "SCSI"),
    "virtual": ("ok", "a virtual disk; only infinity-bench can measure its speed"),
    "rotating": ("slower", "a rotating disk: every step waits for it"),
    "SATA": ("slower", "SATA, which moves 0.6 GB/s at most"),
    "USB": ("slower", "on USB"),
    "card": ("slower", "a memory card"),
    "network": ("slower", "a network disk. Name a directory on a local SSD"),
    "memory": ("missing", "this is RAM, so it saves no RAM. Name a directory on an SSD"),
    "": ("unknown", "the system does not report its kind"),
}


def disk(directory: Path, root: Path = _ROOT) -> ProbeGroup:
    """Return the probes of a directory of nvme.paths.

    If the directory is missing, its parent must exist, and a run creates the directory.
    """
    section, name = f"disk {directory}", directory.expanduser().absolute()
    looks = DiskProbes(name, root)
    rows = {
        "directory": looks.directory,
        "file system": looks.filesystem,
        "device": looks.device,
        "free space": looks.free,
        "direct I/O": looks.direct,
        "measured": looks.measured,
        "scheduler": looks.scheduler,
        "wear": looks.wear,
    }
    return ProbeGroup.of(section, rows, _LIMIT_S, looks.scratch)


class DiskProbes:
    """Probes of the disk on which a directory is.

    Args:
        path: the directory.
        root: parent of /sys and /proc, for tests.

    Attributes:
        path: the directory.
        there: the directory, or its nearest existing parent.
        scratch: path of the file that is used to try direct I/O.
    """

    def __init__(self, path: Path, root: Path = _ROOT) -> None:
        self.path, self._root = path, root
        self.there = files.nearest(path)
        self.scratch = new_name(self.there)

    def directory(self) -> ProbeFinding:
        try:
            require_place(self.path)
        except ConfigError as error:
            name, quoted = self.path, shlex.quote(str(self.path))
            mend = ""
            if not os.path.lexists(name):  # if the parent is missing as well, the disk may not be mounted
                refused = name.parent.is_dir() and not os.access(name.parent, os.W_OK) and not self._is_read_only
                mend = f"sudo install -d -o $USER {quoted}" if refused else ""
            elif name.is_dir() and not os.access(name, os.W_OK) and not self._is_read_only:
                mend = f"sudo install -d -o $USER {shlex.quote(str(name / 'infinity-swap'))}"
            return ProbeFinding("missing", str(error).removeprefix("nvme.paths: "), mend)
        return ProbeFinding("ok", "writable" if self.path.exists() else "the run will create the directory")

    def filesystem(self) -> ProbeFinding:
        kind, mount = self._disk.filesystem, shlex.quote(self._disk.mount_point)
        options = [each for each in self._disk.mount_options.split(",") if each.partition("=")[0] in _SHOWN_OPTIONS]
        said = f"{kind or 'unknown'}{', mounted ' if options else ''}{','.join(options)}"
        if self._is_read_only:
            mend = f"sudo mount -o remount,rw {mount}" if self._disk.mount_point else ""
            return ProbeFinding("missing", f"{said}: the file system is read-only", mend)
        if kind == "overlay":
            mend = restarted("-v /a/directory/on/the/ssd:/swap", self._root)
            return ProbeFinding(
                "slower", f"{said}: these are layers of a container's image. Name a mounted directory", mend
            )
        if kind == "btrfs" and "nodatacow" not in options:
            mend = f"chattr +C {shlex.quote(str(self.path))}" if self.path.exists() else ""
            said += ": it copies blocks on overwrite. Turn this off while the directory is empty"
            return ProbeFinding("slower", said, mend)
        if "sync" in options:
            return ProbeFinding(
                "slower", f"{said}: every write waits for the disk", f"sudo mount -o remount,async {mount}"
            )
        return ProbeFinding("ok" if kind else "unknown", said)

    def device(self) -> ProbeFinding:
        names = " + ".join(member.name for member in self._disk.members) or self._disk.filesystem or "a device"
        state, why = _KINDS[self._kind]
        return ProbeFinding(state, f"{names} {self._told('device/model')}".strip() + f": {why}")

    def free(self) -> ProbeFinding:
        room = shutil.disk_usage(self.there)
        said = f"{format_bytes(room.free)} of {format_bytes(room.total)}"
        if room.free < PAGE_BYTES:
            return ProbeFinding("missing", f"{said}: the disk is full")
        if room.free < _FULL_SHARE * room.total:
            return ProbeFinding("slower", f"{said}: full file systems, and full drives, are slow")
        return ProbeFinding("ok", said)

    def direct(self) -> ProbeFinding:
        """Check whether swap files can bypass the page cache.

        The check creates an empty file and removes it immediately.
        """
        try:
            file = _native.File(str(self.scratch), create=True)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                return ProbeFinding("unknown", f"a file cannot be created here: {error.strerror}")
            raise
        self.scratch.unlink()
        works = file.direct
        file.close()
        if works:
            return ProbeFinding("ok", "works in blocks of 4 KiB")
        said = "does not work here in blocks of 4 KiB"
        return ProbeFinding("slower", f"{said}: transfers go through the page cache, which costs RAM and time")

    def measured(self) -> ProbeFinding:
        """Return a row with the rates that the planner uses."""
        profile = profile_of(self.there)
        if profile is None:
            said = "not measured yet: block size and rates are guesses; measuring takes three minutes"
            return ProbeFinding("unknown", said, self._measuring())
        said = f"{profile.read_rate / 1e9:.2f} GB/s reading, {profile.overwrite_rate / 1e9:.2f} overwriting, "
        return ProbeFinding("ok", f"{said}{profile.mixed_rate / 1e9:.2f} both, measured {profile.measured}")

    def _measuring(self) -> str:
        """Return the command that measures the disk.

        The result is "" if the directory cannot be created, because the run may then use another directory on another
        disk.
        """
        if self.there not in (self.path, self.path.parent) or not os.access(self.there, os.W_OK):
            return ""
        quoted = shlex.quote(str(self.path))
        return f"{'' if self.there == self.path else f'mkdir {quoted} && '}infinity-bench --path {quoted}"

    def scheduler(self) -> ProbeFinding:
        found = chosen(self._told("queue/scheduler"))
        if self._kind == "NVMe" and found in ("bfq", "kyber"):
            name = f"/sys/block/{self._disk.members[0].name}/queue/scheduler"
            return ProbeFinding("slower", f"{found}, which costs processor time", written("none", name))
        return ProbeFinding("ok", found or "the device has none, or the system does not report it")

    def wear(self) -> ProbeFinding:
        """Return a row with the wear that the drive reports. The drive's serial number is not shown."""
        if self._kind != "NVMe":
            return ProbeFinding("ok", f"not checked for {self._kind or 'such'} disks")
        if smartctl() is None:
            return ProbeFinding("unknown", "smartmontools is not installed", "sudo apt-get install smartmontools")
        name = self._disk.members[0].name
        command, told = f"smartctl -a /dev/{name}", endurance_of(name)
        if told is None and os.geteuid() != 0:
            return ProbeFinding("unknown", "the drive reports its wear only to root", f"sudo {command}")
        if told is None:
            return ProbeFinding("unknown", f"`{command}` does not report the wear")
        said = f"{told.percentage_used} % used, {told.written_bytes / 1e12:.1f} TB written"
        if told.percentage_used >= _WORN_PERCENT:
            return ProbeFinding(
                "slower", f"{said}: the drive is near the end of its rated life, and fine-tuning writes a lot"
            )
        return ProbeFinding("ok", said)

    @cached_property
    def _disk(self) -> disks.DiskFacts:
        return disks.disk_under(self.there, self._root)

    @cached_property
    def _kind(self) -> DiskKind:
        return kind_of(self._disk.filesystem, next(iter(self._disk.members), None))

    def _told(self, file: str) -> str:
        """Return the contents of a sysfs file of the first device; '' if the file does not exist."""
        return text_of(self._disk.members[0] / file) if self._disk.members else ""

    @property
    def _is_read_only(self) -> bool:
        return bool(os.statvfs(self.there).f_flag & os.ST_RDONLY)
