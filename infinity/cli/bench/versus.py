"""`--vs-fio`: infinity's engines and fio on one file, taking turns.

[Note: fio's memory]
infinity's buffers are in huge pages, which fio only uses where some are reserved for it. On 4 KiB pages a 1 MiB
transfer is hundreds of scattered pieces, and on some devices (virtio) half as fast. So the comparison says which pages
fio had; with `sysctl vm.nr_hugepages=64` it is one of engines alone.

[Note: how two programs are compared on a disk that changes by the second]
A shared or virtual disk may swing by a factor of two within seconds, so neither a mean nor a best says anything. Each
round runs every contender once, in an order that turns round by round (A B C, C B A, …), and gives the ratios within
the round. fio stands in the round twice: how far fio is from itself is the noise of the method, and a contender is as
good as fio when its median ratio lies above the 5 % quantile of fio against fio.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from infinity.cli.bench.fio import huge_pages_for, require_fio, run_fio
from infinity.cli.bench.scratch import Scratch
from infinity.cli.bench.workload import Kind, Rig, Sample, Workload

COMPARED: tuple[Kind, ...] = ("read", "overwrite", "mixed")
_REFERENCE, _AGAIN = "fio", "fio again"


@dataclass(frozen=True)
class Ratio:
    """A contender against fio over all rounds: 5 %, 50 % and 95 % quantiles of rate / fio's rate.

    Attributes:
        rate: median, bytes per second.
        cpu_s_per_gb: median.
        cpu_ratio: median of processor time per byte / fio's.
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
    """One kind of workload, all contenders.

    Attributes:
        fio: its version, and the pages its buffers are in.
        noise_low: the 5 % quantile of fio against fio.
    """

    kind: Kind
    block_bytes: int
    queue_depth: int
    rounds: int
    fio: str
    noise_low: float
    ratios: Sequence[Ratio]


def compare_with_fio(
    scratch: Scratch, rig: Rig, workload: Workload, rounds: int, say: Callable[[str], None] = lambda _: None
) -> Comparison:
    """Run `rounds` rounds of `workload`.

    Raises:
        BenchError: fio is missing or failed; the disk failed.
    """
    pages = "huge pages" if huge_pages_for(workload) else "4 KiB pages"
    version = f"{require_fio()}, {pages}"
    contenders: dict[str, Callable[[], Sample]] = {
        _REFERENCE: lambda: run_fio(replace(workload, engine="io_uring"), scratch.open_path, scratch.nbytes),
        "io_uring": lambda: rig.run(replace(workload, engine="io_uring"), check=False),
        _AGAIN: lambda: run_fio(replace(workload, engine="io_uring"), scratch.open_path, scratch.nbytes),
        "threads": lambda: rig.run(replace(workload, engine="threads"), check=False),
    }
    samples: dict[str, list[Sample]] = {name: [] for name in contenders}
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
    """Forwards and backwards in turn (ABBA), beginning one further on every second round."""
    start = number // 2 % len(names)
    turned = names[start:] + names[:start]
    return turned if number % 2 == 0 else turned[::-1]


def _ratio(name: str, samples: Sequence[Sample], reference: Sequence[Sample]) -> Ratio:
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
