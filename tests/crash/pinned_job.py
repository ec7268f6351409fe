"""A job that saves checkpoint folders, removes them, resumes from them, and is killed.

The job does the work of a trainer with save_total_limit, and of the trainer's user between two processes (lives). Each
life has another learning rate, so that two lives reach different states at the same step.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import shutil
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity
from infinity import _native
from infinity.checkpoint.pinned import make_room_for_pin
from infinity.io import atomic_file
from infinity.io.generation_pins import is_gone, read_marker, read_pins
from infinity.runtime.pins import pin, pinned, unpin
from tests.conftest import residuals_of, states_of, weights_of
from tests.crash.job import append, kind_of

WIDTH = 32
EXPECTED = "expected"
"""Name of the file that stands for a folder's exported weights: the digest of the states at its save."""

Act = tuple[str, Any]
"""Kind and argument of an act.

The argument of `train` is the number of steps, and of `save` the way to make room. `remove` unpins and removes the
oldest folder; its argument says which happens first. `vanish` removes the oldest folder without unpinning it.
"""


@dataclass(frozen=True)
class Life:
    """Acts of one process.

    Attributes:
        number: number of the life, which determines its learning rate.
        folder: folder to resume from; "" for the newest generation.
        killed_at: number of the act on a small file, or of the write to the store, before which the life is killed.
        writes: whether `killed_at` counts writes to the store.
    """

    number: int
    acts: Sequence[Act]
    folder: str = ""
    killed_at: int | None = None
    writes: bool = False


@dataclass(frozen=True)
class Setup:
    keep: int = 1
    pins: int = 2
    commit_every: int = 1
    weights: str = "nvme"
    overlap: str = "auto"

    def config(self, root: Path) -> dict[str, Any]:
        return {
            "weights": self.weights,
            "optimizer": "nvme",
            "activations": "keep",
            "overlap": self.overlap,
            "memory": {"device": "64KiB", "host": "16MiB"},
            "nvme": {"paths": [str(root / "swap")], "engine": "threads", "block": "16KiB"},
            "update": {"tile": "8KiB", "threads": 1},
            "commit_every": self.commit_every,
            "keep": self.keep,
            "pins": self.pins,
        }


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH).bfloat16() for _ in range(2))
        self.fixed = nn.Linear(WIDTH, WIDTH).bfloat16().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return (self.fixed(x).float() ** 2).mean()


def digest_of(model: nn.Module) -> str:
    """Return a digest of all weights, masters and moments."""
    digest = hashlib.sha256()
    for name, value in sorted((weights_of(model) | states_of(model)).items()):
        digest.update(name.encode() + value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    for name, data in sorted(residuals_of(model)):
        digest.update(name.encode() + data)
    return digest.hexdigest()


class Acts:
    """Counter of acts on small files. The counter records the kind of each file, and kills the process before act
    number `killed_at`.
    """

    def __init__(self, killed_at: int | None) -> None:
        self.kinds: list[str] = []
        self._killed_at = killed_at

    def __call__(self, moment: str, path: Path, *_: Any) -> None:
        if not moment.startswith("begin"):
            return
        if len(self.kinds) == self._killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.kinds.append(kind_of(path))


def live(setup: Setup, root: Path, life: Life) -> None:
    """Run one life of the job in this process, to its end or until it is killed."""
    torch.set_num_threads(1)
    logging.getLogger("infinity").setLevel(logging.ERROR)
    faults: list[_native.Fault] = []
    try:
        if life.killed_at is not None and life.writes:
            faults.append(_native.Fault(life.killed_at, "kill", operation="write"))
        acts = Acts(None if life.writes else life.killed_at)
        with atomic_file.observed(acts):
            _Job(setup, root, life, faults).run()
        (root / "acts").write_text(" ".join(acts.kinds))
    except BaseException:
        (root / "error").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


class _Job:
    def __init__(self, setup: Setup, root: Path, life: Life, faults: list[_native.Fault]) -> None:
        self._setup, self._root, self._life = setup, root, life
        self._chance = random.Random(life.number)
        self._log = root / "log"
        torch.manual_seed(0)
        self._model = Net()
        config = setup.config(root)
        try:
            infinity.resume(self._model, config, folder=life.folder or None, faults=faults)
        except infinity.ResumeError:
            if life.folder or list((root / "swap").glob("generation-*")):
                raise
            infinity.offload(self._model, config, faults=faults)
        self._optim = infinity.AdamW(self._model.parameters(), lr=1e-2)
        self._done = infinity.track(model=self._model)
        for group in self._optim.param_groups:
            group["lr"] = 1e-2 / (1 + life.number)
        append(self._log, f"began {self._done} {digest_of(self._model)}")

    def run(self) -> None:
        for act, argument in self._life.acts:
            getattr(self, f"_{act}")(argument)
        infinity.commit(self._model)
        append(self._log, f"state {self._done} {digest_of(self._model)}")
        infinity.close(self._model)

    def _train(self, steps: int) -> None:
        for _ in range(steps):
            self._done += 1
            batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(self._done)).bfloat16()
            self._model(batch).backward()
            self._optim.step()
            self._optim.zero_grad()
            append(self._log, f"state {self._done} {digest_of(self._model)}")

    def _save(self, how: str) -> None:
        folder = self._root / "out" / f"checkpoint-{self._done}"
        self._make_room(folder, how)
        aside = folder.with_name(f"aside-{self._done}")
        shutil.rmtree(aside, ignore_errors=True)
        if how == "aside":
            aside.mkdir(parents=True)
            (aside / EXPECTED).write_text(digest_of(self._model))
            pin(self._model, folder, into=aside)
            shutil.rmtree(folder, ignore_errors=True)
            aside.rename(folder)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / EXPECTED).write_text(digest_of(self._model))
            pin(self._model, folder)

    def _make_room(self, folder: Path, how: str) -> None:
        """Make room for a folder, and unpin folders that vanished. `rotate` does this as a trainer with
        save_total_limit, `portable` as a trainer without a limit.
        """
        for each in pinned(self._model):
            if not each.exists() and len(pinned(self._model)) >= self._setup.pins:
                unpin(self._model, each)
        while how != "portable" and len(pinned(self._model).keys() - {folder}) >= self._setup.pins:
            self._remove(self._chance.choice(["folder first", "pin first"]))
        if how != "aside":
            make_room_for_pin(self._model, folder)

    def _remove(self, order: str) -> None:
        oldest = next(iter(pinned(self._model)), None)
        if oldest is None:
            return
        if order == "folder first":
            shutil.rmtree(oldest, ignore_errors=True)
        unpin(self._model, oldest)
        shutil.rmtree(oldest, ignore_errors=True)

    def _vanish(self, _: object) -> None:
        oldest = next(iter(pinned(self._model)), None)
        if oldest is not None:
            shutil.rmtree(oldest, ignore_errors=True)


def check(setup: Setup, root: Path) -> None:
    """Check in this process that a run can resume from every folder with a marker to the folder's bits, and that
    nothing else in the store uses space.
    """
    torch.set_num_threads(1)
    logging.getLogger("infinity").setLevel(logging.ERROR)
    try:
        require_folders_lead_to_their_bits(setup, root)
        require_nothing_else_keeps_space(setup, root)
    except BaseException:
        (root / "error").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def resumable(root: Path) -> list[Path]:
    return sorted(path for path in root.glob("out/checkpoint-*") if read_marker(path) is not None)


def require_folders_lead_to_their_bits(setup: Setup, root: Path) -> None:
    for folder in resumable(root):
        torch.manual_seed(1)
        model, config = Net(), setup.config(root)
        marker = read_marker(folder)
        if marker is None or marker.portable is None:
            infinity.resume(model, config, folder=folder)
        else:
            config |= {"commit_every": 0, "weights": "host", "optimizer": "host", "nvme": {"paths": []}}
            infinity.offload_from_checkpoint(model, folder / marker.portable, config)
        assert digest_of(model) == (folder / EXPECTED).read_text(), f"{folder} leads to other bits: {marker}"
        infinity.close(model)


def require_nothing_else_keeps_space(setup: Setup, root: Path) -> None:
    """Require that pins and manifests match the folders, after a life that resumed and was not killed.

    Folders that need a pin, and folders that vanished, have a pin. Each pin has a manifest, and there is no manifest
    without a pin.
    """
    pins = read_pins(root / "swap")
    needed = {str(folder) for folder in resumable(root) if (read_marker(folder) or marker_missing()).digest}
    assert {pin.folder for pin in pins if not is_gone(pin)} == needed
    assert all(pin.finished for pin in pins if is_gone(pin))
    names = sorted(path.name for path in (root / "swap").iterdir())
    assert sorted(name for name in names if name.startswith("pinned-")) == sorted({pin.manifest_name for pin in pins})
    assert not [name for name in names if name.endswith(".aside")], names
    assert len([name for name in names if name.startswith("generation-")]) <= setup.keep, names


def marker_missing() -> Any:
    raise AssertionError("a marker that was there is gone")
