"""The same workload through fio: the reference that every storage engineer trusts."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from infinity.cli.bench.workload import Sample, Workload
from infinity.errors import BenchError

_HUGE_PAGE_BYTES = 2 << 20
_DIRECTIONS = {"read": "read", "overwrite": "write", "first_write": "write", "mixed": "rw"}


def require_fio() -> str:
    """fio's version. Raises BenchError where it is not installed."""
    if shutil.which("fio") is None:
        raise BenchError("--vs-fio needs fio, which is not installed: apt install fio")
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()


def huge_pages_for(workload: Workload) -> bool:
    """Whether enough huge pages are reserved for fio's buffers (vm.nr_hugepages): it has no other way to them."""
    wanted = workload.block_bytes * workload.queue_depth // _HUGE_PAGE_BYTES + 1
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next((int(line.split()[1]) for line in lines if line.startswith("HugePages_Free:")), 0)
    return free >= wanted


def fio_arguments(workload: Workload, path: str, file_bytes: int) -> list[str]:
    """The command line that does `workload` on the file at `path`."""
    engine = "io_uring" if workload.engine in ("auto", "io_uring") else "psync"
    arguments = [
        "fio",
        "--name=reference",
        f"--filename={path}",
        f"--rw={_DIRECTIONS[workload.kind]}",
        f"--bs={workload.block_bytes}",
        f"--iodepth={workload.queue_depth}",
        f"--ioengine={engine}",
        f"--size={file_bytes}",
        f"--io_size={workload.nbytes}",
        "--direct=1",
        "--numjobs=1",
        "--allow_file_create=0",
        "--end_fsync=0",
        "--randrepeat=1",
        "--output-format=json",
    ]
    if huge_pages_for(workload):
        arguments.append("--iomem=mmaphuge")
    if engine == "io_uring":
        arguments += ["--registerfiles=1", "--fixedbufs=1"]  # its best, and what ours does
    return [*arguments, "--rwmixread=50"] if workload.kind == "mixed" else arguments


def run_fio(workload: Workload, path: str, file_bytes: int) -> Sample:
    """Run it once.

    Raises:
        BenchError: fio failed; says what it said.
    """
    done = subprocess.run(fio_arguments(workload, path, file_bytes), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchError(f"fio ended with code {done.returncode}: {(done.stderr or done.stdout).strip()[:500]}")
    # Warnings may come before the JSON.
    return parse_fio(json.loads(done.stdout[done.stdout.index("{") :]))


def parse_fio(report: dict[str, Any]) -> Sample:
    """The sample in fio's JSON: bytes and time of its job, and the processor time it says it took."""
    job = report["jobs"][0]
    if job.get("error"):
        raise BenchError(f"fio reports error {job['error']}")
    sides = [job["read"], job["write"]]
    seconds = max(side["runtime"] for side in sides) / 1e3
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    return Sample(sum(side["io_bytes"] for side in sides), max(seconds, 1e-3), cpu_s)
