"""What drives tell of their wear, to programs made for the tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infinity.io import endurance
from infinity.io.endurance import Asked, Endurance, ask_drive, parse_nvme_smart_log, parse_smartctl


def test_wear_is_read_from_smartctl_and_nvme_cli() -> None:
    log = {"data_units_written": 2_000_000, "percentage_used": 10}
    found = parse_smartctl({"nvme_smart_health_information_log": log})
    assert found is not None
    assert (found.written_bytes, found.percentage_used) == (2_000_000 * 512_000, 10)
    assert found.rated_bytes == 10 * found.written_bytes
    assert parse_nvme_smart_log({"data_units_written": 2_000_000, "percent_used": 10}) == found
    table = [
        {"name": "Total_LBAs_Written", "raw": {"value": 1000}},
        {"name": "Wear_Leveling_Count", "value": 97},
    ]
    sata = parse_smartctl({"ata_smart_attributes": {"table": table}})
    assert sata is not None
    assert (sata.written_bytes, sata.percentage_used, sata.rated_bytes) == (512_000, 3, None)


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


def test_without_a_program_nothing_is_asked(programs: Path) -> None:
    assert ask_drive("nvme0n1") == Asked(None, ())


def test_the_first_program_that_tells_is_the_last_one_asked(programs: Path) -> None:
    program(programs, "nvme", "echo '" + json.dumps(LOG) + "'")
    program(programs, "smartctl", "exit 1")
    found = ask_drive("nvme0n1")
    assert found.endurance == Endurance(2_000_000 * 512_000, 10, 20_000_000 * 512_000)
    assert found.commands == ("nvme smart-log -o json /dev/nvme0n1",)
    assert ask_drive("sda") == Asked(None, ("smartctl -j -a /dev/sda",))


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
    program(programs, "nvme", does)
    assert ask_drive("nvme0n1").endurance is None


@pytest.mark.parametrize(
    "report",
    [
        [],
        None,
        {"ata_smart_attributes": None},
        {"ata_smart_attributes": {"table": [None, {"name": "Total_LBAs_Written"}]}},
        {"ata_smart_attributes": {"table": [{"name": "Total_LBAs_Written", "raw": {"value": 1}}]}},
        {"nvme_smart_health_information_log": {"data_units_written": None, "percentage_used": 1}},
        {"nvme_smart_health_information_log": {"data_units_written": 5}},
        {"data_units_written": "many", "percent_used": 1},
    ],
)
def test_a_report_of_another_shape_gives_no_wear_and_no_error(report: object) -> None:
    assert parse_smartctl(report) is None
    assert parse_nvme_smart_log(report) is None
