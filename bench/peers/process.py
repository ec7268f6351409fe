"""The driver's side of a contender: a child process that reads one order per line on stdin and answers in JSON
lines."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peers.workload import Job

BENCH_DIR = Path(__file__).resolve().parent.parent
# Spinning OpenMP threads made steps 4× longer on a busy machine, with a different factor for every contender.
_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class WorkerError(RuntimeError):
    """A contender failed, or did not answer in time.

    Attributes:
        log: its stderr.
        cause: the traceback that the contender sent, if any.
    """

    def __init__(self, message: str, log: Path, cause: str = "") -> None:
        super().__init__(message)
        self.log = log
        self.cause = cause


class Child:
    """A contender's process.

    By default the process runs in a separate session, so that Ctrl-C reaches only the driver, which then stops the
    contender in order. Life cycle: start() → order() and answer(), in turns → stop().

    Args:
        name: name of the contender.
        python, module, arguments: the command, which runs in bench/.
        log: file for its stderr.
        environment: variables in addition to the driver's environment.
        timeout_s: longest wait for one answer; None: no limit.
        stop_s: longest wait for the process to end after the order to quit.
        own_session: whether the process gets a separate session; False: a signal to the driver's process group also
            kills the contender.
    """

    quit = "quit"
    """The order on which the process cleans up and exits."""

    def __init__(
        self,
        name: str,
        python: Path,
        module: str,
        arguments: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        stop_s: float = 60.0,
        own_session: bool = True,
    ) -> None:
        self.name = name
        self.log = log
        self.timeout_s = timeout_s
        self.stop_s = stop_s
        self._command = [str(python), "-m", module, *arguments]
        self._environment = dict(environment or {})
        self._own_session = own_session
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the process without waiting for its first answer, so that several processes can set up at the same
        time."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        paths = os.pathsep.join([str(BENCH_DIR), *filter(None, [os.environ.get("PYTHONPATH")])])
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
                cwd=BENCH_DIR,
                env={**_ENVIRONMENT, **os.environ, "PYTHONPATH": paths, **self._environment},
                start_new_session=self._own_session,
            )

    def order(self, line: str) -> dict[str, Any]:
        """Give an order and return its answer.

        Raises:
            WorkerError: the order failed or took too long, or the process has ended.
        """
        try:
            self._running().stdin.write(f"{line}\n")  # type: ignore[union-attr]
        except BrokenPipeError:
            raise WorkerError(f"{self.name} is gone; its log is {self.log}", self.log) from None
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Return the next answer. Raises WorkerError like order()."""
        process = self._running()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)  # type: ignore[arg-type]
            if not selector.select(self.timeout_s):
                raise WorkerError(
                    f"{self.name} gave no answer in {self.timeout_s:.0f} s; its log is {self.log}", self.log
                )
        line = process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            code = process.wait()
            raise WorkerError(f"{self.name} ended with code {code}: {self._last_words()}", self.log)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(
                f"{self.name}: {answer['error']} (log: {self.log})", self.log, answer.get("traceback", "")
            )
        return answer

    def cpu_seconds(self) -> float:
        """Return the CPU time of the process so far, over all threads."""
        fields = Path(f"/proc/{self._running().pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS

    @property
    def pid(self) -> int:
        return self._running().pid

    def stop(self) -> None:
        """Let the process clean up and exit; kill the process if it does not exit."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.stdin.write(f"{self.quit}\n")  # type: ignore[union-attr]
            process.stdin.close()  # type: ignore[union-attr]
        except (BrokenPipeError, OSError):
            pass
        try:
            process.wait(timeout=self.stop_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()  # type: ignore[union-attr]

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise WorkerError(f"{self.name} is not running", self.log)
        return self._process

    def _last_words(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"{lines[-1].strip()} (log: {self.log})" if lines else f"(empty log: {self.log})"


class Worker(Child):
    """A contender that makes a training step when ordered (peers/protocol.py).

    Args:
        module: `peers.worker_*`.
        job: the training, and the worker's own directory, which is removed when the worker is stopped.
        threads: number of threads of torch's arithmetic; 0: one for each core.
        others: the arguments of Child.

    Attributes:
        facts: the answer that the contender sent when it was ready.
    """

    def __init__(
        self,
        name: str,
        python: Path,
        module: str,
        job: Job,
        log: Path,
        *,
        timeout_s: float = 600.0,
        threads: int = 0,
        own_session: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        environment = {"OMP_NUM_THREADS": str(threads or len(os.sched_getaffinity(0))), **(environment or {})}
        super().__init__(
            name,
            python,
            module,
            [job.to_json()],
            log,
            environment=environment,
            timeout_s=timeout_s,
            stop_s=30.0,
            own_session=own_session,
        )
        self.job = job
        self.facts: dict[str, Any] = {}

    def start(self) -> None:
        """Start the process as Child does; `wait_ready` collects the first answer."""
        if self.job.swap_dir:
            Path(self.job.swap_dir).mkdir(parents=True, exist_ok=True)
        super().start()

    def wait_ready(self) -> None:
        """Wait until the contender is set up. Raises WorkerError."""
        self.facts = self.answer()

    def step(self) -> dict[str, Any]:
        """Return the measurements of a turn with one measured training step. Raises WorkerError."""
        return self.order("step")

    def replay(self) -> dict[str, Any]:
        """Move the bytes of a step without computing; return the measurements. Raises WorkerError."""
        return self.order("replay")

    def stop(self) -> None:
        """Stop the process as Child does, and remove the worker's directory in any case."""
        was_started = self._process is not None
        super().stop()
        if was_started and self.job.swap_dir:
            shutil.rmtree(self.job.swap_dir, ignore_errors=True)


class JsonWorker(Child):
    """A contender that receives its orders, and returns its answers, as JSON objects: {"do": ..., ...}. The
    constructor starts it."""

    quit = json.dumps({"do": "quit"})

    def __init__(
        self,
        name: str,
        python: Path,
        module: str,
        log: Path,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(name, python, module, arguments, log, environment=environment)
        self.start()

    def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Give an order, made of the arguments, and return its answer, as order() does."""
        return self.order(json.dumps(order))
