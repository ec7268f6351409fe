"""Comparison of infinity's optimizer pass with DeepSpeedCPUAdam and torch.optim.AdamW(fused=True), in memory.

    bench/adam_vs_peers.py [--json FILE]

The script needs DeepSpeed in .venv-peers (bench/peers/setup.sh). Two workloads on flat states:

  step   fp32 gradients, fp32 states: the optimizer's arithmetic alone
  pass   what a trainer does: bf16 gradients in, norm, unscale, clip, AdamW, bf16 weights out

Every contender is a separate process with its memory in huge pages. Each round runs all contenders, in an order that
rotates; each ratio compares two rates of the same round. A peer's pass is measured in two forms: the usual form (cast,
norm, multiply, step, cast), and the fastest other form that is known. The other forms compute the norm of the bf16
gradients, or pass the clipping factor to the step. A probe finds the fastest form first.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from peers.process import JsonWorker

ROOT = Path(__file__).resolve().parent.parent
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
_PROBES = 3
_BOUND_BYTES = 28
_STEP_BYTES = 28
"""Bytes per parameter of a step: fp32 parameter, moments and gradient are read; all but the gradient are written."""
_PASS_BYTES = 28
"""Bytes per parameter of a pass with split16.

The gradient is read for the norm and again for the update; weight, residual and moments are read and written.
"""


class Contender(JsonWorker):
    """The driver's side of one worker."""

    def __init__(self, name: str, python: Path, module: str, log: Path, arguments: list[str], isa: str = "") -> None:
        environment = {"OMP_NUM_THREADS": arguments[1]} | ({"INFINITY_ISA": isa} if isa else {})
        super().__init__(name, python, module, log, arguments, environment)
        self.rows: list[str] = self.answer()["rows"]

    def run(self, row: str) -> float:
        """Run a row once and return its seconds."""
        answer = self.ask({"do": "run", "row": row})
        if not answer["check"] == answer["check"]:
            raise RuntimeError(f"{self.name}: the weights are NaN after '{row}'")
        return float(answer["seconds"])


@dataclass(frozen=True)
class Measured:
    """Medians of the measurements with one number of threads.

    Attributes:
        parameters_per_s: by row; "peer: row" for peers.
        ratios: ratios of rates, by the pair that is compared; each is the median of the rounds' ratios.
        bound_bytes_per_s: rate of reading and writing in place.
    """

    threads: int
    isa: str
    rounds: int
    parameters_per_s: dict[str, float]
    ratios: dict[str, float]
    bound_bytes_per_s: float


_PLAIN = "pass, norm of fp32"


def fastest_pass(peer: Contender) -> str:
    """Return the peer's fastest pass other than the plain pass."""
    passes = [row for row in peer.rows if row.startswith("pass") and row != _PLAIN]
    return min(passes, key=lambda row: statistics.median(peer.run(row) for _ in range(_PROBES)))


def measure(numel: int, threads: int, isa: str, rounds: int, logs: Path) -> Measured:
    arguments = [str(numel), str(threads)]
    ours = Contender("infinity", Path(sys.executable), "peers.adam_infinity", logs / "infinity", arguments, isa)
    torch, deepspeed = (
        Contender(name, PEERS_PYTHON, "peers.adam_torch", logs / name, [*arguments, name])
        for name in ("torch", "deepspeed")
    )
    contenders = [ours, torch, deepspeed]
    try:
        rows = [(ours, row) for row in ours.rows] + [(peer, "step") for peer in (torch, deepspeed)]
        rows += [(peer, row) for peer in (torch, deepspeed) for row in (_PLAIN, fastest_pass(peer))]
        for contender, row in rows:
            contender.run(row)
            contender.run(row)
        seconds: dict[str, list[float]] = {}
        for number in range(rounds):
            for contender, row in rows if number % 2 == 0 else rows[::-1]:
                if contender is ours and row != "bound":
                    ours.run(row)  # the rows share memory, so the first step of each row fills the row's states
                label = row if contender is ours else f"{contender.name}: {_label(row)}"
                seconds.setdefault(label, []).append(contender.run(row))
    finally:
        for contender in contenders:
            contender.stop()
    return _conclude(numel, threads, isa, rounds, seconds)


def _label(row: str) -> str:
    return "plain pass" if row == _PLAIN else row.split(",")[0]


def _conclude(numel: int, threads: int, isa: str, rounds: int, seconds: dict[str, list[float]]) -> Measured:
    def ratio(ours: str, *others: str) -> float:
        """Return the median over the rounds of infinity's rate divided by the best peer's rate in the same round."""
        return statistics.median(
            min(seconds[other][number] for other in others) / seconds[ours][number] for number in range(rounds)
        )

    steps, passes = ("torch: step", "deepspeed: step"), ("torch: pass", "deepspeed: pass")
    ratios = {f"{ours} / {other}": ratio(ours, other) for ours in ("step",) for other in steps}
    passes += tuple(label.replace(": ", ": plain ") for label in passes)
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
