"""Pins, pinned manifests and markers with valid checksums and absurd content: each is listed, unpinned and resumed, to
the bits of the folder or of the run, or to a typed error."""

from __future__ import annotations

import contextlib
import random
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import infinity
from infinity.cli.checkpoint import checkpoint
from infinity.errors import InfinityError
from infinity.io.directory import generations_in, pinned_in
from infinity.io.generation_pins import MARKER_NAME, PINS_NAME
from tests.conftest import states_of, weights_of
from tests.hostile.limits import failures
from tests.hostile.mutations import mutate_document, mutate_json
from tests.hostile.stores import CASES, PARTS
from tests.runtime.test_pins import Net, Run, config, same
from tests.sampling import seed

STEPS = (2, 4, 6)
Case = tuple[Path, Path, int]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run at step 6 whose folders pin steps 2 and 4; beside it what each step has."""
    root = tmp_path_factory.mktemp("pinned")
    run = Run(root)
    for step in STEPS:
        torch.save(run.to(step).bits, root / f"bits-{step}.pt")
        if step != STEPS[-1]:
            run.save()
    run.end()
    return root


def typed(act: Callable[[], object]) -> None:
    with contextlib.suppress(InfinityError):
        act()


def require_bits_of_a_step(root: Path, folder: Path | None) -> None:
    model = Net()
    try:
        infinity.resume(model, config(root), folder=folder)
    except InfinityError:
        return
    found = weights_of(model) | states_of(model)
    assert any(same(found, torch.load(root / f"bits-{step}.pt")) for step in STEPS), f"the bits of no step: {folder}"
    infinity.close(model)


def check(case: Case) -> None:
    made, work, number = case
    draw = random.Random(f"{seed('INFINITY_HOSTILE_SEED')} pins {number}")
    root = made  # the pins name its folders, so it is put back afterwards
    kept = work / "kept"
    shutil.copytree(root, kept)
    try:
        for what in draw.sample(["pins", "pinned", "marker", "kept"], draw.choice([1, 1, 2])):
            spoil(root, what, draw)
        for act in ("list", "unpin"):
            options = {"folder": [root / "out" / "checkpoint-2"], "all_gone": True, "step": None, "pinned": False}
            if act == "list" or draw.random() < 0.3:
                typed(
                    lambda act=act, options=options: checkpoint(
                        Namespace(act=act, directory=[root / "swap"], **options)
                    )
                )
        for folder in (root / "out" / "checkpoint-2", root / "out" / "checkpoint-4", None):
            require_bits_of_a_step(root, folder)
    finally:
        shutil.rmtree(root)
        kept.rename(root)


def spoil(root: Path, what: str, draw: random.Random) -> None:
    if what == "pins":
        mutate_document(root / "swap" / PINS_NAME, "pins", 1, draw)
    elif what == "pinned":
        mutate_document(draw.choice(pinned_in(root / "swap")), "generation", 2, draw)
    elif what == "kept":
        mutate_document(next(iter(generations_in(root / "swap").values())), "generation", 2, draw)
    else:
        mutate_json(draw.choice(sorted(root.glob(f"out/*/{MARKER_NAME}"))), draw)


@pytest.mark.timeout(3600)
def test_pins_of_nobody_lead_to_bits_of_the_run_or_a_typed_error(made: Path, tmp_path: Path) -> None:
    cases = []
    for number in range(0, CASES, PARTS):
        (tmp_path / str(number)).mkdir()
        cases.append((made, tmp_path / str(number), number))
    assert failures(check, cases, tmp_path) == []
