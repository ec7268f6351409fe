"""fio as the reference: what it is asked to do, how its answer is read, and the order of the turns."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from infinity.cli.bench.scratch import Scratch
from infinity.cli.bench.versus import _order, compare_with_fio, fio_arguments, parse_fio, run_fio
from infinity.cli.bench.workload import Rig, Workload
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


@needs_fio
def test_fio_and_the_engines_take_turns_on_one_file(tmp_path: Path) -> None:
    with Scratch(tmp_path, 16 << 20) as scratch:
        rig = Rig(scratch, 16 << 20)
        rig.fill()
        said: list[str] = []
        result = compare_with_fio(scratch, rig, Workload("mixed", 1 << 20, 4, 8 << 20), 2, said.append)
        assert {ratio.contender for ratio in result.ratios} == {"io_uring", "fio again", "threads"}
        assert result.fio.startswith("fio-")
        assert len(said) == 2
        with pytest.raises(BenchError, match="fio ended with code"):
            run_fio(Workload("read", 1 << 20, 4, 8 << 20), "/nonexistent/file", 8 << 20)
    assert list(tmp_path.iterdir()) == []
