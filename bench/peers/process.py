"""The driver's side of the protocol: one contender as a child process that makes a step when told to."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.workload import Job

BENCH_DIR = Path(__file__).resolve().parent.parent
# Spinning OpenMP threads made steps 4× longer on a busy machine, and not by the same factor for every contender.
_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class WorkerError(RuntimeError):
    """A contender failed, or did not answer in time.

    Attributes:
        log: its stderr.
        cause: the traceback it sent, if it sent one.
    """

    def __init__(self, message: str, log: Path, cause: str = "") -> None:
        super().__init__(message)
        self.log = log
        self.cause = cause


@dataclass
class Worker:
    """A contender's process, by default in a session of its own: Ctrl-C reaches the driver alone, which then stops it
    in order.

    Attributes:
        name: of the contender.
        python: interpreter to run it under.
        module: `peers.worker_*`.
        job: what to train, and the worker's own directory.
        log: where its stderr goes.
        timeout_s: longest wait for one answer; `stop_s`: for it to end when told to.
        threads: of torch's arithmetic; 0: one for each core.
        own_session: False: whoever kills the driver's process group kills the contender, too.
        facts: what it said when it was ready.
    """

    name: str
    python: Path
    module: str
    job: Job
    log: Path
    timeout_s: float = 600.0
    stop_s: float = 30.0
    threads: int = 0
    own_session: bool = True
    facts: dict[str, Any] = field(default_factory=dict)
    _process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the process; `wait_ready` collects the answer, so that several can set up one after the other."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self.job.swap_dir:
            Path(self.job.swap_dir).mkdir(parents=True, exist_ok=True)
        threads = str(self.threads or len(os.sched_getaffinity(0)))
        paths = os.pathsep.join([str(BENCH_DIR), *filter(None, [os.environ.get("PYTHONPATH")])])
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [str(self.python), "-m", self.module, self.job.to_json()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
                cwd=BENCH_DIR,
                env={**_ENVIRONMENT, **os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": threads},
                start_new_session=self.own_session,
            )

    def wait_ready(self) -> None:
        """Wait until the contender is set up.

        Raises:
            WorkerError: its set-up failed.
        """
        self.facts = self._answer()

    def step(self) -> dict[str, Any]:
        """One turn with one measured training step; what the worker printed.

        Raises:
            WorkerError: the step failed, or took too long.
        """
        return self._ask("step")

    def replay(self) -> dict[str, Any]:
        """The bytes of a step moved with nothing else. Raises WorkerError."""
        return self._ask("replay")

    def _ask(self, order: str) -> dict[str, Any]:
        try:
            self._running().stdin.write(f"{order}\n")  # type: ignore[union-attr]
        except BrokenPipeError:
            raise WorkerError(f"{self.name} is gone; its log is {self.log}", self.log) from None
        return self._answer()

    def cpu_seconds(self) -> float:
        """CPU time of the process so far, all threads."""
        fields = Path(f"/proc/{self._running().pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS

    def stop(self) -> None:
        """Let the worker clean up and exit; kill it if it does not. Its directory is gone afterwards either way."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.stdin.write("quit\n")  # type: ignore[union-attr]
            process.stdin.close()  # type: ignore[union-attr]
        except (BrokenPipeError, OSError):
            pass
        try:
            process.wait(timeout=self.stop_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()  # type: ignore[union-attr]
        if self.job.swap_dir:
            shutil.rmtree(self.job.swap_dir, ignore_errors=True)

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise WorkerError(f"{self.name} is not running", self.log)
        return self._process

    def _answer(self) -> dict[str, Any]:
        process = self._running()
        deadline = time.monotonic() + self.timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)  # type: ignore[arg-type]
            if not selector.select(max(deadline - time.monotonic(), 0)):
                raise WorkerError(
                    f"{self.name} gave no answer in {self.timeout_s:.0f} s; its log is {self.log}", self.log
                )
        line = process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            code = process.wait()
            raise WorkerError(f"{self.name} ended with code {code}: {self._last_words()}", self.log)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{self.name}: {answer['error']}", self.log, answer.get("traceback", ""))
        return answer

    def _last_words(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"{lines[-1].strip()} (log: {self.log})" if lines else f"(empty log: {self.log})"
