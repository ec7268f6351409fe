"""`make gpu-check` as a whole, with stages that take no time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gpu_check
import pytest
from gpu.environment import TorchFacts
from gpu.runner import Stage

_STAGE = """
import sys
from gpu.record import run

def stage(record, options):
    if options.found.get("early", {}).get("broken"):
        raise RuntimeError
    record.note("python", sys.executable)
    record.note("found", sorted(options.found))
    record.note("environment", {"python": sys.executable})
    record.note("settings", options.settings)
    if options.settings.get("fails"):
        record.measure("failing", "nothing", lambda: 1 / 0)

if __name__ == "__main__":
    run(stage)
"""
_STAGES = (
    Stage(0, "early", 60, "played", False, "builds"),
    Stage(1, "gpu", 60, "played", True, "needs a GPU"),
    Stage(5, "late", 60, "played", False, "needs none"),
)


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run it with arguments, on a machine with so many GPUs; returns (exit code, lines of gpu-check.jsonl)."""
    (tmp_path / "played.py").write_text(_STAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu_check, "STAGES", _STAGES)
    monkeypatch.setattr(gpu_check, "prepared", lambda root, python: None)

    def run(*arguments: str, devices: int = 1) -> tuple[int, list[dict[str, Any]]]:
        facts = TorchFacts(Path(sys.executable), "2.13.0+cpu", None, devices)
        monkeypatch.setattr(gpu_check, "choose_python", lambda candidates: facts)
        out, work = tmp_path / "out", tmp_path / "work"
        work.mkdir(exist_ok=True)
        (work / "precious").write_text("was there before")
        monkeypatch.setattr(sys, "argv", ["gpu_check", "--out", str(out), "--work", str(work), *arguments])
        code = gpu_check.main()
        assert [path.name for path in work.iterdir()] == ["precious"]
        return code, [json.loads(line) for line in (out / "gpu-check.jsonl").read_text().splitlines()]

    return run


def test_each_stage_has_a_line_on_stdout_and_in_the_file(check: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = check()
    assert code == 0
    assert [line["stage"] for line in lines] == [0, 1, 5]
    said = capsys.readouterr()
    assert [json.loads(line) for line in said.out.splitlines()] == lines
    assert [line.split()[:3] for line in said.err.splitlines()] == [
        ["stage", "0", "early"],
        ["stage", "1", "gpu"],
        ["stage", "5", "late"],
    ]
    assert lines[2]["measured"]["found"] == ["early", "gpu"]


def test_a_failed_stage_does_not_stop_the_later_ones(check: Any) -> None:
    code, lines = check("--settings", '{"gpu": {"fails": true}}')
    assert code == 1
    assert [line["verdict"] for line in lines] == ["noted", "failed", "noted"]


def test_without_a_gpu_one_line_says_what_is_missing(check: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = check(devices=0)
    said = capsys.readouterr().err.strip()
    assert code == 2
    assert said == (
        "needs a CUDA device: torch 2.13.0+cpu sees none (torch.version.cuda=None): stages 1 cannot run, 0, 5 can"
    )
    assert [line["verdict"] for line in lines] == ["noted", "skipped", "noted"]
    assert lines[1]["reason"].startswith("needs a CUDA device")


def test_a_budget_that_is_used_up_skips_what_is_left_and_says_so(check: Any) -> None:
    code, lines = check("--budget", "12")
    assert code == 0
    assert {line["verdict"] for line in lines} == {"skipped"}
    assert "s of the budget are left" in lines[0]["reason"]


def test_nothing_runs_without_a_python_that_has_infinity(check: Any) -> None:
    _, lines = check("--stages", "5")
    assert lines[0]["reason"] == "infinity is not built: see stage 0, or run it"


@pytest.mark.parametrize("text", ["10", "0,x", ""])
def test_a_stage_that_does_not_exist_is_refused(check: Any, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check("--stages", text)
    assert "no list of stages from 0 to 9" in capsys.readouterr().err
