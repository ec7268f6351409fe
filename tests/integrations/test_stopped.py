"""A script under `infinity run` that Ctrl-C stops, and what can be done with what it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, TrainerCallback

import infinity
from infinity.cli.main import main
from infinity.integrations.resume_hint import by_trainer, log_leftovers
from tests import processes
from tests.integrations.conftest import Launch
from tests.integrations.training import SAVING, Rows, trainer

Result = subprocess.CompletedProcess[str]

SCRIPT = """
import os, signal, torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

class CtrlC(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGINT)

ids = torch.arange(512).reshape(32, 16) % 96
args = TrainingArguments({out!r}, use_cpu=True, max_steps=6, save_steps={save_steps}, report_to=[], disable_tqdm=True)
model = AutoModelForCausalLM.from_pretrained({checkpoint!r})
rows = [{{"input_ids": row, "labels": row}} for row in ids]
Trainer(model=model, args=args, train_dataset=rows, callbacks=[CtrlC()]).train()
"""


def stopped(checkpoint: Path, directory: Path, *, save_steps: int) -> Result:
    """In a process of its own, which Ctrl-C reaches after its second step."""
    swap = {"optimizer": "nvme", "nvme": {"paths": ["swap"]}, "memory": {"host": "96MiB"}}
    (directory / "swap.yaml").write_text(json.dumps(swap | {"commit_every": 1}))
    script = SCRIPT.format(out=str(directory / "out"), checkpoint=str(checkpoint), save_steps=save_steps)
    (directory / "train.py").write_text(script)
    return processes.run(launch_in, str(directory))


def launch_in(directory: str) -> int:
    """Launch the script as `python -m infinity.run` does."""
    os.chdir(directory)
    return main(["run", "swap.yaml", "train.py"])


def test_ctrl_c_ends_in_one_message_that_names_the_folder_to_go_on_from(checkpoint: Path, tmp_path: Path) -> None:
    ended = stopped(checkpoint, tmp_path, save_steps=1)
    assert ended.returncode == 128 + signal.SIGINT
    folder, swap = tmp_path / "out" / "checkpoint-2", tmp_path / "swap"
    resume = rf"`.* run --resume {folder} swap\.yaml train\.py`"
    remove = rf"  to start from the beginning: `infinity checkpoint remove --pinned {swap}` removes the states in the "
    remove += r"store\n"
    message = re.fullmatch(
        r".*\n\ninfinity: stopped after step 3; the newest checkpoint folder is of step 2, so the next start continues "
        rf"after step 2 and computes step 3 again, to the same bits\n  to resume it after step 2: {resume}\n{remove}",
        ended.stderr,
        re.DOTALL,
    )
    assert message is not None, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "left by an exception" not in ended.stderr
    assert "Lightning" not in ended.stderr
    refused = processes.run(launch_in, str(tmp_path))
    assert refused.returncode == 2
    assert re.fullmatch(
        rf"(?:.*\n)?error: {swap} holds the states of an earlier run, whose newest checkpoint folder is of step 2\n"
        rf"  to resume it after step 2: {resume}\n{remove}"
        r"  or give this run another directory in nvme\.paths\n",
        refused.stderr,
        re.DOTALL,
    ), refused.stderr
    assert "Traceback" not in refused.stderr


def test_before_the_first_folder_it_says_that_none_names_the_states(checkpoint: Path, tmp_path: Path) -> None:
    ended = stopped(checkpoint, tmp_path, save_steps=6)
    assert ended.returncode == 128 + signal.SIGINT
    said, *ways = ended.stderr.splitlines()[-4:]
    state = f"no checkpoint folder was saved, and {tmp_path / 'swap'} has the states after step "
    assert said.startswith(f"infinity: stopped after step 3; {state}")
    assert "no checkpoint folder was saved" in ways[0]
    assert "checkpoint export" in ways[1]
    assert "checkpoint remove" in ways[2]


def test_a_script_that_is_stopped_before_it_has_a_model_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "swap.yaml").write_text("{}")
    (tmp_path / "train.py").write_text("raise KeyboardInterrupt")
    ended = processes.run(launch_in, str(tmp_path))
    assert ended.returncode == 130
    assert (
        ended.stderr.splitlines()[-1] == "infinity: stopped; no step of it is durable, so the script must "
        "start from the beginning"
    )


class _Stop(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise KeyboardInterrupt


def test_a_second_run_without_a_folder_is_told_what_it_can_do_and_that_works(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    with contextlib.suppress(KeyboardInterrupt), launch():
        one = trainer(checkpoint, rows, tmp_path / "out", **SAVING | {"save_steps": 6})
        one.add_callback(_Stop())
        one.train()
    swap, out = tmp_path / "swap", tmp_path / "copy"
    with launch(), pytest.raises(infinity.StoreNotEmptyError) as refused:
        trainer(checkpoint, rows, tmp_path / "out", **SAVING).train()
    told = str(refused.value)
    assert "no checkpoint folder was saved" in told
    assert "resume_from_checkpoint" not in told
    assert f"`infinity checkpoint export {swap} --output OUT`" in told
    assert f"`infinity checkpoint remove {swap}`" in told
    assert main(["checkpoint", "export", str(swap), "--output", str(out)]) == 0
    assert AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)[1]["missing_keys"] == set()
    assert main(["checkpoint", "remove", str(swap)]) == 0
    with launch():
        trainer(out, rows, tmp_path / "out", **SAVING).train()


def test_a_second_run_where_a_run_has_finished_is_told_so(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    def train(steps: int, folder: Path | None = None) -> None:
        with launch():
            made = trainer(checkpoint, rows, tmp_path / "out", **SAVING | {"max_steps": steps, "save_steps": 2})
            made.train(resume_from_checkpoint=folder and str(folder))

    train(2)
    swap, folder = tmp_path / "swap", tmp_path / "out" / "checkpoint-2"
    with pytest.raises(infinity.StoreNotEmptyError) as refused:
        train(2)
    assert str(refused.value).splitlines() == [
        f"{swap} holds a run that finished after step 2",
        f"to continue it, give the script more steps and resume: `trainer.train(resume_from_checkpoint='{folder}')`",
        f"to start from the beginning: `infinity checkpoint remove --pinned {swap}` removes the states in the store",
        "or give this run another directory in nvme.paths",
    ]
    train(3, folder)
    assert main(["checkpoint", "remove", "--pinned", str(swap)]) == 0
    train(2)


def test_a_resumed_run_that_is_stopped_names_no_folder_of_the_branch_that_it_left(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = SAVING | {"save_total_limit": 2, "max_steps": 4}
    with launch():
        trainer(checkpoint, rows, tmp_path / "out", **options).train()
    folder = tmp_path / "out" / "checkpoint-2"
    with contextlib.suppress(KeyboardInterrupt), launch():
        again = trainer(checkpoint, rows, tmp_path / "out", **options)
        again.add_callback(_Stop())
        again.train(resume_from_checkpoint=str(folder))
    way = f"to resume it after step 2: `trainer.train\\(resume_from_checkpoint='{folder}'\\)`"
    assert re.search(way, caplog.messages[-1])
    with launch(), pytest.raises(infinity.StoreNotEmptyError, match=way):
        trainer(checkpoint, rows, tmp_path / "out", **options).train()


@pytest.mark.parametrize("ends_well", [True, False])
def test_a_store_on_two_disks_goes_with_the_command_that_is_said_at_the_end(
    ends_well: bool, checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    with contextlib.suppress(KeyboardInterrupt), launch(nvme={"paths": [str(path) for path in paths]}):
        one = trainer(checkpoint, rows, tmp_path / "out", **SAVING | {"save_steps": 4 if ends_well else 6})
        if not ends_well:
            one.add_callback(_Stop())
        one.train()
    if not ends_well:
        log_leftovers({paths[0]: 0}, by_trainer, stopped=True)
    command = caplog.text.partition("`infinity checkpoint remove ")[2].partition("`")[0]
    assert main(["checkpoint", "remove", *shlex.split(command)]) == 0
    assert not any(os.listdir(path) for path in paths if path.exists())
