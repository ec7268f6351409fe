"""Commands under a memory limit that the kernel enforces: a control group of version 2 or 1, whichever exists.

The limit applies to all RAM of the command, including the page cache of the files that it reads and writes. The kernel
reclaims page cache before it kills a process. Swap is off.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_SAMPLE_S = 0.5


class NoLimitError(RuntimeError):
    """This machine or this user cannot set a memory limit; the message says why and what to do."""


@dataclass(frozen=True)
class Usage:
    """Memory use and exit code of a command under a limit.

    Attributes:
        exit_code: negative if a signal ended the command (the kernel sends one if memory runs out).
        peak_bytes: peak of all memory that counts towards the limit; it is near the limit if the command reads or
            writes large files.
        peak_anonymous_bytes: peak of the memory that cannot be reclaimed, sampled twice a second.
        oom_kills: number of processes that the kernel killed because memory ran out.
    """

    limit_bytes: int
    exit_code: int
    peak_bytes: int
    peak_anonymous_bytes: int
    oom_kills: int


@dataclass(frozen=True)
class Controller:
    """The kernel's memory controller: the location of its groups, and the names of its files.

    Attributes:
        root: directory of the root group.
        own: group of this process.
    """

    root: Path
    own: Path
    limit: str
    swap: tuple[str, int | None]
    """Name of the swap file and its value; None: the same value as the limit."""
    peak: str
    events: str
    anonymous: str

    def parent(self) -> Path:
        """Return the parent of a new group: this process's group if it has a limit, so that this limit applies, too;
        else the root."""
        return self.own if _is_limit(_read(self.own / self.limit)) else self.root


def version_2(root: Path, own: Path) -> Controller:
    return Controller(root, own, "memory.max", ("memory.swap.max", 0), "memory.peak", "memory.events", "anon")


def version_1(root: Path, own: Path) -> Controller:
    swap = ("memory.memsw.limit_in_bytes", None)
    limit, peak = "memory.limit_in_bytes", "memory.max_usage_in_bytes"
    return Controller(root, own, limit, swap, peak, "memory.oom_control", "total_rss")


def find_controller(mounts: str, groups: str) -> Controller:
    """Return the memory controller of this machine.

    Args:
        mounts: contents of /proc/self/mountinfo.
        groups: contents of /proc/self/cgroup.

    Raises:
        NoLimitError: neither version of control groups has a memory controller.
    """
    own = {line.split(":", 2)[1]: line.split(":", 2)[2].strip("/") for line in groups.splitlines() if line}
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        root, (kind, _, options) = Path(before.split()[4]), after.split(maxsplit=2)
        if kind == "cgroup" and "memory" in options.split(","):
            names = next((names for names in own if "memory" in names.split(",")), "")
            return version_1(root, root / own.get(names, ""))
        if kind == "cgroup2" and "memory" in _read(root / "cgroup.controllers").split():
            return version_2(root, root / own.get("", ""))
    raise NoLimitError("no control group of version 1 or 2 has the memory controller, so no limit can be set here")


@contextmanager
def memory_group(controller: Controller, limit_bytes: int) -> Iterator[Path]:
    """Create a group with a limit, and remove it afterwards.

    Raises:
        NoLimitError: the group cannot be created.
    """
    parent = controller.parent()
    group = parent / f"infinity-bench-{os.getpid()}"
    try:
        shared = parent / "cgroup.subtree_control"
        if shared.exists() and "memory" not in shared.read_text().split():
            shared.write_text("+memory")
        group.mkdir()
    except OSError as error:
        raise NoLimitError(
            f"cannot make a control group in {parent}: {error.strerror}. Run as root, outside a container or in one "
            f"that may write there (docker run --privileged --cgroupns=host)"
        ) from error
    try:
        (group / controller.limit).write_text(str(limit_bytes))
        name, value = controller.swap
        if (group / name).exists():  # the file does not exist if the kernel does not account swap
            (group / name).write_text(str(limit_bytes if value is None else value))
        yield group
    except OSError as error:
        raise NoLimitError(f"cannot set the limit of the control group {group}: {error}") from error
    finally:
        group.rmdir()


def run_limited(
    command: Sequence[str], limit_bytes: int, log: IO[str] | None = None, environment: Mapping[str, str] | None = None
) -> Usage:
    """Run a command to its end under a memory limit.

    Args:
        command: program and arguments.
        limit_bytes: the limit.
        log: file for the command's output; None: the output of this process.
        environment: variables in addition to the environment of this process.

    Raises:
        NoLimitError: no limit can be set.
    """
    controller = find_controller(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    with memory_group(controller, limit_bytes) as group:
        # The shell joins the group and then becomes the command, so that all of its pages are counted.
        join = ["bash", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *command]
        process = subprocess.Popen(join, stdout=log, stderr=log, env={**os.environ, **(environment or {})})
        try:
            anonymous = _watch(process, group / "memory.stat", controller.anonymous)
        except BaseException:
            process.kill()
            process.wait()
            raise
        return Usage(
            limit_bytes=limit_bytes,
            exit_code=process.returncode,
            peak_bytes=int(_read(group / controller.peak) or 0),
            peak_anonymous_bytes=anonymous,
            oom_kills=_values(_read(group / controller.events)).get("oom_kill", 0),
        )


def _watch(process: subprocess.Popen[bytes], statistics: Path, key: str) -> int:
    """Wait for the end of the process; return the largest value that was sampled."""
    largest = 0
    while True:
        largest = max(largest, _values(_read(statistics)).get(key, 0))
        try:
            process.wait(_SAMPLE_S)
        except subprocess.TimeoutExpired:
            continue
        return largest


def _values(text: str) -> dict[str, int]:
    """Parse lines that consist of a name and a number."""
    return {name: int(value) for name, value in (line.split() for line in text.splitlines() if line.strip())}


def _read(path: Path) -> str:
    """Return the text of a file; '' if the file does not exist, because not all kernels have all files."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _is_limit(text: str) -> bool:
    """Return whether a limit is set. Without a limit, version 2 has "max", version 1 the largest number of pages."""
    return text.strip().isdigit() and int(text) < 1 << 62
