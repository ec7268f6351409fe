"""Costs of tests: CPU time, and started processes.

`make test` writes the costs to build/costs.json, and `python -m tests.costs build/costs.json` reports which limits are
exceeded (.ci/run).

[Note: the processor time of a test]
A test's processor time is the CPU time of the test's process and of all processes that the test started and that have
ended, because the kernel adds the time of ended children to their parent. The fork server (tests/processes.py) is a
child that has children itself. The imports of the fork server count for no test. The processor time includes the test's
fixtures. If a library or a fixture of a module or session is used by several tests, the first of these tests has its
cost.
"""

from __future__ import annotations

import functools
import json
import multiprocessing.forkserver
import multiprocessing.util
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

SLOW_S = 2.0
"""CPU seconds of a test's own call above which the test must have the mark `long`.

The value is for a machine on which all tests take `WHOLE_S`.
"""
WHOLE_S = 400.0
"""CPU time of `make test` on a fast machine without other work.

If `make test` takes longer, the machine is slower, and `SLOW_S` is scaled in proportion.
"""
LONG = 60
"""Maximum number of tests with the mark `long` in `make test`."""
PROCESSES = 1200
"""Maximum number of processes that the tests may start. Processes that these processes start, such as torchrun's ranks,
do not count.
"""


@dataclass
class Cost:
    """Cost of one test.

    Attributes:
        call_s: CPU time of the test itself, without its fixtures.
        processor_s: CPU time with its fixtures.
        processes: number of processes that the test and its fixtures started.
        long: whether the test has the mark `long`.
    """

    call_s: float = 0.0
    processor_s: float = 0.0
    processes: int = 0
    long: bool = False


# ------------------------------------------------------------------------------------------ in the process of a test

_started = 0
_TICKS = os.sysconf("SC_CLK_TCK")


def _counting(start: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that counts the call and calls `start`, which starts a process. An audit hook would be slower:
    it would also run for each call of `id`.
    """

    @functools.wraps(start)
    def counted(*arguments: Any, **options: Any) -> Any:
        global _started
        _started += 1
        return start(*arguments, **options)

    return counted


for _name in ("fork", "forkpty", "posix_spawn"):
    setattr(os, _name, _counting(getattr(os, _name)))
subprocess.Popen._execute_child = _counting(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
multiprocessing.forkserver.connect_to_new_process = _counting(multiprocessing.forkserver.connect_to_new_process)
multiprocessing.util.spawnv_passfds = _counting(multiprocessing.util.spawnv_passfds)  # type: ignore[attr-defined]


def _processor_s(*, with_server: bool = False) -> float:
    """Return the CPU time of this process and of its children that have ended.

    Args:
        with_server: whether to include the CPU time of the fork server itself.
    """
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    total = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    try:
        stat = Path(f"/proc/{multiprocessing.forkserver._forkserver._forkserver_pid}/stat").read_text()  # type: ignore[attr-defined]
    except FileNotFoundError:  # there is no fork server
        return total
    own_and_children = [int(each) / _TICKS for each in stat.rpartition(")")[2].split()[11:15]]
    return total + sum(own_and_children if with_server else own_and_children[2:])


_seen = pytest.StashKey[tuple[float, int]]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[_seen] = _processor_s(), _started
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    seconds, processes = item.stash[_seen]
    item.stash[_seen] = now = _processor_s(), _started
    long = item.get_closest_marker("long") is not None
    report.user_properties.append((__name__, [report.when, now[0] - seconds, now[1] - processes, long]))
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[__name__] = _processor_s(with_server=True)


# ------------------------------------------------------------------------------------------------- of the whole run


@dataclass(eq=False)  # hashable, because pytest keeps plugins in sets
class Costs:
    """Costs of a complete run of pytest, over all its workers."""

    tests: dict[str, Cost] = field(default_factory=dict)
    processor_s: float = 0.0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == __name__:
                self._add(report.nodeid, *value)  # type: ignore[misc]

    def _add(self, nodeid: str, when: str, seconds: float, processes: int, long: bool) -> None:
        cost = self.tests.setdefault(nodeid, Cost(long=long))
        cost.processor_s += seconds
        cost.processes += processes
        if when == "call":
            cost.call_s = seconds

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.processor_s += getattr(node, "workeroutput", {}).get(__name__, 0.0)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        # With xdist, the workers have sent their costs. The workers are children of this process, so children do not
        # count.
        self.processor_s += time.process_time() if self.processor_s else _processor_s(with_server=True)
        terminalreporter.write_line(self.summary())
        path = Path(os.environ["INFINITY_COSTS"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Costs:
        written = json.loads(path.read_text())
        return cls({name: Cost(**cost) for name, cost in written["tests"].items()}, written["processor_s"])

    @property
    def slow_s(self) -> float:
        return SLOW_S * max(1.0, self.processor_s / WHOLE_S)

    def slow(self) -> list[str]:
        """Return the tests without the mark `long` that take too long."""
        return [name for name, cost in self.tests.items() if cost.call_s > self.slow_s and not cost.long]

    def summary(self) -> str:
        minutes, seconds = divmod(round(self.processor_s), 60)
        processes, long = self._processes(), self._long()
        return (
            f"{minutes}:{seconds:02} of processor time for {len(self.tests)} tests, of which {long} are long; "
            f"{processes} processes were started"
        )

    def _processes(self) -> int:
        return sum(cost.processes for cost in self.tests.values())

    def _long(self) -> int:
        return sum(cost.long for cost in self.tests.values())

    def exceeded(self) -> list[str]:
        """Return a line for each limit that is exceeded."""
        slow = [f"  {self.tests[name].call_s:.1f} s  {name}" for name in self.slow()]
        found = [
            (
                bool(slow),
                f"{len(slow)} tests take more than {self.slow_s:.1f} s of processor time. Make each of them faster, or "
                "mark it `long` and give `make test` a faster one that finds the same fault:\n" + "\n".join(slow),
            ),
            (
                self._long() > LONG,
                f"{self._long()} tests are marked `long(kept=…)`; at most {LONG} may be. Keep one for each kind of "
                "fault.",
            ),
            (
                self._processes() > PROCESSES,
                f"the tests start {self._processes()} processes; they may start {PROCESSES}. Call main() instead.",
            ),
        ]
        return [line for is_exceeded, line in found if is_exceeded]


def pytest_configure(config: pytest.Config) -> None:
    if "INFINITY_COSTS" in os.environ and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Costs())


if __name__ == "__main__":
    costs = Costs.read(Path(sys.argv[1]))
    print(costs.summary())
    for line in costs.exceeded():
        print(line, file=sys.stderr)
    sys.exit(bool(costs.exceeded()))
