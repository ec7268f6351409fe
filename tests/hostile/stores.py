"""Helpers of tests of hostile small files: runs with their expected values, and the commands, which are applied to
copies of the runs.
"""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

import infinity
from infinity.cli.checkpoint import checkpoint
from infinity.errors import InfinityError
from infinity.io import store
from tests.conftest import states_of, weights_of
from tests.models import llama
from tests.sampling import number

STEPS = 2
CASES = number(16, 1000, "INFINITY_HOSTILE")
PARTS = 4
Case = tuple[str, Path, Path, int]
"""Kind of model, directory of the model's run, directory for this case alone, and number of the case."""
Values = dict[str, torch.Tensor]


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)).bfloat16()


def transformer() -> nn.Module:
    torch.manual_seed(0)
    return llama(layers=1)[0].bfloat16()


BUILD: dict[str, Callable[[], Any]] = {"plain": plain, "transformer": transformer}


def config(*paths: Path, **overrides: Any) -> dict[str, Any]:
    base = {"weights": "nvme", "optimizer": "nvme", "memory": {"device": "64MiB", "host": "256MiB"}}
    nvme = {"paths": [str(path) for path in paths], "engine": "threads"}
    return base | {"nvme": nvme, "update": {"threads": 1}, "commit_every": 1, "keep": STEPS} | overrides


def loss_of(kind: str, model: Any) -> torch.Tensor:
    if kind == "plain":
        loss: torch.Tensor = model(torch.ones(4, 32).bfloat16()).float().square().mean()
        return loss
    batch = {key: value.clone() for key, value in llama(layers=1)[1].items()}
    result: torch.Tensor = model(**batch).loss
    return result


def make_run(kind: str, root: Path, paths: list[Path]) -> None:
    """Make a run in `paths`. Beside the run, write the expected values ("values-STEP.pt") and a portable copy of each
    step.
    """
    before, store.STRIPE_BYTES = store.STRIPE_BYTES, 4096
    probe, store._probe = store._probe, lambda *_: 1e9
    try:
        model = infinity.offload(BUILD[kind](), config(*paths))
    finally:
        store.STRIPE_BYTES, store._probe = before, probe
    optim = infinity.AdamW(model.parameters(), lr=1e-2)
    infinity.track(torch.optim.lr_scheduler.StepLR(optim, 100), model=model)
    for step in range(1, STEPS + 1):
        loss_of(kind, model).backward()
        optim.step()
        optim.zero_grad()
        infinity.commit(model)
        torch.save({"weights": weights_of(model), "states": states_of(model)}, root / f"values-{step}.pt")
    infinity.close(model)
    for step in range(1, STEPS + 1):
        infinity.export_checkpoint(paths, root / f"copy-{step}", step=step)


def cases_of(part: int, runs: Mapping[str, Path], work: Path) -> list[Case]:
    """Return every PARTS-th case. Successive cases use different runs."""
    kinds = list(runs)
    numbers = range(part, CASES, PARTS)
    return [(kind := kinds[each // PARTS % len(kinds)], runs[kind], work / str(each), each) for each in numbers]


def tensors_of(copy: Path) -> Values:
    """Return all tensors of a portable copy. The key is the folder of the tensor's file and the tensor's name."""
    found: Values = {}
    for path in sorted(copy.rglob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {f"{path.parent.name == 'optimizer'}/{name}": file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


_IN_THE_MANIFEST = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers whose values are in the manifest itself, so that a changed value with a valid checksum is not detected."""


def require_same_tensors(copy: Path, reference: Path) -> None:
    """Require that a copy has values of the run, under any names and in any shapes of the manifest.

    A wrong shape that ends before the next parameter cannot be distinguished from the true shape. With a wrong shape,
    the copy has a part of a value, or a value followed by some zeros.
    """
    found, whole = tensors_of(copy), tensors_of(reference)
    assert found, "a copy of nothing"
    known = {bits(tensor) for tensor in whole.values()}
    for name, tensor in found.items():
        if not name.endswith(_IN_THE_MANIFEST):
            mine = bits(tensor)
            whole_or_part = any(mine in value or mine.rstrip(b"\0") == value.rstrip(b"\0") for value in known)
            assert whole_or_part, f"{name} is no value of the run, nor a part of one"


def require_same_run(model: Any, root: Path) -> None:
    """Require that a model has the weights and states of one step of the run, which may be any step: a changed file may
    name another step.
    """
    optim = infinity.AdamW(model.parameters(), lr=0.5)
    infinity.track(torch.optim.lr_scheduler.StepLR(optim, 100), model=model)
    found = {"weights": weights_of(model), "states": states_of(model)}
    wrong = [_difference(found, torch.load(root / f"values-{step}.pt")) for step in range(1, STEPS + 1)]
    assert "" in wrong, wrong


def _difference(found: dict[str, Values], expected: dict[str, Values]) -> str:
    for what, values in found.items():
        for name, tensor in values.items():
            if bits(tensor) != bits(expected[what][name]):
                return f"{what}: {name}"
    return ""


def typed(act: Callable[[], Any]) -> Any:
    """Return the result of `act`; if `act` raises an error of infinity, return the error."""
    try:
        return act()
    except InfinityError as error:
        assert str(error)
        assert all(letter.isprintable() or letter in "\n\t" for letter in str(error)), ascii(str(error))
        return error


def command(act: str, paths: list[Path], **options: Any) -> Any:
    return typed(lambda: checkpoint(Namespace(act=act, directory=paths, **({"step": None, "pinned": False} | options))))


def put_through(kind: str, root: Path, paths: list[Path], work: Path) -> None:
    """Apply every command and function that reads a store to the store in `paths`, which is a changed copy of the run
    in `root`.
    """
    for path in paths:
        command("list", [path])
    command("verify", paths)
    exported = work / "exported"
    result = typed(lambda: infinity.export_checkpoint(paths, exported))
    assert isinstance(result, InfinityError) == (not exported.exists())
    if exported.exists():
        require_same_tensors(exported, root / f"copy-{result}")
        carry_on(kind, root, exported, work)
    resume(kind, root, paths)
    if command("remove", paths) == 0:
        assert [name for path in paths if path.exists() for name in os.listdir(path)] == []


def resume(kind: str, root: Path, paths: list[Path]) -> None:
    model = BUILD[kind]()

    def go_on() -> None:
        infinity.resume(model, config(*paths))
        try:
            require_same_run(model, root)
        finally:
            infinity.close(model)

    typed(go_on)


def carry_on(kind: str, root: Path, copy: Path, work: Path) -> Any:
    model = BUILD[kind]()

    def go_on() -> bool:
        infinity.offload_from_checkpoint(model, copy, config(work / "other", weights="host", optimizer="host"))
        try:
            require_same_run(model, root)
        finally:
            infinity.close(model, discard=True)
        return True

    return typed(go_on)


def copied(paths: list[Path], work: Path) -> list[Path]:
    """Return copies under `work`."""
    work.mkdir(parents=True)
    for path in paths:
        shutil.copytree(path, work / path.name)
    return [work / path.name for path in paths]
