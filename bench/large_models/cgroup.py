"""A command under a memory limit that the kernel enforces: a control group of version 2 or 1, whichever there is.

The limit is on everything the command has in RAM, the page cache of what it reads and writes included; the kernel
reclaims that before it kills anything. There is no swap beside it.
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
    """This machine, or this user, cannot set a memory limit; says why and what to do."""


@dataclass(frozen=True)
class Usage:
    """What a command under a limit did.

    Attributes:
        exit_code: negative where a signal ended it, as the kernel does when memory runs out.
        peak_bytes: of everything that counts; it comes near the limit wherever files are read or written.
        peak_anonymous_bytes: of what cannot be reclaimed, sampled twice a second.
        oom_kills: processes the kernel ended for want of memory.
    """

    limit_bytes: int
    exit_code: int
    peak_bytes: int
    peak_anonymous_bytes: int
    oom_kills: int


@dataclass(frozen=True)
class Controller:
    """The memory controller: where its groups are, and what their files are called.

    Attributes:
        root: the directory of the group that has all others in it.
        own: the group this process is in.
    """

    root: Path
    own: Path
    limit: str
    swap: tuple[str, int | None]
    """The file and its value; None: as the limit."""
    peak: str
    events: str
    anonymous: str

    def parent(self) -> Path:
        """Where a new group goes: into our own where that has a limit, which then holds as well."""
        return self.own if _is_limit(_read(self.own / self.limit)) else self.root


def version_2(root: Path, own: Path) -> Controller:
    return Controller(root, own, "memory.max", ("memory.swap.max", 0), "memory.peak", "memory.events", "anon")


def version_1(root: Path, own: Path) -> Controller:
    swap = ("memory.memsw.limit_in_bytes", None)
    limit, peak = "memory.limit_in_bytes", "memory.max_usage_in_bytes"
    return Controller(root, own, limit, swap, peak, "memory.oom_control", "total_rss")


def find_controller(mounts: str, groups: str) -> Controller:
    """The memory controller of this machine.

    Args:
        mounts: /proc/self/mountinfo; groups: /proc/self/cgroup.

    Raises:
        NoLimitError: neither version has one.
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
    """A group with a limit, removed afterwards.

    Raises:
        NoLimitError: it cannot be made.
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
        if (group / name).exists():  # absent where the kernel counts no swap
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
        log: where its output goes; None: ours.
        environment: added to ours.

    Raises:
        NoLimitError: no limit can be set.
    """
    controller = find_controller(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    with memory_group(controller, limit_bytes) as group:
        # The shell joins the group and becomes the command, so that not a page of it is outside.
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
    """Wait for the end; the largest value seen."""
    largest = 0
    while True:
        largest = max(largest, _values(_read(statistics)).get(key, 0))
        try:
            process.wait(_SAMPLE_S)
        except subprocess.TimeoutExpired:
            continue
        return largest


def _values(text: str) -> dict[str, int]:
    """Lines of a name and a number."""
    return {name: int(value) for name, value in (line.split() for line in text.splitlines() if line.strip())}


def _read(path: Path) -> str:
    """Empty where there is no such file: kernels differ."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _is_limit(text: str) -> bool:
    """Version 2 says max where there is none, version 1 the largest number of pages."""
    return text.strip().isdigit() and int(text) < 1 << 62
