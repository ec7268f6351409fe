"""What is read of disks and machines: from trees made for the tests, and from the machine the tests run on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infinity.io.devices import describe_disk, describe_machine, disk_key


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def place(root: Path, under: Path, real: str) -> None:
    """Make `real` (below sys/devices) the block device of the file system that holds `under`."""
    number = os.stat(under).st_dev
    link = root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
    link.parent.mkdir(parents=True, exist_ok=True)
    (root / real).mkdir(parents=True, exist_ok=True)
    link.symlink_to(root / real)


def nvme(root: Path, name: str, node: str = "1") -> str:
    """An NVMe disk below a PCI device; returns its place."""
    pci = f"sys/devices/pci0000:00/{name}-bridge"
    disk = f"{pci}/nvme/{name}/{name}n1"
    write(
        root,
        {
            f"{pci}/numa_node": node,
            f"{pci}/nvme/{name}/model": "FAST DRIVE 2TB",
            f"{disk}/size": "4000797360",
            f"{disk}/queue/rotational": "0",
            f"{disk}/queue/write_cache": "write back",
            f"{disk}/queue/scheduler": "[none] mq-deadline kyber",
            f"{disk}/queue/logical_block_size": "512",
            f"{disk}/queue/physical_block_size": "4096",
            f"{disk}/queue/max_sectors_kb": "512",
            f"{disk}/queue/discard_max_bytes": "2199023255040",
        },
    )
    (root / disk / "device").symlink_to(root / f"{pci}/nvme/{name}")
    return disk


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir()
    return path


def test_a_partition_is_traced_to_its_drive(root: Path, tmp_path: Path) -> None:
    disk = nvme(root, "nvme0")
    write(root, {f"{disk}/nvme0n1p2/partition": "2"})
    place(root, tmp_path, f"{disk}/nvme0n1p2")
    facts = describe_disk(tmp_path, root=root)
    assert (facts.device, facts.members, facts.model) == ("nvme0n1", ("nvme0n1",), "FAST DRIVE 2TB")
    assert (facts.numa_node, facts.rotational, facts.write_cache) == (1, False, "write back")
    assert (facts.logical_block_bytes, facts.physical_block_bytes) == (512, 4096)
    assert (facts.max_transfer_bytes, facts.size_bytes) == (512 << 10, 4000797360 * 512)
    assert (facts.scheduler, facts.kind, facts.discards) == ("none", "NVMe", True)


@pytest.mark.parametrize(("nodes", "node"), [(("0", "0"), 0), (("0", "1"), None), (("-1", "-1"), None)])
def test_a_stack_of_devices_is_traced_to_its_drives(
    nodes: tuple[str, str], node: int | None, root: Path, tmp_path: Path
) -> None:
    disks = [nvme(root, f"nvme{index}", number) for index, number in enumerate(nodes)]
    stack = "sys/devices/virtual/block/dm-0"
    array = "sys/devices/virtual/block/md0"
    for place_, below in ((stack, [array]), (array, disks)):
        (root / place_ / "slaves").mkdir(parents=True)
        for slave in below:
            (root / place_ / "slaves" / Path(slave).name).symlink_to(root / slave)
    place(root, tmp_path, stack)
    facts = describe_disk(tmp_path, root=root)
    assert (facts.device, facts.members) == ("dm-0", ("nvme0n1", "nvme1n1"))
    assert facts.numa_node == node


def test_what_the_system_does_not_tell_is_left_open(root: Path, tmp_path: Path) -> None:
    facts = describe_disk(tmp_path, root=root)
    assert facts.free_bytes > 0
    assert (facts.device, facts.members, facts.model, facts.filesystem) == ("", (), "", "")
    assert facts.numa_node is facts.rotational is facts.endurance is facts.dio_offset_align is None
    machine = describe_machine(root)
    assert machine.cores >= 1
    assert (machine.numa_nodes, machine.cpu_model, machine.io_uring_disabled) == (1, "", None)
    with pytest.raises(FileNotFoundError):
        describe_disk(tmp_path / "nothing", root=root)


def test_the_innermost_mount_counts_and_blanks_are_unescaped(root: Path, tmp_path: Path) -> None:
    inner = tmp_path / "with blank"
    inner.mkdir()
    escaped = str(inner).replace(" ", "\\040")
    write(
        root,
        {
            "proc/self/mountinfo": f"1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
            f"2 1 0:5 / {escaped} rw,noatime shared:1 - xfs /dev/nvme0n1 rw\n"
            f"3 1 0:6 / {escaped}x rw - tmpfs tmpfs rw\nnonsense"
        },
    )
    facts = describe_disk(inner, root=root)
    assert (facts.filesystem, facts.mount_point, facts.source) == ("xfs", str(inner), "/dev/nvme0n1")
    assert facts.mount_options == "rw,noatime"


def test_limits_of_the_machine_are_read(root: Path) -> None:
    write(
        root,
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
    machine = describe_machine(root)
    assert (machine.cpu_model, machine.numa_nodes, machine.io_uring_disabled) == ("Some CPU", 2, 2)
    assert machine.can_lock_any
    assert machine.container
    assert machine.transparent_hugepage == "madvise"
    assert machine.cgroup_io_max.startswith("259:0")


def test_this_machine_is_described(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x")
    facts = describe_disk(tmp_path, file=file)
    assert facts.total_bytes >= facts.free_bytes > 0
    assert facts.filesystem
    assert (facts.dio_memory_align is None) == (facts.dio_offset_align is None)
    assert describe_machine().total_memory_bytes > 0


def test_directories_of_one_file_system_have_one_key(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert disk_key(tmp_path) == disk_key(tmp_path / "a")
    if Path("/dev/shm").is_dir():
        assert disk_key(Path("/dev/shm")) != disk_key(tmp_path)


def test_a_file_system_without_a_device_number_is_traced_by_its_source(root: Path, tmp_path: Path) -> None:
    disk = nvme(root, "nvme0")
    write(
        root,
        {
            f"{disk}/nvme0n1p2/partition": "2",
            "proc/self/mountinfo": "1 0 0:40 / / rw,relatime - btrfs /dev/nvme0n1p2 rw,compress=zstd:1",
        },
    )
    (root / "sys/class/block").mkdir(parents=True)
    (root / "sys/class/block/nvme0n1p2").symlink_to(root / f"{disk}/nvme0n1p2")
    facts = describe_disk(tmp_path, root=root)
    assert (facts.device, facts.members, facts.numa_node) == ("nvme0n1", ("nvme0n1",), 1)
    assert facts.mount_options == "rw,relatime,compress=zstd:1"


@pytest.mark.parametrize(("told", "node"), [("0", 0), ("1", 1), ("-1", None), ("junk", None)])
def test_a_virtual_disk_may_have_a_node_or_none(told: str, node: int | None, root: Path, tmp_path: Path) -> None:
    pci = "sys/devices/pci0000:00/0000:00:02.0"
    disk = f"{pci}/virtio1/block/vda"
    write(root, {f"{pci}/numa_node": told, f"{disk}/size": "8"})
    (root / disk / "device").symlink_to(root / f"{pci}/virtio1")
    place(root, tmp_path, disk)
    facts = describe_disk(tmp_path, root=root)
    assert (facts.device, facts.numa_node, facts.size_bytes) == ("vda", node, 4096)
    assert (facts.model, facts.scheduler, facts.write_cache) == ("", "", "")


@pytest.mark.parametrize(("controllers", "node"), [(("1",), 1), (("0", "0"), 0), (("0", "1"), None)])
def test_a_multipath_drive_is_at_the_node_of_its_controllers(
    controllers: tuple[str, ...], node: int | None, root: Path, tmp_path: Path
) -> None:
    subsystem = "sys/devices/virtual/nvme-subsystem/nvme-subsys0"
    write(root, {f"{subsystem}/nvme0n1/size": "8"})
    (root / subsystem / "nvme0n1/device").symlink_to(root / subsystem)
    for index, told in enumerate(controllers):
        controller = f"sys/devices/pci0000:00/0000:0{index}:00.0/nvme/nvme{index}"
        write(root, {f"{controller}/numa_node": told})
        (root / subsystem / f"nvme{index}").symlink_to(root / controller)
    place(root, tmp_path, f"{subsystem}/nvme0n1")
    assert describe_disk(tmp_path, root=root).numa_node == node


def test_limits_of_outer_groups_count_beside_version_1_too(root: Path) -> None:
    write(
        root,
        {
            "proc/self/status": "CapEff:\tjunk",
            "proc/self/cgroup": "4:memory:/x\n0::/a/b",
            "sys/fs/cgroup/unified/a/b/io.max": "8:0 rbps=1",
            "sys/fs/cgroup/unified/a/io.max": "8:0 wbps=2",
        },
    )
    machine = describe_machine(root)
    assert machine.cgroup_io_max == "8:0 rbps=1\n8:0 wbps=2"
    assert not machine.can_lock_any


@pytest.mark.parametrize("odd", ["²", "9" * 5000, "-3", "", "0x10", "\0"])
def test_an_odd_file_of_the_system_tells_nothing_and_is_no_error(odd: str, root: Path, tmp_path: Path) -> None:
    disk = nvme(root, "nvme0", odd)
    names = ("size", "queue/rotational", "queue/max_sectors_kb", "queue/discard_max_bytes")
    write(root, {f"{disk}/{name}": odd for name in names} | {"proc/sys/kernel/io_uring_disabled": odd})
    place(root, tmp_path, disk)
    facts = describe_disk(tmp_path, root=root)
    assert facts.size_bytes is facts.rotational is facts.max_transfer_bytes is facts.discards is None
    assert facts.numa_node is describe_machine(root).io_uring_disabled is None
