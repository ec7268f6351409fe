"""When all pins are taken the oldest pinned generation becomes a portable copy in its folder, or saving fails before
anything is written."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.checkpoint import export, pinned
from infinity.checkpoint.pinned import make_room_for_pin
from infinity.cli.main import main
from infinity.errors import PlanError, ResumeError
from infinity.io import atomic_file
from infinity.io.generation_pins import read_marker
from infinity.runtime.pins import generation_of, pin
from infinity.runtime.pins import pinned as pins_of
from tests import sampling
from tests.conftest import states_of, weights_of
from tests.models import llama, loss_of
from tests.runtime.test_pins import Net, Run, config, same


class Killed(BaseException):
    pass


def carried_on(run: Run, folder: Path) -> dict[str, torch.Tensor]:
    """Return the bits of a run that continues from the portable copy in a folder."""
    model = infinity.offload_from_checkpoint(Net(), folder / "portable", {**run.config, "nvme": {"paths": []}, **RAM})
    infinity.AdamW(model.parameters(), lr=1e-2)
    infinity.track(model=model)
    found = {name: value.clone() for name, value in (weights_of(model) | states_of(model)).items()}
    infinity.close(model)
    return found


RAM = {"weights": "host", "optimizer": "host", "commit_every": 0}


def full(root: Path, **options: Any) -> tuple[Run, dict[str, torch.Tensor]]:
    """Return a run at step 5 whose only pin is taken by step 2, and the bits of step 2."""
    run = Run(root, pins=1, **options).to(2)
    run.save()
    expected = run.bits
    return run.to(5), expected


def test_the_oldest_pin_becomes_a_portable_copy_of_its_bits(tmp_path: Path) -> None:
    run, expected = full(tmp_path)
    os.utime(run.folder(2), ns=(0, 2_000_000_000))
    assert make_room_for_pin(run.model, run.folder(5)) == [run.folder(2)]
    assert run.folder(2).stat().st_mtime_ns == 2_000_000_000, "a trainer would take it for a newer folder"
    assert make_room_for_pin(run.model, run.folder(5)) == []
    run.save()
    assert pins_of(run.model) == {run.folder(5): 5}
    later = run.bits
    run.to(9).end()
    assert same(carried_on(run, run.folder(2)), expected)
    where = re.escape(f"in other nvme.paths, with infinity.offload_from_checkpoint(model, '{run.folder(2)}/portable', ")
    with pytest.raises(ResumeError, match=f"portable copy.*{where}"):
        Run(tmp_path, folder=run.folder(2), pins=1)
    model = infinity.offload_from_checkpoint(Net(), f"{run.folder(2)}/portable", config(tmp_path / "other", pins=1))
    infinity.AdamW(model.parameters(), lr=1e-2)
    assert infinity.track(model=model) == 2
    assert same(weights_of(model) | states_of(model), expected)
    infinity.close(model)
    again = Run(tmp_path, folder=run.folder(5), pins=1)
    assert same(again.bits, later)
    again.end()


def test_a_folder_that_holds_something_else_by_now_is_let_go_and_not_touched(tmp_path: Path) -> None:
    run, _ = full(tmp_path)
    (run.folder(2) / "infinity.json").unlink()
    (run.folder(2) / "portable").mkdir()
    (run.folder(2) / "portable" / "training-state.infinity").write_text("somebody's")
    assert make_room_for_pin(run.model, run.folder(5)) == []
    run.save()
    assert pins_of(run.model) == {run.folder(5): 5}
    assert (run.folder(2) / "portable" / "training-state.infinity").read_text() == "somebody's"
    assert read_marker(run.folder(2)) is None
    run.end()


def test_a_run_that_goes_on_after_the_copy_ends_in_the_same_bits(tmp_path: Path) -> None:
    plain = Run(tmp_path / "plain", pins=0).to(8)
    run, _ = full(tmp_path / "copied", overlap="during_backward")
    make_room_for_pin(run.model, run.folder(5))
    assert same(run.to(8).bits, plain.bits)
    run.end()
    plain.end()


@pytest.mark.parametrize("options", [{}, {"moments": "int8"}, {"master": "fp32"}, {"master": "none"}], ids=str)
def test_the_room_that_is_asked_for_is_enough_and_little_more(options: dict[str, Any], tmp_path: Path) -> None:
    run, _ = full(tmp_path, **options)
    needed: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pinned, "copy_bytes", lambda generation: needed.append(export.copy_bytes(generation)) or 0)
        make_room_for_pin(run.model, run.folder(5))
    taken = sum(path.stat().st_size for path in (run.folder(2) / "portable").rglob("*"))
    assert taken <= needed[0] <= taken + (1 << 20) + (16 << 10)
    run.end()


def test_without_room_for_the_copy_saving_fails_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = full(tmp_path)
    small = os.statvfs_result((4096, 4096, 100, 3, 3, 1, 1, 1, 0, 255))
    monkeypatch.setattr(pinned.os, "statvfs", lambda _: small)
    acts: list[str] = []
    message = "checkpoint-2 .*takes 1.*MiB, and the disk has 12.00 KiB free"
    with atomic_file.observed(lambda name, *_: acts.append(name)), pytest.raises(PlanError, match=message):
        make_room_for_pin(run.model, run.folder(5))
    assert acts == []
    assert pins_of(run.model) == {run.folder(2): 2}
    run.end()


@pytest.mark.parametrize("way", ["put back", "unpinned by the command", "unpinned here"])
def test_a_folder_that_is_gone_can_hold_no_copy_and_each_way_on_is_one(way: str, tmp_path: Path) -> None:
    run, _ = full(tmp_path)
    run.folder(2).rename(tmp_path / "moved")
    with pytest.raises(PlanError, match="oldest pin is gone.*checkpoint-2.*--all-gone") as refused:
        make_room_for_pin(run.model, run.folder(5))
    if way == "put back":
        (tmp_path / "moved").rename(run.folder(2))
    elif way == "unpinned here":
        infinity.runtime.pins.unpin(run.model, run.folder(2))
    else:
        run.end()
        line = str(refused.value).partition("`infinity ")[2].partition("`")[0]
        assert main(shlex.split(line)) == 0
        run = Run(tmp_path, pins=1, resumes=True)
    assert make_room_for_pin(run.model, run.folder(5)) == [run.folder(2)] * (way == "put back")
    run.save(run.folder(5))
    assert pins_of(run.model) == {run.folder(5): 5}
    run.end()


def test_a_folder_that_is_written_again_does_not_look_resumable_meanwhile(tmp_path: Path) -> None:
    run, _ = full(tmp_path)
    assert make_room_for_pin(run.model, run.folder(2)) == []
    assert read_marker(run.folder(2)) is None
    assert pins_of(run.model) == {run.folder(2): 2}, "nothing is lost before the folder pins another generation"
    run.save(run.folder(2))
    assert pins_of(run.model) == {run.folder(2): 5}
    run.end()


def test_without_pins_there_is_no_room_to_make(tmp_path: Path) -> None:
    run = Run(tmp_path, pins=0).to(1)
    with pytest.raises(PlanError, match="pins: 0"):
        make_room_for_pin(run.model, run.folder(1))
    run.end()


def test_wherever_making_the_copy_ends_the_folder_leads_to_its_bits(tmp_path: Path) -> None:
    run, _ = full(tmp_path / "whole")
    acts: list[str] = []
    with atomic_file.observed(lambda name, *_: acts.append(name)):
        make_room_for_pin(run.model, run.folder(5))
    run.end()
    assert len(acts) > 10
    few = sampling.number(3, len(acts))
    for at in {len(acts) * index // few for index in range(few)} | {len(acts)}:
        root = tmp_path / str(at)
        run, expected = full(root)
        assert stopped_at(run, at) == (at == len(acts))
        run.end()
        folder = run.folder(2)
        if generation_of(folder).portable is None:
            again = Run(root, folder=folder, pins=1)
            assert same(again.bits, expected)
        else:
            assert same(carried_on(run, folder), expected)
            again = Run(root, resumes=True, pins=1)
        make_room_for_pin(again.model, run.folder(6))
        assert read_marker(folder).portable == "portable"  # type: ignore[union-attr]
        again.to(6).save()
        assert pins_of(again.model) == {run.folder(6): 6}
        assert sorted(path.name for path in folder.iterdir()) == ["infinity.json", "portable"]
        again.end()


def stopped_at(run: Run, at: int) -> bool:
    """Whether making room did not reach its act number `at`; there it is left."""
    acts = 0

    def count(name: str, *_: Any) -> None:
        nonlocal acts
        acts += 1
        if acts > at:
            raise Killed

    try:
        with atomic_file.observed(count):
            make_room_for_pin(run.model, run.folder(5))
    except Killed:
        return False
    return True


def test_load_pretrained_goes_on_from_a_folder_whether_it_pins_or_holds_a_copy(tmp_path: Path) -> None:
    source, batch = llama()
    source.save_pretrained(tmp_path / "model")
    memory = {"device": "4MiB", "host": "64MiB"}
    config = {"weights": "nvme", "optimizer": "nvme", "memory": memory, "nvme": {"paths": [str(tmp_path / "swap")]}}
    config |= {"commit_every": 1, "pins": 1}
    model = infinity.load_pretrained(tmp_path / "model", config)
    optim = infinity.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, batch).backward()
    optim.step()
    folder = tmp_path / "out" / "checkpoint-1"
    pin(model, folder)
    expected = {name: value.clone() for name, value in (weights_of(model) | states_of(model)).items()}
    for _ in range(2):
        optim.zero_grad()
        loss_of(model, batch).backward()
        optim.step()
    infinity.close(model)
    for portable in (False, True):
        elsewhere = config | {"nvme": {"paths": [str(tmp_path / "elsewhere")]}} if portable else config
        again = infinity.load_pretrained(tmp_path / "model", elsewhere, resume=folder)
        infinity.AdamW(again.parameters(), lr=1e-2)
        assert infinity.track(model=again) == 1
        assert same(weights_of(again) | states_of(again), expected)
        if not portable:
            make_room_for_pin(again, tmp_path / "out" / "checkpoint-2")
        infinity.close(again)
