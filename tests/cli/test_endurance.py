"""The wear of drives, as programs made for the tests report it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from infinity.cli import endurance
from infinity.cli.endurance import Endurance, endurance_bytes, endurance_of, parse_smartctl, smartctl


def test_wear_is_read_from_smartctl() -> None:
    log = {"data_units_written": 2_000_000, "percentage_used": 10}
    found = parse_smartctl({"nvme_smart_health_information_log": log})
    assert found is not None
    assert (found.written_bytes, found.percentage_used) == (2_000_000 * 512_000, 10)
    assert found.rated_bytes == 10 * found.written_bytes
    new = parse_smartctl({"nvme_smart_health_information_log": {"data_units_written": 2, "percentage_used": 4}})
    assert new == Endurance(1_024_000, 4, None)  # too early for an estimate


LOG = {"data_units_written": 2_000_000, "percentage_used": 10}


def program(place: Path, name: str, does: str) -> None:
    (place / name).write_text(f"#!/bin/sh\n{does}\n")
    (place / name).chmod(0o755)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A directory for programs, beside which there are none."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(endurance, "_SYSTEM_PROGRAMS", ())
    return tmp_path


def test_without_the_program_nothing_is_asked(programs: Path) -> None:
    assert smartctl() is endurance_of("nvme0n1") is None


def test_the_program_is_found_and_asked_of_the_drive(programs: Path) -> None:
    told = json.dumps({"nvme_smart_health_information_log": LOG})
    program(programs, "smartctl", f"[ \"$*\" = '-j -a /dev/nvme0n1' ] && echo '{told}'; exit 4")
    assert smartctl() == str(programs / "smartctl")
    assert endurance_of("nvme0n1") == Endurance(2_000_000 * 512_000, 10, 20_000_000 * 512_000)
    assert endurance_of("sda") is None


@pytest.mark.parametrize(
    "does",
    [
        "echo not json",
        "echo 'Permission denied' >&2; exit 1",
        "printf '\\377'",
        "echo []",
        "printf '[%.0s' 1 2 3",
        "exec sleep 60",
    ],
)
def test_no_wear_is_made_up_where_none_is_told(does: str, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endurance, "_ASK_S", 0.2)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    program(programs, "smartctl", does)
    assert endurance_of("nvme0n1") is None


@pytest.mark.parametrize(
    "report",
    [
        [],
        None,
        {"ata_smart_attributes": {"table": [{"name": "Total_LBAs_Written", "raw": {"value": 1}}]}},
        {"nvme_smart_health_information_log": [1]},
        {"nvme_smart_health_information_log": {"data_units_written": None, "percentage_used": 1}},
        {"nvme_smart_health_information_log": {"data_units_written": 5}},
        {"nvme_smart_health_information_log": {"data_units_written": "many", "percentage_used": 1}},
    ],
)
def test_a_report_of_another_shape_gives_no_wear_and_no_error(report: object) -> None:
    assert parse_smartctl(report) is None


def test_drives_endure_what_all_of_them_are_rated_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimpleNamespace(members=[tmp_path / "nvme0n1"])
    monkeypatch.setattr(endurance, "disk_under", lambda path: disk)
    monkeypatch.setattr(endurance, "endurance_of", lambda name: Endurance(10**13, 10, 10**14))
    assert endurance_bytes([tmp_path, tmp_path]) == 2 * 10**14
    assert endurance_bytes([]) == 0
    told = iter([Endurance(10**13, 10, 10**14), Endurance(10**10, 1, None)])
    monkeypatch.setattr(endurance, "endurance_of", lambda name: next(told))
    assert endurance_bytes([tmp_path, tmp_path]) == 0  # of one drive it is not known
