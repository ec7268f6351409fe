"""What is read of machines: from trees made for the tests, and from the machine the tests run on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infinity.cli.machine_facts import describe_machine, last_cache_bytes
from tests.io.test_disks import write


def test_limits_of_the_machine_are_read(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/status": "Name:\tpython\nCapEff:\t0000000000004000",
            "proc/cpuinfo": "processor\t: 0\nmodel name\t: Some CPU\n",
            "proc/sys/kernel/io_uring_disabled": "2",
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
            "sys/devices/system/node/node0/cpulist": "0",
            "sys/devices/system/node/node1/cpulist": "1",
            "proc/1/cgroup": "0::/docker/abc",
            "proc/self/cgroup": "0::/jobs/one",
            "sys/fs/cgroup/jobs/one/io.max": "259:0 rbps=1000 wbps=max",
        },
    )
    machine = describe_machine(tmp_path)
    assert (machine.cpu_model, machine.numa_nodes, machine.io_uring_disabled) == ("Some CPU", 2, 2)
    assert machine.can_lock_any
    assert machine.container
    assert machine.transparent_hugepage == "madvise"
    assert machine.cgroup_io_max.startswith("259:0")


def test_limits_of_outer_groups_count_beside_version_1_too(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/status": "CapEff:\tjunk",
            "proc/self/cgroup": "4:memory:/x\n0::/a/b",
            "sys/fs/cgroup/unified/a/b/io.max": "8:0 rbps=1",
            "sys/fs/cgroup/unified/a/io.max": "8:0 wbps=2",
        },
    )
    machine = describe_machine(tmp_path)
    assert machine.cgroup_io_max == "8:0 rbps=1\n8:0 wbps=2"
    assert not machine.can_lock_any


def test_what_the_system_does_not_tell_is_left_open(tmp_path: Path) -> None:
    machine = describe_machine(tmp_path)
    assert machine.cores >= 1
    assert machine.total_memory_bytes > 0
    assert (machine.numa_nodes, machine.cpu_model, machine.io_uring_disabled) == (1, "", None)
    assert not machine.container


@pytest.mark.parametrize("odd", ["²", "9" * 5000, "-3", "", "0x10", "\0"])
def test_an_odd_file_of_the_system_tells_nothing_and_is_no_error(odd: str, tmp_path: Path) -> None:
    write(tmp_path, {"proc/sys/kernel/io_uring_disabled": odd})
    assert describe_machine(tmp_path).io_uring_disabled is None


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3})


def cache(root: Path, cpu: int, index: int, level: int, shared: str, size: str) -> None:
    directory = root / f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
    directory.mkdir(parents=True)
    for name, text in (("level", f"{level}"), ("shared_cpu_list", shared), ("size", size)):
        (directory / name).write_text(f"{text}\n")


def test_caches_of_the_last_level_count_once_each(two_cores: None, tmp_path: Path) -> None:
    for cpu in (0, 1, 3):
        cache(tmp_path, cpu, 2, 2, f"{cpu}", "2048K")
        cache(tmp_path, cpu, 3, 3, "0-1" if cpu < 2 else "2-3", "32768K")
    assert last_cache_bytes(tmp_path) == 64 << 20


def test_a_system_that_does_not_tell_has_none(two_cores: None, tmp_path: Path) -> None:
    assert last_cache_bytes(tmp_path) == 0
    cache(tmp_path, 0, 3, 3, "0-3", "")
    assert last_cache_bytes(tmp_path) == 0
