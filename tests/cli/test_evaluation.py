"""The loss on held-out data: what it is, when it comes, and that it changes nothing of the training."""

from __future__ import annotations

import csv
import itertools
import json
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from infinity.cli import step_watch
from infinity.cli.batches import TokenBatch
from infinity.cli.data import SequenceSubset, split
from infinity.cli.main import main
from infinity.cli.trainers import FinetuneSFTTrainer
from infinity.errors import ConfigError
from tests.cli import test_resume
from tests.cli.test_finetune import TEXT, run, tokenizer
from tests.cli.test_resume import _losses, _same, _stop_after
from tests.models import llama

APART = "a red fox and the lazy hen run over the brown dog\n" * 9


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    llama(2, attention_dropout=0.1)[0].bfloat16().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "apart.txt").write_text(APART)
    return evaluated(tmp_path, "a")


def _job(tmp_path: Path, name: str, **overrides: Any) -> dict[str, Any]:
    return test_resume._job(tmp_path, name, **overrides) | {"--steps": 12}


def evaluated(tmp_path: Path, name: str) -> dict[str, Any]:
    return _job(tmp_path, name) | {"--eval-data": tmp_path / "apart.txt", "--eval-steps": 5}


def evaluations(output: Path) -> list[tuple[int, float]]:
    report = json.loads((output / "report.json").read_text())
    return [(each["step"], each["loss"]) for each in report["evaluations"]]


def test_data_of_one_sequence_is_evaluated_on_data_apart(job: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "text.txt").write_text(APART)
    short = _job(tmp_path, "a") | {"--steps": 1}
    numel = len(tokenizer()(APART)["input_ids"])
    assert run(short | {"--sequence-length": numel, "--eval-split": 0.5}) == 2
    assert "give --eval-data instead" in capsys.readouterr().err
    assert run(short | {"--sequence-length": numel, "--eval-data": tmp_path / "apart.txt"}) == 0
    assert len(evaluations(tmp_path / "out-a")) == 1


@pytest.mark.usefixtures("picture")
def test_a_run_is_evaluated_while_it_trains_and_trains_as_without(
    job: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    _job(tmp_path, "a", overlap="off")  # no update begins for nothing, which moves bytes
    assert run(job) == 0
    out = capsys.readouterr().out
    found = evaluations(tmp_path / "out-a")
    assert [step for step, _ in found] == [5, 10, 12]
    assert f"step 5: held-out loss {found[0][1]:.4f}" in out
    assert f"held-out loss         {found[0][1]:.4f} after step 5 → {found[2][1]:.4f} after step 12" in out
    report = json.loads((tmp_path / "out-a" / "report.json").read_text())
    assert [(each["step"], each["loss"]) for each in report["evaluations"]] == found
    assert "; held out: " in report["data"]
    assert run(_job(tmp_path, "b", overlap="off")) == 0
    assert _losses(tmp_path / "out-b") == _losses(tmp_path / "out-a")
    assert _same(tmp_path / "out-a", tmp_path / "out-b")
    other = json.loads((tmp_path / "out-b" / "report.json").read_text())
    assert report["bytes_per_parameter"] == pytest.approx(other["bytes_per_parameter"], rel=0.1)


def test_the_loss_is_the_mean_over_the_held_out_tokens(job: dict[str, Any], tmp_path: Path) -> None:
    assert run(job | {"--dtype": "fp32"}) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out-a").eval()
    ids = torch.tensor(tokenizer()(APART)["input_ids"] + [tokenizer().eos_token_id])
    rows = ids[: len(ids) // 16 * 16].view(-1, 16)
    assert len(rows) % 2, "the last batch is smaller"
    with torch.no_grad():
        expected = model(input_ids=rows, labels=rows).loss.item()
    assert evaluations(tmp_path / "out-a")[-1][1] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_a_stopped_run_has_the_evaluations_of_one_that_was_not(
    number: int, job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(job | {"--eval-steps": 1}) == 0
    other = evaluated(tmp_path, "b") | {"--eval-steps": 1}
    assert _stop_after(other, number).returncode == (-9 if number == signal.SIGKILL else 128 + number)
    evaluating_for_an_hour(monkeypatch)
    assert main(["finetune", "--resume", str(tmp_path / "swap-b")]) == 0
    with (tmp_path / "out-b" / "loss.csv").open() as file:
        assert max(float(row["seconds"]) for row in csv.DictReader(file)) < 60, "evaluating is no part of a step"
    assert evaluations(tmp_path / "out-b") == evaluations(tmp_path / "out-a")
    assert _losses(tmp_path / "out-b") == _losses(tmp_path / "out-a")


def evaluating_for_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock of a run's steps."""
    hours, evaluate = itertools.count(1), FinetuneSFTTrainer.evaluate
    passed = [0]

    def slow(*given: Any, **named: Any) -> Any:
        passed[0] = next(hours) * 3600
        return evaluate(*given, **named)

    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + passed[0])
    monkeypatch.setattr(step_watch, "time", clock)
    monkeypatch.setattr(FinetuneSFTTrainer, "evaluate", slow)


class Numbers:
    """Sequences of one token each, their own number."""

    sequences, digest = 20, "numbers"

    def rows(self, indices: Any) -> TokenBatch:
        return TokenBatch(torch.tensor([[index] for index in indices]))


@pytest.mark.parametrize("share", [0.001, 0.25, 0.9])
def test_what_is_held_out_is_not_trained_on(share: float) -> None:
    trained, held_out = split(Numbers(), share, seed=3)
    parts = [part.rows(range(part.sequences)).ids.flatten().tolist() for part in (trained, held_out)]
    assert sorted(parts[0] + parts[1]) == list(range(20))
    assert held_out.sequences == max(round(20 * share), 1)
    assert trained.digest != split(Numbers(), share, seed=4)[0].digest
    with pytest.raises(ConfigError, match="has only one"):
        split(SequenceSubset(Numbers(), [0]), share, 0)


def test_a_split_is_evaluated_too(job: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    given = {name: value for name, value in job.items() if not name.startswith("--eval")}
    assert run(given | {"--eval-split": 0.1}) == 0
    assert len(evaluations(tmp_path / "out-a")) == 1
    assert "191 to train on, 21 held out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"--eval-steps": 3}, "--eval-steps does nothing without --eval-data or --eval-split"),
        ({"--eval-split": 0.1, "--eval-data": "x"}, "not allowed with argument"),
        ({"--eval-data": "missing.txt"}, "missing.txt: no such file or directory"),
        ({"--eval-split": 1}, "must be between 1e-06 and 0.9"),
    ],
)
def test_what_cannot_be_evaluated_is_said(options: dict[str, Any], says: str, job: dict[str, Any], capsys: Any) -> None:
    given = {name: value for name, value in job.items() if not name.startswith("--eval")}
    assert run(given | options) == 2
    assert says in capsys.readouterr().err
