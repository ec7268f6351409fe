"""Rate of the optimizer's pass in memory, for every form of the states: `python bench/adam_forms.py [--isa ISA ...]`.

Each form is compared with a bound: the rate of a pass that reads and writes the same streams in place with almost no
arithmetic (infinity/plan/adam_rate.py). Each ratio compares two rates of the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from infinity import _native
from infinity.plan.adam_rate import AdamBuffers, StateFormat, measure

FORMATS = {
    "fp32 weights, master weight, fp32 moments, fp32 gradients": StateFormat("fp32", "weight", "fp32", "fp32"),
    "bf16 weights, master split16, fp32 moments, bf16 gradients": StateFormat("bf16", "split16", "fp32", "bf16"),
    "bf16 weights, master fp32, fp32 moments, bf16 gradients": StateFormat("bf16", "fp32", "fp32", "bf16"),
    "bf16 weights, master split16, bf16 moments, bf16 gradients": StateFormat("bf16", "split16", "bf16", "bf16"),
    "bf16 weights, master split16, int8 moments, bf16 gradients": StateFormat("bf16", "split16", "int8", "bf16"),
    "bf16 weights, master none, int8 moments, bf16 gradients": StateFormat("bf16", "none", "int8", "bf16"),
    "fp32 weights, master weight, fp32 moments, fp32 gradients of 1e-22":
        StateFormat("fp32", "weight", "fp32", "fp32", 1e-22),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Result of one form.

    Attributes:
        of_bound: rate of this form, divided by the rate at which the bound's pass moves the same bytes.
    """

    format: str
    isa: str
    threads: int
    parameters_per_s: float
    bytes_per_s: float
    of_bound: float
    state_bytes: float


@dataclass(frozen=True)
class Report:
    """Result: all rows, and the bandwidth of the bound in bytes per second, by "isa x threads"."""

    numel: int
    rounds: int
    bound: dict[str, float]
    results: list[Row]


def run_adam(
    numel: int, threads: Sequence[int], isas: Sequence[str], rounds: int, names: Sequence[str] = tuple(FORMATS)
) -> Report:
    memory, bounds, rows = AdamBuffers(numel), dict[str, float](), list[Row]()
    for count in threads:
        pool = _native.ThreadPool(count)
        for isa in isas:
            found = {name: measure(memory, FORMATS[name], isa, pool, rounds) for name in names}
            bounds[f"{isa} x {count}"] = statistics.median(each.bound for each in found.values())
            for name, each in found.items():
                form, rate = FORMATS[name], each.parameters_per_s
                rows.append(Row(name, isa, count, rate, rate * form.memory_bytes, each.of_bound, form.state_bytes))
    return Report(numel, rounds, bounds, rows)


def main() -> None:
    cores, isas = len(os.sched_getaffinity(0)), _native.supported_isas()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--numel", type=int, default=64 << 20, help="parameters (default 64 Mi: 1.5 GiB of memory)")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, cores}))
    parser.add_argument("--isa", choices=isas, nargs="+", default=[isas[-1]])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = run_adam(options.numel, options.threads, options.isa, options.rounds)
    for row in report.results:
        print(
            f"{row.format:<68}{row.isa:<9}{row.threads:>3}{row.parameters_per_s / 1e9:7.3f} Gparam/s"
            f"{row.bytes_per_s / 1e9:7.1f} GB/s{row.of_bound:6.2f} of the bound{row.state_bytes:6.2f} B on NVMe"
        )
    print(f"bound: {', '.join(f'{name}: {rate / 1e9:.1f} GB/s' for name, rate in report.bound.items())}")
    if options.json:
        options.json.write_text(json.dumps(asdict(report), indent=2) + "\n")


if __name__ == "__main__":
    main()
