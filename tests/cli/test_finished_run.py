"""A finished `infinity finetune` removes its store once the output is complete on disk, and not a moment before."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM

from infinity.cli import verifying
from infinity.cli.finished_run import finish
from infinity.cli.main import main
from infinity.cli.step_watch import StepCallback
from infinity.errors import InfinityError
from infinity.io import atomic_file
from infinity.io.directory import FINISHED_NAME, HEADER_NAME, LOCK_NAME, SWAP_NAME, generations_in
from infinity.io.manifest import read_header
from tests.cli.test_finetune import run
from tests.processes import Forked

Job = dict[str, Any]


@pytest.fixture
def short(job: Job, tmp_path: Path) -> Job:
    """Two steps, with a store on two paths and commit_every as it is by default."""
    config = yaml.safe_load(job["--config"].read_text())
    del config["commit_every"]
    config["nvme"]["paths"] = [str(tmp_path / "swap"), str(tmp_path / "swap2")]
    job["--config"].write_text(yaml.safe_dump(config))
    return job | {"--steps": 2}


def complete(output: Path) -> bool:
    AutoModelForCausalLM.from_pretrained(output)
    return {"report.json", "loss.csv", "tokenizer.json", "model.safetensors"} <= set(os.listdir(output))


def files(directory: Path) -> set[str]:
    return set(os.listdir(directory)) if directory.is_dir() else set()


def test_a_finished_run_removes_its_store_and_says_so(short: Job, tmp_path: Path, capsys: Any) -> None:
    assert run(short, "--verify-output") == 0
    out = capsys.readouterr().out
    assert "commits: every step (all states are on NVMe)\nthe first step begins: " in out
    assert f"the store in {tmp_path / 'swap'} is removed" in out
    assert f"its file {FINISHED_NAME} tells a later --resume where the output is, and a new run there removes" in out
    assert complete(short["--output"])
    assert files(tmp_path / "swap") == {FINISHED_NAME}
    assert files(tmp_path / "swap2") == set()


def test_keep_store_keeps_it(short: Job, tmp_path: Path, capsys: Any) -> None:
    assert run(short, "--keep-store") == 0
    assert f"checkpoint of step 2: {tmp_path / 'swap'}" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(tmp_path / "swap")]) == 0
    assert main(["finetune", "--resume", str(tmp_path / "swap")]) == 2
    error = capsys.readouterr().err
    assert "has done all of its 2 steps" in error
    assert f"checkpoint remove {tmp_path / 'swap'} {tmp_path / 'swap2'}` frees the store" in error


def test_a_resumed_run_keeps_its_store_if_the_run_was_begun_so(short: Job, tmp_path: Path) -> None:
    longer = ["finetune", "--resume", str(tmp_path / "swap"), "--steps", "3", "--output", str(tmp_path / "more")]
    assert run(short, "--keep-store") == 0
    assert main(longer) == 0
    assert list(generations_in(tmp_path / "swap")) == [3]
    assert main([*longer[:3], "--steps", "4", "--output", str(tmp_path / "most")]) == 0
    assert list(generations_in(tmp_path / "swap")) == [4]


def test_a_finished_run_has_nothing_to_go_on_with(short: Job, tmp_path: Path, capsys: Any) -> None:
    assert run(short) == 0
    for flags in (["--resume", str(tmp_path / "swap")], ["--resume", "--config", str(short["--config"])]):
        capsys.readouterr()
        assert main(["finetune", *flags]) == 0
        said = f"the run ended after step 2, and nothing is left to do. Its output is in {short['--output']}\n"
        assert capsys.readouterr().out == f"loading libraries, which may take a minute\n{said}"
    more = ["finetune", "--resume", str(tmp_path / "swap"), "--steps", "5", "--output", str(tmp_path / "more")]
    assert main(more) == 2
    error = capsys.readouterr().err
    assert "the run ended after step 2, and its store is removed" in error
    assert "--keep-store" in error
    assert f"Its model is in {short['--output']}: a new run starts from it with --model." in error
    assert run(short | {"--model": short["--output"], "--output": tmp_path / "more"}) == 0


def test_more_epochs_than_a_finished_run_had_are_not_ignored(job: Job, tmp_path: Path, capsys: Any) -> None:
    config = yaml.safe_load(job["--config"].read_text()) | {"commit_every": 1}
    job["--config"].write_text(yaml.safe_dump(config))
    one_pass = {name: value for name, value in job.items() if name != "--steps"} | {"--sequence-length": 128}
    assert run(one_pass) == 0
    resumed = ["finetune", "--resume", str(tmp_path / "swap"), "--epochs"]
    assert main([*resumed, "1"]) == 0
    assert "nothing is left to do" in capsys.readouterr().out
    assert main([*resumed, "2"]) == 2
    assert "its store is removed" in capsys.readouterr().err


def test_the_next_run_in_the_directory_forgets_the_finished_one(short: Job, tmp_path: Path, capsys: Any) -> None:
    assert run(short) == 0
    assert run(short | {"--output": tmp_path / "next"}, "--keep-store") == 0
    assert not (tmp_path / "swap" / FINISHED_NAME).exists()
    assert run(short | {"--output": tmp_path / "third", "--steps": 3}, "--resume") == 0
    assert "resumed after step 2 of 3" in capsys.readouterr().out


def test_what_differs_from_the_trained_model_leaves_the_store(
    short: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differs(*_: Any) -> None:
        raise InfinityError("the saved model's logits differ")

    monkeypatch.setattr(verifying, "verify", differs)
    assert run(short, "--verify-output") == 1
    assert list(generations_in(tmp_path / "swap")) == [2]


def test_an_interrupted_run_keeps_its_store(short: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = StepCallback._finish

    def step(self: Any, number: int) -> None:
        made(self, number)
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(StepCallback, "_finish", step)
        assert run(short) == 130
    assert list(generations_in(tmp_path / "swap")) == [1]
    assert main(["finetune", "--resume", str(tmp_path / "swap")]) == 0
    assert complete(short["--output"])
    assert files(tmp_path / "swap") == {FINISHED_NAME}


def test_a_store_that_cannot_be_removed_does_not_cost_the_output(
    short: Job, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = atomic_file.remove

    def remove(path: Path) -> None:
        if path.name == SWAP_NAME and path.exists():
            raise InfinityError("unlink: Read-only file system.")
        made(path)

    monkeypatch.setattr(atomic_file, "remove", remove)
    assert run(short) == 0
    error = capsys.readouterr().err
    assert "warning: the finished run's store was not removed: unlink: Read-only file system. Remove it with:" in error
    assert f"checkpoint remove {tmp_path / 'swap'} {tmp_path / 'swap2'}" in error
    assert complete(short["--output"])


def test_the_store_goes_after_the_output_is_on_disk(
    short: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole order: every file of the output synced, renamed, the directory synced; the note; the store."""
    acts: list[str] = []
    fsync, replace, output = atomic_file.fsync, os.replace, short["--output"]

    def synced(path: Path) -> None:
        fsync(path)
        if path == output.parent:
            acts.append("sync the output's directory")
        elif path.parent.name == "model" and path.name == "model.safetensors":
            acts.append("sync the model")

    def replaced(source: Any, target: Any) -> None:
        replace(source, target)
        if Path(target) == output:
            acts.append("rename the output")

    def observe(name: str, path: Path, target: Path | None, data: bytes) -> None:
        if name == "end rename" and target is not None and target.name == FINISHED_NAME:
            acts.append("the note")
        if name == "begin unlink" and path.name == SWAP_NAME and path.exists():
            acts.append("the store goes")

    monkeypatch.setattr(atomic_file, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    with atomic_file.observed(observe):
        assert run(short) == 0
    first = acts.index("sync the model")
    assert acts[first : first + 3] == ["sync the model", "rename the output", "sync the output's directory"]
    assert [act for act in acts[first:] if "sync" not in act] == [
        "rename the output",
        "the note",
        *["the store goes"] * 2,
    ]


def _finish_and_die(paths: list[Path], run_id: str, output: Path, number: int) -> None:
    """Finish a run, but die at the beginning of one act."""
    acts = iter(range(10_000))

    def observe(name: str, path: Path, target: Path | None, data: bytes) -> None:
        if name.startswith("begin") and next(acts) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    with atomic_file.observed(observe):
        finish(paths, run_id, output, 2, None)


def test_a_kill_while_the_store_is_removed_loses_nothing(short: Job, tmp_path: Path, capsys: Any) -> None:
    """The output is complete whenever something of the store is gone, and --resume finishes what was begun."""
    assert run(short, "--keep-store") == 0
    paths = [tmp_path / "swap", tmp_path / "swap2"]
    run_id = read_header(paths[0] / HEADER_NAME).run
    for path in paths:
        shutil.copytree(path, path.with_name(f"{path.name}-kept"))
    killed = 0
    while True:
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(path.with_name(f"{path.name}-kept"), path)
        process = Forked(_finish_and_die, paths, run_id, short["--output"], killed)
        process.finished()
        noted = (paths[0] / FINISHED_NAME).exists()
        whole = all({SWAP_NAME, HEADER_NAME} <= files(path) for path in paths) and bool(generations_in(paths[0]))
        assert noted or whole, "nothing goes before the note is there"
        capsys.readouterr()
        code = main(["finetune", "--resume", str(paths[0])])
        if noted:
            assert (code, files(paths[0])) == (0, {FINISHED_NAME})
            assert files(paths[1]) <= {LOCK_NAME}, "a lock that nobody holds"
            assert "nothing is left to do" in capsys.readouterr().out
        else:
            assert code == 2
            assert "if it is the run's output, nothing is left to do" in capsys.readouterr().err
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        killed += 1
    assert killed > 10
    assert complete(short["--output"])


def test_the_store_of_another_run_stays(short: Job, tmp_path: Path) -> None:
    """Another process may have begun a run there since the output was written."""
    assert run(short, "--keep-store") == 0
    finish([tmp_path / "swap", tmp_path / "swap2"], "another", short["--output"], 2, None)
    assert main(["checkpoint", "verify", str(tmp_path / "swap")]) == 0


def test_a_note_of_another_run_is_not_believed(short: Job, tmp_path: Path, capsys: Any) -> None:
    """Else --resume would remove a store whose run is not finished."""
    assert run(short, "--keep-store") == 0
    kept = files(tmp_path / "swap")
    note = f'{{"run":"%s","output":"{short["--output"]}","steps":%d,"ended":"now"}}'
    mine = read_header(tmp_path / "swap" / HEADER_NAME).run
    for text in (note % ("another", 9), note % (mine, 1), "{", note % (mine, -1)):
        (tmp_path / "swap" / FINISHED_NAME).write_text(text)
        assert main(["finetune", "--resume", str(tmp_path / "swap")]) == 2
        assert "has done all of its 2 steps" in capsys.readouterr().err
        assert files(tmp_path / "swap") >= kept
