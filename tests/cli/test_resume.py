"""`infinity finetune --resume` goes on to the bits of a run that never stopped; `infinity checkpoint` says what there
is."""

from __future__ import annotations

import csv
import math
import os
import shlex
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import infinity
from infinity.cli.main import main
from infinity.cli.step_watch import StepCallback
from infinity.cli.suggested_command import command
from infinity.cli.trainers import FinetuneSFTTrainer
from infinity.io.directory import HEADER_NAME, SWAP_NAME, generations_in
from tests.cli.test_finetune import TEXT, arguments_of, run, tokenizer
from tests.io.test_headers import build, config, trained
from tests.models import llama
from tests.processes import Forked


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    """A small run with generations, dropout in the model and a schedule."""
    model = llama(2, attention_dropout=0.1)[0].bfloat16()
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    return _job(tmp_path, "a")


def _job(tmp_path: Path, name: str, **overrides: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "weights": "nvme",
        "optimizer": "nvme",
        "memory": {"device": "8MiB", "host": "64MiB"},
        "nvme": {"paths": [str(tmp_path / f"swap-{name}")]},
        "commit_every": 1,
    }
    (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(config | overrides))
    return {
        "--model": tmp_path / "model",
        "--data": tmp_path / "text.txt",
        "--config": tmp_path / f"{name}.yaml",
        "--output": tmp_path / f"out-{name}",
        "--steps": 8,
        "--sequence-length": 16,
        "--batch-size": 2,
        "--lr": 3e-3,
        "--warmup-steps": 2,
        "--dtype": "bf16",  # on every processor
    }


class _Signalling:
    """A stream that sends this process a signal after the first line about a step that says `at`."""

    def __init__(self, stream: Any, number: int, at: str) -> None:
        self._stream, self._number, self._at = stream, number, at
        self.text = ""
        self._sent = False

    def write(self, text: str) -> int:
        self.text += text
        written: int = self._stream.write(text)
        line = self.text.rstrip("\n").rpartition("\n")[2]
        if not self._sent and self._at and text.endswith("\n") and line.startswith("step ") and self._at in line:
            self._sent = True
            self._stream.flush()
            os.kill(os.getpid(), self._number)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _signalled(arguments: list[str], number: int, at: str) -> tuple[int, str]:
    """Exit code and what was printed."""
    made = StepCallback._finish

    def step(self: Any, step: int) -> None:
        made(self, step)
        if step == _STOPPED_AFTER and not at:
            os.kill(os.getpid(), number)

    stream: Any = _Signalling(sys.stdout, number, at)
    with redirect_stdout(stream), pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepCallback, "_finish", step)
        code = main(arguments)
    return code, stream.text


def _ended(arguments: list[str], number: int, at: str) -> int:
    return _signalled(arguments, number, at)[0]


_STOPPED_AFTER = 4


def _stop_after(job: dict[str, Any], number: int, *flags: str, at: str = "") -> subprocess.CompletedProcess[str]:
    """Send the job a signal after its fourth step, or after a line about a step that says `at`. For SIGKILL the job
    runs in a process of its own."""
    arguments = arguments_of(job, *flags)
    if number == signal.SIGKILL:
        process = Forked(_ended, arguments, number, at)
        said, _ = process.finished()
        return subprocess.CompletedProcess(arguments, process.returncode or 0, said)
    return subprocess.CompletedProcess(arguments, *_signalled(arguments, number, at))


def _losses(output: Path) -> list[str]:
    with (output / "loss.csv").open() as file:
        return [row["loss"] for row in csv.DictReader(file)]


def _same(one: Path, other: Path) -> bool:
    mine, others = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return mine.keys() == others.keys() and all(torch.equal(mine[name], others[name]) for name in mine)


@pytest.mark.covering(strength=1, most=2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_run_ends_in_the_bits_of_one_that_was_not(number: int, job: dict[str, Any], tmp_path: Path) -> None:
    assert run(job) == 0
    other = _job(tmp_path, "b")
    stopped = _stop_after(other, number)
    assert stopped.returncode == (-9 if number == signal.SIGKILL else 128 + number), stopped.stdout
    if number != signal.SIGKILL:
        assert f"infinity finetune --resume {tmp_path / 'swap-b'}" in stopped.stdout
    assert not (tmp_path / "out-b").exists()
    assert main(["finetune", "--resume", str(tmp_path / "swap-b")]) == 0
    assert _losses(tmp_path / "out-b") == _losses(tmp_path / "out-a")
    assert _same(tmp_path / "out-a", tmp_path / "out-b")
    left = {name for name in os.listdir(tmp_path) if name.startswith(".")}
    assert not left, "nothing is left beside the output"


def test_a_run_that_fails_within_a_step_goes_on_after_the_step_before(
    job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though generations are written every fifth step only."""
    assert run(job) == 0
    other, compute = _job(tmp_path, "b", commit_every=5), FinetuneSFTTrainer.compute_loss

    def interrupted(self: FinetuneSFTTrainer, *given: Any, **named: Any) -> torch.Tensor:
        if self.state.global_step == 3:
            raise KeyboardInterrupt
        return compute(self, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(FinetuneSFTTrainer, "compute_loss", interrupted)
        assert run(other) == 130
    assert list(generations_in(tmp_path / "swap-b")) == [3]
    assert main(["finetune", "--resume", str(tmp_path / "swap-b")]) == 0
    assert _losses(tmp_path / "out-b") == _losses(tmp_path / "out-a")
    assert _same(tmp_path / "out-a", tmp_path / "out-b")


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_an_fp16_run_goes_on_with_its_loss_scale(number: int, job: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    """Its first steps overflow, so the scale it has is not the one it would begin with."""
    llama(2, initializer_range=0.3)[0].half().save_pretrained(tmp_path / "model")
    fp16 = {"--dtype": "fp16", "--steps": 12}
    assert run(job | fp16) == 0
    out = capsys.readouterr().out
    assert "fp16 weights: the loss is scaled" in out
    assert "step 1: skipped, a gradient overflowed; the loss scale is 32768 now" in out
    assert len(set(_losses(tmp_path / "out-a"))) > 6, "most steps are taken"
    falls = 0.5 * (1 + math.cos(math.pi * (11 - 2) / (12 - 2)))
    with (tmp_path / "out-a" / "loss.csv").open() as file:
        *_, last = csv.DictReader(file)
    assert float(last["learning_rate"]) == pytest.approx(3e-3 * falls), "the schedule counts skipped steps, too"
    stopped = _stop_after(_job(tmp_path, "b") | fp16, number)
    assert stopped.returncode == (-9 if number == signal.SIGKILL else 130), stopped.stdout
    assert main(["finetune", "--resume", str(tmp_path / "swap-b")]) == 0
    assert _losses(tmp_path / "out-b") == _losses(tmp_path / "out-a")
    assert _same(tmp_path / "out-a", tmp_path / "out-b")


def test_resume_finds_the_run_through_the_config_and_begins_anew_where_there_is_none(
    job: dict[str, Any], capsys: Any
) -> None:
    assert run(job | {"--steps": 2}, "--resume", "--keep-store") == 0
    assert "the run begins at step 0" in capsys.readouterr().out
    job["--output"] = job["--output"].with_name("again")
    assert run(job | {"--steps": 2}, "--resume") == 0
    assert "resumed after step 2 of 2" in capsys.readouterr().out


def test_an_option_that_would_change_the_run_is_named(job: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    assert run(job | {"--steps": 2}, "--keep-store") == 0
    assert main(["finetune", "--resume", str(tmp_path / "swap-a"), "--lr", "0.5"]) == 2
    assert "--lr is 0.5, but the resumed run has 0.003" in capsys.readouterr().err
    (tmp_path / "text.txt").write_text(TEXT + "one more line\n")
    assert main(["finetune", "--resume", str(tmp_path / "swap-a"), "--output", str(tmp_path / "new")]) == 2
    assert "give the same --data" in capsys.readouterr().err
    (tmp_path / "same.txt").write_text(TEXT)
    same = ["--data", str(tmp_path / "same.txt"), "--output", str(tmp_path / "new")]
    assert main(["finetune", "--resume", str(tmp_path / "swap-a"), *same]) == 0


def test_a_new_run_does_not_replace_generations(job: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    assert run(job | {"--steps": 2}, "--keep-store") == 0
    before = sorted(os.listdir(tmp_path / "swap-a"))
    assert run(job | {"--output": tmp_path / "new"}) == 2
    first, *ways = capsys.readouterr().err.splitlines()[-4:]
    assert first.endswith("contains the generations of an earlier run")
    assert [way.split(":")[0] for way in ways[:2]] == ["  to resume it", "  to remove it"]
    assert "infinity checkpoint remove" in ways[1]
    assert ways[2] == "  or name another directory in nvme.paths"
    assert sorted(os.listdir(tmp_path / "swap-a")) == before
    assert main(["checkpoint", "remove", str(tmp_path / "swap-a")]) == 0
    assert run(job | {"--output": tmp_path / "new", "--steps": 2}) == 0


def test_nothing_to_resume_says_why(job: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    assert main(["finetune", "--resume", str(tmp_path / "nowhere")]) == 2
    assert "nothing to resume" in capsys.readouterr().err
    assert main(["finetune", "--from-checkpoint", str(tmp_path)]) == 2
    assert "not a portable copy" in capsys.readouterr().err
    assert main(["finetune"]) == 2
    assert "required: --model, --data, --config, --output" in capsys.readouterr().err


def test_where_a_run_goes_on_is_said_and_each_way_on_is_one(job: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    swap, copy = str(tmp_path / "swap-a"), str(tmp_path / "copy")
    assert run(job | {"--steps": 2}, "--keep-store") == 0
    other = _job(tmp_path, "b")
    elsewhere = ["--config", str(other["--config"])]
    more = ["--steps", "3", "--output"]
    assert main(["finetune", "--resume", swap, *elsewhere]) == 2
    refused = capsys.readouterr().err
    assert f"is not the first of nvme.paths in --config ({tmp_path}/swap-b): " in refused
    assert main(["finetune", "--from-checkpoint", swap, *elsewhere]) == 2
    assert "make a copy with `infinity checkpoint export`" in capsys.readouterr().err
    export = shlex.split(refused.partition("export it with `")[2].partition("`")[0])
    assert main([*export[1:], swap, "--output", copy]) == 0
    (tmp_path / "out-a" / "report.json").rename(tmp_path / "out-a" / "mine.json")
    assert main(["finetune", "--resume", swap, "--steps", "3"]) == 2
    assert "(it is the output of the resumed run; --output DIR)" in capsys.readouterr().err
    assert main(["finetune", "--resume", copy, *more, str(tmp_path / "c")]) == 2
    assert "resume from it with --from-checkpoint" in capsys.readouterr().err
    there = _job(tmp_path, "there", nvme={"paths": [copy]})
    assert run(there, "--resume") == 2, "what the copy has is not left for a new beginning"
    assert "resume from it with --from-checkpoint" in capsys.readouterr().err
    assert main(["finetune", "--from-checkpoint", copy, *elsewhere, *more, str(tmp_path / "c")]) == 0
    assert main(["finetune", "--resume", *more, str(tmp_path / "d")]) == 2
    assert "--resume DIR, or --config with nvme.paths" in capsys.readouterr().err
    assert main(["finetune", "--resume", "--config", str(job["--config"]), *more, str(tmp_path / "d")]) == 0
    assert main(["finetune", "--resume", swap, "--steps", "4", "--output", str(tmp_path / "e")]) == 0
    assert _same(tmp_path / "c", tmp_path / "d")


def test_a_run_of_another_program_is_resumed_by_that(tmp_path: Path, capsys: Any) -> None:
    trained(config(tmp_path / "swap"))
    assert main(["finetune", "--resume", str(tmp_path / "swap")]) == 2
    assert (
        "that `infinity finetune` did not make; resume the run with the program that made it" in capsys.readouterr().err
    )
    infinity.close(infinity.resume(build(), config(tmp_path / "swap")))


def test_a_run_moves_to_other_disks_and_forms_as_a_portable_copy(
    job: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    """Exported after a stop, continued elsewhere, with the states in RAM: the bits of the run that never stopped."""
    assert run(job) == 0
    other = _job(tmp_path, "b")
    stopped = _stop_after(other, signal.SIGINT)
    assert stopped.returncode == 130, stopped.stdout
    copy = tmp_path / "copy"
    assert main(["checkpoint", "export", str(tmp_path / "swap-b"), "--output", str(copy)]) == 0
    assert "exported to" in capsys.readouterr().out
    third = _job(tmp_path, "c", weights="host", optimizer="host")
    given = {"--from-checkpoint": copy, "--config": third["--config"], "--output": third["--output"]}
    assert run(given) == 0
    assert "resumed after step" in capsys.readouterr().out
    assert _losses(tmp_path / "out-c") == _losses(tmp_path / "out-a")
    assert _same(tmp_path / "out-a", tmp_path / "out-c")
    converted = _job(tmp_path, "d", moments="int8")
    given = {"--from-checkpoint": copy, "--config": converted["--config"], "--output": converted["--output"]}
    assert run(given) == 0
    assert len(_losses(tmp_path / "out-d")) == 8


def test_list_and_verify_name_what_is_there_and_what_is_damaged(
    job: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    config = yaml.safe_load(job["--config"].read_text()) | {"keep": 2}
    job["--config"].write_text(yaml.safe_dump(config))
    assert run(job | {"--steps": 3}, "--keep-store") == 0
    swap = tmp_path / "swap-a"
    capsys.readouterr()
    assert main(["checkpoint", "list", str(swap)]) == 0
    listed = capsys.readouterr().out
    assert [int(line.split()[1]) for line in listed.splitlines() if line.startswith("generation")] == [3, 2]
    assert main(["checkpoint", "verify", str(swap)]) == 0
    assert capsys.readouterr().out.count("every byte is as it was written") == 2
    newest = next(iter(generations_in(swap)))
    from infinity.io.manifest import read_manifest

    record = next(e for e in read_manifest(generations_in(swap)[newest]).extents if e.state == "exp_avg")
    with (swap / SWAP_NAME).open("r+b") as file:
        file.seek(record.offset + 5000)
        byte = file.read(1)
        file.seek(record.offset + 5000)
        file.write(bytes([byte[0] ^ 1]))
    assert main(["checkpoint", "verify", str(swap)]) == 1
    out = capsys.readouterr().out
    assert f"damaged: exp_avg of unit '{record.unit}' (group {record.group}), generation 3: {swap / SWAP_NAME}" in out
    assert "generation 2: " in out
    path = generations_in(swap)[2]
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["checkpoint", "list", str(swap)]) == 1
    assert "damaged" in capsys.readouterr().out


def test_a_finished_run_goes_on_with_more_steps(job: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    """With a schedule that does not end, to the bits of a run that had as many from the start."""
    constant = {"--schedule": "constant"}
    assert run(_job(tmp_path, "b") | constant) == 0
    assert run(job | constant | {"--steps": 5}, "--keep-store") == 0
    resumed = ["finetune", "--resume", str(tmp_path / "swap-a")]
    assert main([*resumed, "--steps", "4", "--output", str(tmp_path / "less")]) == 2
    assert "--steps is 4, but the resumed run has done 5 steps" in capsys.readouterr().err
    assert main([*resumed, "--steps", "8"]) == 2
    assert "out-a: exists and is not an empty directory" in capsys.readouterr().err
    assert main([*resumed, "--steps", "8", "--output", str(tmp_path / "more")]) == 0
    assert "begun for 5 steps and now ends after 8" in capsys.readouterr().out
    assert _losses(tmp_path / "more") == _losses(tmp_path / "out-b")
    assert _same(tmp_path / "more", tmp_path / "out-b")
    assert main([*resumed, "--output", str(tmp_path / "again")]) == 0
    assert "the run has done all of its 8 steps" in capsys.readouterr().out
    assert _same(tmp_path / "more", tmp_path / "again")


def test_the_learning_rates_of_a_run_with_more_steps_are_those_of_its_new_end(
    job: dict[str, Any], tmp_path: Path
) -> None:
    assert run(_job(tmp_path, "b")) == 0
    assert run(job | {"--steps": 5}, "--keep-store") == 0
    longer = ["--resume", str(tmp_path / "swap-a"), "--steps", "8", "--output", str(tmp_path / "more")]
    assert main(["finetune", *longer]) == 0
    rates = [
        [row["learning_rate"] for row in csv.DictReader((tmp_path / name / "loss.csv").open())]
        for name in ("more", "out-b")
    ]
    assert rates[0][5:] == rates[1][5:]
    assert rates[0][:5] != rates[1][:5]


def test_the_hint_to_resume_names_a_program_that_can_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "my venv" / "infinity"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.argv", [str(program)])
    assert command("finetune", "--resume", "a b") == f"'{program}' finetune --resume 'a b'"
    monkeypatch.setenv("PATH", str(program.parent))
    assert command("finetune") == "infinity finetune"
    monkeypatch.setattr("sys.argv", [f"{tmp_path}/infinity/cli/main.py"])
    assert command("finetune").endswith(" -m infinity.cli.main finetune")


def test_a_run_whose_disk_cannot_be_told_moves_as_the_error_says(
    job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("infinity.io.store._probe", lambda *_: 1e9)  # of two disks alike the first has the first stripe
    monkeypatch.setattr("infinity.io.store.STRIPE_BYTES", 1 << 30)  # nothing is on the second
    disks = [str(tmp_path / "one"), str(tmp_path / "two")]
    few = _job(tmp_path, "a", nvme={"paths": disks}) | {"--steps": 2}
    assert run(few, "--keep-store") == 0
    (tmp_path / "two" / HEADER_NAME).unlink()
    more = ["--steps", "3", "--output", str(tmp_path / "longer")]
    assert main(["finetune", "--resume", disks[0], *more]) == 2
    assert "move the run with `infinity checkpoint export` and --from-checkpoint" in capsys.readouterr().err
    assert main(["checkpoint", "export", *disks, "--output", str(tmp_path / "copy")]) == 0
    _job(tmp_path, "b")
    moved = ["--from-checkpoint", str(tmp_path / "copy"), "--config", str(tmp_path / "b.yaml")]
    assert main(["finetune", *moved, *more]) == 0
    assert "step 3/3" in capsys.readouterr().out
