"""Cores, containers, shared memory and NUMA nodes, by trees of /sys made for the tests."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from infinity.cli.doctor import machine
from infinity.cli.doctor.machine import (
    binding,
    container,
    cores,
    io_limit,
    node_processors,
    nodes,
    parse_list,
    places,
    shared,
)
from tests.base.test_pci import card
from tests.io.test_disks import nvme, place, write


def two_nodes(root: Path, memory: str = "0-1") -> None:
    write(
        root,
        {
            "sys/devices/system/node/node0/cpulist": "0-3,8",
            "sys/devices/system/node/node1/cpulist": "4-7",
            "sys/devices/system/node/nodes_are_odd": "x",
            "proc/self/status": f"Mems_allowed_list:\t{memory}",
        },
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir()
    return path


def test_cores_say_what_the_quota_is_worth(root: Path) -> None:
    assert cores(root).state == "ok"
    write(root, {"sys/fs/cgroup/cpu.max": "150000 100000"})
    assert cores(root).finding.endswith("quota is worth 1.5 of them")


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


def test_a_control_group_that_holds_disks_back_is_slower(root: Path) -> None:
    assert io_limit(root) == ("ok", "none", "", "")
    files = {"proc/self/cgroup": "0::/jobs/one", "sys/fs/cgroup/jobs/one/io.max": "259:0 rbps=1000 wbps=max"}
    write(root, files)
    assert io_limit(root) == ("slower", "io.max of the control group: 259:0 rbps=1000 wbps=max", "", "")


# ------------------------------------------------------------------------------------------------ NUMA


def test_one_node_has_everything(root: Path, tmp_path: Path) -> None:
    assert nodes(root).finding == "one"
    assert places([tmp_path], root).state == binding([tmp_path], root).state == "ok"


def test_nodes_are_listed_with_their_processors(root: Path) -> None:
    two_nodes(root)
    assert node_processors(root) == {0: {0, 1, 2, 3, 8}, 1: {4, 5, 6, 7}}
    assert nodes(root).finding == "0 (processors 0-3,8), 1 (processors 4-7)"


@pytest.mark.parametrize(
    ("of_disk", "of_card", "state"),
    [("1", "1", "ok"), ("0", "1", "slower"), ("-1", "1", "unknown"), ("1", "-1", "unknown")],
)
def test_a_disk_and_a_gpu_should_be_at_one_node(
    of_disk: str, of_card: str, state: str, root: Path, tmp_path: Path
) -> None:
    two_nodes(root)
    place(root, tmp_path, nvme(root, "nvme0", of_disk))
    card(root, node=of_card)
    assert places([tmp_path], root).state == state


@pytest.mark.parametrize(
    ("mine", "memory", "of_disk", "state", "mend"),
    [
        ({0, 1, 2, 3, 4, 5, 6, 7, 8}, "0-1", "1", "ok", ""),
        ({4, 5}, "1", "1", "ok", ""),
        ({0, 1}, "0-1", "1", "slower", "numactl --cpunodebind=1 --membind=1 infinity …"),
        ({0, 4}, "0", "1", "slower", "numactl --cpunodebind=1 --membind=1 infinity …"),
        ({0, 1}, "0", "-1", "ok", ""),
    ],
)
def test_a_process_that_is_bound_away_from_the_disk_is_slower(
    mine: set[int],
    memory: str,
    of_disk: str,
    state: str,
    mend: str,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two_nodes(root, memory)
    place(root, tmp_path, nvme(root, "nvme0", of_disk))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: mine)
    found = binding([tmp_path], root)
    assert (found.state, found.mend) == (state, mend)


def test_a_process_is_to_be_bound_to_the_node_of_the_gpu_whatever_that_of_the_disks(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_nodes(root, "0")
    place(root, tmp_path, nvme(root, "nvme0", "0"))
    card(root, node="1")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    found = binding([tmp_path], root)
    assert (found.state, found.mend) == ("slower", "numactl --cpunodebind=1 --membind=1 infinity …")
    assert "the GPU is at node 1" in found.finding


@pytest.mark.parametrize(("text", "found"), [("", set()), ("0", {0}), ("0-2,7", {0, 1, 2, 7}), ("3-3\n", {3})])
def test_lists_of_processors_are_parsed(text: str, found: set[int]) -> None:
    assert parse_list(text) == found


@pytest.mark.parametrize("text", ["x", "3-1", "-1", "1-2-3", "0-99999999999", "½"])
def test_a_list_that_is_none_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (int's own, or ours)
        parse_list(text)
