"""infinity's optimizer pass against DeepSpeedCPUAdam and torch.optim.AdamW(fused=True), taking turns, in memory.

    bench/adam_vs_peers.py [--json FILE]

Needs DeepSpeed in .venv-peers (bench/peers/setup.sh). Two workloads on flat states:

  step   fp32 gradients, fp32 states: the optimizer's arithmetic alone
  pass   what a trainer does: bf16 gradients in, norm, unscale, clip, AdamW, bf16 weights out

Every contender is a process of its own with memory in huge pages; each round runs all of them, in an order that turns;
ratios are within a round. A peer's pass is the fastest of the ways to write it, probed first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BENCH_DIR = ROOT / "bench"
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
_PROBES = 3
_BOUND_BYTES = 28
_STEP_BYTES = 28
"""fp32 parameter, two moments and gradient read, all but the gradient written."""
_PASS_BYTES = 28
"""split16: gradient read for the norm; weight, residual and moments read and written, gradient read."""


class Contender:
    """The driver's side of one worker."""

    def __init__(self, name: str, python: Path, module: str, arguments: list[str], log: Path, isa: str | None) -> None:
        self.name = name
        environment = {**os.environ, "PYTHONPATH": str(BENCH_DIR), "OMP_NUM_THREADS": arguments[1]}
        if isa:
            environment["INFINITY_ISA"] = isa
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [str(python), "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
                cwd=BENCH_DIR,
                env=environment,
            )
        self._log = log
        self.rows: list[str] = self._read()["rows"]

    def run(self, row: str) -> float:
        """Seconds of one run."""
        print(json.dumps({"do": "run", "row": row}), file=self._process.stdin, flush=True)
        answer = self._read()
        if not answer["check"] == answer["check"]:
            raise RuntimeError(f"{self.name}: the master is NaN after '{row}'")
        return float(answer["seconds"])

    def stop(self) -> None:
        if self._process.poll() is None:
            try:
                print(json.dumps({"do": "quit"}), file=self._process.stdin, flush=True)
                self._process.wait(60)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                self._process.kill()
                self._process.wait()

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise RuntimeError(f"{self.name} ended; its last words:\n{self._log.read_text()[-2000:]}")
        result: dict[str, Any] = json.loads(line)
        return result


@dataclass(frozen=True)
class Measured:
    """Medians of one thread count.

    Attributes:
        parameters_per_s: by row, "peer: row" for peers.
        ratios: of rates, by what is compared; medians of the ratio within a round.
        bound_bytes_per_s: of reading and writing in place.
    """

    threads: int
    isa: str
    rounds: int
    parameters_per_s: dict[str, float]
    ratios: dict[str, float]
    bound_bytes_per_s: float


def fastest_pass(peer: Contender) -> str:
    passes = [row for row in peer.rows if row.startswith("pass")]
    return min(passes, key=lambda row: statistics.median(peer.run(row) for _ in range(_PROBES)))


def measure(numel: int, threads: int, isa: str, rounds: int, logs: Path) -> Measured:
    arguments = [str(numel), str(threads)]
    ours = Contender("infinity", Path(sys.executable), "peers.adam_infinity", arguments, logs / "infinity", isa)
    torch = Contender("torch", PEERS_PYTHON, "peers.adam_torch", [*arguments, "torch"], logs / "torch", None)
    deepspeed = Contender(
        "deepspeed", PEERS_PYTHON, "peers.adam_torch", [*arguments, "deepspeed"], logs / "deepspeed", None
    )
    contenders = [ours, torch, deepspeed]
    try:
        rows = [(ours, row) for row in ours.rows] + [(peer, "step") for peer in (torch, deepspeed)]
        rows += [(peer, fastest_pass(peer)) for peer in (torch, deepspeed)]
        for contender, row in rows:
            contender.run(row)
            contender.run(row)
        seconds: dict[str, list[float]] = {}
        for number in range(rounds):
            for contender, row in rows if number % 2 == 0 else rows[::-1]:
                if contender is ours and row != "bound":
                    ours.run(row)  # the rows share memory: the first step of each fills its states
                label = row if contender is ours else f"{contender.name}: {row.split(',')[0]}"
                seconds.setdefault(label, []).append(contender.run(row))
    finally:
        for contender in contenders:
            contender.stop()
    return _conclude(numel, threads, isa, rounds, seconds)


def _conclude(numel: int, threads: int, isa: str, rounds: int, seconds: dict[str, list[float]]) -> Measured:
    def ratio(ours: str, *others: str) -> float:
        """Of our rate to the best of the others', within rounds."""
        return statistics.median(
            min(seconds[other][number] for other in others) / seconds[ours][number] for number in range(rounds)
        )

    steps, passes = ("torch: step", "deepspeed: step"), ("torch: pass", "deepspeed: pass")
    ratios = {f"{ours} / {other}": ratio(ours, other) for ours in ("step",) for other in steps}
    ratios |= {f"{ours} / {other}": ratio(ours, other) for ours in ("pass", "pass, fp32 master") for other in passes}
    ratios["step / better peer"] = ratio("step", *steps)
    ratios["pass / better peer"] = ratio("pass", *passes)
    ratios["step / bound"] = ratio("step", "bound") * _STEP_BYTES / _BOUND_BYTES
    ratios["pass / bound"] = ratio("pass", "bound") * _PASS_BYTES / _BOUND_BYTES
    ratios["step, int8 / step"] = ratio("step, int8", "step")
    ratios["pass, int8 / pass"] = ratio("pass, int8", "pass")
    ratios["pass, bf16 / pass"] = ratio("pass, bf16", "pass")
    rates = {label: numel / statistics.median(times) for label, times in seconds.items()}
    return Measured(threads, isa, rounds, rates, ratios, rates["bound"] * _BOUND_BYTES)


def describe(measured: Measured) -> str:
    lines = [f"{measured.threads} thread(s), {measured.isa}: bound {measured.bound_bytes_per_s / 1e9:.1f} GB/s"]
    lines += [f"  {rate / 1e9:6.3f} Gparam/s  {label}" for label, rate in measured.parameters_per_s.items()]
    lines += [f"  {value:6.2f}x  {label}" for label, value in measured.ratios.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=64 << 20, help="parameters (default 64 Mi)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--isa", nargs="+", help="of infinity; default: the best, and avx2")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from infinity import _native

    if not PEERS_PYTHON.exists():
        sys.exit("no .venv-peers: run bench/peers/setup.sh first")
    known = _native.supported_isas()
    isas = options.isa or [known[-1], *(["avx2"] if known[-1] == "avx512" else [])]
    results = []
    with tempfile.TemporaryDirectory() as logs:
        for threads in options.threads:
            for isa in isas:
                results.append(measure(options.numel, threads, isa, options.rounds, Path(logs)))
                print(describe(results[-1]), flush=True)
    if options.json:
        content = {"processor": platform.processor() or platform.machine(), "numel": options.numel}
        options.json.write_text(json.dumps(content | {"results": [asdict(result) for result in results]}, indent=1))


if __name__ == "__main__":
    main()
