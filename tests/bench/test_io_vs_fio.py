"""fio as the reference: what it is asked to do, how its answer is read, and the order of the turns."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import io_vs_fio
import pytest
from io_vs_fio import Comparison, Ratio, _order, compare_with_fio, fio_arguments, main, parse_fio, run_fio, text

from infinity.cli.bench.scratch import ScratchFile
from infinity.cli.bench.workload import Workload, WorkloadRunner
from infinity.errors import BenchError

needs_fio = pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")


def test_fio_is_asked_for_the_same_workload() -> None:
    arguments = fio_arguments(Workload("mixed", 1 << 20, 16, 1 << 30, "io_uring"), "/a/file", 2 << 30)
    for part in ("--rw=rw", "--rwmixread=50", "--bs=1048576", "--iodepth=16", "--direct=1", "--ioengine=io_uring"):
        assert part in arguments
    assert "--filename=/a/file" in arguments


def test_rates_and_processor_time_are_read_from_its_json() -> None:
    side = {"io_bytes": 1_000_000_000, "runtime": 500}
    idle = {"io_bytes": 0, "runtime": 0}
    job = {"error": 0, "read": side, "write": idle, "usr_cpu": 5.0, "sys_cpu": 15.0, "job_runtime": 500}
    sample = parse_fio({"jobs": [job]})
    assert (sample.nbytes, sample.seconds) == (1_000_000_000, 0.5)
    assert sample.rate == 2e9
    assert sample.cpu_s == pytest.approx(0.1)
    with pytest.raises(BenchError, match="error 5"):
        parse_fio({"jobs": [job | {"error": 5}]})


def test_everyone_is_first_and_last_equally_often() -> None:
    names = list("abcd")
    orders = [_order(names, number) for number in range(8)]
    for name in names:
        assert sum(order[0] == name for order in orders) == 2
        assert sum(order[-1] == name for order in orders) == 2
    assert all(orders[number] == orders[number + 1][::-1] for number in range(0, 8, 2))


def test_a_contender_is_as_good_as_fio_where_its_median_is_above_fios_own_noise() -> None:
    ratios = [Ratio(name, 0.9, median, 1.1, 2e9, 0.01, 1.5) for name, median in (("io_uring", 1.0), ("threads", 0.8))]
    ratios.append(Ratio("fio again", 0.95, 1.0, 1.05, 2e9, 0.01, 1.0))
    said = text(Comparison("read", 1 << 20, 32, 41, "fio-3.33, 4 KiB pages", 0.95, tuple(ratios))).splitlines()
    assert [line.split()[0] for line in said[1:4]] == ["io_uring", "threads", "fio"]
    assert [line.endswith("  as good as fio") for line in said[1:4]] == [True, False, False]
    assert said[2].endswith("  behind fio")
    assert "sysctl vm.nr_hugepages=64" in said[4]


def test_the_command_has_a_line_for_each_contender_and_names_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a program in fio's place, as fio is not installed everywhere."""
    monkeypatch.setattr(io_vs_fio, "FIO_NAMES", {"mixed": "rw"})
    monkeypatch.setattr(sys, "argv", ["", "--path", str(tmp_path), "--size", "16MiB", "--bytes", "16MiB", "--rounds=1"])
    with monkeypatch.context() as without:
        without.setenv("PATH", str(tmp_path))
        with pytest.raises(SystemExit, match="apt install fio"):
            main()
    side = {"io_bytes": 16 << 20, "runtime": 10}
    job = {"error": 0, "read": side, "write": side, "usr_cpu": 1.0, "sys_cpu": 1.0, "job_runtime": 10}
    said = f"[ $1 = --version ] && echo fio-3.0 || echo '{json.dumps({'jobs': [job]})}'"
    (tmp_path / "fio").write_text(f"#!/bin/sh\n{said}\n")
    (tmp_path / "fio").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    main()
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("mixed, 1024 KiB × 32, fio-3.0")]
    assert [line.split()[0] for line in lines[1:4]] == ["io_uring", "fio", "threads"]


@needs_fio
def test_fio_and_the_engines_take_turns_on_one_file(tmp_path: Path) -> None:
    with ScratchFile(tmp_path, 16 << 20) as scratch:
        rig = WorkloadRunner(scratch, 16 << 20)
        rig.fill()
        said: list[str] = []
        result = compare_with_fio(scratch, rig, Workload("mixed", 1 << 20, 4, 8 << 20), 2, said.append)
        assert {ratio.contender for ratio in result.ratios} == {"io_uring", "fio again", "threads"}
        assert result.fio.startswith("fio-")
        assert len(said) == 2
        with pytest.raises(BenchError, match="fio ended with code"):
            run_fio(Workload("read", 1 << 20, 4, 8 << 20), "/nonexistent/file", 8 << 20)
    assert list(tmp_path.iterdir()) == []
