"""pytest plugin (`-p gpu.pytest_lines`) that writes one JSON line per test to the file named by INFINITY_TEST_LINES.

Each line is written when its test ends, so a run that hangs or is killed loses no earlier result.
"""

from __future__ import annotations

import json
import os
from typing import Any

_KEPT_CHARACTERS = 3000


def pytest_runtest_logreport(report: Any) -> None:
    """Write a line for the test's call phase.

    The set-up and clean-up of a test get a line only if they did not pass.
    """
    if report.when != "call" and report.outcome == "passed":
        return
    line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
    if report.outcome == "failed":
        line["said"] = report.longreprtext[-_KEPT_CHARACTERS:]
    elif report.outcome == "skipped":
        line["said"] = str(report.longrepr)[-300:]
    with open(os.environ["INFINITY_TEST_LINES"], "a") as file:
        file.write(json.dumps(line) + "\n")
