"""Containers, their limits, shared memory and NUMA nodes, by trees of /sys made for the tests."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from infinity.cli.doctor import machine
from infinity.cli.doctor.machine import container, io_limit, node_processors, numa, shared, threads
from infinity.cli.doctor.probes import ProbeFinding
from infinity.config import SwapConfig
from tests.base.test_pci import card
from tests.io.test_disks import nvme, place, write


def two_nodes(root: Path) -> None:
    nodes = {0: (0, 1, 2, 3, 8), 1: (4, 5, 6, 7)}
    write(root, {f"sys/devices/system/node/node{node}/cpu{cpu}/x": "" for node in nodes for cpu in nodes[node]})
    odd = ("nodes_are_odd", "node1x", "node½", "node0/cpulist", "node0/cpu4_is_odd", "node0/cpumap")
    write(root, {f"sys/devices/system/node/{name}": "x" for name in odd})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir()
    return path


@pytest.mark.parametrize(
    ("quota", "state", "mend"),
    [
        ("max 100000", "ok", ""),
        ("800000 100000", "ok", ""),
        ("250000 100000", "slower", "export OMP_NUM_THREADS=2"),
        ("50000 100000", "slower", "export OMP_NUM_THREADS=1"),
    ],
)
def test_more_threads_than_the_quota_wait(quota: str, state: str, mend: str, tmp_path: Path) -> None:
    write(tmp_path, {"sys/fs/cgroup/cpu.max": quota, "proc/self/cgroup": "0::/"})
    config = SwapConfig.model_validate({"update": {"threads": 8}})
    found = threads(config, tmp_path)
    assert (found.state, found.mend) == (state, mend)
    assert found.finding.startswith("8 for the update")


def test_a_container_is_named(root: Path) -> None:
    assert container(root).finding == "none"
    write(root, {".dockerenv": ""})
    assert container(root).finding == "docker"


@pytest.mark.parametrize(
    ("files", "nbytes", "state", "mend"),
    [
        ({}, 8 << 30, "ok", ""),
        ({}, 64 << 20, "slower", "sudo mount -o remount,size=8G /dev/shm"),
        ({".dockerenv": ""}, 64 << 20, "slower", "docker run --shm-size 8g …"),
    ],
)
def test_little_shared_memory_is_slower(
    files: dict[str, str], nbytes: int, state: str, mend: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(root, files)
    monkeypatch.setattr(machine.os, "statvfs", lambda path: SimpleNamespace(f_blocks=nbytes // 4096, f_frsize=4096))
    found = shared(root=root)
    assert (found.state, found.mend) == (state, mend)


def test_no_shared_memory_is_slower(root: Path) -> None:
    assert shared(root / "nothing", root).state == "slower"


def test_ranks_without_a_memfd_are_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.shared_memory().state == "ok"

    def denied(*_: object) -> int:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", denied)
    found = machine.shared_memory()
    assert found.state == "slower"
    assert found.finding.startswith("memfd_create: Operation not permitted; ranks on the CPU send weights over sockets")


def test_a_control_group_that_holds_disks_back_is_slower(root: Path) -> None:
    assert io_limit(root) == ProbeFinding("ok", "none")
    files = {"proc/self/cgroup": "0::/jobs/one", "sys/fs/cgroup/jobs/one/io.max": "259:0 rbps=1000 wbps=max"}
    write(root, files)
    assert io_limit(root) == ProbeFinding("slower", "io.max of the control group: 259:0 rbps=1000 wbps=max")


def test_limits_of_outer_groups_count_beside_version_1_too(root: Path) -> None:
    places = {"a/b": "8:0 rbps=1", "a": "8:0 wbps=2"}
    write(root, {f"sys/fs/cgroup/unified/{group}/io.max": limit for group, limit in places.items()})
    write(root, {"proc/self/cgroup": "4:memory:/x\n0::/a/b"})
    assert io_limit(root).finding == "io.max of the control group: 8:0 rbps=1; 8:0 wbps=2"


# ------------------------------------------------------------------------------------------------ NUMA


def test_one_node_has_everything(root: Path, tmp_path: Path) -> None:
    assert numa([tmp_path], root) == ProbeFinding("ok", "there is only one node")


def test_nodes_have_their_processors(root: Path) -> None:
    two_nodes(root)
    assert node_processors(root) == {0: {0, 1, 2, 3, 8}, 1: {4, 5, 6, 7}}


EVERYWHERE = set(range(9))
AT_1 = "numactl --cpunodebind=1 --membind=1 infinity …"


@pytest.mark.parametrize(
    ("mine", "of_disk", "of_card", "state", "mend"),
    [
        (EVERYWHERE, "1", "1", "ok", ""),
        (EVERYWHERE, "0", "1", "slower", ""),
        (EVERYWHERE, "-1", "1", "unknown", ""),
        (EVERYWHERE, "1", "-1", "unknown", ""),
        (EVERYWHERE, "1", "", "ok", ""),
        ({4, 5}, "1", "", "ok", ""),
        ({0, 4}, "1", "", "ok", ""),
        ({0, 1}, "1", "", "slower", AT_1),
        ({0, 1}, "-1", "", "unknown", ""),
        ({0, 1}, "0", "1", "slower", AT_1),
        ({0, 1}, "1", "0", "slower", ""),
    ],
)
def test_disks_gpus_and_this_process_should_be_at_one_node(
    mine: set[int],
    of_disk: str,
    of_card: str,
    state: str,
    mend: str,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two_nodes(root)
    place(root, tmp_path, nvme(root, "nvme0", of_disk))
    if of_card:
        card(root, node=of_card)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: mine)
    found = numa([tmp_path], root)
    assert (found.state, found.mend) == (state, mend)
    assert ("use disks at the GPU's node" in found.finding) == (state == "slower" and not mend)
