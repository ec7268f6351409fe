"""Limits of control groups, by trees made for the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity.base.control_groups import memory_limits, processors_allowed
from infinity.base.host_limits import available_host_bytes
from tests.io.test_disks import write

V1 = "4:cpuacct,cpu:/jobs\n3:memory:/jobs/one\n0::/"
UNLIMITED_V1 = "9223372036854771712"


@pytest.mark.parametrize(
    ("files", "limits"),
    [
        ({}, []),
        ({"memory.max": "max", "memory.current": "5"}, []),
        ({"memory.max": "1000", "memory.current": "400"}, [(1000, 400)]),  # a container, whose group is the root
        ({"jobs/one/memory.max": "500", "jobs/one/memory.current": "100"}, [(500, 100)]),
        (
            {"jobs/memory.max": "900", "jobs/memory.current": "800", "jobs/one/memory.max": "max"},
            [(900, 800)],
        ),  # of the group above
        ({"jobs/one/memory.max": "junk", "jobs/one/memory.current": "1"}, []),
        ({"jobs/one/memory.max": "500"}, []),
    ],
)
def test_limits_of_this_group_and_of_those_above_hold(
    files: dict[str, str], limits: list[tuple[int, int]], tmp_path: Path
) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/jobs/one"} | {f"sys/fs/cgroup/{name}": it for name, it in files.items()})
    assert memory_limits(tmp_path) == limits


def test_version_1_has_a_tree_for_each_controller(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/jobs/one"
    write(
        tmp_path,
        {
            "proc/self/cgroup": V1,
            f"{group}/memory.limit_in_bytes": "700",
            f"{group}/memory.usage_in_bytes": "100",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED_V1,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "9",
            "sys/fs/cgroup/cpuacct,cpu/jobs/cpu.cfs_quota_us": "150000",
            "sys/fs/cgroup/cpuacct,cpu/jobs/cpu.cfs_period_us": "100000",
        },
    )
    assert memory_limits(tmp_path) == [(700, 100), (int(UNLIMITED_V1), 9)]
    assert processors_allowed(tmp_path) == 1.5
    assert available_host_bytes(tmp_path) == 600


@pytest.mark.parametrize(
    ("outer", "inner", "allowed"),
    [
        ("max 100000", "max 100000", None),
        ("400000 100000", "max 100000", 4.0),
        ("400000 100000", "250000 100000", 2.5),
        ("", "", None),
        ("100000 0", "junk", None),
        ("-1 100000", "", None),
    ],
)
def test_the_smallest_quota_holds(outer: str, inner: str, allowed: float | None, tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/jobs/one",
            "sys/fs/cgroup/jobs/cpu.max": outer,
            "sys/fs/cgroup/jobs/one/cpu.max": inner,
        },
    )
    assert processors_allowed(tmp_path) == allowed


def test_a_group_that_is_outside_of_the_container_is_its_root(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../../elsewhere",
            "sys/fs/cgroup/memory.max": "1000",
            "sys/fs/cgroup/memory.current": "1",
        },
    )
    assert memory_limits(tmp_path) == [(1000, 1)]


def test_without_a_list_of_groups_the_root_is_asked(tmp_path: Path) -> None:
    write(tmp_path, {"sys/fs/cgroup/memory.max": "1000", "sys/fs/cgroup/memory.current": "2000"})
    assert memory_limits(tmp_path) == [(1000, 2000)]
    assert available_host_bytes(tmp_path) == 0


def test_this_machine_has_memory() -> None:
    assert available_host_bytes() > 0
