"""Portable copies whose indexes, training state, configs or tensors' headers are absurd and whose checksums are right,
or that have none: a run goes on with its own bits, or the error is typed."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

import infinity
from infinity.checkpoint import portable
from infinity.checkpoint.portable import STATE_NAME, SUMS_NAME
from tests.hostile.conftest import Runs
from tests.hostile.limits import failures
from tests.hostile.mutations import mutate_document, mutate_json, mutate_tensors
from tests.hostile.stores import PARTS, STEPS, Case, carry_on, cases_of, config, require_same_run, typed
from tests.sampling import seed


def mutate(copy: Path, draw: random.Random) -> None:
    indexes = sorted(copy.rglob("*.json"))
    chosen = draw.choice(["index", "index", "index", "state", "state", "tensors", "sums", "config"])
    if chosen == "state":
        mutate_document(copy / STATE_NAME, "training state", 1, draw)
    elif chosen == "tensors":
        mutate_tensors(draw.choice(sorted(copy.rglob("*.safetensors"))), draw)
    elif chosen == "config":
        mutate_json(draw.choice(indexes), draw)
    else:
        mutate_json(copy / "optimizer" / "optimizer.safetensors.index.json", draw)
    (copy / SUMS_NAME).unlink()
    if draw.random() < 0.9:
        portable.write_checksums(copy)
    if chosen == "sums" and (copy / SUMS_NAME).exists():
        lines = (copy / SUMS_NAME).read_text().splitlines(keepends=True)
        lines[draw.randrange(len(lines))] = draw.choice(["", "\n", "x\n", f"{'0' * 64}  ../../x\n", f"{'0' * 64}  /\n"])
        (copy / SUMS_NAME).write_text("".join(lines))


def check(case: Case) -> None:
    kind, root, work, number_of = case
    draw = random.Random(f"{seed('INFINITY_HOSTILE_SEED')} indexes {number_of}")
    copy = work / "copy"
    shutil.copytree(root / f"copy-{draw.randint(1, STEPS)}", copy)
    mutate(copy, draw)
    carry_on(kind, root, copy, work)
    if kind == "transformer" and not (work / "other").exists():

        def load() -> None:
            model = infinity.load_pretrained(copy, config(work / "again"), from_checkpoint=True)
            try:
                require_same_run(model, root)
            finally:
                infinity.close(model, discard=True)

        typed(load)
    shutil.rmtree(work)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_copy_of_nobody_is_the_runs_bits_or_a_typed_error(part: int, runs: Runs, tmp_path: Path) -> None:
    assert failures(check, cases_of(part, runs, tmp_path), tmp_path) == []
