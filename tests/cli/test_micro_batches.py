"""`infinity finetune --micro-batches` ends in the bits of as many backward passes, and moves the weights of one."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from infinity.cli.main import main
from tests.cli.test_finetune import TEXT, run, tokenizer
from tests.cli.test_resume import _job, _losses, _same, _stop_after
from tests.models import llama


def prepare(tmp_path: Path, layers: int = 8, **options: Any) -> None:
    llama(layers, **options)[0].bfloat16().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)


def bytes_of(output: Path) -> tuple[float, float]:
    """Per parameter and step: moved, and planned."""
    report = json.loads((output / "report.json").read_text())
    return report["bytes_per_parameter"], report["planned_bytes_per_parameter"]


@pytest.mark.long(kept="only here the command trains its micro-batches in both orders")
def test_micro_batches_end_in_the_bits_of_as_many_passes_and_move_the_weights_once(tmp_path: Path) -> None:
    prepare(tmp_path)
    for name, options in (("a", {"--gradient-accumulation": 4}), ("b", {"--micro-batches": 4})):
        assert run(_job(tmp_path, name, overlap="off", memory=SMALL) | {"--steps": 2} | options) == 0
    assert _losses(tmp_path / "out-b") == _losses(tmp_path / "out-a")
    assert _same(tmp_path / "out-a", tmp_path / "out-b")
    (passes, planned_passes), (together, planned) = (bytes_of(tmp_path / f"out-{name}") for name in "ab")
    assert together <= planned < 30
    assert together < passes - 6
    assert planned_passes - planned == pytest.approx(12, abs=1)  # two bytes, in padded units, three times more each way


@pytest.mark.long
def test_passes_and_micro_batches_may_be_combined(tmp_path: Path) -> None:
    prepare(tmp_path, 4)
    for name, passes, together in (("a", 4, 1), ("b", 2, 2)):
        options = {"--gradient-accumulation": passes, "--micro-batches": together, "--steps": 3}
        assert run(_job(tmp_path, name) | options) == 0
    assert _losses(tmp_path / "out-b") == _losses(tmp_path / "out-a")
    assert _same(tmp_path / "out-a", tmp_path / "out-b")


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_with_dropout_and_tied_weights_goes_on_where_it_was_stopped(number: int, tmp_path: Path) -> None:
    prepare(tmp_path, 2, attention_dropout=0.1, tie_word_embeddings=True)
    assert run(_job(tmp_path, "a") | {"--micro-batches": 3, "--steps": 6}) == 0
    assert _stop_after(_job(tmp_path, "b") | {"--micro-batches": 3, "--steps": 6}, number).returncode != 0
    assert main(["finetune", "--resume", str(tmp_path / "swap-b")]) == 0
    assert _losses(tmp_path / "out-b") == _losses(tmp_path / "out-a")
    assert _same(tmp_path / "out-a", tmp_path / "out-b")


SMALL = {"device": "640KiB", "host": "64MiB"}
