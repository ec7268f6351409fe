"""What the reports tell of disks: from trees made for the tests, and from the machine the tests run on."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity.cli.disk_facts import describe_disk
from tests.io.test_disks import mounts, nvme, place, write


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir()
    return path


def test_a_drive_is_described(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts(monkeypatch, (tmp_path, "xfs", "rw,noatime", "/dev/nvme0n1"))
    place(root, tmp_path, nvme(root, "nvme0"))
    facts = describe_disk(tmp_path, root)
    assert (facts.device, facts.members, facts.model) == ("nvme0n1", ("nvme0n1",), "FAST DRIVE 2TB")
    assert (facts.numa_node, facts.write_cache, facts.scheduler) == (1, "write back", "none")
    assert (facts.kind, facts.discards) == ("NVMe", True)
    assert (facts.filesystem, facts.mount_options, facts.mount_point) == ("xfs", "rw,noatime", str(tmp_path))


def test_what_the_system_does_not_tell_is_left_open(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts(monkeypatch)
    facts = describe_disk(tmp_path, root)
    assert (facts.device, facts.members, facts.model, facts.filesystem, facts.kind) == ("", (), "", "", "")
    assert (facts.scheduler, facts.write_cache) == ("", "")
    assert facts.numa_node is facts.discards is None
    with pytest.raises(FileNotFoundError):
        describe_disk(tmp_path / "nothing", root)


@pytest.mark.parametrize("odd", ["²", "9" * 5000, "-3", "", "0x10", "\0"])
def test_an_odd_file_of_the_system_tells_nothing_and_is_no_error(odd: str, root: Path, tmp_path: Path) -> None:
    disk = nvme(root, "nvme0", odd)
    write(root, {f"{disk}/queue/discard_max_bytes": odd})
    place(root, tmp_path, disk)
    assert describe_disk(tmp_path, root).discards is None


def test_this_machine_is_described(tmp_path: Path) -> None:
    facts = describe_disk(tmp_path)
    assert facts.total_bytes >= facts.free_bytes > 0
    assert facts.filesystem
