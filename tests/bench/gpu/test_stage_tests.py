"""A test that fails on the GPU is run once more by itself, and both outcomes are told."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from gpu import stage_tests
from gpu.record import Options, Record
from gpu.runner import BENCH_DIR

_TESTS = """
import os, pytest

def test_right(): pass

def test_wrong(): assert 1 == 2

def test_wrong_beside_others(): assert os.environ.get("CUDA_LAUNCH_BLOCKING") == "1"
"""


@pytest.mark.long
def test_a_failed_test_runs_again_by_itself_with_blocking_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(BENCH_DIR))
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    (tmp_path / "test_played.py").write_text(_TESTS)
    channel = io.StringIO()
    settings = {"arguments": ["test_played.py"], "root": str(tmp_path), "again_s": 0}
    stage_tests.stage(Record(channel, 120.0), Options(120.0, tmp_path, tmp_path / "work", {}, settings))
    lines: dict[str, Any] = {
        line["name"].rpartition("::")[2]: line
        for line in map(json.loads, channel.getvalue().splitlines())
        if "name" in line
    }
    value = lines["tests"]["value"]
    assert (value["passed"], value["failed"], value["skipped"], value["rc"]) == (1, 2, 0, 1)
    for test, alone in (("test_wrong", "failed"), ("test_wrong_beside_others", "passed")):
        assert lines[test]["verdict"] == "failed"
        assert lines[test]["value"]["with the others"]["outcome"] == "failed"
        assert lines[test]["value"]["by itself"]["outcome"] == alone
    assert "assert 1 == 2" in lines["test_wrong"]["value"]["by itself"]["said"]
    assert "test_right" not in lines


def test_results_before_a_crash_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(BENCH_DIR))
    crash = "def test_crash(): os.kill(os.getpid(), signal.SIGKILL)\n"
    (tmp_path / "test_played.py").write_text(f"import os, signal\ndef test_right(): pass\n{crash}")
    found = stage_tests.run_tests(["test_played.py"], tmp_path, tmp_path, 60.0)
    assert found.rc == -9
    assert found.named("passed") == ["test_played.py::test_right"]
