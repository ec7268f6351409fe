"""An unchanged Trainer that rotates its checkpoint folders under `infinity run`, and checks of folders and store.

The checks apply after the job has ended and after it was killed. All processes (lives) of a sequence are one run of
`STEPS` steps. A state saved after step N must have the bits of an uninterrupted run at the same step; `undisturbed`
writes the digests of this run.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import shutil
import signal
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers as hf
from safetensors.torch import load_file

import infinity
from infinity import _native
from infinity.config import load_config
from infinity.integrations.launcher import installed
from infinity.io.generation_pins import PinMarker, read_marker, read_pins
from infinity.tiers import resources
from tests.conftest import weights_of
from tests.crash.pinned_job import digest_of

STEPS = 8
VOCABULARY = 32
Digests = dict[int, str]
"""Digests of all weights and states, by step."""

_WRITES = {"os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate"}


@dataclass(frozen=True)
class Life:
    """Settings of one process.

    Attributes:
        save_steps, limit, best: save_steps, save_total_limit and load_best_model_at_end of the Trainer.
        folder: folder to resume from; "" for a new run.
        killed_at: number of the act on the disk before which the process is killed.
        acts: acts that `killed_at` counts. "writes": writes to the store. "files": file operations of Python, which are
            opening for writing, renaming and removing, also within shutil.rmtree. "pins": the file operations on pins,
            pinned manifests, markers and removed folders.
        chance: seed of the choice of the steps after which the states are compared.
    """

    save_steps: int
    limit: int | None
    best: bool
    folder: str = ""
    killed_at: int | None = None
    acts: Literal["files", "pins", "writes"] = "files"
    chance: int = 0


def config_of(root: Path) -> dict[str, Any]:
    return {
        "weights": "nvme",
        "optimizer": "nvme",
        "activations": "keep",
        "memory": {"device": "64KiB", "host": "16MiB"},
        "nvme": {"paths": [str(root / "swap")], "engine": "threads", "block": "16KiB"},
        "update": {"tile": "8KiB", "threads": 1},
        "commit_every": 1,
    }


def make_checkpoint(directory: Path) -> None:
    """Save the initial model of a new run."""
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
    )
    hf.LlamaForCausalLM(config).save_pretrained(directory)


class _Watch(hf.TrainerCallback):  # type: ignore[misc]
    """Callback that compares the states with the states of the undisturbed run, at the start and after some steps. In
    the undisturbed run, it records the states.
    """

    def __init__(self, expected: Mapping[int, str] | None, chance: random.Random) -> None:
        self.seen: Digests = {}
        self._expected = expected
        self._chance = chance

    def _see(self, step: int, model: Any) -> None:
        self.seen[step] = digest_of(model)
        if self._expected is not None and self._expected[step] != self.seen[step]:
            raise AssertionError(f"after step {step} the run has other states than the undisturbed one")

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._see(state.global_step, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self._expected is None or self._chance.random() < 0.3:
            self._see(state.global_step, model)


def _train(checkpoint: Path, root: Path, life: Life, watch: _Watch, *, saves: bool = True) -> None:
    ids = torch.randint(0, VOCABULARY, (2 * STEPS, 8), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    given: dict[str, Any] = {"save_strategy": "no"}
    if saves:
        given = {"save_strategy": "steps", "save_steps": life.save_steps, "save_total_limit": life.limit}
    if saves and life.best:
        given |= {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": life.save_steps}
    arguments = hf.TrainingArguments(
        output_dir=str(root / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=1,
        learning_rate=1e-2,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **given,
    )
    model = hf.AutoModelForCausalLM.from_pretrained(checkpoint)
    trainer = hf.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:1], callbacks=[watch])
    trainer.train(resume_from_checkpoint=life.folder or None)


# -- processes ---------------------------------------------------------------------------------------------------------


def undisturbed(checkpoint: Path, root: Path) -> None:
    """Write the digests of a run that is not killed and saves nothing into root/digests."""
    with _Contained(root):
        watch = _Watch(None, random.Random(0))
        with installed(load_config(config_of(root))):
            _train(checkpoint, root, Life(1, None, best=False), watch, saves=False)
        (root / "digests").write_text(json.dumps(watch.seen))


def live(checkpoint: Path, root: Path, life: Life, expected: Digests) -> None:
    """Run one life of the job to its end, or until it is killed."""
    with _Contained(root):
        _kill_at(life, root)
        with installed(load_config(config_of(root))):
            _train(checkpoint, root, life, _Watch(expected, random.Random(life.chance)))


def check(checkpoint: Path, root: Path, expected: Digests, pins: int, killed: bool) -> None:
    """Check folders and store after a life. `pins` is the number of pins of the store."""
    with _Contained(root):
        require_folders_lead_to_their_bits(checkpoint, root, expected, pins)
        require_nothing_else_keeps_space(root, killed=killed)


class _Contained:
    """Context that ends its process. After an exception, the exit code is 1, and the file root/error contains the
    traceback.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def __enter__(self) -> None:
        torch.set_num_threads(1)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        sys.stdout = open(os.devnull, "w")  # Trainer prints its log entries
        for name in ("infinity", "transformers"):
            logging.getLogger(name).setLevel(logging.ERROR)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            (self._root / "error").write_text("".join(traceback.format_exception(error)))
        os._exit(0 if error is None else 1)


def _kill_at(life: Life, root: Path) -> None:
    if life.killed_at is None:
        return
    if life.acts == "writes":
        fault, original = _native.Fault(life.killed_at, "kill", operation="write"), resources.open_engine
        resources.open_engine = lambda nvme, faults: original(nvme, [*faults, fault])  # type: ignore[assignment]
        return
    acts, place = iter(range(life.killed_at)), str(root)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if not _changes(event, arguments, place):
            return
        counts = life.acts == "files" or event == "os.rmdir" or _OF_PINS.search(str(arguments[0]))
        if counts and next(acts, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _changes(event: str, arguments: tuple[Any, ...], place: str) -> bool:
    """Return whether an audit event changes a file below `place`. shutil.rmtree's removals have no full path."""
    if event == "open":
        path, _, flags = arguments
        return isinstance(path, str | os.PathLike) and str(path).startswith(place) and bool(flags & _TO_WRITE)
    if event not in _WRITES:
        return False
    path = os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes | os.PathLike) else ""  # or a descriptor
    return not os.path.isabs(path) or path.startswith(place)


_OF_PINS = re.compile(r"pins\.infinity|infinity\.json|pinned-")
_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT


# -- what must be true -------------------------------------------------------------------------------------------------


def marked(root: Path) -> dict[Path, PinMarker]:
    """Return the checkpoint folders that look resumable, with their markers."""
    found = {path: read_marker(path) for path in sorted(root.glob("out/checkpoint-*"))}
    return {path: marker for path, marker in found.items() if marker is not None}


def require_folders_lead_to_their_bits(checkpoint: Path, root: Path, expected: Digests, pins: int) -> None:
    """Require that a run can resume from each folder to the folder's states. The check uses a copy of the store, so
    that the store stays unchanged.
    """
    for folder, marker in marked(root).items():
        assert marker.step == int(folder.name.split("-")[1]), f"{folder} holds step {marker.step}"
        model, aside = hf.AutoModelForCausalLM.from_pretrained(checkpoint), root / "tried"
        aside.mkdir()
        if marker.portable is None:
            shutil.copytree(root / "swap", aside / "swap")
            infinity.resume(model, config_of(aside) | {"pins": pins}, folder=folder)
        else:
            infinity.offload_from_checkpoint(model, folder / marker.portable, config_of(aside))
        assert digest_of(model) == expected[marker.step], f"{folder} leads to other states: {marker}"
        plain, weights = load_file(folder / "model.safetensors"), weights_of(model)
        assert all(torch.equal(plain[name], value) for name, value in weights.items()), f"{folder} has other weights"
        infinity.close(model)
        shutil.rmtree(aside)


def require_nothing_else_keeps_space(root: Path, *, killed: bool) -> None:
    """Require that every folder that needs a pin has one, that every pin has a manifest, and that there are no other
    pins and manifests. A killed process may leave one more pin and one more manifest, for the folder that it was
    writing or removing.
    """
    needed = {str(folder): marker.digest for folder, marker in marked(root).items() if marker.digest is not None}
    names = sorted(path.name for path in (root / "swap").glob("*"))
    pins = read_pins(root / "swap")
    assert needed.items() <= {pin.folder: pin.digest for pin in pins}.items(), f"{needed} are pinned by {pins}"
    assert len(pins) - len(needed) <= killed, f"pinned are {pins}, and {list(needed)} need it"
    generations = [name for name in names if name.startswith("generation-") and not name.endswith(".aside")]
    manifests = {name for name in names if name.startswith("pinned-") and not name.endswith(".aside")}
    expected = {pin.manifest_name for pin in pins}
    assert expected <= manifests
    assert len(manifests - expected) <= killed, names
    assert len(generations) <= 1 + killed, names
    if not killed:
        assert not [name for name in names if name.endswith(".aside")], names
        assert needed or not generations, f"no folder needs the store: {names}"
