"""`infinity-bench adam`: how fast the optimizer's pass is in memory, held against what this memory can do.

The bound is a pass that reads and writes the same streams in place and does next to no arithmetic, measured in the
same rounds, with the same instruction set and as many threads. Bytes are those the pass must move; GB is 10^9.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import psutil
from rich.console import Console

from infinity import _native
from infinity.cli.bench.report import table
from infinity.errors import BenchError
from infinity.sizes import format_bytes
from infinity.state.dtypes import residual_itemsize

SCHEMA, VERSION = "infinity-bench-adam", 1

_ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
_BOUND_BYTES = 28
_STREAM_BYTES_MAX = 4  # per element


@dataclass(frozen=True)
class Format:
    """One way to keep the states.

    Attributes:
        tiny: gradients of 1e-22, whose squares are denormal numbers.
    """

    weight: _native.DTypeName
    master: _native.MasterName
    moments: _native.MomentsName
    grad: _native.DTypeName
    tiny: bool = False

    @property
    def name(self) -> str:
        gradients = f"{self.grad} gradients" + (" of 1e-22" if self.tiny else "")
        return f"{self.weight} weights, master {self.master}, {self.moments} moments, {gradients}"

    @property
    def state_bytes(self) -> float:
        """Bytes per parameter that are read and written back when master and moments are on NVMe and weights in RAM."""
        moment = _native.moment_bytes(self.moments, _native.CHUNK_NUMEL) / _native.CHUNK_NUMEL
        return 2 * (residual_itemsize(self.master) + 2 * moment)

    @property
    def memory_bytes(self) -> float:
        """Bytes per parameter that cross memory. A weight beside an fp32 master is only written."""
        weight = _ITEMSIZE[self.weight] * (1 if self.master == "fp32" else 2)
        return weight + self.state_bytes + _ITEMSIZE[self.grad]


FORMATS = (
    Format("fp32", "weight", "fp32", "fp32"),
    Format("bf16", "split16", "fp32", "bf16"),
    Format("bf16", "fp32", "fp32", "bf16"),
    Format("bf16", "split16", "bf16", "bf16"),
    Format("bf16", "split16", "int8", "bf16"),
    Format("bf16", "none", "int8", "bf16"),
    Format("fp32", "weight", "fp32", "fp32", tiny=True),
)


@dataclass(frozen=True)
class Result:
    """One row: medians over the rounds.

    Attributes:
        parameters_per_s: of the update alone, in memory.
        of_bound: its time as a share of the bound's for as many bytes; 1 is as fast as memory.
        state_bytes: per parameter, read and written on NVMe.
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
    """All rows, and the bytes per second of the bound by (isa, threads)."""

    numel: int
    rounds: int
    bound: dict[str, float]
    results: tuple[Result, ...]

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "version": VERSION, **asdict(self)}


class _Memory:
    """Every stream of `numel` elements, each in an arena of its own, as fp32 at the widest; "z" stays zero."""

    _STREAMS = ("w", "r", "m", "v", "g", "z")

    def __init__(self, numel: int) -> None:
        # Of few elements, int8 moments are the larger ones: whole chunks of them.
        nbytes = max(numel * _STREAM_BYTES_MAX, *(_native.moment_bytes(form.moments, numel) for form in FORMATS))
        needed = len(self._STREAMS) * nbytes
        available = psutil.virtual_memory().available
        if needed > available * 0.9:
            raise BenchError(
                f"{numel} parameters take {format_bytes(needed)} of memory and {format_bytes(available)} are free; "
                "give fewer with --numel"
            )
        self.numel = numel
        self._arenas = {name: _native.Arena(nbytes) for name in self._STREAMS}
        for arena in self._arenas.values():
            np.frombuffer(arena.view(0, arena.nbytes), np.uint8)[:] = 0

    def view(self, name: str, nbytes: int) -> memoryview:
        return self._arenas[name].view(0, nbytes)

    def fill_gradients(self, dtype: _native.DTypeName, size: float) -> None:
        """With the same numbers again and again: random ones take long to make."""
        count = min(self.numel, 1 << 20)
        numbers = (np.random.default_rng(0).standard_normal(count) * size).astype(np.float32)
        kept = np.empty(count, np.float32 if dtype == "fp32" else np.uint16)
        _native.round_weights(numbers, kept, dtype)
        flat = np.frombuffer(self.view("g", self.numel * _ITEMSIZE[dtype]), kept.dtype)
        for at in range(0, self.numel, count):
            flat[at : at + count] = kept[: self.numel - at]


def run_adam(
    numel: int, threads: Sequence[int], isas: Sequence[str], rounds: int, formats: Sequence[Format] = FORMATS
) -> Report:
    """Measure every format with every instruction set and number of threads.

    Raises:
        BenchError: there is not enough memory.
    """
    memory = _Memory(numel)
    bound: dict[str, float] = {}
    results: list[Result] = []
    for count in threads:
        pool = _native.ThreadPool(count)
        for isa in isas:
            limit, rows = _measure(memory, formats, isa, pool, rounds)
            bound[f"{isa} x {count}"] = limit
            results += rows
    return Report(numel, rounds, bound, tuple(results))


def _measure(
    memory: _Memory, formats: Sequence[Format], isa: str, pool: _native.ThreadPool, rounds: int
) -> tuple[float, list[Result]]:
    """The bound in bytes per second, and a row for each format. The bound is measured beside every run of a format."""
    bounds: list[float] = []
    rows = []
    for form in formats:
        update = _updater(memory, form, isa, pool)
        ours, shares = [], []
        for _ in range(rounds):
            limit = _seconds(lambda: _bound(memory, isa, pool)) * form.memory_bytes / _BOUND_BYTES
            seconds = _seconds(update)
            bounds.append(memory.numel * form.memory_bytes / limit)
            ours.append(seconds)
            shares.append(limit / seconds)
        rate = memory.numel / statistics.median(ours)
        rows.append(
            Result(
                format=form.name,
                isa=isa,
                threads=pool.threads,
                parameters_per_s=rate,
                bytes_per_s=rate * form.memory_bytes,
                of_bound=statistics.median(shares),
                state_bytes=form.state_bytes,
            )
        )
    return statistics.median(bounds), rows


def _bound(memory: _Memory, isa: str, pool: _native.ThreadPool) -> None:
    # Zeros are added, so that the states stay what they are.
    a, b, c, d = (memory.view(name, memory.numel * 4) for name in ("w", "m", "v", "z"))
    _native.read_modify_write(a, b, c, d, pool, isa)


def _updater(memory: _Memory, form: Format, isa: str, pool: _native.ThreadPool) -> Callable[[], None]:
    """A call that makes one step; it was called once, so that the moments are in their form."""
    numel = memory.numel
    memory.fill_gradients(form.grad, 1e-22 if form.tiny else 1e-2)
    moment = _native.moment_bytes(form.moments, numel)
    rest = numel * residual_itemsize(form.master)

    def update(step: int = 2) -> None:
        finite = _native.optimizer_update(
            memory.view("w", numel * _ITEMSIZE[form.weight]),
            memory.view("r", rest) if rest else None,
            memory.view("m", moment),
            memory.view("v", moment),
            memory.view("g", numel * _ITEMSIZE[form.grad]),
            weight_dtype=form.weight,
            master=form.master,
            moments=form.moments,
            grad_dtype=form.grad,
            segments=[_native.Segment(0, numel, lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, step=step, grad_scale=0.5)],
            pool=pool,
            isa=isa,
        )
        if not finite:
            raise BenchError(f"{form.name}: the states are not finite any more; what was measured means nothing")

    # Zeros are a state of every format.
    for name in ("w", "r", "m", "v"):
        np.frombuffer(memory.view(name, numel * _STREAM_BYTES_MAX), np.uint8)[:] = 0
    update(step=1)
    return update


def _seconds(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def print_report(console: Console, report: Report) -> None:
    rows = [
        (
            row.format,
            row.isa,
            row.threads,
            f"{row.parameters_per_s / 1e9:.3f}",
            f"{row.bytes_per_s / 1e9:.1f}",
            f"{row.of_bound:.2f}",
            f"{row.state_bytes:.2f}",
        )
        for row in report.results
    ]
    title = f"AdamW in memory, {report.numel / 2**20:.0f} Mi parameters, median of {report.rounds}"
    console.print(table(title, ("states", "isa", "threads", "Gparam/s", "GB/s", "of bound", "B on NVMe"), rows))
    limits = ", ".join(f"{name}: {rate / 1e9:.1f} GB/s" for name, rate in report.bound.items())
    console.print(f"bound, reading and writing in place: {limits}", markup=False, highlight=False)
