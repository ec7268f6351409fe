"""`infinity-bench adam` measures every format it names, and says so in a table and in JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infinity import _native
from infinity.cli.bench.adam import FORMATS, Format
from infinity.cli.bench.main import main


def test_every_format_isa_and_thread_count_has_a_row(tmp_path: Path, capsys: Any) -> None:
    target = tmp_path / "adam.json"
    isas = _native.supported_isas()
    arguments = ["--numel", "70000", "--threads", "1", "2", "--isa", *isas, "--rounds", "2", "--json", str(target)]
    assert main(["adam", *arguments]) == 0
    report = json.loads(target.read_text())
    rows = report["results"]
    assert len(rows) == len(FORMATS) * len(isas) * 2
    assert {(row["isa"], row["threads"]) for row in rows} == {(isa, count) for isa in isas for count in (1, 2)}
    assert all(row["parameters_per_s"] > 0 and row["of_bound"] > 0 for row in rows)
    assert len(report["bound"]) == len(isas) * 2
    assert "Gparam/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("form", "state_bytes", "memory_bytes"),
    [
        (Format("fp32", "weight", "fp32", "fp32"), 16, 28),
        (Format("bf16", "split16", "fp32", "bf16"), 20, 26),
        (Format("bf16", "fp32", "fp32", "bf16"), 24, 28),
        (Format("bf16", "split16", "int8", "bf16"), 8.0625, 14.0625),
    ],
)
def test_bytes_per_parameter_are_those_of_the_design(form: Format, state_bytes: float, memory_bytes: float) -> None:
    assert form.state_bytes == state_bytes
    assert form.memory_bytes == memory_bytes


def test_one_parameter_is_enough(tmp_path: Path, capsys: Any) -> None:
    assert main(["adam", "--numel", "1", "--threads", "1", "--rounds", "1"]) == 0


def test_bad_arguments_are_named(capsys: Any) -> None:
    assert main(["adam", "--threads", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err
    assert main(["adam", "--numel", str(1 << 50), "--rounds", "1"]) == 1
    assert "give fewer with --numel" in capsys.readouterr().err
    assert main(["adam", "--numel", "1000", "--threads", "1", "--rounds", "1"]) == 0
