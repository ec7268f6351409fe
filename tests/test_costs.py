"""Costs of tests are counted whole, and a limit that is exceeded is named with the tests that exceed it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import costs, processes
from tests.costs import LONG, PROCESSES, SLOW_S, WHOLE_S, Cost, Costs

BURN = "import time\nwhile time.process_time() < {seconds}: pass"


def costs_of(pytester: pytest.Pytester, source: str, monkeypatch: pytest.MonkeyPatch) -> Costs:
    """Return the costs of a test file that is run in this process."""
    pytester.makepyfile(source)
    monkeypatch.setenv("INFINITY_COSTS", str(pytester.path / "build" / "costs.json"))
    pytester.runpytest_inprocess("-q", "-p", "no:cacheprovider", "-p", "tests.costs")
    return Costs.read(pytester.path / "build" / "costs.json")


def test_a_test_pays_for_its_fixtures_and_for_the_processes_that_it_starts(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = costs_of(
        pytester,
        f"""
        import os, subprocess, sys, time
        import pytest

        def burn(seconds):
            end = time.process_time() + seconds
            while time.process_time() < end: ...

        @pytest.fixture
        def slow(): burn(0.2)

        @pytest.mark.long(kept="a reason")
        def test_with_a_fixture(slow): ...

        def test_that_starts_processes():
            subprocess.run([sys.executable, "-S", "-c", {BURN.format(seconds=0.2)!r}], check=True)
            os.waitpid(os.posix_spawn(sys.executable, [sys.executable, "-S", "-c", ""], os.environ), 0)
        """,
        monkeypatch,
    )
    with_a_fixture, that_starts = found.tests.values()
    assert with_a_fixture.processor_s >= 0.2 > with_a_fixture.call_s
    assert (with_a_fixture.processes, with_a_fixture.long) == (0, True)
    assert that_starts.call_s >= 0.2
    assert (that_starts.processes, that_starts.long) == (2, False)
    assert found.processor_s > 0.4


def test_processes_of_the_fork_server_and_of_multiprocessing_are_counted() -> None:
    assert processes.run_script("").returncode == 0  # the first one starts the server
    before, seconds = costs._started, costs._processor_s()
    assert processes.run_script(BURN.format(seconds=0.2)).returncode == 0
    subprocess.run([sys.executable, "-S", "-c", ""], check=True)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert costs._started == before + 3
    assert costs._processor_s() >= seconds + 0.2


def test_within_its_limits_a_run_exceeds_nothing() -> None:
    tests = {f"test_{number}": Cost(call_s=SLOW_S, processes=PROCESSES // 10) for number in range(10)}
    tests |= {f"test_long_{number}": Cost(call_s=60, long=True) for number in range(LONG)}
    found = Costs(tests, WHOLE_S)
    assert found.exceeded() == []
    assert found.summary() == (
        f"6:40 of processor time for {10 + LONG} tests, of which {LONG} are long; {PROCESSES} processes were started"
    )


def test_each_limit_that_is_exceeded_is_said() -> None:
    tests = {"test_slow": Cost(call_s=2.5, processes=PROCESSES + 1)}
    tests |= {f"test_long_{number}": Cost(call_s=60, long=True) for number in range(LONG + 1)}
    slow, long, processes = Costs(tests, WHOLE_S).exceeded()
    assert "1 tests take more than 2.0 s of processor time" in slow
    assert "\n  2.5 s  test_slow" in slow
    assert long.startswith(f"{LONG + 1} tests are marked `long(kept=…)`; at most {LONG} may be")
    assert processes.startswith(f"the tests start {PROCESSES + 1} processes; they may start {PROCESSES}")


def test_a_machine_that_takes_longer_for_the_whole_may_take_longer_for_each() -> None:
    tests = {"test_slow": Cost(call_s=2.5)}
    assert Costs(tests, WHOLE_S).slow() == Costs(tests, WHOLE_S / 2).slow() == ["test_slow"]
    assert Costs(tests, 1.3 * WHOLE_S).slow() == []


def test_what_is_written_is_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reporter:
        lines: list[str] = []  # noqa: RUF012

        def write_line(self, line: str) -> None:
            self.lines.append(line)

    monkeypatch.setenv("INFINITY_COSTS", str(tmp_path / "new" / "costs.json"))
    written = Costs({"test": Cost(1.0, 2.0, 3, True)}, 5.0)
    written.pytest_terminal_summary(Reporter())
    read = Costs.read(tmp_path / "new" / "costs.json")
    assert (read.tests, read.processor_s) == (written.tests, written.processor_s)
    assert Reporter.lines == [written.summary()]
