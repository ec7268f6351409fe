"""The command line does the job on real input, and says what is wrong with bad input."""

from __future__ import annotations

import csv
import importlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import infinity
from infinity.base.timeline import CAUSES
from infinity.cli import training
from infinity.cli.main import main
from infinity.cli.optimizers import make_optimizer
from infinity.cli.run_report import make_report, processors_alone
from infinity.cli.trainers import FinetuneSFTTrainer
from infinity.io.directory import SwapDirectory
from tests import processes
from tests.models import VOCABULARY, bert, llama
from tests.processes import Forked

TEXT = "the quick brown fox jumps over the lazy dog and runs away from the slow red hen\n" * 200


def tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.Whitespace()
    bpe.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<eos>", "<unk>"]))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", unk_token="<unk>")


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    """Arguments of a small run; tests change them."""
    llama(2)[0].bfloat16().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    config = {
        "weights": "nvme",
        "optimizer": "nvme",
        "memory": {"device": "8MiB", "host": "64MiB"},
        "nvme": {"paths": [str(tmp_path / "swap")]},
        "commit_every": 0,
    }
    (tmp_path / "swap.yaml").write_text(yaml.safe_dump(config))
    return {
        "--model": tmp_path / "model",
        "--data": tmp_path / "text.txt",
        "--config": tmp_path / "swap.yaml",
        "--output": tmp_path / "out",
        "--steps": 5,
        "--sequence-length": 16,
        "--batch-size": 2,
        "--lr": 3e-3,
        "--dtype": "bf16",  # on every processor
    }


def arguments_of(job: dict[str, Any], *flags: str) -> list[str]:
    return ["finetune", *(str(part) for item in job.items() for part in item), *flags]


def run(job: dict[str, Any], *flags: str) -> int:
    return main(arguments_of(job, *flags))


def _without_trl(arguments: list[str]) -> int:
    """Call main() as in a new process, and check that it has not imported TRL."""
    slow = "trl", "transformers.trainer"
    for name in [name for name in sys.modules if name.startswith(("infinity.cli", *slow))]:
        del sys.modules[name]
    code: int = importlib.import_module("infinity.cli.main").main(arguments)
    assert [name for name in sys.modules if name.startswith(slow)] == []
    return code


def test_data_that_cannot_be_used_are_refused_before_trl_is_imported_and_the_model_is_made(
    job: dict[str, Any], tmp_path: Path
) -> None:
    template = "{% for each in messages %}{{ each.role + each.content }}{% endfor %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    (tmp_path / "model" / "model.safetensors").unlink()
    talk = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "a hen"}]
    job["--data"] = tmp_path / "chats.jsonl"
    job["--data"].write_text(json.dumps({"messages": talk}) + "\n")
    ended = processes.run(_without_trl, arguments_of(job))
    assert ended.returncode == 2, ended.stderr
    assert "the model's chat template does not say which tokens are the assistant's" in ended.stderr


def test_a_store_with_a_run_is_refused_before_transformers_reads_the_tokenizer(
    job: dict[str, Any], tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "model")
    swap = tmp_path / "swap"
    swap.mkdir()
    (swap / "generation-000000000002.infinity").touch()
    ended = processes.run(_without_trl, arguments_of(job))
    assert ended.returncode == 2, ended.stderr
    assert f"error: {swap} contains the generations of an earlier run\n" in ended.stderr
    assert "  to resume it: " in ended.stderr


def test_a_store_that_another_run_uses_is_refused_before_transformers_reads_the_tokenizer(
    job: dict[str, Any], tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "model")
    held = SwapDirectory(tmp_path / "swap")
    try:
        ended = processes.run(_without_trl, arguments_of(job))
    finally:
        held.close()
    assert ended.returncode == 2, ended.stderr
    assert f"the swap directory {tmp_path / 'swap'} is in use by a run (process {os.getpid()})" in ended.stderr


@pytest.mark.usefixtures("picture")
def test_the_main_job_ends_with_a_model_a_report_and_a_curve(job: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    job["--steps"] = 8
    assert run(job, "--verify-output") == 0
    out = capsys.readouterr().out
    assert re.match(
        r"loading libraries, which may take a minute\n(.*\n)+libraries loaded.*\nmodel loaded.*\n(.*\n)*step 1/8", out
    )
    assert "step 8/8" in out
    assert "GB/s" in out
    assert "bit for bit" in out
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["steps"] == 8
    assert report["last_loss"] < report["first_loss"]
    assert f"loss {report['first_loss']:.4f} → {report['last_loss']:.4f}" in out
    assert 20 < report["bytes_per_parameter"] < 30
    assert report["peak_rss_bytes"] > 0
    assert (tmp_path / "out" / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert len((tmp_path / "out" / "loss.csv").read_text().splitlines()) == 9
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("the fox")["input_ids"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    assert set(os.listdir(tmp_path)) == {"model", "text.txt", "swap.yaml", "out"}


def test_the_report_says_where_a_step_went(job: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    config = yaml.safe_load(job["--config"].read_text()) | {"commit_every": 1}
    job["--config"].write_text(yaml.safe_dump(config))
    assert run(job) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    stalls = report["stall_s"]
    assert set(stalls) == set(CAUSES)
    assert stalls["commit"] > 0
    assert stalls["step"] > 0
    assert report["compute_s"] + sum(stalls.values()) == pytest.approx(report["step_s"])
    bound = max(report["io_bound_s"], report["compute_bound_s"])
    assert report["efficiency"] == pytest.approx(bound / report["step_s"])
    assert 0 < report["efficiency"] <= 1
    rows = (tmp_path / "out" / "report.txt").read_text()
    for label in ("waiting: weights", "waiting: room", "landing gradients", "optimizer step", "commit"):
        assert f"  {label} " in rows


@pytest.mark.parametrize("passes", [1, 4])
def test_what_is_moved_is_what_was_planned_for_as_many_passes(passes: int, job: dict[str, Any], tmp_path: Path) -> None:
    config = yaml.safe_load(job["--config"].read_text())
    config |= {"weights": "host", "gradients": "nvme", "overlap": "off"}
    job["--config"].write_text(yaml.safe_dump(config))
    assert run(job | {"--steps": 3, "--gradient-accumulation": passes}) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    moved, planned = report["bytes_per_parameter"], report["planned_bytes_per_parameter"]
    assert 0.95 * planned < moved <= planned  # what is still in the window when the next pass adds to it is not read
    assert passes > 1 or moved == planned


def test_a_run_of_one_step_reports_its_whole_update(job: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    models, reported = [], []

    def counted(model: Any) -> Any:
        models.append(model)
        return infinity.statistics(model)

    def make(facts: Any, done: int, before: Any, after: Any, **options: Any) -> Any:
        infinity.synchronize(models[-1])
        reported.append((after, infinity.statistics(models[-1])))
        return make_report(facts, done, before, after, **options)

    monkeypatch.setattr(training, "statistics", counted)
    monkeypatch.setattr(training, "make_report", make)
    assert run(job | {"--steps": 1}) == 0
    (after, at_the_end), *others = reported
    assert others == []
    assert after.read_bytes == at_the_end.read_bytes
    assert after.written_bytes == at_the_end.written_bytes
    assert after.adam_s == at_the_end.adam_s


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_of_one_step_reports_that_step(steps: int, job: dict[str, Any], tmp_path: Path) -> None:
    assert run(job | {"--steps": steps}) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["bytes_per_parameter"] > (20 if steps == 1 else 0)  # of two, the last update is not waited for
    assert report["io_bound_s"] > 0
    assert report["adam_s"] > 0
    assert report["stall_s"]["step"] > 0
    assert report["compute_s"] + sum(report["stall_s"].values()) == pytest.approx(report["step_s"])
    said = "with its warm-up" in (tmp_path / "out" / "report.txt").read_text()
    assert said == (report["first_measured_step"] == 1) == (steps == 1)


def test_compute_beside_adam_is_bound_by_the_longer_one_and_on_the_same_cores_by_both() -> None:
    assert processors_alone(10.0, 5.0, 3.0, device="cpu") == 8.0
    assert processors_alone(10.0, 9.0, 3.0, device="cpu") == 10.0
    assert processors_alone(10.0, 9.0, 3.0, device="cuda") == 9.0


def traced_steps(path: Path) -> list[str]:
    events = json.loads(path.read_text())["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "step"]


def test_a_trace_of_the_run_is_written(job: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    job["--steps"] = 8
    assert run(job | {"--trace": tmp_path / "trace.json"}) == 0
    assert traced_steps(tmp_path / "trace.json") == [f"step {step}" for step in range(2, 7)]
    assert "ui.perfetto.dev" in capsys.readouterr().out
    assert run(job | {"--trace": tmp_path / "trace.json", "--trace-steps": "3:3", "--output": tmp_path / "more"}) == 0
    assert traced_steps(tmp_path / "trace.json") == ["step 3"]
    again, first = ((tmp_path / name / "loss.csv").read_text().splitlines() for name in ("more", "out"))
    assert [row.split(",")[:4] for row in again] == [row.split(",")[:4] for row in first]


def test_a_run_shorter_than_its_trace_leaves_what_it_did(job: dict[str, Any], tmp_path: Path) -> None:
    assert run(job | {"--steps": 1, "--trace": tmp_path / "trace.json"}) == 0
    assert traced_steps(tmp_path / "trace.json") == ["step 1"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"--trace": "nowhere/trace.json"}, "cannot write a trace to"),
        ({"--trace": "out/trace.json"}, "write it elsewhere"),
        ({"--trace-steps": "2:3"}, "--trace-steps does nothing without --trace"),
        ({"--trace": "trace.json", "--trace-steps": "9:12"}, "this run does steps 1 to 5"),
    ],
)
def test_a_trace_that_cannot_be_made_is_refused_before_training(
    options: dict[str, str], message: str, job: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "out").mkdir()
    paths = {key: tmp_path / value if key == "--trace" else value for key, value in options.items()}
    assert run(job | paths) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "step 1/8" not in captured.out
    assert not (tmp_path / "swap").exists()


def test_steps_to_trace_are_traced_into_a_file_outside_the_output(
    job: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    some = job | {"--steps": 2, "--trace-steps": "2:2"}
    assert run(some) == 2
    assert "--trace-steps does nothing without --trace" in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    assert run(some | {"--trace": tmp_path / "out" / "trace.json"}) == 2
    assert "--output must be empty when the run ends; write it elsewhere" in capsys.readouterr().err
    assert run(some | {"--trace": tmp_path / "trace.json"}) == 0
    assert traced_steps(tmp_path / "trace.json") == ["step 2"]


@pytest.mark.parametrize("steps", ["3", "0:2", "3:2", "a:b", ":", "1:-1"])
def test_steps_to_trace_that_make_no_sense_are_refused(steps: str, job: dict[str, Any], capsys: Any) -> None:
    assert run(job | {"--trace": "trace.json", "--trace-steps": steps}) == 2
    assert "is not A:B" in capsys.readouterr().err


def test_gradient_accumulation_schedules_and_epochs_run(job: dict[str, Any], tmp_path: Path) -> None:
    del job["--steps"]
    (tmp_path / "text.txt").write_text(TEXT[:1500])
    options = ["--gradient-accumulation", "2", "--schedule", "linear", "--warmup-steps", "2", "--max-grad-norm", "0"]
    assert run(job, *options) == 0


def test_the_rate_falls_to_the_one_that_is_given_and_moments_have_what_is_given(
    job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job["--steps"] = 8
    made: dict[str, Any] = {}

    def noted(name: str, params: Any, **options: Any) -> Any:
        made.update(options)
        return make_optimizer(name, params, **options)

    monkeypatch.setattr(training, "make_optimizer", noted)
    assert run(job, "--min-lr", "1e-3", "--beta2", "0.95", "--eps", "1e-6") == 0
    assert made["betas"] == (0.9, 0.95)
    assert made["eps"] == 1e-6
    with (tmp_path / "out" / "loss.csv").open() as file:
        rates = [float(row["learning_rate"]) for row in csv.DictReader(file)]
    assert rates == pytest.approx([1e-3 + 2e-3 * 0.5 * (1 + math.cos(math.pi * step / 8)) for step in range(8)])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--optimizer", "sgd", "--beta1", "0.8"],
            "--beta1 does nothing with --optimizer sgd; adamw, adam, lion have it",
        ),
        (["--optimizer", "lion", "--eps", "1e-6"], "--eps does nothing with --optimizer lion"),
        (["--min-lr", "1"], "--min-lr is 1, but the rate falls from --lr 0.003"),
        (["--epochs", "2"], "not allowed with argument"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(
    options: list[str], says: str, job: dict[str, Any], capsys: Any
) -> None:
    assert run(job, *options) == 2
    assert says in capsys.readouterr().err


def test_a_rate_that_would_rise_is_refused_and_one_that_stays_or_falls_is_not(
    job: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    assert run(job | {"--steps": 1}, "--min-lr", "0.004") == 2
    assert "--min-lr is 0.004, but the rate falls from --lr 0.003" in capsys.readouterr().err
    assert run(job | {"--steps": 1}, "--min-lr", "0.003") == 0
    assert run(job | {"--steps": 1, "--lr": 0.005, "--output": tmp_path / "more"}, "--min-lr", "0.004") == 0


@pytest.mark.parametrize("options", [("--beta1", "0.8"), ("--eps", "1e-6")])
def test_an_option_that_does_nothing_does_something_with_the_optimizers_that_are_named(
    options: tuple[str, str], job: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    assert run(job, "--optimizer", "sgd", *options) == 2
    named = re.search("does nothing with --optimizer sgd; (.*) have it", capsys.readouterr().err)
    assert named is not None
    for name in named[1].split(", "):
        assert run(job | {"--steps": 1, "--output": tmp_path / name}, "--optimizer", name, *options) == 0


def test_epochs_are_passes_over_the_data(job: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    del job["--steps"]
    (tmp_path / "text.txt").write_text(TEXT[:500])
    assert run(job, "--epochs", "1") == 0
    one = len((tmp_path / "out" / "loss.csv").read_text().splitlines()) - 1
    assert run(job | {"--output": tmp_path / "more"}, "--epochs", "3") == 0
    assert len((tmp_path / "more" / "loss.csv").read_text().splitlines()) - 1 in (3 * one, 3 * one + 1, 3 * one + 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--data": "nowhere.txt"}, "no such file or directory"),
        ({"--data": "empty.txt"}, "the file is empty"),
        ({"--data": "short.txt"}, "less than one sequence"),
        ({"--data": "bad.jsonl"}, "bad.jsonl:2: a row needs a 'text' string, a list of 'messages'"),
        ({"--data": "broken.jsonl"}, "broken.jsonl:1: not valid JSON"),
        ({"--data": "chat.jsonl"}, "no chat template"),
        ({"--data": "binary.txt"}, "not UTF-8 text"),
        ({"--data": "emptydir"}, "the directory has no files"),
        ({"--model": "nomodel"}, "there is no directory"),
        ({"--model": "bert"}, "not a causal language model"),
        ({"--config": "no.yaml"}, "cannot read the swap config"),
        ({"--config": "typo.yaml"}, "unknown key 'optimzer'; did you mean 'optimizer'?"),
        ({"--output": "model"}, "exists and is not an empty directory"),
        ({"--output": "text.txt/out"}, "cannot write to"),
        ({"--lr": 0}, "--lr: must be positive"),
        ({"--batch-size": 0}, "--batch-size: must be at least 1"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    change: dict[str, Any], message: str, job: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("the fox")
    (tmp_path / "bad.jsonl").write_text('{"text": "the fox"}\n{"txt": "the hen"}\n')
    (tmp_path / "broken.jsonl").write_text("{text\n")
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "fox"}]}\n')
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00\x01" * 100)
    (tmp_path / "emptydir").mkdir()
    (tmp_path / "typo.yaml").write_text("optimzer: nvme\n")
    bert()[0].save_pretrained(tmp_path / "bert")
    tokenizer().save_pretrained(tmp_path / "bert")
    before = set(os.listdir(tmp_path))
    values = {key: value if key in ("--lr", "--batch-size") else tmp_path / value for key, value in change.items()}
    assert run(job | values) == 2
    error = capsys.readouterr().err
    assert error.count("error: ") == 1
    assert message in error
    assert set(os.listdir(tmp_path)) == before


def test_nan_loss_ends_the_run_with_nothing_written(job: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path / "model")
    assert run(job) == 1
    captured = capsys.readouterr()
    assert "step 1: the loss is nan; the step is skipped" in captured.out
    assert "5 steps in a row" in captured.err
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "swap").exists()


def changing(monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor], at: set[int]) -> None:
    """Change the loss of the passes `at`, counted from 1."""
    compute, passes = FinetuneSFTTrainer.compute_loss, itertools.count(1)

    def compute_loss(*arguments: Any, **options: Any) -> Any:
        loss = compute(*arguments, **options)
        return change(loss) if next(passes) in at else loss

    monkeypatch.setattr(FinetuneSFTTrainer, "compute_loss", compute_loss)


def losing(monkeypatch: pytest.MonkeyPatch, at: set[int], value: float = float("nan")) -> None:
    """Losses that are not finite, with gradients that are."""
    changing(monkeypatch, lambda loss: loss + value, at)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_skips_its_step_whatever_the_gradients_are(
    value: float, job: dict[str, Any], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that decay would show a step that was taken."""
    losing(monkeypatch, {1, 2, 3}, value)
    assert run(job | {"--steps": 3, "--weight-decay": 0.5}) == 0
    out = capsys.readouterr().out
    assert out.count("; the step is skipped and the weights do not change") == 3
    assert "  skipped  lr " in out
    before, after = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("model", "out"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    text = (tmp_path / "out" / "report.json").read_text()
    report = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    assert (report["skipped_steps"], report["first_loss"], report["last_loss"]) == (3, None, None)


def test_a_loss_that_is_not_finite_now_and_then_is_left_out_of_the_means(
    job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job["--steps"] = 8
    losing(monkeypatch, {1, 5})
    assert run(job) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["skipped_steps"] == 2
    assert report["last_steps"] == 5
    assert report["last_loss"] < report["first_loss"]


def test_five_losses_that_are_not_finite_end_the_run(
    job: dict[str, Any], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    losing(monkeypatch, set(range(1, 9)))
    assert run(job) == 1
    assert "the loss is nan; 5 steps in a row were skipped" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_gradients_that_are_not_finite_are_said(
    job: dict[str, Any], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflow(loss: torch.Tensor) -> torch.Tensor:
        loss.register_hook(lambda gradient: gradient * float("inf"))
        return loss

    changing(monkeypatch, overflow, {2})
    assert run(job) == 0
    out = capsys.readouterr().out
    assert "step 2: a gradient is not finite; the step is skipped and the weights do not change" in out
    assert out.count("skipped and the weights") == 1


def test_a_warmup_as_long_as_the_run_is_said(job: dict[str, Any], capsys: Any) -> None:
    job["--steps"] = 8
    said = "the learning rate never reaches --lr"
    assert run(job | {"--warmup-steps": 7}) == 0
    assert said not in capsys.readouterr().out
    assert run(job | {"--warmup-steps": 8, "--output": job["--output"].with_name("other")}) == 0
    assert f"--warmup-steps 8 are as many as the 8 steps of the run, or more: {said}" in capsys.readouterr().out


def test_ctrl_c_ends_at_a_step_and_saves(job: dict[str, Any], tmp_path: Path) -> None:
    more = {"--steps": 100_000, "--trace": tmp_path / "trace.json", "--trace-steps": "1:90000"}
    process = Forked(main, arguments_of(job | more))
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step "):
            break
    process.send_signal(signal.SIGINT)
    rest, _ = process.finished()
    assert process.returncode == 130, "".join(lines) + rest
    assert "stopping after this step" in rest
    assert "trace of the steps until" in rest
    steps = json.loads((tmp_path / "out" / "report.json").read_text())["steps"]
    assert 1 <= steps < 100_000
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not (tmp_path / "swap").exists()


def test_a_second_ctrl_c_is_one_line(job: dict[str, Any], tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("infinity.cli.step_watch.StepCallback._finish", interrupted)
    assert run(job) == 130
    assert capsys.readouterr().err.strip().splitlines()[-1] == "interrupted"
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "swap").exists()


def test_a_run_that_nobody_reads_any_more_goes_on_to_its_end(job: dict[str, Any], tmp_path: Path) -> None:
    job["--steps"] = 8
    process = Forked(main, arguments_of(job), apart=True)
    process.stdout.close()
    _, errors = process.finished()
    assert process.returncode == 0, errors
    assert errors.count("the work continues without it") == 1
    assert json.loads((tmp_path / "out" / "report.json").read_text())["steps"] == 8


def require_plain(out: str, errors: str) -> None:
    assert "step 5/5" in out
    for said in (out, errors):
        assert "\r" not in said
        assert "\x1b" not in said


@pytest.mark.long
def test_lines_that_are_piped_are_plain(job: dict[str, Any], tmp_path: Path) -> None:
    """The command is a process as a shell starts it, with its own imports and streams."""
    command = [sys.executable, "-m", "infinity.cli.main", *arguments_of(job, "--verify-output")]
    environment = os.environ | {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"}
    done = subprocess.run(command, capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr
    require_plain(done.stdout.decode(), done.stderr.decode())


def test_lines_that_a_forked_process_pipes_are_plain(job: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    done = processes.run(main, arguments_of(job, "--verify-output"))
    assert done.returncode == 0, done.stderr
    require_plain(done.stdout, done.stderr)


@pytest.mark.covering(most=2)
@pytest.mark.parametrize("optimizer", ["adam", "lion", "adagrad", "sgd"])
def test_every_optimizer_can_be_chosen(optimizer: str, job: dict[str, Any]) -> None:
    lr = {"lion": 1e-3, "sgd": 1e-2}.get(optimizer, 3e-3)
    assert run(job | {"--optimizer": optimizer, "--lr": lr}) == 0
    report = json.loads((job["--output"] / "report.json").read_text())
    assert report["last_loss"] < report["first_loss"]


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_compressed_moments_train_too(moments: str, job: dict[str, Any]) -> None:
    config = yaml.safe_load(job["--config"].read_text()) | {"moments": moments}
    job["--config"].write_text(yaml.safe_dump(config))
    assert run(job, "--verify-output") == 0
