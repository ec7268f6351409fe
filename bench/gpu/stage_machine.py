"""Stage 0: build of infinity, followed by measurements of the machine.

The build needs only the standard library. The measurements run as `gpu.machine_facts` in the Python that the build
prepared.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu.environment import prepare
from gpu.record import Options, Record, run
from gpu.runner import ROOT


def stage(record: Record, options: Options) -> None:
    """Run the stage. Settings: `touch_bytes`, the largest number of bytes of RAM to touch."""
    python = Path(options.settings.get("python", sys.executable))
    ready = record.measure("environment", "a Python that imports infinity of this checkout", lambda: _prepare(python))
    if ready is None:
        return
    # The child writes its lines to this stage's channel, and the child's time limit ends before this stage's limit.
    facts = Options(max(record.left_s - 2, 5), options.out, options.work, options.found, options.settings)
    record.measure(
        "machine facts",
        "exit code 0",
        lambda: _look_around(record, ready["python"], facts),
        good=lambda code: code == 0,
    )


def _look_around(record: Record, python: str, facts: Options) -> int:
    command = [python, "-m", "gpu.machine_facts", facts.to_json()]
    return subprocess.run(command, stdout=record.fileno(), check=False).returncode


def _prepare(python: Path) -> dict[str, Any]:
    began = time.perf_counter()
    _, facts = prepare(ROOT, python)
    return facts | {"seconds": round(time.perf_counter() - began, 1)}


if __name__ == "__main__":
    run(stage)
