"""A finished model is in the output, or where the error says; what cannot work is refused before the work begins."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from infinity.cli import finetuned_model
from infinity.cli.main import main
from infinity.cli.output import OutputDirectory, SavedModel
from infinity.cli.training import FinetuneRun
from infinity.errors import ConfigError, InfinityError
from tests.cli.test_finetune import run

Job = dict[str, Any]


@pytest.fixture
def short(job: Job) -> Job:
    return job | {"--steps": 1}


def configure(job: Job, **values: Any) -> None:
    job["--config"].write_text(yaml.safe_dump(yaml.safe_load(job["--config"].read_text()) | values))


def where_it_is(error: str) -> Path:
    found = re.search(r"The model is complete in (\S+): move it, with `mv ", error)
    assert found, error
    return Path(found[1])


def loads(directory: Path) -> bool:
    AutoModelForCausalLM.from_pretrained(directory)
    return bool(AutoTokenizer.from_pretrained(directory)("the fox")["input_ids"])


def during_the_run(monkeypatch: pytest.MonkeyPatch, act: Any) -> None:
    made = FinetuneRun.report

    def report(self: Any) -> Any:
        act()
        return made(self)

    monkeypatch.setattr(FinetuneRun, "report", report)


@pytest.mark.parametrize("kind", ["a file in it", "a file", "a dangling link"])
def test_what_appears_in_the_outputs_place_does_not_cost_the_model(
    kind: str, short: Job, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    output: Path = short["--output"]

    def appear() -> None:
        if kind == "a file":
            output.write_text("mine")
        elif kind == "a dangling link":
            output.symlink_to("nowhere")
        else:
            output.mkdir()
            (output / "notes.txt").write_text("mine")

    during_the_run(monkeypatch, appear)
    assert run(short) == 1
    assert loads(where_it_is(capsys.readouterr().err))
    assert os.path.lexists(output)
    assert not (tmp_path / "swap").exists()


def test_an_empty_directory_that_is_there_becomes_the_output(short: Job) -> None:
    short["--output"].mkdir()
    assert run(short) == 0
    assert loads(short["--output"])


def test_an_output_on_another_disk_than_above_it_is_filled_from_within(
    short: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short["--output"].mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == short["--output"])
    assert run(short) == 0
    assert loads(short["--output"])
    assert not [name for name in os.listdir(short["--output"]) if name.startswith(".")]
    assert set(os.listdir(tmp_path)) == {"model", "text.txt", "swap.yaml", "out"}


def test_a_link_to_an_empty_directory_stays_one(short: Job, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    short["--output"].symlink_to(tmp_path / "there")
    assert run(short) == 0
    assert short["--output"].is_symlink()
    assert loads(tmp_path / "there")


def full_disk(monkeypatch: pytest.MonkeyPatch, *directories: Path) -> None:
    """Files cannot be made larger in these directories, once training is over."""
    allocate = os.posix_fallocate

    def full(descriptor: int, offset: int, length: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if any(directory in path.parents and "swap" not in path.parts[-2:-1] for directory in directories):
            raise OSError(28, "No space left on device")
        allocate(descriptor, offset, length)

    during_the_run(monkeypatch, lambda: monkeypatch.setattr(os, "posix_fallocate", full))


def test_a_full_output_disk_does_not_cost_the_model(
    short: Job, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    short["--output"] = tmp_path / "disk" / "out"
    full_disk(monkeypatch, tmp_path / "disk")
    assert run(short) == 1
    error = capsys.readouterr().err
    assert "No space left on device" in error
    assert tmp_path / "swap" in where_it_is(error).parents
    assert loads(where_it_is(error))
    assert os.listdir(tmp_path / "disk") == []


def test_with_generations_a_full_disk_leaves_the_run_to_be_saved_again(
    short: Job, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(short, commit_every=1)
    with monkeypatch.context() as patched:
        full_disk(patched, tmp_path)
        assert run(short) == 1
    error = capsys.readouterr().err
    assert f"finetune --resume {tmp_path / 'swap'} --output" in error
    assert main(["finetune", "--resume", str(tmp_path / "swap"), "--output", str(tmp_path / "again")]) == 0
    assert loads(tmp_path / "again")


@pytest.mark.parametrize("what", ["tokenizer", "report", "logits"])
def test_what_fails_beside_the_model_does_not_cost_it(
    what: str, short: Job, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    places = {
        "tokenizer": "transformers.PreTrainedTokenizerBase.save_pretrained",
        "report": "infinity.cli.finetune.write_report",
        "logits": "infinity.cli.verifying.expected_of",
    }
    monkeypatch.setattr(places[what], fail)
    assert run(short, "--verify-output") == 1
    error = capsys.readouterr().err
    assert "Permission denied" in error
    AutoModelForCausalLM.from_pretrained(where_it_is(error))
    assert not short["--output"].exists()


def test_an_interrupt_while_the_model_is_saved_waits_for_it(
    short: Job, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import signal

    save = finetuned_model.save_model

    def interrupted(*given: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        save(*given)

    monkeypatch.setattr(finetuned_model, "save_model", interrupted)
    assert run(short) == 130
    assert "the model is being saved" in capsys.readouterr().out
    assert loads(short["--output"])


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("swap", "and nvme.paths .* are the same"),
        ("swap/out", "is in nvme.paths"),
        (".", "exists and is not an empty directory"),
        ("link/out", "is in nvme.paths"),
        ("docs/out", "is in --data"),
    ],
)
def test_an_output_in_the_swap_directory_or_the_data_is_refused(
    output: str, message: str, short: Job, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "text.txt").rename(tmp_path / "docs" / "text.txt")
    (tmp_path / "link").symlink_to(tmp_path / "swap")
    before = set(os.listdir(tmp_path))
    assert run(short | {"--data": tmp_path / "docs", "--output": tmp_path / output}) == 2
    assert re.search(message, capsys.readouterr().err)
    assert set(os.listdir(tmp_path)) == before


def test_a_swap_directory_in_the_output_or_in_the_data_is_refused(short: Job, tmp_path: Path, capsys: Any) -> None:
    configure(short, nvme={"paths": [str(tmp_path / "out" / "swap")]})
    assert run(short) == 2
    assert re.search(r"nvme.paths .*swap is in --output", capsys.readouterr().err)
    (tmp_path / "docs").mkdir()
    (tmp_path / "text.txt").rename(tmp_path / "docs" / "text.txt")
    configure(short, nvme={"paths": [str(tmp_path / "docs" / "swap")]})
    assert run(short | {"--data": tmp_path / "docs"}) == 2
    assert re.search(r"nvme.paths .*swap is in --data", capsys.readouterr().err)


def test_a_disk_too_small_for_the_model_is_refused_before_training(
    short: Job, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    require = OutputDirectory.require_room

    def require_on_a_small_disk(output: OutputDirectory, model_bytes: int) -> None:
        require(output, model_bytes + (1 << 60))

    monkeypatch.setattr(OutputDirectory, "require_room", require_on_a_small_disk)
    assert run(short) == 2
    captured = capsys.readouterr()
    assert "the trained model takes" in captured.err
    assert "step 1/" not in captured.out
    assert not (tmp_path / "swap").exists()


def test_places_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "file").write_text("mine")
    for path in ("/proc/out", tmp_path / "circle" / "out", tmp_path / "file" / "out", tmp_path / ("x" * 300)):
        with pytest.raises(ConfigError, match="--output .*: cannot write to"):
            OutputDirectory(Path(path))
    assert sorted(os.listdir(tmp_path)) == ["circle", "file"]


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the name is not UTF-8") as caught:
        OutputDirectory(tmp_path / os.fsdecode(b"o\xff\x1b[31mut"))
    assert str(caught.value).isprintable()
    assert os.listdir(tmp_path) == []


def test_a_place_to_move_the_model_from_is_written_as_a_shell_reads_it(tmp_path: Path) -> None:
    for name in ("a b", "a'b", "a\x1b[2Jb"):
        (tmp_path / name).mkdir()
        said = str(SavedModel(tmp_path / name, ""))
        assert said.isprintable()
        command = re.search("`mv (.*) DIRECTORY`", said)
        assert command
        listed = subprocess.run(["bash", "-c", f"ls -d {command[1]}"], capture_output=True, check=True).stdout
        assert listed == os.fsencode(tmp_path / name) + b"\n"


def test_a_long_name_is_no_trouble(tmp_path: Path) -> None:
    output = OutputDirectory(tmp_path / ("x" * 250))

    def write(directory: Path) -> None:
        directory.mkdir()
        (directory / "config.json").write_text("{}")

    output.publish(output.save(write), lambda _: None)
    assert os.listdir(tmp_path) == ["x" * 250]


def test_where_no_disk_takes_the_model_that_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    def full(directory: Path) -> None:
        directory.mkdir()
        raise InfinityError("No space left on device")

    (tmp_path / "other").mkdir()
    with pytest.raises(InfinityError, match="the model could not be saved. No space left"):
        OutputDirectory(tmp_path / "out").save(full, [tmp_path / "other"])
    assert os.listdir(tmp_path) == ["other"]
    assert os.listdir(tmp_path / "other") == []
