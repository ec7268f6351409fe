"""Control groups of this process: the process's own group, and the groups above, whose limits also apply."""

from __future__ import annotations

from pathlib import Path

from infinity.base.small_files import number_in, number_of, text_of

_ROOT = Path("/")


def groups(controller: str, root: Path = _ROOT) -> list[Path]:
    """Return the directories of the groups, innermost first, of both cgroup versions if the system has both.

    Args:
        controller: the controller's name in version 1: 'memory', 'cpu', 'io'.
        root: directory that contains sys/ and proc/; `/` except in tests.
    """
    mounts = root / "sys/fs/cgroup"
    found: list[Path] = []
    for line in text_of(root / "proc/self/cgroup").splitlines():
        parts = line.split(":", 2)
        if len(parts) < 3:
            continue
        if parts[:2] == ["0", ""]:
            tops = [mounts, mounts / "unified"]  # the directory is called "unified" if the system has version 1, too
        elif controller in parts[1].split(","):
            tops = [mounts / parts[1], mounts / controller]
        else:
            continue
        group = Path(parts[2].lstrip("/"))
        if ".." in group.parts:  # the group is outside the container, so its directory is not visible
            group = Path()
        found += [top / place for top in tops for place in (group, *group.parents)]
    return list(dict.fromkeys(found or [mounts, mounts / controller]))


def memory_limits(root: Path = _ROOT) -> list[tuple[int, int]]:
    """Return (bytes allowed, bytes used) of each group that has a limit."""
    found = []
    for group in groups("memory", root):
        for limit_name, usage_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, usage = number_of(group / limit_name), number_of(group / usage_name)
            if limit is not None and usage is not None:  # the word 'max' means no limit
                found.append((limit, usage))
    return found


def processors_allowed(root: Path = _ROOT) -> float | None:
    """Return the number of processors that the groups' quotas allow; None without a quota."""
    quotas = []
    for group in groups("cpu", root):
        quota, period = [*text_of(group / "cpu.max").split(), "", ""][:2]
        if not quota:
            quota, period = text_of(group / "cpu.cfs_quota_us"), text_of(group / "cpu.cfs_period_us")
        allowed, of = number_in(quota), number_in(period)
        if allowed is not None and of is not None and allowed > 0 and of > 0:  # 'max' or -1 means no quota
            quotas.append(allowed / of)
    return min(quotas, default=None)
