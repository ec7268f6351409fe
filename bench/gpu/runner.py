"""Runner of the stages: it runs each stage as a process with a time limit, and collects measurements and a verdict.
The module uses only the standard library."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from gpu.record import Options

BENCH_DIR = Path(__file__).resolve().parent.parent
ROOT = BENCH_DIR.parent

_ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without this setting, matrix products differ from run to run
    "OMP_WAIT_POLICY": "passive",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_KEPT_CHARACTERS = 4000
_DYING_S = 10.0
_DUMP_BEGINS = "Timeout ("


@dataclass(frozen=True)
class Stage:
    """A stage: one row of the table in stages.py.

    Attributes:
        limit_s: seconds after which the stage's processes are killed.
        least_s: the stage is not started if fewer seconds are left.
        module: the module that runs, as `python -m MODULE OPTIONS`.
        needs_gpu: whether the stage is useless without a GPU.
        purpose: the question that the stage answers.
        limit_without_gpu_s: shorter limit on a machine without a GPU.
    """

    number: int
    name: str
    limit_s: float
    module: str
    needs_gpu: bool
    purpose: str
    least_s: float = 10.0
    limit_without_gpu_s: float = 45.0


@dataclass
class _Collected:
    """The lines that a stage has written so far."""

    measured: dict[str, Any] = field(default_factory=dict)
    expected: dict[str, str] = field(default_factory=dict)
    verdicts: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    garbage: list[str] = field(default_factory=list)
    running: str = ""

    def take(self, text: str) -> None:
        try:
            line = json.loads(text)
            if "begins" in line:
                self.running = line["begins"]
                return
            name = line["name"]
            self.verdicts[name] = line["verdict"]
        except (ValueError, KeyError, TypeError):
            self.garbage.append(text.strip()[:200])
            return
        self.running = ""
        for key, into in (("value", self.measured), ("expected", self.expected), ("reason", self.reasons)):
            if key in line:
                into[name] = line[key]
        if "error" in line:
            self.errors[name] = line["error"][-_KEPT_CHARACTERS:]


def run_stage(stage: Stage, python: Path, options: Options, log: Path) -> dict[str, Any]:
    """Run one stage to its end or to its time limit, whichever comes first.

    Args:
        stage: the stage to run.
        python: the interpreter that runs it.
        options: argument of the stage; `options.seconds` is the time limit.
        log: the stage's stderr is appended to this file.

    Returns:
        The stage's JSON line: stage, rc (negative: the signal that ended it), seconds, measured, expected, verdict;
        and, when there are any: verdicts of the measurements, reasons, errors, garbage.
    """
    began = time.monotonic()
    start = log.stat().st_size if log.exists() else 0
    collected = _Collected()
    hung = False
    with log.open("a") as errors:
        print(f"==== stage {stage.number}: {stage.name}, at most {options.seconds:.0f} s", file=errors, flush=True)
        process = subprocess.Popen(
            [str(python), "-m", stage.module, options.to_json()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=ROOT,
            env=environment(options.work),
            start_new_session=True,
        )
        reader = threading.Thread(target=_read, args=(process.stdout, collected), daemon=True)
        reader.start()
        try:
            process.wait(options.seconds)
        except subprocess.TimeoutExpired:
            hung = True
        finally:
            _end_group(process)
        reader.join(5)
    seconds = time.monotonic() - began
    return _line(stage, options, process.returncode, seconds, collected, _tail(log, start), hung=hung)


def environment(work: Path) -> dict[str, str]:
    """Return the environment of a stage, with importable bench modules, separate caches and deterministic results."""
    paths = [str(BENCH_DIR), *filter(None, [os.environ.get("PYTHONPATH")])]
    cache = {"XDG_CACHE_HOME": str(work / "cache")}  # the stage must not use a profile of an earlier measurement
    return {**os.environ, **_ENVIRONMENT, **cache, "PYTHONPATH": os.pathsep.join(paths)}


def skipped(stage: Stage, reason: str) -> dict[str, Any]:
    """Return the line of a stage that was not run."""
    return {
        "stage": stage.number,
        "name": stage.name,
        "rc": None,
        "seconds": 0.0,
        "measured": {},
        "expected": stage.purpose,
        "verdict": "skipped",
        "reason": reason,
    }


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a stage and all processes that it started, and wait until they are gone and their GPU memory is free."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    until = time.monotonic() + _DYING_S
    while _is_alive(process.pid) and time.monotonic() < until:
        time.sleep(0.02)


def _is_alive(group: int) -> bool:
    """Return whether a process of the group is alive; zombies do not count."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def _read(pipe: IO[bytes] | None, collected: _Collected) -> None:
    if pipe is None:
        raise AssertionError("a stage without a pipe")
    for line in pipe:
        collected.take(line.decode(errors="replace"))


def _tail(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")


def _line(
    stage: Stage,
    options: Options,
    returned: int,
    seconds: float,
    collected: _Collected,
    said: str,
    *,
    hung: bool,
) -> dict[str, Any]:
    line: dict[str, Any] = {
        "stage": stage.number,
        "name": stage.name,
        "rc": returned,
        "seconds": round(seconds, 1),
        "measured": collected.measured,
        "expected": collected.expected,
        "verdict": _verdict(returned, collected, hung=hung),
        "verdicts": collected.verdicts,
    }
    for key in ("reasons", "errors", "garbage"):
        if getattr(collected, key):
            line[key] = getattr(collected, key)
    if hung:
        line["died"] = f"killed after {options.seconds:.0f} s{_during(collected)}"
        line["traceback"] = said[said.find(_DUMP_BEGINS) :][:_KEPT_CHARACTERS] if _DUMP_BEGINS in said else ""
    elif returned < 0:
        line["died"] = f"by {_signal_name(-returned)}{_during(collected)}"
    elif returned:
        line["died"] = f"with exit code {returned}{_during(collected)}"
    if hung or returned:
        line["stderr"] = said[-_KEPT_CHARACTERS:]
    return line


def _verdict(returned: int, collected: _Collected, *, hung: bool) -> str:
    found = set(collected.verdicts.values())
    if hung or returned or collected.garbage or "failed" in found or not found:
        return "failed"
    return next((verdict for verdict in ("missed", "known", "ok", "noted") if verdict in found), "skipped")


def _during(collected: _Collected) -> str:
    return f" during '{collected.running}'" if collected.running else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass
class Budget:
    """Time budget in seconds for all stages together."""

    seconds: float
    reserve_s: float = 5.0
    """Seconds reserved for killing the processes and writing the lines."""
    _began: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        return self.seconds - self.reserve_s - (time.monotonic() - self._began)

    def limit_of(self, stage: Stage, *, gpu: bool) -> float:
        """Return the seconds that a stage gets; 0 if the time left is too short for the stage."""
        whole = stage.limit_s if gpu else min(stage.limit_s, stage.limit_without_gpu_s)
        limit = min(whole, self.left_s)
        return limit if limit >= min(stage.least_s, whole) else 0.0


def facts_of(lines: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the measurements of the earlier stages, by stage name; a later stage uses them."""
    return {name: line["measured"] for name, line in lines.items()}
