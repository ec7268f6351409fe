"""The driver's side of a worker process that takes orders as JSON lines and answers each with one."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BENCH_DIR = Path(__file__).resolve().parent.parent


class LineWorker:
    """A process of its own, in a session of its own: Ctrl-C reaches the driver, which stops it.

    Args:
        python, module, arguments: what to run, in bench/.
        log: where its stderr goes.
        environment: added to ours.
    """

    def __init__(
        self,
        name: str,
        python: Path,
        module: str,
        log: Path,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [str(python), "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
                cwd=BENCH_DIR,
                env={**os.environ, "PYTHONPATH": str(BENCH_DIR), "OMP_WAIT_POLICY": "passive", **(environment or {})},
                start_new_session=True,
            )

    def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Raises RuntimeError with the worker's own error, or when it is gone."""
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return self.read()

    def read(self) -> dict[str, Any]:
        """The next answer."""
        if self._process.stdout is None:
            raise AssertionError("no pipes")
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "it is gone"}
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']} (log: {self._log})\n{self._log.read_text()[-2000:]}")
        return answer

    def stop(self) -> None:
        if self._process.poll() is None:
            try:
                print(json.dumps({"do": "quit"}), file=self._process.stdin, flush=True)
                self._process.wait(60)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                self._process.kill()
                self._process.wait()
