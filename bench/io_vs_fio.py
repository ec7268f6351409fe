"""Comparison of infinity's engines with fio on one file: `python bench/io_vs_fio.py [--path DIR]`.

[Note: fio's memory]
infinity's buffers are in huge pages. fio uses huge pages only if some are reserved for it. In memory of 4 KiB pages,
a 1 MiB transfer consists of hundreds of scattered pieces, and on some devices (virtio) it is half as fast. The report
therefore says which pages fio's memory had. With `sysctl vm.nr_hugepages=64` both programs have huge pages, and only
the engines differ.

[Note: how two programs are compared on a disk that changes by the second]
A shared or virtual disk may become twice as fast or half as fast within seconds, so neither a mean nor a best time is
meaningful.
Each round runs every contender once, in an order that rotates from round to round (A B C, C B A, …), and gives the
ratios within the round. fio runs twice in each round: the difference between its two runs is the noise of the method. A
contender is as good as fio if its median ratio is above the 5 % quantile of the ratios of fio's two runs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from infinity.cli.bench.scratch import ScratchFile
from infinity.cli.bench.workload import Kind, Workload, WorkloadMeasurement, WorkloadRunner
from infinity.errors import BenchError
from infinity.sizes import parse_bytes

ROOT = Path(__file__).resolve().parent.parent
FIO_NAMES: dict[Kind, str] = {"read": "read", "overwrite": "write", "mixed": "rw"}
_MEMORY_BYTES = 256 << 20
_REFERENCE, _AGAIN = "fio", "fio again"
_HUGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True)
class Ratio:
    """A contender compared with fio: 5 %, 50 % and 95 % quantiles, over all rounds, of its rate divided by fio's rate.

    Attributes:
        rate: median, bytes per second.
        cpu_s_per_gb: median CPU seconds per GB.
        cpu_ratio: median of the CPU time per byte divided by fio's CPU time per byte.
    """

    contender: str
    low: float
    median: float
    high: float
    rate: float
    cpu_s_per_gb: float
    cpu_ratio: float


@dataclass(frozen=True)
class Comparison:
    """One kind of workload and all contenders.

    Attributes:
        fio: version of fio, and kind of the pages of fio's buffers.
        noise_low: the 5 % quantile of the ratios of fio's two runs.
    """

    kind: Kind
    block_bytes: int
    queue_depth: int
    rounds: int
    fio: str
    noise_low: float
    ratios: Sequence[Ratio]


def compare_with_fio(
    scratch: ScratchFile,
    rig: WorkloadRunner,
    workload: Workload,
    rounds: int,
    say: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Compare the contenders in `rounds` rounds of `workload`.

    Raises:
        BenchError: fio is missing or failed; the disk failed.
    """
    pages = "huge pages" if huge_pages_for(workload) else "4 KiB pages"
    version = f"{require_fio()}, {pages}"
    contenders: dict[str, Callable[[], WorkloadMeasurement]] = {
        _REFERENCE: lambda: run_fio(replace(workload, engine="io_uring"), scratch.open_path, scratch.nbytes),
        "io_uring": lambda: rig.run(replace(workload, engine="io_uring"), check=False),
        _AGAIN: lambda: run_fio(replace(workload, engine="io_uring"), scratch.open_path, scratch.nbytes),
        "threads": lambda: rig.run(replace(workload, engine="threads"), check=False),
    }
    samples: dict[str, list[WorkloadMeasurement]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name in _order(list(contenders), number):
            samples[name].append(contenders[name]())
        say(f"{workload.kind}: round {number + 1} of {rounds}")
    reference = samples[_REFERENCE]
    ratios = [_ratio(name, samples[name], reference) for name in contenders if name != _REFERENCE]
    noise = next(ratio for ratio in ratios if ratio.contender == _AGAIN)
    return Comparison(
        workload.kind, workload.block_bytes, workload.queue_depth, rounds, version, noise.low, tuple(ratios)
    )


def _order(names: list[str], number: int) -> list[str]:
    """Return the names forwards and backwards in turn (ABBA), rotated by one position every second round."""
    start = number // 2 % len(names)
    turned = names[start:] + names[:start]
    return turned if number % 2 == 0 else turned[::-1]


def _ratio(name: str, samples: Sequence[WorkloadMeasurement], reference: Sequence[WorkloadMeasurement]) -> Ratio:
    rates = [mine.rate / its.rate for mine, its in zip(samples, reference, strict=True)]
    cpu = [mine.cpu_s_per_gb / max(its.cpu_s_per_gb, 1e-6) for mine, its in zip(samples, reference, strict=True)]
    low, high = np.quantile(rates, [0.05, 0.95])
    return Ratio(
        contender=name,
        low=float(low),
        median=statistics.median(rates),
        high=float(high),
        rate=statistics.median(sample.rate for sample in samples),
        cpu_s_per_gb=statistics.median(sample.cpu_s_per_gb for sample in samples),
        cpu_ratio=statistics.median(cpu),
    )


# -- fio ---------------------------------------------------------------------------------------------------------------


def require_fio() -> str:
    """Return the version of fio. Raises BenchError if fio is not installed."""
    if shutil.which("fio") is None:
        raise BenchError("fio is not installed: apt install fio")
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()


def huge_pages_for(workload: Workload) -> bool:
    """Return whether enough huge pages are reserved (vm.nr_hugepages) for fio's buffers, as fio requires."""
    wanted = workload.block_bytes * workload.queue_depth // _HUGE_PAGE_BYTES + 1
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next((int(line.split()[1]) for line in lines if line.startswith("HugePages_Free:")), 0)
    return free >= wanted


def fio_arguments(workload: Workload, path: str, file_bytes: int) -> list[str]:
    """Return the command line that runs `workload` on the file at `path`."""
    engine = "io_uring" if workload.engine in ("auto", "io_uring") else "psync"
    arguments = [
        *("fio", "--name=reference", f"--filename={path}", f"--rw={FIO_NAMES[workload.kind]}"),
        *(f"--bs={workload.block_bytes}", f"--iodepth={workload.queue_depth}", f"--ioengine={engine}"),
        *(f"--size={file_bytes}", f"--io_size={workload.nbytes}", "--direct=1", "--numjobs=1"),
        *("--allow_file_create=0", "--end_fsync=0", "--randrepeat=1", "--output-format=json"),
    ]
    if huge_pages_for(workload):
        arguments.append("--iomem=mmaphuge")
    if engine == "io_uring":
        arguments += ["--registerfiles=1", "--fixedbufs=1"]  # fio's fastest settings, which infinity's engine uses too
    return [*arguments, "--rwmixread=50"] if workload.kind == "mixed" else arguments


def run_fio(workload: Workload, path: str, file_bytes: int) -> WorkloadMeasurement:
    """Run fio once.

    Raises:
        BenchError: fio failed; the message has fio's output.
    """
    done = subprocess.run(fio_arguments(workload, path, file_bytes), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchError(f"fio ended with code {done.returncode}: {(done.stderr or done.stdout).strip()[:500]}")
    # Warnings may precede the JSON.
    return parse_fio(json.loads(done.stdout[done.stdout.index("{") :]))


def parse_fio(report: dict[str, Any]) -> WorkloadMeasurement:
    """Return the sample in fio's JSON: bytes and time of its job, and the CPU time that fio reports."""
    job = report["jobs"][0]
    if job.get("error"):
        raise BenchError(f"fio reports error {job['error']}")
    sides = [job["read"], job["write"]]
    seconds = max(side["runtime"] for side in sides) / 1e3
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    return WorkloadMeasurement(sum(side["io_bytes"] for side in sides), max(seconds, 1e-3), cpu_s)


# -- the command ------------------------------------------------------------------------------------------------------


def text(of: Comparison) -> str:
    """Return a line for each contender.

    A contender is marked as good as fio if its median ratio is above the 5 % quantile of fio's two runs.
    """
    lines = [f"{of.kind}, {of.block_bytes >> 10} KiB × {of.queue_depth}, {of.fio}"]
    for each in of.ratios:
        line = f"  {each.contender:<10}{each.rate / 1e9:6.2f} GB/s  {each.median:.3f}× ({each.low:.2f}–{each.high:.2f})"
        line += f"  {each.cpu_s_per_gb:.4f} CPU s/GB  {each.cpu_ratio:.2f}×"
        as_good = "as good as fio" if each.median > of.noise_low else "behind fio"
        lines.append(line if each.contender == _AGAIN else f"{line}  {as_good}")
    if "4 KiB" in of.fio:
        lines.append("  fio's buffers were in 4 KiB pages. To compare engines alone: sysctl vm.nr_hugepages=64")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--path", type=Path, default=ROOT / "build", help="where the file is made (default build/)")
    parser.add_argument("--size", type=parse_bytes, default=2 << 30, help="size of the file (default 2GiB)")
    parser.add_argument("--bytes", type=parse_bytes, default=512 << 20, help="bytes moved per run (default 512MiB)")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--block", type=parse_bytes, default=1 << 20)
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    try:
        compare(options)
    except BenchError as error:
        raise SystemExit(f"error: {error}") from error


def compare(options: argparse.Namespace) -> None:
    require_fio()
    memory = min(_MEMORY_BYTES, options.bytes, options.size)
    found = []
    with ScratchFile(options.path, options.size // memory * memory) as scratch:
        rig = WorkloadRunner(scratch, memory)
        rig.fill()
        for kind in FIO_NAMES:
            load = Workload(kind, options.block, options.depth, options.bytes // memory * memory)
            found.append(compare_with_fio(scratch, rig, load, options.rounds))
            print(text(found[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in found], indent=2) + "\n")


if __name__ == "__main__":
    main()
