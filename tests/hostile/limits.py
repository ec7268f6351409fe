"""Limits for hostile input: seconds, 500 MB, and no traceback.

Cases run in processes that are forked from a process that has imported everything (tests/processes.py). Each process
runs many cases. A case that dies or hangs is reported, and the others continue.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from infinity.errors import InfinityError
from tests.processes import Forked

MEMORY_BYTES = 500_000_000
"""Largest growth of the peak memory during a case."""

_SECONDS = 60
"""Seconds after which a case counts as hanging, on a machine with other work."""
_ADDRESSES_BYTES = 16 << 30
"""Limit of the address space that a process may add to its initial address space, so that excessive allocations get a
MemoryError early.
"""

Check = Callable[[Any], object]


def failures(check: Check, cases: Sequence[Any], directory: Path) -> list[str]:
    """Return the failed cases and their problems. The list is empty if each case ended in a result or a typed error
    within the limits.

    Args:
        check: function that runs a case; an InfinityError counts as a result, any other exception as a failure. `check`
            must be a function of a module, and the cases must be picklable.
        cases: the cases.
        directory: place for the list of outcomes.
    """
    outcomes, wrong = directory / "outcomes", []
    begin = 0
    while begin < len(cases):
        outcomes.write_text("")
        process = Forked(_run, check, list(cases[begin:]), str(outcomes))
        out, _ = process.finished(within_s=_SECONDS * (len(cases) - begin) + 60)
        lines = [json.loads(line) for line in outcomes.read_text().splitlines()]
        wrong += [f"{cases[begin + at]!r:.300}: {line}" for at, line in enumerate(lines) if line]
        begin += len(lines)
        if begin < len(cases):
            wrong.append(f"{cases[begin]!r:.300}: ended the process with {process.returncode}; {out[-1000:]}")
            begin += 1
    return wrong


def _run(check: Check, cases: list[Any], outcomes: str) -> None:
    """Run cases in the new process."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _ADDRESSES_BYTES, used + _ADDRESSES_BYTES))
    with open(outcomes, "a", buffering=1) as file:
        for case in cases:
            signal.alarm(_SECONDS)  # no handler: the signal ends the process
            print(json.dumps(_outcome(check, case)), file=file)
        signal.alarm(0)


def _outcome(check: Check, case: Any) -> str:
    """Return the problem of a case; "" if there is no problem."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak memory, so that the peak is of this case
    before = _memory("VmRSS")
    try:
        check(case)
    except InfinityError:
        pass
    except BaseException:
        return traceback.format_exc(limit=-6)
    grown = _memory("VmHWM") - before
    return f"took {grown / 1e6:.0f} MB" if grown > MEMORY_BYTES else ""


def _memory(kind: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


@contextlib.contextmanager
def printed(directory: Path) -> Any:
    """Capture the output to descriptors 1 and 2 within the context. Yield the paths of the two files with
    the output.
    """
    files = directory / "stdout", directory / "stderr"
    kept = [os.dup(number) for number in (1, 2)]
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        for number, file in zip((1, 2), files, strict=True):
            descriptor = os.open(file, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            os.dup2(descriptor, number)
            os.close(descriptor)
        yield files
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        for number, descriptor in zip((1, 2), kept, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
