"""A checkpoint folder pins its generation: whatever the run does next, it goes on from that folder to the same bits."""

from __future__ import annotations

import json
import logging
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.cli.main import main
from infinity.coordinator import registry
from infinity.errors import ConfigError, InfinityError, PlanError, ResumeError, StoreNotEmptyError
from infinity.io import atomic_file
from infinity.io.directory import generations_in, pinned_in
from infinity.io.generation_pins import MARKER_NAME, PINS_NAME
from infinity.runtime.pins import generation_of, pin, pinned, unpin
from tests.conftest import states_of, weights_of

SIZE = 48


def config(root: Path, **options: Any) -> dict[str, Any]:
    given = {"weights": "nvme", "optimizer": "nvme", "activations": "keep", "commit_every": 1, "pins": 2}
    memory = {"device": "4MiB", "host": "64MiB"}
    root.mkdir(exist_ok=True)
    return given | {"memory": memory, "nvme": {"paths": [str(root / "swap")]}} | options


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(SIZE, SIZE).bfloat16() for _ in range(2))
        self.fixed = nn.Linear(SIZE, SIZE).bfloat16().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return (self.fixed(x).float() ** 2).mean()


class Run:
    """A loop whose every step has its own batch; `bits` are all weights and states."""

    def __init__(self, root: Path, *, lr: float = 1e-2, resumes: bool = False, **options: Any) -> None:
        self.root = root
        torch.manual_seed(0)
        keys = {name: options.pop(name) for name in ("folder", "step") if name in options}
        self.config = config(root, **options)
        how: Callable[..., nn.Module] = infinity.resume if resumes or keys else infinity.offload
        self.model = how(Net(), self.config, **keys)
        self.optim = infinity.AdamW(self.model.parameters(), lr=lr)
        self.done = infinity.track(model=self.model)
        for group in self.optim.param_groups:
            group["lr"] = lr

    def to(self, step: int) -> Run:
        while self.done < step:
            self.done += 1
            batch = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(self.done)).bfloat16()
            self.model(batch).backward()
            self.optim.step()
            self.optim.zero_grad()
        return self

    def folder(self, step: int) -> Path:
        return self.root / "out" / f"checkpoint-{step}"

    def save(self, folder: Path | None = None) -> Path:
        folder = folder or self.folder(self.done)
        pin(self.model, folder)
        return folder

    @property
    def bits(self) -> dict[str, torch.Tensor]:
        found = weights_of(self.model) | states_of(self.model)
        return {name: value.clone() for name, value in found.items()}

    def end(self) -> None:
        infinity.close(self.model)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_run_goes_on_from_a_folder_whose_generation_keep_would_have_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "infinity")
    run = Run(tmp_path).to(2)
    folder, expected = run.save(), run.bits
    run.to(7).end()
    assert list(generations_in(tmp_path / "swap")) == [7]
    again = Run(tmp_path, folder=folder)
    assert again.done == 2
    assert same(again.bits, expected)
    assert pinned(again.model) == {folder: 2}
    again.to(3).end()
    assert (
        f"the run resumes from generation 2, of {folder}; generation 7 is of a step that the run computes again, to "
        f"the same bits if the script is unchanged, and is removed ({tmp_path / 'swap'}/generation-"
    ) in caplog.text
    assert "damaged" not in caplog.text


def test_a_newer_generation_that_a_folder_pins_is_not_called_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "infinity")
    run = Run(tmp_path).to(2)
    folder = run.save()
    newer = run.to(4).save()
    run.end()
    Run(tmp_path, folder=folder).to(3).end()
    assert "unchanged, and stays for its checkpoint folder" in caplog.text
    assert "removed" not in caplog.text
    again = Run(tmp_path, folder=newer)
    assert again.done == 4
    again.end()


def test_a_damaged_generation_that_goes_is_called_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Run(tmp_path, keep=2).to(4).end()
    newest = generations_in(tmp_path / "swap")[4]
    newest.write_bytes(newest.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING, "infinity"):
        again = Run(tmp_path, keep=2, resumes=True)
        assert again.done == 3
        again.to(4).end()
    assert f"the run resumes from generation 3; generation 4 is damaged and is removed ({newest})" in caplog.text


def test_pinning_does_not_change_a_bit_of_the_run(tmp_path: Path) -> None:
    plain = Run(tmp_path / "plain", pins=0).to(6)
    run = Run(tmp_path / "pinned")
    for step in (2, 4):
        run.to(step).save()
    assert same(run.to(6).bits, plain.bits)
    run.end()
    plain.end()


@pytest.mark.parametrize("keep", [1, 2])
def test_going_back_to_an_older_folder_keeps_the_newer_one(keep: int, tmp_path: Path) -> None:
    run = Run(tmp_path, keep=keep).to(2)
    older = run.save()
    newer, expected = run.to(4).save(), run.to(4).bits
    run.to(6).end()
    back = Run(tmp_path, folder=older, keep=keep, lr=1e-3).to(7)
    assert pinned(back.model) == {older: 2, newer: 4}
    back.end()
    again = Run(tmp_path, folder=newer, keep=keep)
    assert same(again.bits, expected)
    again.end()


def test_a_generation_made_again_does_not_replace_the_pinned_one_of_that_step(tmp_path: Path) -> None:
    run = Run(tmp_path).to(2)
    older = run.save()
    newer, expected = run.to(4).save(), run.bits
    run.end()
    back = Run(tmp_path, folder=older, lr=1e-3).to(4)
    other = back.bits
    assert not same(other, expected)
    back.end()
    with pytest.raises(ResumeError, match="has 2 generations 4.*checkpoint-4.*folder="):
        Run(tmp_path, step=4)
    newest = Run(tmp_path, resumes=True)
    assert same(newest.bits, other)
    newest.end()
    again = Run(tmp_path, folder=newer)
    assert same(again.bits, expected)
    again.end()


def test_a_folder_that_is_written_again_pins_the_new_generation(tmp_path: Path) -> None:
    run = Run(tmp_path, pins=1).to(3)
    folder = run.save()
    run.to(5).end()
    back = Run(tmp_path, folder=folder, pins=1, lr=1e-3).to(5)
    back.save(folder)
    expected = back.bits
    back.to(8).end()
    assert len(pinned_in(tmp_path / "swap")) == 1
    again = Run(tmp_path, folder=folder, pins=1)
    assert again.done == 5
    assert same(again.bits, expected)
    again.end()


def test_without_a_free_pin_nothing_is_written(tmp_path: Path) -> None:
    run = Run(tmp_path, pins=1, commit_every=4).to(1)
    run.save()
    run.to(2)
    acts: list[str] = []
    with (
        atomic_file.observed(lambda name, *_: acts.append(name)),
        pytest.raises(PlanError, match=r"checkpoint-2 cannot pin.*pins: 1.*checkpoint-1 \(generation 1\)"),
    ):
        run.save()
    assert acts == []
    assert not run.folder(2).exists()
    unpin(run.model, run.folder(1))
    assert not (run.folder(1) / MARKER_NAME).exists()
    run.save()
    assert pinned(run.model) == {run.folder(2): 2}
    run.to(9).end()


def test_without_pins_and_without_generations_saving_says_what_to_set(tmp_path: Path) -> None:
    run = Run(tmp_path / "a", pins=0).to(1)
    with pytest.raises(PlanError, match="pins: 0"):
        run.save()
    run.end()
    assert not (tmp_path / "a" / "swap" / PINS_NAME).exists()
    run = Run(tmp_path / "b", commit_every=0).to(1)
    with pytest.raises(ConfigError, match="commit_every: 1"):
        run.save()
    run.end()


def test_a_folder_that_vanished_stays_pinned_and_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path).to(1)
    folder = run.save()
    run.to(2).end()
    shutil.rmtree(folder)
    with caplog.at_level(logging.WARNING, "infinity"):
        again = Run(tmp_path, resumes=True)
    assert f"{folder} (generation 1), which is gone" in caplog.text
    assert pinned(again.to(4).model) == {folder: 1}
    again.end()
    with pytest.raises(StoreNotEmptyError, match="checkpoint-1.*which is gone.*--folder"):
        Run(tmp_path)


def test_a_pin_whose_folder_has_no_marker_goes_with_the_next_resume(tmp_path: Path) -> None:
    run = Run(tmp_path).to(1)
    folder = run.save()
    run.to(2).end()
    (folder / MARKER_NAME).unlink()
    again = Run(tmp_path, resumes=True).to(3)
    assert pinned(again.model) == {}
    assert pinned_in(tmp_path / "swap") == []
    again.end()


def test_a_folder_gets_its_name_after_its_pin(tmp_path: Path) -> None:
    run = Run(tmp_path).to(1)
    aside, folder = tmp_path / "out" / "aside", tmp_path / "out" / "checkpoint-1"
    pin(run.model, folder, into=aside)
    expected = run.bits
    aside.rename(folder)
    run.to(3).end()
    again = Run(tmp_path, folder=folder)
    assert same(again.bits, expected)
    again.end()


def test_a_folder_that_never_got_its_name_keeps_no_space(tmp_path: Path) -> None:
    run = Run(tmp_path).to(1)
    pin(run.model, tmp_path / "out" / "checkpoint-1", into=tmp_path / "out" / "aside")
    run.to(3).end()
    again = Run(tmp_path, resumes=True).to(4)
    assert pinned(again.model) == {}
    again.end()


def test_a_config_with_fewer_pins_than_there_are_is_refused_though_the_file_has_room(tmp_path: Path) -> None:
    run = Run(tmp_path, pins=2).to(1)
    run.save()
    run.to(2).save()
    run.to(3).end()
    with pytest.raises(ResumeError, match="2 generations.*are pinned, and pins is 1.*checkpoint-1.*Set pins: 2"):
        Run(tmp_path, resumes=True, pins=1, keep=2)
    with pytest.raises(ResumeError, match="holds a store of"):
        Run(tmp_path, resumes=True, pins=1)
    Run(tmp_path, resumes=True, pins=2).end()


@pytest.mark.parametrize("what", ["remove --pinned", "unpin"])
def test_a_pinned_store_on_two_disks_goes_with_the_command_that_its_error_names(what: str, tmp_path: Path) -> None:
    nvme = {"paths": [str(tmp_path / "a"), str(tmp_path / "b")]}
    run = Run(tmp_path, nvme=nvme).to(1)
    folder = run.save()
    run.end()
    with pytest.raises(StoreNotEmptyError) as raised:
        Run(tmp_path, nvme=nvme)
    given = str(raised.value).partition(f"`infinity checkpoint {what} ")[2].partition("`")[0]
    assert main(["checkpoint", *what.split(), *shlex.split(given.replace("FOLDER", str(folder)))]) == 0
    if what == "unpin":
        assert not pinned_in(tmp_path / "a")
    else:
        Run(tmp_path, nvme=nvme).end()


def test_a_store_that_another_run_uses_is_refused_before_the_script_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path).to(1)
    folder = run.save()
    (tmp_path / "swap.json").write_text(json.dumps(run.config))
    (tmp_path / "script.py").write_text(f"open({str(tmp_path / 'started')!r}, 'w').close()\n")
    line = ["run", "--resume", str(folder), str(tmp_path / "swap.json"), str(tmp_path / "script.py")]
    assert main(line) == 2
    assert f"error: the swap directory {tmp_path / 'swap'} is in use by a run" in capsys.readouterr().err
    assert not (tmp_path / "started").exists()
    run.end()


def test_a_marker_leads_to_its_generation_or_says_why_not(tmp_path: Path) -> None:
    run = Run(tmp_path).to(1)
    folder = run.save()
    run.end()
    assert (generation_of(folder).step, generation_of(folder, run.config).step) == (1, 1)
    other = Run(tmp_path / "other").to(1)
    with pytest.raises(ResumeError, match="names run .*holds run .*Set nvme.paths"):
        generation_of(folder, other.config)
    marker = (folder / MARKER_NAME).read_text()
    again = Run(tmp_path, resumes=True)
    unpin(again.model, folder)
    again.end()
    with pytest.raises(ResumeError, match="has no infinity.json"):
        generation_of(folder)
    (folder / MARKER_NAME).write_text(marker)
    with pytest.raises(ResumeError, match="generation 1.*not in .*any more.*load them as a model"):
        generation_of(folder)
    (folder / MARKER_NAME).write_text(json.dumps(json.loads(marker) | {"step": "1"}))
    with pytest.raises(ResumeError, match="wrong value: step"):
        generation_of(folder)
    with pytest.raises(ResumeError, match="does not exist"):
        generation_of(tmp_path / "nowhere")
    other.end()


def test_discarding_a_run_that_folders_need_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path).to(1)
    folder = run.save()
    with pytest.raises(InfinityError, match="checkpoint-1"):
        infinity.close(run.model, discard=True)
    run.to(2)
    shutil.rmtree(folder)
    infinity.close(run.model, discard=True)
    assert not (tmp_path / "swap").exists()


@pytest.mark.parametrize("saved", [False, True], ids=["no folder", "a folder"])
def test_a_loop_in_a_directory_of_an_earlier_run_is_told_what_a_loop_does_and_it_works(
    saved: bool, tmp_path: Path
) -> None:
    run = Run(tmp_path).to(1)
    folder = run.save() if saved else None
    run.to(2).end()
    with pytest.raises(StoreNotEmptyError) as refused:
        Run(tmp_path)
    said = str(refused.value).partition("To resume it: ")[2]
    assert said.startswith("in a loop of your own, infinity.resume(model, config)")
    again = Run(tmp_path, resumes=True)
    assert again.done == 2
    again.end()
    if folder is not None:
        assert "folder=FOLDER" in said
        earlier = Run(tmp_path, folder=folder)
        assert earlier.done == 1
        earlier.end()
    assert ("No checkpoint folder names its generations" in said) is not saved


def test_a_frozen_state_has_one_copy_that_all_generations_share(tmp_path: Path) -> None:
    run = Run(tmp_path, pins=3)
    extents = registry.coordinator_of(run.model).resources.generations._extents  # type: ignore[union-attr]
    assert sorted({len(extent.offsets) for extent in extents}) == [1, 5]
    run.end()
