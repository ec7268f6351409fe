"""Check of a machine with a GPU in ten minutes; `make gpu-check` calls it.

The check builds infinity, measures the machine, runs the tests for GPUs, and compares the time of a step with torch's.

bench/gpu_check.py [--out DIR] [--stages 0,5] [--budget 570]

Each stage (gpu/stages.py) is a separate process with a time limit. Each stage's result is one JSON line on stdout and
in DIR/gpu-check.jsonl, with the measurements and their expectations. A stage that fails does not stop the others, but
without the build no other stage runs. The check needs no network. It needs only Python's standard library and torch;
missing packages are installed from .bundle (`make gpu-bundle`).

Exit code: 0 nothing failed; 1 something failed; 2 there is no GPU, and only the stages that do not need a GPU have run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu.environment import TorchFacts, choose_python, prepared
from gpu.record import Options
from gpu.runner import ROOT, Budget, Stage, facts_of, run_stage, skipped
from gpu.stages import NUMBERS, STAGES

_BUDGET_S = 570.0
_LOG_BYTES_MAX = 8 << 20
_TOLD = ("failed", "missed", "known", "skipped")


class Check:
    """One run of the stages: it collects and writes the stages' lines."""

    def __init__(self, out: Path, work: Path, budget: Budget, torch: TorchFacts, settings: dict[str, Any]) -> None:
        self._out, self._work = out, work
        self._budget = budget
        self._torch = torch
        self._settings = settings
        self._python: Path | None = prepared(ROOT, torch.python)
        self._lines: dict[str, dict[str, Any]] = {}
        self._file = (out / "gpu-check.jsonl").open("w")

    def run(self, stages: list[Stage]) -> int:
        """Run the stages and return the exit code."""
        for stage in stages:
            line = self._run(stage)
            self._lines[stage.name] = line
            for file in (sys.stdout, self._file):
                print(json.dumps(line), file=file, flush=True)
        self._file.close()
        self._shorten_log()
        if not self._torch.missing():
            print("\n".join(map(summary, self._lines.values())), file=sys.stderr)
        failed = any(line["verdict"] == "failed" for line in self._lines.values())
        return 2 if self._torch.missing() else 1 if failed else 0

    def _shorten_log(self) -> None:
        """Shorten the log, so that the copied folder has no large files.

        The end of the log is kept, because it says more than the beginning.
        """
        log = self._out / "gpu-check.log"
        content = log.read_bytes() if log.exists() else b""
        if len(content) > _LOG_BYTES_MAX:
            log.write_bytes(content[-_LOG_BYTES_MAX:])

    def _run(self, stage: Stage) -> dict[str, Any]:
        missing = self._torch.missing()
        if stage.needs_gpu and missing:
            return skipped(stage, missing)
        python = self._torch.python if stage.number == 0 else self._python
        if python is None:
            return skipped(stage, "infinity is not built: see stage 0, or run it")
        limit = self._budget.limit_of(stage, gpu=not missing)
        if not limit:
            return skipped(stage, f"{self._budget.left_s:.0f} s of the budget are left")
        found = facts_of(self._lines)
        settings = self._settings.get(stage.name, {})
        options = Options(limit, self._out, self._work, found, settings)
        line = run_stage(stage, python, options, self._out / "gpu-check.log")
        if stage.number == 0:
            ready = line["measured"].get("environment")
            self._python = Path(ready["python"]) if ready else None
        return line


def summary(line: dict[str, Any]) -> str:
    """Return a readable line on a stage: its verdict, and the measurements that are not as expected."""
    said = ", ".join(f"{name} ({verdict})" for name, verdict in line.get("verdicts", {}).items() if verdict in _TOLD)
    why = line.get("died") or line.get("reason") or said
    return (
        f"stage {line['stage']} {line['name']:<8} {line['seconds']:6.1f} s  {line['verdict']}{': ' if why else ''}{why}"
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/gpu-check"), help="folder for the results")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("build"),
        help="folder on the disk to measure; a folder in it is used and removed",
    )
    parser.add_argument(
        "--stages", type=_numbers, default=NUMBERS, help="numbers from 0 to 9, such as 0,5 (default: all)"
    )
    parser.add_argument(
        "--budget", type=float, default=_BUDGET_S, help=f"seconds for all stages (default {_BUDGET_S:.0f})"
    )
    parser.add_argument(
        "--settings", type=json.loads, default={}, help='JSON, by stage: {"pinning": {"sizes_gib": [4]}}'
    )
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        numbers = (-1,)
    if not set(numbers) <= set(NUMBERS):
        raise argparse.ArgumentTypeError(f"'{text}' is no list of stages from 0 to {NUMBERS[-1]}")
    return numbers


def main() -> int:
    options = build_parser().parse_args()
    budget = Budget(options.budget)
    signal.signal(signal.SIGTERM, _terminate)
    out = options.out.resolve()
    for folder in (out, options.work):
        folder.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="gpu-check-", dir=options.work.resolve()))
    (out / "gpu-check.log").write_text("")
    candidates = [Path(sys.executable)]
    if (own := ROOT / ".venv" / "bin" / "python").exists() and own != candidates[0]:
        candidates.append(own)
    torch = choose_python(candidates)
    chosen = [stage for stage in STAGES if stage.number in options.stages]
    if torch.missing():
        needing = ", ".join(str(stage.number) for stage in chosen if stage.needs_gpu)
        running = ", ".join(str(stage.number) for stage in chosen if not stage.needs_gpu)
        print(f"{torch.missing()}: stages {needing or 'none'} cannot run, {running or 'none'} can", file=sys.stderr)
    try:
        return Check(out, work, budget, torch, options.settings).run(chosen)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _terminate(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
