"""A pytest plugin (`-p gpu.pytest_lines`): one JSON line per test, written as it ends, to the file INFINITY_TEST_LINES.
A run that hangs or is killed loses no earlier result."""

from __future__ import annotations

import json
import os
from typing import Any

_KEPT_CHARACTERS = 3000


def pytest_runtest_logreport(report: Any) -> None:
    """A test's own phase; its set-up and clean-up only where they did not pass."""
    if report.when != "call" and report.outcome == "passed":
        return
    line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
    if report.outcome == "failed":
        line["said"] = report.longreprtext[-_KEPT_CHARACTERS:]
    elif report.outcome == "skipped":
        line["said"] = str(report.longrepr)[-300:]
    with open(os.environ["INFINITY_TEST_LINES"], "a") as file:
        file.write(json.dumps(line) + "\n")
