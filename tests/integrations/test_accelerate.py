"""A loop with Accelerate that knows nothing of infinity trains, saves and resumes the same with its model offloaded."""

from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import infinity
from infinity.cli.main import main
from infinity.coordinator import registry
from infinity.runtime.pins import pinned, unpin
from tests.conftest import weights_of
from tests.integrations.conftest import Launch

Rows = list[dict[str, torch.Tensor]]


@pytest.fixture(autouse=True)
def _alone() -> Any:
    """Reset of the states that accelerate keeps for the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Loop:
    """A model, an optimizer and data, prepared."""

    def __init__(self, checkpoint: Path, rows: Rows, **options: Any) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        self.accelerator = Accelerator(cpu=True, **options)
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        loader: Any = DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )

    def train(self, passes: int, *, skip: int = 0) -> list[float]:
        """Train, and return losses and gradient norms."""
        found = []
        for batch, _ in zip(self.accelerator.skip_first_batches(self.loader, skip), range(passes), strict=False):
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                found.append(loss.item())
                if self.accelerator.sync_gradients:
                    found.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return found


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_losses_and_norms_are_those_of_the_plain_loop(
    precision: str, accumulated: int, checkpoint: Path, rows: Rows, launch: Launch
) -> None:
    found = []
    for context in (nullcontext(), launch()):
        with context as run:
            loop = Loop(checkpoint, rows, mixed_precision=precision, gradient_accumulation_steps=accumulated)
            found.append(loop.train(8))
            assert (run is not None) == registry.is_offloaded(loop.model)
    tolerance = 1e-6 if precision == "no" else 2e-2
    torch.testing.assert_close(found[1], found[0], rtol=tolerance, atol=tolerance)


def test_resume_and_load_state_go_on_to_the_bits_of_the_uninterrupted_loop(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    """From a folder of which another generation is the newest."""
    folder = tmp_path / "out" / "state-4"
    with launch():
        loop = Loop(checkpoint, rows)
        loop.train(4)
        loop.accelerator.save_state(folder)
        expected = loop.train(4, skip=4)
        loop.accelerator.save_state(tmp_path / "out" / "state-8")
        weights = weights_of(loop.model)
    with launch(resume=folder):
        loop = Loop(checkpoint, rows)
        loop.accelerator.load_state(str(folder))
        assert loop.scheduler.get_last_lr() == [1e-3 * 0.25]
        assert loop.train(4, skip=4) == expected
        assert all(torch.equal(value, weights[name]) for name, value in weights_of(loop.model).items())


def test_a_folder_has_the_files_of_the_plain_loop_and_its_weights(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    names = []
    for context in (nullcontext(), launch()):
        with context:
            loop = Loop(checkpoint, rows)
            folder = Path(loop.accelerator.save_state(str(tmp_path / f"out{len(names)}")))
            names.append({path.name for path in folder.iterdir()})
    assert names[1] == names[0] | {"infinity.json"}
    assert (tmp_path / "out0" / "model.safetensors").read_bytes() == (tmp_path / "out1/model.safetensors").read_bytes()


def test_weights_that_do_not_fit_in_memory_are_written_one_unit_at_a_time(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinity.integrations.accelerate.fits_memory", lambda model: False)
    monkeypatch.setattr("infinity.runtime.guards._StateDictHooks._require_room", _no_room)
    with launch():
        loop = Loop(checkpoint, rows)
        loop.train(2)
        loop.accelerator.save_state(tmp_path / "out")
        expected, losses = weights_of(loop.model), loop.train(1, skip=2)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(plain.get_parameter(name), value) for name, value in expected.items())
    with launch(resume=tmp_path / "out"):
        loop = Loop(checkpoint, rows)
        loop.accelerator.load_state(tmp_path / "out")
        assert loop.train(1, skip=2) == losses


def _no_room(*args: Any) -> None:
    raise AssertionError("a whole state_dict was asked for")


def test_load_state_of_the_states_that_are_there_works(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    with launch():
        loop = Loop(checkpoint, rows)
        loop.train(2)
        loop.accelerator.save_state(str(tmp_path / "out"))
        before = weights_of(loop.model)
        loop.accelerator.load_state(str(tmp_path / "out"))
        assert all(torch.equal(value, before[name]) for name, value in weights_of(loop.model).items())


def test_load_state_without_resume_names_the_option(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    with launch():
        loop = Loop(checkpoint, rows)
        loop.train(2)
        loop.accelerator.save_state(tmp_path / "out")
        loop.train(2)
        with pytest.raises(infinity.ResumeError, match=r"infinity run --resume \S+/out CONFIG SCRIPT"):
            loop.accelerator.load_state(tmp_path / "out")
    other = launch(nvme={"paths": [str(tmp_path / "other")]})
    with other, pytest.raises(infinity.ResumeError, match=r"offloaded without a checkpoint.*generation 2"):
        Loop(checkpoint, rows).accelerator.load_state(tmp_path / "out")


def test_an_optimizers_state_dict_that_the_script_saves_itself_is_warned_of_and_refused_later(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "infinity")
    with launch():
        loop = Loop(checkpoint, rows)
        loop.train(2)
        loop.accelerator.save_state(tmp_path / "out")
        copy.deepcopy(loop.optimizer.state_dict())
        assert "names of the states" not in caplog.text
        for _ in range(2):
            torch.save({"optimizer": loop.optimizer.state_dict()}, tmp_path / "by-hand.pt")
        loop.optimizer.load_state_dict(torch.load(tmp_path / "by-hand.pt")["optimizer"])
        unpin(loop.model, tmp_path / "out")
    assert caplog.text.count("names of the states") == 1
    assert "resume from step 2 in a later process, save with accelerator.save_state" in caplog.text
    with launch(), pytest.raises(infinity.ModelError, match=r"run \w+, and this is .*infinity run --resume FOLDER"):
        Loop(checkpoint, rows).optimizer.load_state_dict(torch.load(tmp_path / "by-hand.pt")["optimizer"])


def test_a_script_that_saves_a_state_dict_itself_goes_on_from_a_folder_that_it_pins_as_the_warning_says(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"

    def made() -> tuple[Any, Any]:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto").train()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(model: Any, optimizer: Any, batches: Rows) -> list[float]:
        losses = []
        for each in batches:
            loss = model(**{name: value[None] for name, value in each.items()}).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    with launch(pins=1):
        model, optimizer = made()
        train(model, optimizer, rows[:2])
        torch.save(optimizer.state_dict(), tmp_path / "by-hand.pt")
        assert "with `pins: 1` in the swap config, with infinity.runtime.pins.pin(model, folder)" in caplog.text
        infinity.runtime.pins.pin(model, folder)
        expected = train(model, optimizer, rows[2:4])
    with launch(resume=folder, pins=1):
        assert train(*made(), rows[2:4]) == expected


def test_a_folder_of_the_plain_loop_is_refused(checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path) -> None:
    Loop(checkpoint, rows).accelerator.save_state(tmp_path / "out")
    with launch(), pytest.raises(infinity.ResumeError, match=r"infinity\.json"):
        Loop(checkpoint, rows).accelerator.load_state(tmp_path / "out")


def test_folders_beyond_the_limit_let_their_generations_go(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    project = ProjectConfiguration(str(tmp_path / "out"), automatic_checkpoint_naming=True, total_limit=2)
    folders = tmp_path / "out" / "checkpoints"
    with launch():
        loop = Loop(checkpoint, rows, project_config=project)
        for _ in range(4):
            loop.train(1)
            loop.accelerator.save_state()
        assert pinned(loop.model) == {folders / "checkpoint_2": 3, folders / "checkpoint_3": 4}
        assert sorted(path.name for path in folders.iterdir()) == ["checkpoint_2", "checkpoint_3"]
    project = ProjectConfiguration(str(tmp_path / "out"), automatic_checkpoint_naming=True, total_limit=2, iteration=4)
    with launch(resume=folders / "checkpoint_3"):
        loop = Loop(checkpoint, rows, project_config=project)
        loop.accelerator.load_state()
        loop.train(1)
        loop.accelerator.save_state()
        assert pinned(loop.model) == {folders / "checkpoint_3": 4, folders / "checkpoint_4": 5}


def test_resume_goes_on_with_another_limit_in_the_room_that_the_store_has(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    folders = tmp_path / "out" / "checkpoints"
    with launch():
        project = ProjectConfiguration(str(tmp_path / "out"), automatic_checkpoint_naming=True, total_limit=1)
        loop = Loop(checkpoint, rows, project_config=project)
        loop.train(1)
        loop.accelerator.save_state()
    with launch(resume=folders / "checkpoint_0"):
        project = ProjectConfiguration(
            str(tmp_path / "out"), automatic_checkpoint_naming=True, total_limit=3, iteration=1
        )
        loop = Loop(checkpoint, rows, project_config=project)
        loop.accelerator.load_state()
        for _ in range(2):
            loop.train(1)
            loop.accelerator.save_state()
        assert pinned(loop.model) == {folders / "checkpoint_1": 2, folders / "checkpoint_2": 3}
        assert (folders / "checkpoint_0" / "portable").is_dir()


def test_of_folders_that_are_all_kept_older_ones_hold_a_copy_to_go_on_from(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    with launch():
        loop = Loop(checkpoint, rows)
        losses = []
        for step in (1, 2, 3):
            losses.append(loop.train(1, skip=step))
            loop.accelerator.save_state(tmp_path / f"state-{step}")
    assert (tmp_path / "state-1" / "portable").is_dir()
    with launch(resume=tmp_path / "state-1", nvme={"paths": [str(tmp_path / "other")]}):
        loop = Loop(checkpoint, rows)
        loop.accelerator.load_state(tmp_path / "state-1")
        assert loop.train(1, skip=2) == losses[1]


SCRIPT = """
import os, sys, torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
accelerator = Accelerator(cpu=True)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)
if os.path.isdir(sys.argv[2]):
    accelerator.load_state(sys.argv[2])
ids = torch.arange(16).reshape(1, 16)
loss = model(input_ids=ids, labels=ids).loss
accelerator.backward(loss)
optimizer.step()
accelerator.save_state(sys.argv[2])
print("step done", loss.item())
"""


@pytest.fixture
def arguments(checkpoint: Path, tmp_path: Path) -> list[str]:
    """Arguments of `infinity run`, with the script."""
    script, config = tmp_path / "script.py", tmp_path / "swap.yaml"
    script.write_text(SCRIPT)
    config.write_text(
        f"{{weights: nvme, optimizer: nvme, nvme: {{paths: [{tmp_path}/swap]}}, commit_every: 1, "
        "memory: {device: 64MiB, host: 256MiB}}"
    )
    return [str(config), str(script), str(checkpoint), str(tmp_path / "out")]


def require_resumes(
    arguments: list[str], out: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["run", "--resume", str(out), *arguments]) == 0
    assert "step done" in capfd.readouterr().out
    assert '"step": 2' in (out / "infinity.json").read_text()


def test_a_script_with_what_accelerate_launch_sets_and_the_option_resume(
    arguments: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.commands import launch

    given = launch.launch_command_parser().parse_args(["--cpu", "-m", "infinity.run", *arguments])
    command, environment = launch.prepare_simple_launcher_cmd_env(launch._validate_launch_command(given)[0])
    assert command == [sys.executable, "-m", "infinity.run", *arguments]
    for name in environment.keys() - os.environ.keys():
        monkeypatch.setenv(name, environment[name])
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["run", *command[3:]]) == 0
    assert "step done" in capfd.readouterr().out
    require_resumes(arguments, tmp_path / "out", capfd, monkeypatch)


@pytest.mark.long
def test_accelerate_launch_and_the_option_resume(
    arguments: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "-m", "infinity.run", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "step done" in done.stdout
    require_resumes(arguments, tmp_path / "out", capfd, monkeypatch)
    assert main(["run", "--resume", str(tmp_path / "nowhere"), *arguments]) == 2
    assert "infinity.json" in capfd.readouterr().err


def test_a_trainer_that_saves_nothing_has_no_room_for_pins(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    """It has an Accelerator, too."""
    with launch():
        arguments = TrainingArguments(str(tmp_path), max_steps=1, save_strategy="no", report_to=[], use_cpu=True)
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        Trainer(model, arguments, train_dataset=rows).train()  # type: ignore[arg-type]
        assert registry.coordinator_of(model).plan.placement.pins == 0
