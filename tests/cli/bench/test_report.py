"""What is printed of a comparison with fio, which is not installed everywhere."""

from __future__ import annotations

import re

import pytest
from rich.console import Console

from infinity.cli.bench.report import print_comparisons
from infinity.cli.bench.versus import Comparison, Ratio


def test_a_contender_is_as_good_as_fio_where_its_median_is_above_fios_own_noise(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ratios = [Ratio(name, 0.9, median, 1.1, 2e9, 0.01, 1.5) for name, median in (("io_uring", 1.0), ("threads", 0.8))]
    ratios.append(Ratio("fio again", 0.95, 1.0, 1.05, 2e9, 0.01, 1.0))
    compared = Comparison("read", 1 << 20, 32, 41, "fio-3.33, 4 KiB pages", 0.95, tuple(ratios))
    print_comparisons(Console(width=120, force_terminal=False), [compared])
    said = capsys.readouterr().out
    rows = [re.split(r"\s*[│┃]\s*", line.strip()) for line in said.splitlines() if "0.0100" in line]
    assert [row[1:4] for row in rows] == [
        ["read, 1MiB × 32", "io_uring", "2.00"],
        ["", "threads", "2.00"],
        ["", "fio again", "2.00"],
    ]
    assert [row[-2] for row in rows] == ["yes", "no", ""]
    assert "sysctl vm.nr_hugepages=64" in said
