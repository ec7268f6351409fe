"""The control groups that this process is in: its own, and those above it, whose limits hold as well."""

from __future__ import annotations

from pathlib import Path

from infinity.base.small_files import number_in, number_of, text_of

_ROOT = Path("/")


def groups(controller: str, root: Path = _ROOT) -> list[Path]:
    """The directories of the groups, innermost first, of both versions where the system has both.

    Args:
        controller: as version 1 calls it: 'memory', 'cpu', 'io'.
        root: of /sys and /proc, for tests.
    """
    mounts = root / "sys/fs/cgroup"
    found: list[Path] = []
    for line in text_of(root / "proc/self/cgroup").splitlines():
        parts = line.split(":", 2)
        if len(parts) < 3:
            continue
        if parts[:2] == ["0", ""]:
            tops = [mounts, mounts / "unified"]  # the second beside version 1
        elif controller in parts[1].split(","):
            tops = [mounts / parts[1], mounts / controller]
        else:
            continue
        group = Path(parts[2].lstrip("/"))
        if ".." in group.parts:  # the group is outside the container, which cannot see it
            group = Path()
        found += [top / place for top in tops for place in (group, *group.parents)]
    return list(dict.fromkeys(found or [mounts, mounts / controller]))


def memory_limits(root: Path = _ROOT) -> list[tuple[int, int]]:
    """(bytes allowed, bytes used) of each group that has a limit."""
    found = []
    for group in groups("memory", root):
        for limit_name, usage_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, usage = number_of(group / limit_name), number_of(group / usage_name)
            if limit is not None and usage is not None:  # no limit is the word 'max'
                found.append((limit, usage))
    return found


def processors_allowed(root: Path = _ROOT) -> float | None:
    """How many processors the groups' quota is worth; None without a quota."""
    quotas = []
    for group in groups("cpu", root):
        quota, period = [*text_of(group / "cpu.max").split(), "", ""][:2]
        if not quota:
            quota, period = text_of(group / "cpu.cfs_quota_us"), text_of(group / "cpu.cfs_period_us")
        allowed, of = number_in(quota), number_in(period)
        if allowed is not None and of is not None and allowed > 0 and of > 0:  # no quota is 'max', or -1
            quotas.append(allowed / of)
    return min(quotas, default=None)
